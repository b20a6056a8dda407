"""Lines that are read many at once land the same, text for text, as those that are read one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.sources.debezium import line_reader, ordinary_lines
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.handling import ALONE, PLAIN
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.debezium.line_reader import LineReader, Tally
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.ordinary_lines import OrdinaryLines
from omnisupport_ingest.sources.debezium.positions import LSN, TRANSACTION
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import mutated
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, SOURCE, TABLES, Recorder, contract
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope

AWKWARD = {
    "email": 'say "hi" \\ \t\n',
    "full_name": "é 漢字 😀 \u2028",
    "status": "",
    "org_id": -9223372036854775808,
    "updated_at": "2026-02-28T13:14:15.120000Z",
    "attrs": '{"a": [1, "}"], "before":null}',
}


@pytest.fixture(scope="module")
def contracts(tmp_path_factory: pytest.TempPathFactory) -> Sequence[TableContract]:
    return Recorder(tmp_path_factory.mktemp("ordinary")).workspace.contracts.of_source(SOURCE)


@pytest.fixture(autouse=True)
def few_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordinary_lines, "LEAST_LINES", 1)


def compact(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def changes(order: int | None = 1) -> list[dict[str, Any]]:
    """Changes of a customer, with awkward values and without any."""
    row = customer(1, name=None, **AWKWARD)
    times = ("1999-12-31T23:59:59Z", "2026-02-30T00:00:00Z", "0001-01-01T00:00:00Z", None, "infinity")
    values = [
        envelope("c", row, order=order),
        envelope("u", row, before=row, order=order),
        envelope("u", row, order=order, before_lsn=None),
        envelope("d", row, order=order),
        envelope("r", row, order=order),
        envelope("r", row, order=order, before_lsn=None),
        *(envelope("u", row | {"updated_at": each}, order=order) for each in times),
    ]
    for number, each in enumerate(values):
        each["source"] |= {"lsn": 1000 + number, "connector": "postgresql", "xmin": None}
    values[1]["source"] |= {"ts_us": TS * 1000 + 7, "ts_ns": TS * 1_000_000 + 7999}
    return values


def one_by_one(
    lines: Sequence[bytes], contracts: Sequence[TableContract], order: str
) -> tuple[pa.Table, Orders]:
    """What ``LineReader`` makes of ``lines``; ``LineFault`` for an odd one."""
    orders = Orders(SOURCE, order)
    reader = LineReader(orders, contracts, PLAIN, Tally())
    events = []
    for number, line in enumerate(lines, 1):
        event = reader.read(line, ALONE, 3, number)
        if reader.odd is not None:
            raise reader.odd
        assert event is not None, "it is of a row"
        events.append(event)
    return events_table(events), orders


def at_once(
    lines: Sequence[bytes], contracts: Sequence[TableContract], order: str
) -> tuple[pa.Table, list[int], Orders]:
    orders = Orders(SOURCE, order)
    reader = OrdinaryLines(contracts, PLAIN, orders)
    content = b"\n".join(lines) if len(lines) > 1 or lines[0] else b"\n"
    tables, others = reader.read(Block.of_file(content + PADDING, 1), 3)
    whole = pa.concat_tables(tables).sort_by("file_row") if tables else events_table([]).slice(0, 0)
    return whole, list(others), orders


@pytest.mark.parametrize("order", [TRANSACTION, LSN])
def test_plain_changes_are_ordinary_and_land_the_same(contracts: Sequence[TableContract], order: str) -> None:
    values = changes(1 if order == TRANSACTION else None)
    if order == LSN:
        values = [each for each in values if each["op"] != "r"]
    # One life: what has no sequence[0] is below every sequence[0].
    for each in values:
        each["source"]["lsn"] -= 900
    lines = [compact(each) for each in values]
    found, others, orders = at_once(lines, contracts, order)
    assert others == []
    wanted, known = one_by_one(lines, contracts, order)
    assert found.equals(wanted)
    assert (orders.first_life, orders.later, orders.order) == (known.first_life, known.later, known.order)


def test_a_record_around_the_envelope_is_ordinary_and_a_key_change_is_not(
    contracts: Sequence[TableContract],
) -> None:
    record = {"topic": "t", "key": {"id": 1}, "value": changes()[0], "headers": [{"key": "a", "value": "b"}]}
    moved = record | {"headers": [{"key": "__debezium.oldkey", "value": '{"id":2}'}]}
    lines = [compact(record), compact(moved), compact(record | {"value": None})]
    found, others, _ = at_once(lines, contracts, TRANSACTION)
    assert others == [1, 2]
    assert found.equals(one_by_one(lines[:1], contracts, TRANSACTION)[0])


def test_a_column_that_is_left_out_is_no_null_and_columns_in_another_order_stay_in_it(
    contracts: Sequence[TableContract],
) -> None:
    whole = changes()[0]
    without, turned = copy.deepcopy(whole), copy.deepcopy(whole)
    del without["after"]["email"]
    turned["after"] = dict(reversed(turned["after"].items()))
    lines = [compact(each) for each in (whole, without, turned)]
    found, others, _ = at_once(lines, contracts, TRANSACTION)
    assert others == [] and found.equals(one_by_one(lines, contracts, TRANSACTION)[0])


def test_lines_of_a_form_that_few_have_are_left_alone(
    contracts: Sequence[TableContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ordinary_lines, "LEAST_LINES", 2)
    update, delete = compact(changes()[0]), compact(changes()[3])
    found, others, _ = at_once([update, delete, b"{}", b"", update], contracts, TRANSACTION)
    assert found.column("file_row").to_pylist() == [1, 5] and others == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    [
        b'{"op":"c"}{"op":"c"}',
        b"null",
        b"",
        b"\xff",
        b'{"schema":"public","table":"customers"}',
        compact(envelope("m", customer(1), order=1)),
        compact(envelope("t", None, order=1)),
        compact(envelope("c", customer(1), order=1, table="nobody_knows")),
        compact(envelope("c", customer(1, email="a\0b"), order=1)),
        compact(envelope("c", customer(1), order=1)).replace(b'"id":1', b'"id":1,"id":2'),
        compact(envelope("c", customer(1), order=1)).replace(b'"id":1', b'"id":1.0'),
        compact(envelope("c", customer(1), order=1, lsn=1 << 49)),
        compact(envelope("c", customer(1), order=1, ts=-1)),
        compact(envelope("c", customer(None), order=1)),  # type: ignore[arg-type]
        compact(envelope("c", customer(1), order=None)),
    ],
)
def test_what_is_not_ordinary_is_left_alone(contracts: Sequence[TableContract], text: bytes) -> None:
    assert at_once([text], contracts, TRANSACTION)[1] == [0]


def test_another_life_of_the_connector_is_found_line_by_line(contracts: Sequence[TableContract]) -> None:
    lines = [compact(envelope("c", customer(1), order=1, before_lsn=n, lsn=500)) for n in (400, None)]  # type: ignore[arg-type]
    found, others, orders = at_once(lines, contracts, TRANSACTION)
    assert (found.num_rows, others, orders.later) == (0, [0, 1], None)


@pytest.mark.parametrize("at_once_from", [1, 100])
def test_a_file_lands_the_same_whether_its_lines_are_read_at_once_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once_from: int
) -> None:
    monkeypatch.setattr(line_reader, "LEAST_OF_WINDOW", at_once_from)
    hours = 3_600_000
    lines = [
        compact(
            envelope("c", customer(n, **AWKWARD), lsn=1000 + n, order=1, ts=TS + n % 3 * hours - n % 7 * 9000)
        )
        for n in range(300)
    ]
    lines[17:17] = [b"null", compact(envelope("c", customer(5), lsn=None, order=1)), b"{}"]
    found = []
    for folder, least in (("at_once", 1), ("one_by_one", 1_000_000)):
        monkeypatch.setattr(ordinary_lines, "LEAST_LINES", least)
        recorder = Recorder(tmp_path / folder)
        done = recorder.land_lines("events.jsonl", lines)
        windows = {each.window: each.rows for each in done.manifest.files}
        assert done.tally is not None
        number, fault = done.tally.first_odd
        told = (str(done.tally), number, fault.problem, done.manifest.relations, done.manifest.file)
        found.append((recorder.events(), windows, told))
    assert len(found[0][0]) == 302 and len(found[0][1]) == 5, "four hours, and the line without a time"
    assert found[0] == found[1]


TOLD = [each for line in DEFAULTS.read_text().splitlines() if isinstance(each := json.loads(line), dict)]
BY_LOG = [
    each
    for each in [*(each.get("value", each) for each in TOLD), *TOLD, *changes()]
    if each is not None and (each.get("value", each) or {}).get("op") in ("c", "u", "d")
]


class _Taken:
    lines = 0
    of = 0


@settings(max_examples=examples(400))
@given(data=st.data())
def test_any_line_that_is_taken_lands_as_it_does_alone(data: st.DataObject) -> None:
    line = data.draw(mutated(_forms(), most=2))
    contracts = _contracts()
    for order in (TRANSACTION, LSN):
        found, others, orders = at_once([line.strip()], contracts, order)
        _Taken.of += 1
        if others:
            continue
        _Taken.lines += 1
        try:
            wanted, known = one_by_one([line.strip()], contracts, order)
        except LineFault as fault:
            raise AssertionError(f"it was taken and is odd: {fault.problem}") from fault
        assert found.equals(wanted)
        assert (orders.first_life, orders.later) == (known.first_life, known.later)


def test_enough_lines_were_taken() -> None:
    # Most changes of a line make it one that is left alone.
    assert _Taken.lines * 100 >= _Taken.of, f"{_Taken.lines} of {_Taken.of}"


def _forms() -> list[Any]:
    """Documents that are taken as they are."""
    if not _CHOSEN:
        _CHOSEN.extend(
            each
            for each in BY_LOG
            for order in (TRANSACTION, LSN)
            if not at_once([compact(each)], _contracts(), order)[1]
        )
    return _CHOSEN


_CHOSEN: list[Any] = []


def _contracts() -> Sequence[TableContract]:
    from omnisupport_ingest.contracts.load import contract_of

    if not _KEPT:
        _KEPT.extend(
            contract_of(contract(name, *told), Path(f"{name}.json")) for name, told in TABLES.items()
        )
    return _KEPT


_KEPT: list[TableContract] = []
