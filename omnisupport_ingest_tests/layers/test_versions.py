"""A changed contract makes those windows stale that have an event of its table, and no others."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, Contracts, TableContract
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.versions import RulesVersions, contracts_changed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.lake.tables import checkpoint

W = "2026-01-01T1200"
DOCUMENT: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Tickets",
    "description": "Tickets.",
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer", "x-pg-type": "bigint", "description": "Key."}},
    "x-cdc": {
        "version": "1.0.0",
        "source": "desk",
        "schema": "public",
        "table": "tickets",
        "owner": "team:tests",
        "key": ["id"],
        "events": {"soft_delete_column": None},
    },
}


def contract(
    table: str, *, pii: dict[str, dict[str, str]] | None = None, **columns: dict[str, Any]
) -> TableContract:
    document = json.loads(json.dumps(DOCUMENT))
    document["x-cdc"] |= {"pii": pii} if pii else {}
    document["x-cdc"]["table"] = table
    document["properties"] |= columns
    return contract_of(document, Path(f"{table}.json"))


SIZE = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "Size."}
DROPPED = {"policy": "drop", "note": "Nobody needs it."}
NOTE = {"type": ["string", "null"], "x-pg-type": "text", "description": "Note."}


def part(batch: str, *tables: str) -> LandedPart:
    at = Position(1, Lsn(10), 0)
    rows = {f"public.{table}": 1 for table in tables}
    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)
    return LandedPart(batch, 1, W, "data/x.parquet", len(rows), at, at, True, rows, moment, None, None)


def rules_in_force(home: Path, *contracts: TableContract) -> RulesVersions:
    settings = Settings(_env_file=None, home=home, window="minutes:1")
    opened = Home.open(home, settings.window_size)
    return RulesVersions(Workspace(settings, opened, Contracts(contracts)), "desk")


def held(made_by: RulesVersions, *batches: str) -> WindowState:
    return WindowState(1, ("a",), None, checkpoint(W), batches=batches, versions=made_by.of(W))


@pytest.mark.parametrize(
    ("tables", "stale"), [(("agents",), False), (("agents", "tickets"), True), (("tickets",), True)]
)
def test_a_window_is_stale_if_it_has_an_event_of_the_table(
    tmp_path: Path, tables: tuple[str, ...], stale: bool
) -> None:
    before = held(rules_in_force(tmp_path, contract("agents"), contract("tickets")), "b1")
    now = rules_in_force(tmp_path, contract("agents"), contract("tickets", size=SIZE))
    assert (now.of_held(W, before, lambda: [part("b1", *tables)]) != before.versions) == stale


def test_a_window_of_which_landing_has_forgotten_a_batch_is_stale(tmp_path: Path) -> None:
    before = held(rules_in_force(tmp_path, contract("agents"), contract("tickets")), "b0", "b1")
    now = rules_in_force(tmp_path, contract("agents"), contract("tickets", size=SIZE))
    assert now.of_held(W, before, lambda: [part("b1", "agents")]) != before.versions


@pytest.mark.parametrize(
    ("before", "now", "stale"),
    [((), ("tickets",), True), (("agents",), ("agents", "tickets"), False), ((), (), False)],
)
def test_a_window_with_rows_that_no_contract_describes_is_stale_by_the_first_policy_of_any_table(
    tmp_path: Path, before: tuple[str, ...], now: tuple[str, ...], stale: bool
) -> None:
    def made(protected: tuple[str, ...], **columns: dict[str, Any]) -> RulesVersions:
        return rules_in_force(
            tmp_path,
            *(
                contract(name, pii={"mail": DROPPED} if name in protected else {}, mail=NOTE, **of_table)
                for name, of_table in (("agents", {}), ("tickets", columns))
            ),
        )

    # Rows of nobody's, and logical messages, lose their values then (cdc.protecting).
    first, second = held(made(before), "b1"), made(now, size=SIZE)
    assert (second.of_held(W, first, lambda: [part("b1", "agents", "nobodys")]) != first.versions) == stale


def test_a_table_that_is_new_makes_only_windows_stale_that_have_events_of_it(tmp_path: Path) -> None:
    before = held(rules_in_force(tmp_path, contract("agents")), "b1")
    now = rules_in_force(tmp_path, contract("agents"), contract("tickets"))
    assert now.of_held(W, before, lambda: [part("b1", "agents")]) == before.versions
    assert now.of_held(W, before, lambda: [part("b1", "agents", "tickets")]) != before.versions


@pytest.mark.parametrize(("tables", "stale"), [(("agents",), False), (("agents", "elsewhere"), True)])
def test_the_first_policy_of_a_source_reaches_windows_with_events_of_no_contract(
    tmp_path: Path, tables: tuple[str, ...], stale: bool
) -> None:
    """Where one table has a policy, events of tables without a contract, and messages, lose their images."""
    document = json.loads(json.dumps(DOCUMENT))
    document["x-cdc"] |= {"table": "tickets", "pii": {"note": {"policy": "drop", "note": "Personal."}}}
    document["properties"]["note"] = NOTE
    covered = contract_of(document, Path("tickets.json"))
    before = held(rules_in_force(tmp_path, contract("agents"), contract("tickets", note=NOTE)), "b1")
    now = rules_in_force(tmp_path, contract("agents"), covered)
    assert (now.of_held(W, before, lambda: [part("b1", *tables)]) != before.versions) == stale


@pytest.mark.parametrize(("tables", "stale"), [(("agents",), False), (("agents", "tickets"), True)])
@pytest.mark.parametrize("first", [False, True])
def test_the_secret_of_a_policy_makes_no_window_stale_without_events_of_its_table(
    tmp_path: Path, tables: tuple[str, ...], stale: bool, first: bool
) -> None:
    """The first policy of a source that hashes adds the version of the key, and the last one removes it."""
    plain, hashing = (
        rules_in_force(tmp_path, contract("agents", mail=NOTE), contract("tickets", mail=NOTE, pii=pii))
        for pii in ({}, {"mail": {"policy": "hash", "note": "Personal."}})
    )
    before, now = (plain, hashing) if first else (hashing, plain)
    state = held(before, "b1")
    found = now.of_held(W, state, lambda: [part("b1", *tables)])
    assert (found != state.versions) == stale
    assert contracts_changed(state.versions, now.of(W)) == {"tickets"}


def test_what_else_changed_is_no_change_of_contracts_alone() -> None:
    held = ("logic:1", "contract:a:1", "contract:b:1", "decisions:1", "pii_key:1")
    assert contracts_changed(held, held) == frozenset()
    assert contracts_changed(held, (*held[:2], "contract:b:2", *held[3:])) == {"b"}
    assert contracts_changed(held, (*held, "contract:c:1")) == {"c"}
    for other in ("pii_key:2", "decisions:2", "logic:2"):
        kind = other.split(":")[0]
        assert contracts_changed(held, [*(each for each in held if kind not in each), other]) is None
    assert contracts_changed(held, (*held, "reviews:1")) is None
    assert contracts_changed(held, (*held, "erasures:1")) is None


@pytest.mark.parametrize(
    ("columns", "judges"),
    [
        ({"note": NOTE}, False),
        ({"note": NOTE | {"default": "none"}}, False),
        ({"note": NOTE | {"maxLength": 9}}, True),
        ({"size": SIZE}, True),
    ],
)
def test_only_what_a_verdict_may_depend_on_has_events_judged_again(
    columns: dict[str, dict[str, Any]], judges: bool
) -> None:
    plain, other = contract("tickets"), contract("tickets", **columns)
    assert other.fingerprint != plain.fingerprint
    assert (other.judged_by != plain.judged_by) == judges


@pytest.mark.parametrize("policy", ["drop", "mask", "keep"])
def test_a_column_that_protection_dropped_before_it_was_known_has_events_made_anew(policy: str) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    document["properties"]["mail"] = NOTE
    mask = {"mask": "email"} if policy == "mask" else {}
    document["x-cdc"]["pii"] = {"mail": {"policy": policy, "note": "Whose ticket it is."} | mask}
    learned = json.loads(json.dumps(document))
    learned["properties"]["note"] = NOTE | {"default": "none"}
    before, after = (contract_of(each, Path("t.json")) for each in (document, learned))
    # Where nothing is protected, what deduped events hold is what landed.
    assert (after.judged_by == before.judged_by) == (policy == "keep")


def test_a_contract_that_was_made_without_a_file_is_judged_by_its_fingerprint() -> None:
    assert replace(contract("tickets"), verdicts_by="", fingerprint="f").judged_by == "f"


@pytest.mark.parametrize("policy", [{"evolution": "block"}, {"history": "changed_only"}])
def test_how_a_table_evolves_makes_nothing_again(policy: dict[str, str]) -> None:
    document = json.loads(json.dumps(DOCUMENT))
    document["x-cdc"] |= policy
    found, plain = contract_of(document, Path("t.json")), contract("tickets")
    assert (found.fingerprint, found.judged_by) == (plain.fingerprint, plain.judged_by)


@pytest.mark.parametrize(("evolution", "judges"), [("block", True), ("pinned", False)])
def test_where_rows_wait_for_their_contract_every_column_of_it_has_them_judged_again(
    tmp_path: Path, evolution: str, judges: bool
) -> None:
    """No definition names the source, so its rows come as files."""
    plain, noted = (
        replace(each, evolution=evolution) for each in (contract("tickets"), contract("tickets", note=NOTE))
    )
    before, after = rules_in_force(tmp_path, plain), rules_in_force(tmp_path, noted)
    assert (after.common() != before.common()) == judges
    assert bool(after.row_columns) == judges


@pytest.mark.parametrize(
    "column",
    [
        SIZE | {"default": "large"},
        SIZE | {"default": "0", "minimum": 1},
        NOTE | {"default": "b", "enum": ["a", None]},
    ],
)
def test_a_default_that_the_gate_would_refuse_is_refused_with_the_contract(column: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"properties\.note\.default: breaks note:"):
        contract("tickets", note=column)
    assert contract("tickets", note=column | {"default": None}).columns[1].default is not None
