"""Every shape that Debezium's events come in: what each becomes, and that one odd line stops no other."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.sources.debezium.changes import (
    HEARTBEAT,
    MARKER,
    NOTIFICATION,
    SCHEMA_CHANGE,
    SIGNAL,
    TOMBSTONE,
    Change,
    Passed,
)
from omnisupport_ingest.sources.debezium.faults import FileRefused, LineFault
from omnisupport_ingest.sources.debezium.handling import (
    BY_ARRIVAL,
    BY_POSITION,
    DELETE,
    PLAIN,
    REFUSE,
    Handling,
    LineContext,
    NamedTable,
)
from omnisupport_ingest.sources.debezium.images import NOT_WHOLE
from omnisupport_ingest.sources.debezium.positions import BINLOG, CHANGE_LSN, SNAPSHOT_BASE
from omnisupport_ingest.sources.debezium.records import read_line
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowSize
from omnisupport_ingest_tests.sources.debezium.recorded import DATA, TABLES, Recorder, contract
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope, flat

SOMEWHERE = LineContext("x.users")
USERS = NamedTable("*users*", "app", "users")
MAPPED = Handling(tables=(NamedTable("*customers*", "public", "customers"),))
TIMED = replace(MAPPED, time_columns=("updated_at",))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "customers", "toasty", handling=TIMED)


def read(document: object, handling: Handling = PLAIN, context: LineContext = SOMEWHERE) -> Change | Passed:
    return read_line(json.dumps(document).encode(), handling, context)


def change(document: object, handling: Handling = PLAIN, context: LineContext = SOMEWHERE) -> Change:
    found = read(document, handling, context)
    assert isinstance(found, Change)
    return found


# ---- The shapes that people meet first


def test_every_line_of_the_collected_shapes_becomes_what_it_should() -> None:
    lines = (DATA / "shapes.jsonl").read_bytes().splitlines()
    handling = Handling(tables=(USERS,), time_columns=("deleted_at",))
    read = [read_line(line, handling, LineContext("app.users.jsonl")) for line in lines]
    assert [each.op if isinstance(each, Change) else each.kind for each in read] == [
        "u",
        "c",
        "c",
        "u",
        "tombstone",
        "d",
        "tombstone",
        "tombstone",
        "tombstone",
    ]
    changes = [each for each in read if isinstance(each, Change)]
    assert {(each.schema, each.table) for each in changes} == {("app", "users")}
    assert [each.lsn for each in changes] == [23405934, 23406100, None, None, None]
    assert changes[3].ts == datetime(2024, 10, 18, 10, tzinfo=UTC)
    assert changes[3].after == {"id": 123, "username": "former_user", "deleted_at": "2024-10-18T10:00:00Z"}


@pytest.mark.parametrize("order", [BY_POSITION, BY_ARRIVAL])
def test_the_collected_shapes_land_as_a_file(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    columns = dict.fromkeys(("email", "username", "status"), "text")
    monkeypatch.setitem(TABLES, "users", (("id",), {"id": "bigint", **columns, "deleted_at": "timestamptz"}))
    # Before the first of the collected events.
    Home.open(tmp_path / "home", WindowSize(60), now=datetime(2023, 3, 1, tzinfo=UTC))
    users = replace(USERS, schema="public")
    handling = Handling(tables=(users,), time_columns=("deleted_at",), order=order)
    recorder = Recorder(tmp_path, "users", handling=handling)
    landing = recorder.land_lines("app.users.jsonl", (DATA / "shapes.jsonl").read_bytes().splitlines())
    assert landing.tally is not None and landing.manifest.rows == 5
    odd = 3 if order == BY_POSITION else 0
    assert (landing.tally.tombstones, landing.tally.odd) == (4, odd)
    changed = SchemaChanges(recorder.inlet.store.folder).all()
    assert [each.column for each in changed if each.kind == "column_dropped"] == []
    judged = recorder.run(spark)
    counts = [(each.raw, each.deduped, each.quarantined) for each in judged]
    assert [sum(each) for each in zip(*counts, strict=True)] == [5, 5 - odd, odd]
    state = {key: row for (key,), row in recorder.state(spark, "users").items()}
    assert (state[101]["status"], state[101]["email"]) == ("inactive", "ana@example.org")
    assert (state[102]["status"], state[102]["_cdc_is_deleted"]) == ("active", False)
    if order == BY_POSITION:
        assert "events.order" in landing.tally.first_odd[1].fix and landing.tally.first_odd[0] == 3
        assert state.keys() == {101, 102}
        return
    assert state.keys() == {101, 102, 123, 124}
    assert (state[123]["email"], state[123]["_cdc_is_deleted"]) == ("former@example.org", True)
    assert state[124]["_cdc_is_deleted"]


@pytest.mark.parametrize("document", [None, {"payload": None}, {"schema": None, "payload": None}, ""])
def test_nothing_is_a_tombstone_in_each_form(document: object) -> None:
    assert read(document) is TOMBSTONE
    assert read({"key": {"id": 1}, "value": document}) is TOMBSTONE
    assert read({"topic": "a.b.c", "key": {"payload": {"id": 1}}, "value": document}) is TOMBSTONE
    assert read({"id": 1, "value": None}) is TOMBSTONE


def test_an_envelope_is_one_under_payload_alone_with_a_schema_and_without() -> None:
    value = envelope("c", customer(1), order=1)
    told = [change(each) for each in (value, {"payload": value}, {"schema": None, "payload": value})]
    assert told[0] == told[1] == told[2]


def test_what_is_no_row_is_known_for_what_it_is() -> None:
    schema_change = {"source": {"table": "t"}, "databaseName": "d", "ddl": "ALTER …", "tableChanges": []}
    assert read({"schema": {}, "payload": {"ts_ms": 5}}) is HEARTBEAT
    assert read({"payload": {"status": "BEGIN", "id": "7:1", "event_count": None}}) is MARKER
    assert read(schema_change) is read({"payload": schema_change}) is SCHEMA_CHANGE
    assert read({"type": "execute-snapshot", "data": {"data-collections": ["public.t"]}}) is SIGNAL
    assert read({"id": "1", "type": "log", "data": "{}"}) is SIGNAL
    told = {"id": "1", "aggregate_type": "Initial Snapshot", "type": "STARTED", "additional_data": {}}
    assert read(told) is NOTIFICATION


def test_a_source_without_a_table_is_mapped_by_file_or_topic_or_is_odd() -> None:
    value = envelope("c", customer(1))
    del value["source"]["schema"], value["source"]["table"]
    mapped = change(value, Handling(tables=(USERS,)))
    assert (mapped.schema, mapped.table) == ("app", "users")
    by_topic = change({"topic": "db.users.v2", "key": None, "value": value}, Handling(tables=(USERS,)))
    assert (by_topic.schema, by_topic.table) == ("app", "users")
    with pytest.raises(LineFault, match=r"does not say its table.*'x\.users'"):
        change(value)


def test_a_table_that_an_event_names_is_never_mapped() -> None:
    told = change(envelope("c", customer(1)), Handling(tables=(NamedTable("*", "app", "users"),)))
    assert (told.schema, told.table) == ("public", "customers")


# ---- The flat form


def test_fields_of_the_flat_form_may_have_other_names_another_prefix_or_be_headers() -> None:
    plain = change(flat("u", customer(1), ts=TS, lsn=5, schema="public"))
    about = {"_op": "u", "_source_ts_ms": TS, "_source_table": "customers", "_source_lsn": 5}
    prefixed = change(customer(1) | about | {"_source_schema": "public"}, Handling(prefix="_"))
    names = {
        "op": "kind",
        "source.ts_ms": "at",
        "source.table": "of",
        "source.schema": "in",
        "source.lsn": "lsn",
    }
    renamed = change(
        customer(1) | {"kind": "u", "at": TS, "of": "customers", "in": "public", "lsn": 5},
        Handling(fields=names),
    )
    held = {
        "__op": "u",
        "__source_ts_ms": str(TS),
        "__source_table": "customers",
        "__source_schema": "public",
    }
    headers = [{"key": name, "value": told} for name, told in (held | {"__source_lsn": "5"}).items()]
    in_headers = change({"topic": "x", "key": None, "value": customer(1), "headers": headers})
    assert plain == prefixed == renamed == in_headers


def test_a_column_of_the_contract_is_no_metadata_however_its_name_begins(tmp_path: Path) -> None:
    names = {"src_name": "text", "src_source_system": "text", "__name": "text", "version": "text"}
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    (contracts / "t.json").write_text(json.dumps(contract("t", ("id",), {"id": "bigint", **names})))
    columns = [*load_contracts(contracts)]
    row: dict[str, Any] = {"id": 1} | dict.fromkeys(names, "x")
    for prefix in ("__", "src_", ""):
        about = {f"{prefix}op": "c", f"{prefix}source_ts_ms": TS, f"{prefix}source_table": "t"}
        told = change(row | about, Handling(prefix=prefix).with_contracts(columns))
        assert (told.table, told.after) == ("t", row)


def test_with_another_prefix_only_known_metadata_is_none_of_the_columns() -> None:
    row = {"id": 1, "src_name": "Ada", "src_source_system": "crm", "src_note": "x"}
    about = {"src_op": "c", "src_source_ts_ms": TS, "src_source_table": "t", "src_source_db": "d"}
    assert change(row | about, Handling(prefix="src_")).after == row
    about = {"op": "c", "source_ts_ms": TS, "source_table": "t", "transaction_total_order": 3}
    assert change({"id": 1, "name": "Ada"} | about, Handling(prefix="")).after == {"id": 1, "name": "Ada"}


def test_without_a_prefix_a_column_called_table_is_not_the_name_of_the_table(tmp_path: Path) -> None:
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    (contracts / "t.json").write_text(json.dumps(contract("t", ("id",), {"id": "bigint", "table": "text"})))
    handling = Handling(prefix="", tables=(NamedTable("*", "public", "t"),))
    told = change(
        {"id": 1, "table": "oak", "op": "c", "ts_ms": TS},
        handling.with_contracts([*load_contracts(contracts)]),
        LineContext("t.jsonl"),
    )
    assert (told.table, told.after) == ("t", {"id": 1, "table": "oak"})


LIKE_MARKERS: tuple[dict[str, Any], ...] = (
    {"id": 1, "status": "END"},
    {"id": 1, "type": "x", "data": "y"},
    {"id": 1, "aggregate_type": "a", "type": "b"},
    {"id": 1, "ddl": "x"},
)


@pytest.mark.parametrize("row", LIKE_MARKERS)
def test_a_bare_row_of_a_contracted_table_is_a_row_whatever_it_looks_like(
    tmp_path: Path, row: dict[str, Any]
) -> None:
    handling = Handling(bare_rows=True, order=BY_ARRIVAL)
    recorder = Recorder(tmp_path, "customers", handling=handling)
    line = {"key": {"id": 1}, "value": row, "headers": []}
    recorder.land_values("a.jsonl", {"topic": "s.public.customers"} | line)
    (event,) = recorder.events()
    assert event["key"] == '["1"]' and json.loads(event["after"]).keys() == row.keys()
    landing = recorder.land_values("b.jsonl", {"topic": "s.transaction"} | line)
    assert landing.tally is not None and landing.tally.passed.total() == 1


@pytest.mark.parametrize(
    ("about", "op"),
    [
        ({"__deleted": "true"}, "d"),
        ({"__deleted": True, "__op": "u"}, "d"),
        ({"__deleted": "false"}, "u"),
        ({"__deleted": False, "__op": "c"}, "c"),
    ],
)
def test_a_flat_row_with_some_of_its_metadata_only(about: dict[str, Any], op: str) -> None:
    row = customer(1, updated_at="2026-11-20T16:00:00Z")
    told = change(row | about, TIMED, LineContext("customers.jsonl"))
    assert (told.op, told.ts, told.order) == (op, datetime(2026, 11, 20, 16, tzinfo=UTC), "time")


def test_a_row_without_a_word_about_it_needs_a_definition_that_says_so() -> None:
    row = customer(1, updated_at="2026-11-20T16:00:00+01:00")
    with pytest.raises(LineFault, match="neither a Debezium"):
        change(row, TIMED, LineContext("customers.jsonl"))
    told = change(row, replace(TIMED, bare_rows=True), LineContext("customers.jsonl"))
    assert (told.op, told.after, told.ts.hour) == ("u", row, 15)


@pytest.mark.parametrize("row", [{"ts_ms": 5}, {"id": 1, "value": None}, {"key": "a", "value": "b"}])
def test_a_bare_row_may_look_like_anything(row: dict[str, Any]) -> None:
    handling = replace(MAPPED, bare_rows=True)
    assert change(row, handling, LineContext("customers.jsonl", datetime.now(UTC))).after == row


def test_without_any_time_a_row_is_odd_and_never_of_now() -> None:
    with pytest.raises(LineFault, match="no commit time"):
        change({"id": 1, "__op": "u"}, MAPPED, LineContext("customers.jsonl"))


_HELD = {"__op": "u", "__source_ts_ms": TS, "__source_schema": "public", "__source_table": "customers"}
_DELETED = {"id": 1, "email": None, "__deleted": "true", **_HELD, "__op": "d"}
_KEY = {"topic": "a.public.customers", "key": {"id": 1}}
_TOMBSTONE = _KEY | {"value": None}
_BY_TOMBSTONES = replace(TIMED, tombstones=DELETE)
OPTIONS: dict[str, tuple[Any, Handling, str]] = {
    "delete.tombstone.handling.mode=rewrite": (_DELETED, PLAIN, "d"),
    "delete.tombstone.handling.mode=rewrite-with-tombstone, the tombstone": (_TOMBSTONE, PLAIN, ""),
    "delete.tombstone.handling.mode=tombstone": (_TOMBSTONE, _BY_TOMBSTONES, "d"),
    "delete.tombstone.handling.mode=delete-to-tombstone": (_TOMBSTONE, _BY_TOMBSTONES, "d"),
    "add.fields": (customer(1) | _HELD, PLAIN, "u"),
    "add.fields with other names": (
        customer(1) | {"kind": "u", **{name: told for name, told in _HELD.items() if name != "__op"}},
        Handling(fields={"op": "kind"}), "u",
    ),
    "add.fields.prefix": (
        customer(1) | {name.replace("__", "meta."): told for name, told in _HELD.items()},
        Handling(prefix="meta."), "u",
    ),
    "add.headers": (
        _KEY | {"value": customer(1), "headers": [{"key": n, "value": str(v)} for n, v in _HELD.items()]},
        PLAIN, "u",
    ),
    "add.headers.prefix": (
        _KEY | {
            "value": customer(1),
            "headers": [{"key": n.replace("__", "meta."), "value": str(v)} for n, v in _HELD.items()],
        },
        Handling(prefix="meta."), "u",
    ),
    "replace.null.with.default=false": (customer(1, name=None) | _HELD, PLAIN, "u"),
    "route.by.field": (
        {"topic": "active", "key": {"id": 1}, "value": customer(1) | _HELD, "headers": []}, PLAIN, "u",
    ),
    "drop.fields.header.name": (
        _KEY | {"value": {"id": 1, **_HELD}, "headers": [{"key": "dropped", "value": '["email"]'}]},
        PLAIN, "u",
    ),
}  # fmt: skip
"""Option of ``ExtractNewRecordState`` → what comes of a customer with it, how it is read, and the operation;
empty: a tombstone, which is dropped."""


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_of_the_flat_form_is_read(option: str) -> None:
    line, handling, op = OPTIONS[option]
    context = LineContext("customers.jsonl", datetime(2026, 11, 20, 16, tzinfo=UTC))
    told = read(line, handling, context)
    if not op:
        assert told is TOMBSTONE
        return
    assert isinstance(told, Change)
    assert (told.op, told.schema, told.table) == (op, "public", "customers")
    image = told.after if op == "u" else told.before
    assert image is not None and image["id"] == 1
    assert not any(name.startswith(("__", "meta.")) or name == "kind" for name in image)


def test_the_page_names_every_option_of_the_flat_form() -> None:
    page = program_file("docs/debezium.md").read_text()
    assert [each for each in OPTIONS if f"`{each.partition('=')[0].partition(' ')[0]}" not in page] == []


def test_a_tombstone_may_be_all_that_tells_of_a_delete() -> None:
    handling = replace(MAPPED, tombstones=DELETE, order=BY_ARRIVAL)
    context = LineContext("customers.jsonl", datetime(2026, 11, 20, 16, tzinfo=UTC))
    for line in ({"key": {"id": 1}, "value": None}, {"id": 1, "value": None}):
        told = change(line, handling, context)
        assert (told.op, told.key, told.table) == ("d", {"id": 1}, "customers")
    assert read(None, handling, context) is TOMBSTONE


def test_among_bare_rows_the_columns_of_a_key_with_a_null_value_are_a_tombstone() -> None:
    handling = replace(MAPPED, tombstones=DELETE, order=BY_ARRIVAL, bare_rows=True)
    context = LineContext("customers.jsonl", datetime(2026, 11, 20, 16, tzinfo=UTC))
    line = {"id": 1, "value": None}
    assert change(line, handling, context).op == "u"
    handling = replace(handling, keys=frozenset({frozenset({"id"}), frozenset({"a", "b"})}))
    told = change(line, handling, context)
    assert (told.op, told.key) == ("d", {"id": 1})
    for more in ({"name": "Ada"}, {"a": 1}):
        # A row of a table that has got a column of this name.
        assert change(line | more, handling, context).op == "u"


@pytest.mark.parametrize("value", [None, ""])
@pytest.mark.parametrize("others", [{}, {"key": "k"}])
def test_a_row_of_the_flat_form_with_an_empty_column_called_value_is_no_tombstone(
    value: str | None, others: dict[str, str]
) -> None:
    row = {"id": 2, "value": value} | others
    for prefix in ("__", "meta."):
        about = {name.replace("__", prefix): told for name, told in _HELD.items()}
        told = change(row | about, Handling(prefix=prefix))
        assert (told.op, told.after) == ("u", row)
    without_op = {name: told for name, told in _HELD.items() if name != "__op"}
    with pytest.raises(LineFault, match="neither a Debezium change event"):
        change({"id": 2, "value": None} | without_op)


def test_an_event_that_names_another_table_than_its_file_is_of_that_table() -> None:
    handling = Handling(tables=(NamedTable("*", "app", "users"),))
    about = {"__op": "c", "__source_ts_ms": TS}
    for table, schema in (("orders", None), ("users", "app")):
        flat = change({"id": 1, "__source_table": table} | about, handling)
        assert (flat.schema, flat.table) == (schema, table)
        envelope = change(of_mysql("u", table=table), handling)
        assert (envelope.schema, envelope.table) == (schema or "shop", table)
    unnamed = change({"id": 1} | about, handling, LineContext("any.jsonl"))
    assert (unnamed.schema, unnamed.table) == ("app", "users")


@pytest.mark.parametrize(
    ("said", "op"), [("True", "d"), (1, "d"), ("1", "d"), (0, "u"), ("FALSE", "u"), ("", "u")]
)
def test_what_says_that_a_row_is_deleted_may_be_spelled_otherwise(said: object, op: str) -> None:
    row = {"id": 1, "__deleted": said, **{name: told for name, told in _HELD.items() if name != "__op"}}
    assert change(row).op == op
    with pytest.raises(LineFault, match="neither true nor false"):
        change(row | {"__deleted": "yes"})


# ---- Other connectors


def of_mysql(
    op: str, file: object = "binlog.000007", pos: object = 1500, row: object = 2, **about: object
) -> Any:
    source = {"connector": "mysql", "db": "shop", "table": "users", "ts_ms": TS, "gtid": None}
    return {
        "op": op,
        "before": None,
        "after": {"id": 1},
        "source": source | {"file": file, "pos": pos, "row": row} | about,
    }


def test_mysql_is_ordered_by_its_binary_log() -> None:
    told = change(of_mysql("u"))
    assert (told.schema, told.table, told.order) == ("shop", "users", BINLOG)
    assert told.position == (7, 1500 << 14 | 2)
    later = [change(of_mysql("u", *place)) for place in (("b.000007", 1501, 0), ("b.000008", 4, 0))]
    assert told.position < later[0].position < later[1].position  # type: ignore[operator]
    row = change(of_mysql("r", "binlog.000009", 4, 0, snapshot="true"))
    assert row.position == (0, SNAPSHOT_BASE + 1)


@pytest.mark.parametrize(
    "document",
    [
        of_mysql("u", file=None),
        of_mysql("u", pos="1500"),
        of_mysql("u", row=1 << 14),
        of_mysql("r", snapshot="incremental"),
    ],
)
def test_what_is_no_place_in_the_log_is_odd(document: Any) -> None:
    with pytest.raises(LineFault):
        change(document)


def test_sql_server_is_ordered_by_the_lsn_of_the_change() -> None:
    def told(lsn: str, serial: int) -> Change:
        source = {"connector": "sqlserver", "schema": "dbo", "table": "users", "ts_ms": TS}
        place = {"change_lsn": lsn, "commit_lsn": "00000027:00000758:0005", "event_serial_no": serial}
        return change({"op": "u", "before": None, "after": {"id": 1}, "source": source | place})

    places = [
        told(*each).position
        for each in (
            ("00000027:00000758:0002", 1),
            ("00000027:00000758:0002", 2),
            ("00000027:00000758:0003", 1),
            ("00000027:00000759:0001", 1),
            ("00000028:00000001:0001", 1),
        )
    ]
    assert places == sorted(set(places))  # type: ignore[type-var]
    assert told("00000027:00000758:0002", 1).order == CHANGE_LSN


def test_the_connector_of_another_postgres_is_read_by_its_lsn() -> None:
    value = envelope("c", customer(1), order=1)
    value["source"]["connector"] = "yugabytedb"
    assert change(value).order == "transaction"


# ---- One odd line among others

ODD: dict[str, bytes] = {
    "text": b"not json at all",
    "bytes": b"\xff\xfe\x00\x01",
    "an object of another kind": b'{"hello": "world"}',
    "no key": json.dumps(envelope("u", {"email": "x"}, order=2)).encode(),
    "a value of another type": json.dumps(envelope("u", customer(1, org_id="many"), order=2)).encode(),
    "no row": json.dumps(envelope("u", None, order=2)).encode(),
    "an unknown operation": json.dumps(envelope("z", customer(1), order=2)).encode(),
    "another order": json.dumps(flat("u", customer(1))).encode(),
    "no time": json.dumps({"id": 1, "__op": "u", "__source_table": "customers"}).encode(),
}


@pytest.mark.parametrize("which", ODD)
def test_one_odd_line_refuses_nothing_and_is_kept(recorder: Recorder, which: str) -> None:
    lines = [json.dumps(envelope("c", customer(number), order=number)).encode() for number in (1, 3)]
    landing = recorder.land_lines("customers.jsonl", [lines[0], ODD[which], lines[1]])
    assert landing.tally is not None and (landing.tally.odd, landing.tally.read) == (1, 2)
    assert landing.tally.first_odd[0] == 2
    first, odd, last = recorder.events()
    assert (first["key"], last["key"], odd["file_row"]) == ('["1"]', '["3"]', 2)
    assert odd["key"] is None or odd["moved_from_key"] == NOT_WHOLE
    assert odd["identity"].startswith('["odd",')
    readable = ODD[which].decode(errors="ignore").replace("\0", "")
    assert readable in odd["envelope"].replace("\\xff\\xfe\\0", "") or which == "bytes"


def test_what_is_known_of_an_odd_line_is_kept(recorder: Recorder) -> None:
    good = json.dumps(envelope("c", customer(1), order=1)).encode()
    recorder.land_lines("customers.jsonl", [good, ODD["a value of another type"], ODD["text"], ODD["no row"]])
    _, value, text, no_row = recorder.events()
    assert (value["key"], value["ordinal"]) == ('["1"]', 1000 << 14 | 2)
    assert json.loads(value["after"])["org_id"] == "many"
    assert (text["source_table"], text["commit_lsn"], text["ordinal"]) == ("customers", 0, SNAPSHOT_BASE)
    assert (no_row["key"], no_row["after"]) == (None, None)
    windows = {file.window: file.rows for each in recorder.inlet.store.manifests() for file in each.files}
    assert windows[OUT_OF_RANGE] == 1, "of the text alone no time is known"


EVENTS = [each for each in ODD if each not in ("text", "bytes", "an object of another kind")]


@pytest.mark.parametrize("which", EVENTS)
def test_a_file_of_one_odd_event_lands_for_quarantine(recorder: Recorder, which: str) -> None:
    lines = [ODD[which]]
    if which == "another order":
        recorder.land_values("customers-1.jsonl", envelope("c", customer(1), order=1))
    landing = recorder.land_lines("customers.jsonl", lines)
    assert landing.tally is not None and (landing.tally.odd, landing.tally.read) == (1, 0)
    (odd,) = recorder.events(landing.manifest)
    assert odd["identity"].startswith('["odd",') and odd["envelope"] == ODD[which].decode()
    assert recorder.land_lines("again.jsonl", lines).already_landed


def test_a_record_around_no_event_lands_for_quarantine(recorder: Recorder) -> None:
    for wrapped in ({"topic": "a.b", "value": {"hello": 1}}, {"schema": {"type": "int32"}, "payload": 5}):
        landing = recorder.land_values("customers.jsonl", wrapped)
        assert landing.tally is not None and landing.tally.odd == 1


def test_odd_lines_alone_do_not_set_the_order_of_their_source(recorder: Recorder) -> None:
    recorder.land_lines("customers-1.jsonl", [ODD["no time"]])
    landing = recorder.land_values("customers-2.jsonl", flat("u", customer(1)))
    assert landing.tally is not None and (landing.tally.odd, landing.tally.read) == (0, 1)
    assert landing.manifest.file is not None and landing.manifest.file.order == "time"


def test_one_odd_event_refuses_its_file_where_the_policy_says_so(recorder: Recorder) -> None:
    recorder.inlet = replace(recorder.inlet, handling=replace(TIMED, odd_lines=REFUSE))
    with pytest.raises(FileRefused, match="line 1: it has no commit time"):
        recorder.land_lines("customers.jsonl", [ODD["no time"]])


def test_a_file_without_one_line_that_is_an_event_is_refused(recorder: Recorder) -> None:
    with pytest.raises(FileRefused, match="line 1: it is not a JSON document"):
        recorder.land_lines("customers.jsonl", [b"{", b'"op": "c"', b"}", b'{"hello": "world"}'])
    assert recorder.inlet.store.batch_ids() == []
    assert recorder.inlet.store.current_epoch() is None


def test_the_same_odd_line_again_is_the_same_event_and_the_corrected_one_another(recorder: Recorder) -> None:
    good = json.dumps(envelope("c", customer(1), order=1)).encode()
    corrected = json.dumps(envelope("u", customer(1, org_id=5), order=2)).encode()
    recorder.land_lines("customers-1.jsonl", [good, ODD["a value of another type"]])
    recorder.land_lines("customers-2.jsonl", [ODD["a value of another type"], good])
    recorder.land_lines("customers-3.jsonl", [corrected])
    places = [(each["ordinal"], each["identity"]) for each in recorder.events() if each["op"] == "u"]
    assert len(places) == 3 and len(set(places)) == 2


# ---- Ordered by arrival


def test_events_without_a_place_of_their_own_stand_as_they_arrived(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers", handling=replace(MAPPED, order=BY_ARRIVAL, bare_rows=True))
    first = recorder.land_values("customers-1.jsonl", customer(1, name="a"), customer(1, name="b"))
    second = recorder.land_values("customers-2.jsonl", customer(1, name="c"))
    assert first.manifest.file is not None and first.manifest.file.order == "arrival"
    events = sorted(recorder.events(), key=lambda each: each["ordinal"])
    assert [json.loads(each["after"])["name"] for each in events] == ["a", "b", "c"]
    assert [each["ordinal"] for each in events] == [1, 2, 3]
    assert second.manifest.windows == (f"{recorder.now:%Y-%m-%dT%H}00",)
    again = recorder.land_values("customers-3.jsonl", customer(1, name="c"))
    assert again.already_landed


# ---- Through the layers


def test_odd_lines_wait_in_quarantine_and_their_rows_are_not_known(
    tmp_path: Path, spark: SparkSession
) -> None:
    columns = TABLES["customers"][1]
    recorder = Recorder(tmp_path, "customers", handling=TIMED)
    full = dict.fromkeys(columns) | customer(1, org_id=1)
    lines = [
        envelope("c", full, lsn=1000, order=1),
        envelope("c", full | {"id": 2}, lsn=1001, order=1),
        envelope("u", {"id": 1, "org_id": "many"}, lsn=1002, order=1),
        envelope("u", full | {"id": 2, "org_id": 7}, lsn=1003, order=1),
    ]
    recorder.land_values("customers.jsonl", *lines, {"hello": "world"})
    recorder.run(spark)
    state = recorder.state(spark, "customers")
    assert state[(1,)]["_cdc_unresolved"] == ["org_id"]
    assert state[(1,)]["email"] == "a@example.com"
    assert (state[(2,)]["org_id"], state[(2,)]["_cdc_unresolved"]) == (7, [])
    recorder.land_values("corrected.jsonl", envelope("u", {"id": 1, "org_id": 9}, lsn=1002, order=1))
    recorder.run(spark)
    corrected = recorder.state(spark, "customers")[(1,)]
    assert (corrected["org_id"], corrected["_cdc_unresolved"]) == (9, [])
