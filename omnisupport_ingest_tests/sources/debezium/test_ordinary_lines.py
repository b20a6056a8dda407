"""Lines that are read many at once land the same, text for text, as those that are read one by one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import compiled_lines
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.foreign import MAX_NESTING
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.sources.debezium import line_reader, ordinary_lines
from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.handling import ALONE, PLAIN, Handling, LineContext, NamedTable
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.debezium.line_reader import FEW_OF_WINDOW, LEAST_OF_WINDOW, LineReader, Tally
from omnisupport_ingest.sources.debezium.orders import Orders
from omnisupport_ingest.sources.debezium.ordinary_lines import OrdinaryLines
from omnisupport_ingest.sources.debezium.positions import LSN, TRANSACTION
from omnisupport_ingest.sources.debezium.unavailable import PLACEHOLDER
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import mutated
from omnisupport_ingest_tests.sources.debezium.recorded import (
    DEFAULTS,
    SOURCE,
    START,
    STRINGS,
    TABLES,
    Recorder,
    contract,
)
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flattened, schema_of

pytestmark = pytest.mark.skipif(compiled_lines is None, reason="installed without a C compiler")

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
    lines: Sequence[bytes],
    contracts: Sequence[TableContract],
    order: str,
    handling: Handling = PLAIN,
    context: LineContext = ALONE,
) -> tuple[pa.Table, Orders]:
    """What ``LineReader`` makes of ``lines``; ``LineFault`` for an odd one."""
    orders = Orders(SOURCE, order)
    reader = LineReader(orders, contracts, handling, Tally())
    events = []
    for number, line in enumerate(lines, 1):
        event = reader.read(line, context, 3, number)
        if reader.odd is not None:
            raise reader.odd
        assert event is not None, "it is of a row"
        events.append(event)
    return events_table(events), orders


def at_once(
    lines: Sequence[bytes],
    contracts: Sequence[TableContract],
    order: str,
    handling: Handling = PLAIN,
    name: str = "",
) -> tuple[pa.Table, list[int], Orders]:
    orders = Orders(SOURCE, order)
    reader = OrdinaryLines(contracts, handling, orders)
    content = b"\n".join(lines) if len(lines) > 1 or lines[0] else b"\n"
    tables, others = reader.read(Block.of_file(content + PADDING, 1, name), 3)
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


ZONED = {"type": "string", "name": "io.debezium.time.ZonedTimestamp", "version": 1}
COLUMNS: dict[str, dict[str, Any]] = {
    "id": {"type": "int64"},
    "email": {"type": "string"},
    "name": {"type": "string"},
    "full_name": {"type": "string"},
    "status": {"type": "string", "default": "active"},
    "org_id": {"type": "int64"},
    "updated_at": ZONED,
    "attrs": {"type": "string", "name": "io.debezium.data.Json", "version": 1},
}
AS_THEY_ARE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an envelope": lambda change: change,
    "flat": flattened,
    "flat, without op": lambda change: flattened(change, op=False),
    "flat, without deleted": lambda change: flattened(change, deleted=False),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "alone": lambda value: value,
    "under payload": lambda value: {"payload": value},
    "with its schema": lambda value: {"schema": schema_of(value, COLUMNS), "payload": value},
    "with a schema that is null": lambda value: {"schema": None, "payload": value},
    "in a record with schemas": lambda value: {
        "topic": "desk.public.customers",
        "key": {"schema": {"type": "struct", "fields": [{"field": "id"}]}, "payload": {"id": 1}},
        "value": {"schema": schema_of(value, COLUMNS), "payload": value},
        "headers": [{"key": "a", "value": "b"}],
    },
}


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("told", AS_THEY_ARE)
def test_every_usual_shape_is_ordinary_and_lands_the_same(
    contracts: Sequence[TableContract], told: str, around: str, blank: str
) -> None:
    values = changes()
    if told == "flat, without op":
        values = [each for each in values if each["op"] in "ud"]
    for each in values:
        each["source"]["lsn"] -= 900
    documents = [AROUND[around](AS_THEY_ARE[told](each)) for each in values]
    lines = [
        json.dumps(each, ensure_ascii=False, separators=("," + blank, ":" + blank)).encode()
        for each in documents
    ]
    found, others, orders = at_once(lines, contracts, TRANSACTION)
    assert others == []
    wanted, known = one_by_one(lines, contracts, TRANSACTION)
    assert found.equals(wanted)
    assert (orders.first_life, orders.later, orders.order) == (known.first_life, known.later, known.order)


def test_a_blank_that_is_not_where_the_others_have_it_is_noticed(contracts: Sequence[TableContract]) -> None:
    right = json.dumps(changes()[0], ensure_ascii=False).encode()
    lines = [
        right,
        right.replace(b'": ', b'":', 1),
        right.replace(b", ", b",", 1),
        right.replace(b'": ', b'":  ', 1),
        right.replace(b": ", b":\t", 1),
    ]
    for line in lines[1:]:
        found, others, _ = at_once([right, line, right], contracts, TRANSACTION)
        assert others == [1] and found.column("file_row").to_pylist() == [1, 3]


def test_another_schema_is_another_form(contracts: Sequence[TableContract]) -> None:
    """What a value is the schema says: the same letters are another time with another schema."""
    fields = COLUMNS | {"updated_at": {"type": "int64", "name": "io.debezium.time.MicroTimestamp"}}
    nanos = COLUMNS | {"updated_at": {"type": "int64", "name": "io.debezium.time.NanoTimestamp"}}
    change = changes()[0]
    change["after"]["updated_at"] = 1_600_000_000_000_000
    lines = [compact({"schema": schema_of(change, each), "payload": change}) for each in (fields, nanos)]
    found, others, _ = at_once(lines, contracts, TRANSACTION)
    assert others == [] and found.equals(one_by_one(lines, contracts, TRANSACTION)[0])
    texts = [json.loads(each)["updated_at"] for each in found.column("after").to_pylist()]
    assert texts == ["2020-09-13 12:26:40+00", "1970-01-19 12:26:40+00"]


def test_a_schema_with_a_name_twice_is_left_alone(contracts: Sequence[TableContract]) -> None:
    line = compact(AROUND["with its schema"](changes()[0]))
    twice = line.replace(b'{"schema":{"type":"struct",', b'{"schema":{"type":"struct","type":"struct",', 1)
    assert at_once([line], contracts, TRANSACTION)[1] == []
    assert twice != line and at_once([twice], contracts, TRANSACTION)[1] == [0]


@pytest.mark.parametrize(
    "wrong", [{"type": "bytes", "name": ["x"]}, {"type": ["string"]}, {"type": {"a": 1}}]
)
def test_a_schema_whose_name_or_type_is_no_text_costs_no_more_than_it_does_line_by_line(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"id": {"type": "int64"}, "email": {"type": "string"}, "extra": wrong}
    events = []
    for number, count in enumerate((10, 300)):
        lines = []
        for id in range(count):
            change = envelope("c", customer(id, extra="AA=="), order=1, lsn=1000 + id)
            lines.append(compact({"schema": schema_of(change, fields), "payload": change}))
        recorder = Recorder(tmp_path / str(number), "customers")
        assert recorder.land_lines("x.jsonl", lines).manifest.rows == count
        events.append([(each["after"], each["identity"]) for each in recorder.events()][:10])
    assert events[0] == events[1]


def test_the_definition_maps_a_file_to_its_table(contracts: Sequence[TableContract]) -> None:
    handling = Handling(tables=(NamedTable("shop-*", "public", "customers"),))
    change = changes()[0]
    for name in ("schema", "table"):
        del change["source"][name]
    told = flattened(changes()[0])
    for name in ("schema", "table"):
        del told[f"__source_{name}"]
    lines = [compact({"payload": change}), compact(told)]
    found, others, _ = at_once(lines, contracts, TRANSACTION, handling, "shop-1.jsonl")
    wanted, _ = one_by_one(lines, contracts, TRANSACTION, handling, LineContext("shop-1.jsonl"))
    assert others == [] and found.equals(wanted)
    assert at_once(lines, contracts, TRANSACTION, handling, "another.jsonl")[1] == [0, 1]


def test_names_and_prefix_of_the_flat_form_are_those_of_the_definition(
    contracts: Sequence[TableContract],
) -> None:
    handling = Handling(fields={"op": "kind", "source.lsn": "at"}, prefix="_")
    renamed = {"__op": "kind", "__source_lsn": "at"}
    lines = [
        compact({renamed.get(name, name.replace("__", "_")): value for name, value in told.items()})
        for told in (flattened(each) for each in changes()[:2])
    ]
    found, others, _ = at_once(lines, contracts, TRANSACTION, handling)
    assert others == [] and found.equals(one_by_one(lines, contracts, TRANSACTION, handling)[0])
    assert at_once(lines, contracts, TRANSACTION)[1] == [0, 1]


def test_a_row_of_which_the_headers_tell_more_is_left_alone(contracts: Sequence[TableContract]) -> None:
    record = {"topic": "t", "key": None, "value": flattened(changes()[0]), "headers": []}
    lines = [
        compact(record | {"headers": [{"key": name, "value": value}]})
        for name, value in (("other", "1"), ("__op", "d"), ("__deleted", "true"), ("__source_lsn", "7"))
    ]
    assert [at_once([each], contracts, TRANSACTION)[1] for each in lines] == [[], [0], [0], [0]]


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


def test_a_column_that_was_not_sent_lands_no_value_whatever_stands_around_it(
    contracts: Sequence[TableContract],
) -> None:
    sent = customer(1, name=None, **AWKWARD)
    rows = [sent | dict.fromkeys(names, PLACEHOLDER) for names in (["email"], ["name"], ["email", "status"])]
    lines = [compact(envelope("u", row, before=row, order=1)) for row in rows]
    found, others, _ = at_once(lines, contracts, TRANSACTION)
    assert others == [] and found.equals(one_by_one(lines, contracts, TRANSACTION)[0])


def test_a_block_may_be_shorter_than_what_stands_in_a_form(contracts: Sequence[TableContract]) -> None:
    record = {"topic": "t", "value": changes()[0], "headers": [{"key": "a", "value": "b" * 3000}]}
    reader = OrdinaryLines(contracts, PLAIN, Orders(SOURCE, TRANSACTION))
    whole = compact(record)
    for line, others in ((whole, []), (whole[:-2500], [0]), (whole[:12], [0])):
        assert list(reader.read(Block.of_file(line + PADDING, 1), 3)[1]) == others


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 300, 900, 1020])
@pytest.mark.parametrize("place", ["key", "headers", "version"])
def test_a_line_that_is_nested_too_deeply_is_left_alone(
    contracts: Sequence[TableContract], place: str, levels: int
) -> None:
    value = changes()[0]
    record: dict[str, Any] = {"topic": "t", "key": None, "value": value, "headers": None}
    (value["source"] if place == "version" else record)[place] = "@@"
    found = {}
    for depth in (1, levels):
        line = compact(record).replace(b'"@@"', b'{"a":' * depth + b"1" + b"}" * depth)
        found[depth] = at_once([line], contracts, TRANSACTION)[1]
    assert found == {1: [], levels: [0]}


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
    lines = [compact(envelope("c", customer(1), order=1, before_lsn=n, lsn=500)) for n in (400, None)]
    found, others, orders = at_once(lines, contracts, TRANSACTION)
    assert (found.num_rows, others, orders.later) == (0, [0, 1], None)


@pytest.mark.parametrize(("at_once_from", "few"), [(1, 0), (100, 0), (1000, 0), (1000, 100), (1, 1000)])
def test_a_file_lands_the_same_whether_its_lines_are_read_at_once_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once_from: int, few: int
) -> None:
    monkeypatch.setattr(line_reader, "LEAST_OF_WINDOW", at_once_from)
    monkeypatch.setattr(line_reader, "FEW_OF_WINDOW", few)
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


def test_windows_of_few_events_have_no_tables_of_their_own(
    tmp_path: Path, contracts: Sequence[TableContract], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = [*range(90), *[90] * FEW_OF_WINDOW, *[91] * LEAST_OF_WINDOW]
    lines = [
        compact(envelope("c", customer(n), order=1, lsn=1000 + n, ts=TS + hour * 3_600_000))
        for n, hour in enumerate(hours)
    ]
    events, _, _ = at_once(lines, contracts, TRANSACTION)
    recorder = Recorder(tmp_path)
    told: dict[str, list[int]] = {"add_table": [], "add_block": []}
    add_to, add_block_to = BatchWriter.add_table, BatchWriter.add_block

    def add_table(writer: BatchWriter, window: str, of_window: pa.Table, highest: datetime) -> None:
        told["add_table"].append(of_window.num_rows)
        add_to(writer, window, of_window, highest)

    def add_block(writer: BatchWriter, block: EventBlock) -> None:
        told["add_block"].append(block.rows)
        add_block_to(writer, block)

    monkeypatch.setattr(BatchWriter, "add_table", add_table)
    monkeypatch.setattr(BatchWriter, "add_block", add_block)
    inlet, then = recorder.inlet, START + timedelta(days=10)
    batch_id = file_batch_id("0" * 64)
    with BatchWriter(inlet.store, inlet.grid, 1, batch_id, clock=lambda: then) as writer:
        line_reader.add_table(writer, events)
        assert told == {"add_table": [FEW_OF_WINDOW], "add_block": [LEAST_OF_WINDOW]}
        files = writer.finish()
    assert sorted(each.rows for each in files) == [*[1] * 90, FEW_OF_WINDOW, LEAST_OF_WINDOW]


TOLD = [each for line in DEFAULTS.read_text().splitlines() if isinstance(each := json.loads(line), dict)]
BY_LOG = [
    each
    for each in [*(each.get("value", each) for each in TOLD), *TOLD, *changes()]
    if each is not None and (each.get("value", each) or {}).get("op") in ("c", "u", "d")
]
BY_LOG += [
    around(written(copy.deepcopy(each)))
    for each in changes()
    for written in AS_THEY_ARE.values()
    for around in AROUND.values()
]
BY_LOG += [json.loads(line) for line in STRINGS.read_text().splitlines() if line[:1] == "{"]


class _Taken:
    lines = 0
    of = 0


@pytest.mark.full
@settings(max_examples=examples(400))
@given(data=st.data())
def test_any_line_that_is_taken_lands_as_it_does_alone(data: st.DataObject) -> None:
    line = data.draw(mutated(_forms(), most=2, blanks=["", " "]))
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


@pytest.mark.full
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


def test_values_that_are_utf8_only_side_by_side_are_left_alone(contracts: Sequence[TableContract]) -> None:
    values = [b'{"op":"\xc3', b'\xa9"}'] * 20
    block = Block.of_values(values, pa.array(values))
    assert block.is_utf8
    known = Orders(SOURCE, TRANSACTION)
    tables, others = OrdinaryLines(contracts, PLAIN, known).read(block, 1)
    assert not tables and [*others] == [*range(40)]
