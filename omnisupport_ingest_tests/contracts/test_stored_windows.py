"""Events of sealed windows need what no record proves they have; of accepted ones nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.pii_policies import HASH, KEEP
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.contracts.stored_policies import UNKNOWN, Step, StoredColumn, StoredTable
from omnisupport_ingest.contracts.stored_windows import Judging, Record, StoredWindow
from omnisupport_ingest_tests.contracts.test_stored_policies import column, contract_of

TABLES = ["a", "b"]


def of(table: str, policy: str) -> Any:
    return replace(contract_of(column("value", policy)), name=table, table=table)


def judged(*contracts: Any, unknown: Sequence[str] = ()) -> Judging:
    known = {each.table_name: StoredTable.of(each) for each in contracts if each.name not in unknown}
    return Judging(known, frozenset(unknown))


changes = st.dictionaries(st.sampled_from(TABLES), st.sampled_from([KEEP, HASH]), max_size=2)


@given(st.lists(changes, min_size=2, max_size=7))
def test_whatever_contracts_come_and_go_nothing_stays_plain_in_quarantine(days: list[dict[str, str]]) -> None:
    """``days``: the policy of each table's column by day; a table that is missing has no contract. By each
    day an event of each table and of one that never has a contract comes to quarantine."""
    held: dict[str, list[tuple[str, ...] | None]] = {name: [] for name in (*TABLES, "loose")}
    record: Record | None = None
    first = [of(*each) for each in days[0].items()]
    for number, day in enumerate(days):
        contracts = [of(*each) for each in day.items()]
        now = StoredWindow.of(record, judged(*first), contracts)
        after = now.after(contracts)
        cover = after.withheld_covered and not now.withheld_covered
        for name, values in held.items():
            if name not in day:
                held[name] = [None if cover else each for each in values]
                continue
            contract = of(name, day[name])
            step = now.tables[contract.full_name].steps(contract)["value"][1]
            if step is Step.PROTECT:
                held[name] = [None if each is None else (*each, day[name]) for each in values]
            elif step is not Step.STAY:
                held[name] = [None for _ in values]
        if number or now != after:
            tables = {**(record.tables if record else {}), **{n: after.tables[n] for n in now.changed(after)}}
            record = Record.from_text(Record(tables, after.covered, after.withheld_covered).to_text())
        assert StoredWindow.of(record, judged(*first), contracts).after(contracts) == after
        protects = any(map(needs_protection, contracts))
        assert all(each is None or len(each) <= 1 for values in held.values() for each in values)
        for name, values in held.items():
            if day.get(name) == HASH or (protects and name == "loose"):
                assert () not in values
            how = None if protects else ()
            values.append({HASH: (HASH,), KEEP: ()}[day[name]] if name in day else how)


def test_a_table_whose_contract_is_away_is_plain_while_no_policy_is_in_force() -> None:
    was = StoredWindow.of(None, judged(of("a", KEEP), of("b", HASH)), [of("a", KEEP)])
    assert was.withheld_covered
    away = was.after([of("a", KEEP)])
    assert not away.withheld_covered and was.changed(away) == {of("b", HASH).full_name}
    record = Record(away.tables, away.covered, away.withheld_covered)
    back = StoredWindow.of(record, Judging(), [of("a", KEEP), of("b", HASH)])
    after = back.after([of("a", KEEP), of("b", HASH)])
    b = of("b", HASH).full_name
    assert back.tables[b].steps(of("b", HASH))["value"] == (Step.STAY, Step.EMPTY)
    assert after.withheld_covered and after.tables[b].withheld_protected


def test_an_unknown_version_of_a_table_with_a_contract_is_no_reason_to_leave_others_uncovered() -> None:
    contracts = [of("a", HASH), of("b", KEEP)]
    now = StoredWindow.of(None, judged(of("a", KEEP), unknown=["b"]), contracts)
    after = now.after(contracts)
    assert after.covered and after.withheld_covered and not after.is_uncovered(contracts)
    assert now.tables[of("b", KEEP).full_name].column("value") == StoredColumn.made_by(UNKNOWN)
    assert now.tables[of("a", KEEP).full_name].column("value") == StoredColumn.made_by(KEEP)


def test_of_a_table_that_nobody_knows_accepted_events_are_left_and_withheld_ones_covered() -> None:
    contracts = [of("a", HASH)]
    now = StoredWindow.of(None, judged(of("a", KEEP), unknown=["gone"]), contracts)
    after = now.after(contracts)
    assert not after.covered and after.withheld_covered and after.is_uncovered(contracts)
    assert StoredWindow.of(None, Judging(unknown=frozenset(["gone"])), contracts).tables[
        contracts[0].full_name
    ] == StoredTable(default=UNKNOWN)


def test_while_its_types_wait_only_quarantine_is_covered() -> None:
    contracts = [of("a", HASH)]
    now = StoredWindow.of(None, judged(of("a", KEEP)), contracts)
    waiting = now.after(contracts, ["a"])
    assert (waiting.covered, waiting.withheld_covered) == (False, True)
    assert waiting.tables[contracts[0].full_name].column("value") == StoredColumn(KEEP, frozenset({HASH}))
    assert waiting.after(contracts).covered


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"covered":[1,2],"tables":{}}'])
def test_a_damaged_record_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Record.from_text(text)
