"""Reads a line as a change: the record around it, the schema beside it, Debezium's envelope or the flat form.

A line is the value of a Kafka record, or a whole record (``topic``, ``key``, ``value``, ``headers``). Key and
value stand alone or as ``{"schema": …, "payload": …}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from omnisupport_ingest.contracts.pg_values import whole_number
from omnisupport_ingest.foreign import Unreadable, parse_row, shortened
from omnisupport_ingest.sources.debezium.changes import (
    HEARTBEAT,
    MARKER,
    MESSAGE,
    NOTIFICATION,
    SCHEMA_CHANGE,
    SIGNAL,
    TOMBSTONE,
    Change,
    Passed,
)
from omnisupport_ingest.sources.debezium.faults import LineFault, NoEvent
from omnisupport_ingest.sources.debezium.flat_form import METADATA, Flat, is_metadata, names_of
from omnisupport_ingest.sources.debezium.handling import ALONE, DELETE, DROP, PLAIN, Handling, LineContext
from omnisupport_ingest.sources.debezium.other_logs import MYSQL, position_of

OLD_KEY = "__debezium.oldkey"
"""The header of a record whose row has changed its key; it holds the key before."""

OPERATIONS = frozenset("crudt")

_START = datetime(1970, 1, 1, tzinfo=UTC)
_ADD_FIELDS = "add.fields=op,source.ts_ms,source.schema,source.table,source.lsn,source.sequence"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """A record taken apart: its values, and their schemas separately. ``topic`` is empty and ``key`` None if
    unknown."""

    topic: str
    key: Any
    key_schema: Document
    value: Any
    value_schema: Document
    headers: Document = field(default_factory=dict)


def read_line(line: bytes, handling: Handling = PLAIN, context: LineContext = ALONE) -> Change | Passed:
    """Return the change in one line of JSON, or the kind of a line without one. Raises ``LineFault`` for any
    other line."""
    return read_record(record_in(_parse(line), handling), handling, context)


def record_of(topic: str, key: bytes | None, value: bytes | None, headers: Document) -> Record:
    """Return the record with these parts, as Kafka has them. Raises ``LineFault`` if the value is no JSON.

    A key that is no JSON counts as none. An empty value is a tombstone.
    """
    try:
        key_document = parse_row(key) if key else None
    except Unreadable:
        key_document = None
    return Record(topic, *unwrapped(key_document), *unwrapped(_parse(value) if value else None), headers)


def read_record(record: Record, handling: Handling, context: LineContext) -> Change | Passed:
    """Return the change in ``record``, or the kind of a record without one. Raises ``LineFault`` for any
    other record."""
    context = replace(context, name=record.topic or context.name)
    value = record.value
    if value is None or value == "":
        return _of_tombstone(record, handling, context)
    if not isinstance(value, dict):
        raise _neither(record)
    flat = Flat(record.headers, value, handling)
    if is_envelope(value):
        return MESSAGE if value["op"] == "m" else _of_envelope(record, value, handling, context)
    if flat.is_flat:
        return _of_flat(record, flat, handling, context)
    # A topic of a table holds rows, whatever they look like.
    if handling.bare_rows and handling.leads_to_a_contract(context.name, record.topic):
        return _of_flat(record, flat, handling, context)
    passed = _beside_the_rows(record, value)
    if passed is not None:
        return passed
    if handling.bare_rows:
        return _of_flat(record, flat, handling, context)
    raise _neither(record)


def _beside_the_rows(record: Record, value: Document) -> Passed | None:
    """Return the kind of a line that concerns no row; None if it may concern one."""
    if record.topic.startswith("__debezium-heartbeat") or value.keys() == {"ts_ms"}:
        return HEARTBEAT
    if value.get("status") in ("BEGIN", "END") and "id" in value:
        return MARKER
    if "ddl" in value or "tableChanges" in value:
        return SCHEMA_CHANGE
    if isinstance(value.get("type"), str) and {"type", "data"} <= value.keys() <= {"id", "type", "data"}:
        return SIGNAL
    if {"aggregate_type", "type"} <= value.keys():
        return NOTIFICATION
    return None


def _parse(line: bytes) -> Any:
    try:
        return parse_row(line)
    except Unreadable as why:
        raise NoEvent(
            f"it is not a JSON document in UTF-8 that can be read: {why}",
            "Write one event per line; `jq -c .` does that for a pretty-printed file, `jq -c '.[]'` for an "
            "array.",
        ) from None


def _neither(record: Record) -> LineFault:
    in_record = bool(record.topic or record.key is not None or record.value_schema)
    return (LineFault if in_record else NoEvent)(
        "it is neither a Debezium change event (op, source, before, after) nor its flat form (__op, "
        "__source_ts_ms …)",
        "Take lines of other kinds out of the file; for the flat form, set " + _ADD_FIELDS + " on the "
        "transform.",
    )


def is_envelope(value: Document) -> bool:
    """Whether ``value`` is Debezium's envelope."""
    return isinstance(value.get("source"), dict) and isinstance(value.get("op"), str)


def record_in(document: Any, handling: Handling) -> Record:
    """Return the record in a line; for a value alone, a record without a topic."""
    if not is_record(document, handling):
        value, schema = unwrapped(document)
        return Record("", None, {}, value, schema)
    key, key_schema = unwrapped(document.get("key"))
    if "key" not in document and "topic" not in document:
        # A value of null has the columns of its key beside it.
        key = {name: member for name, member in document.items() if name != "value"}
    value, value_schema = unwrapped(document["value"])
    topic = document.get("topic")
    return Record(
        topic if isinstance(topic, str) else "",
        key,
        key_schema,
        value,
        value_schema,
        _headers(document.get("headers")),
    )


def is_record(document: Any, handling: Handling) -> bool:
    """Whether a line is a whole record, not a value alone."""
    if not isinstance(document, dict) or "value" not in document:
        return False
    if "op" in document or any(is_metadata(name, handling) for name in document):
        # A row of the flat form may have a column of this name.
        return False
    value = document["value"]
    if "topic" in document or "key" in document:
        # A bare row may have columns of these names.
        return not handling.bare_rows or value is None or value == "" or isinstance(value, dict)
    if handling.bare_rows:
        is_key = document.keys() - {"value"} in handling.keys
        return value is None and handling.tombstones == DELETE and is_key
    return value is None


def unwrapped(document: Any) -> tuple[Any, Document]:
    """Return ``document`` without the schema around it, and that schema; empty if there is none."""
    if isinstance(document, dict) and "payload" in document and document.keys() <= {"schema", "payload"}:
        schema, payload = document.get("schema"), document["payload"]
        if "schema" in document or payload is None or isinstance(payload, dict):
            return payload, schema if isinstance(schema, dict) else {}
    return document, {}


def telling_headers(handling: Handling) -> frozenset[str]:
    """Return the names of headers that hold metadata of a row."""
    return frozenset({OLD_KEY, *(name for what in METADATA for name in names_of(what, handling))})


def _headers(headers: Any) -> Document:
    if isinstance(headers, dict):
        return headers
    pairs = headers if isinstance(headers, list) else []
    return {
        each["key"]: each.get("value")
        for each in pairs
        if isinstance(each, dict) and isinstance(each.get("key"), str)
    }


def _of_envelope(record: Record, value: Document, handling: Handling, context: LineContext) -> Change:
    source, op = value["source"], value["op"]
    if op not in OPERATIONS:
        raise LineFault("its op is none of c, r, u, d, t and m", "Take the line out, or correct its op.")
    transaction = value.get("transaction")
    schema, table = named_table(source.get("schema"), source.get("table"), handling, context)
    if schema is None and source.get("connector") in MYSQL:
        schema = _text(source.get("db"))
    before, after = _image(value.get("before"), "before"), _image(value.get("after"), "after")
    position = position_of(source, op)
    return Change(
        op=op,
        schema=schema,
        table=table,
        before=before,
        after=after,
        key=record.key if isinstance(record.key, dict) else None,
        old_key=_old_key(record),
        fields=row_fields(record.value_schema),
        key_fields=_fields_of(record.key_schema),
        ts=_time(source.get, "source.", after or before or {}, handling, context),
        lsn=None if position else _whole(source.get("lsn"), "source.lsn"),
        commit_before=_commit_before(source.get("sequence")) if position is None else None,
        tx_id=_whole(source.get("txId"), "source.txId"),
        total_order=_whole(transaction.get("total_order"), "transaction.total_order")
        if isinstance(transaction, dict)
        else None,
        position=position[0] if position else None,
        ordered_by=position[1] if position else "",
    )


def _of_flat(record: Record, flat: Flat, handling: Handling, context: LineContext) -> Change:
    row = flat.row
    op = "d" if _is_deleted(flat.about("deleted")) else flat.about("op")
    if op is None and (handling.bare_rows or flat.about("deleted") is not None):
        # An insert or an update, which cannot be told apart: the row has all its values.
        op = "u"
    if not isinstance(op, str) or op not in OPERATIONS:
        raise LineFault("it has no __op that is one of c, r, u, d and t", f"Set {_ADD_FIELDS}.")
    schema, table = flat_table(record, flat, handling, context)
    fields = {
        name: field for name, field in _fields_of(record.value_schema).items() if not flat.is_about(name)
    }
    return Change(
        op=op,
        schema=schema,
        table=table,
        before=row if op == "d" else None,
        after=row if op in "cur" else None,
        key=record.key if isinstance(record.key, dict) else None,
        old_key=_old_key(record),
        fields=fields,
        key_fields=_fields_of(record.key_schema),
        ts=_time(flat.about, "__source_", row, handling, context),
        lsn=_whole(flat.about("lsn"), "__source_lsn"),
        commit_before=_commit_before(flat.about("sequence")),
        tx_id=_whole(flat.about("txId"), "__source_txId"),
        total_order=_whole(flat.about("transaction.total_order"), "__transaction_total_order"),
        flat=True,
    )


def columns_of(record: Record, flat: Flat) -> dict[str, Document]:
    """Return the schemas of the columns of a row of the flat form, by name."""
    fields = _fields_of(record.value_schema)
    return {name: field for name, field in fields.items() if not flat.is_about(name)}


def flat_table(
    record: Record, flat: Flat, handling: Handling, context: LineContext
) -> tuple[str | None, str]:
    """Return the schema (None if unknown) and the table of a row of the flat form. Raises ``LineFault`` if
    the table is unknown."""
    topic = record.topic.split(".")
    schema = flat.about("schema") or (topic[-2] if len(topic) > 2 else None)
    table = flat.about("table")
    if _text(table) is not None:
        return named_table(schema, table, handling, context)
    return table_of(schema, topic[-1] if len(topic) > 1 else None, handling, context)


def _of_tombstone(record: Record, handling: Handling, context: LineContext) -> Change | Passed:
    """Return what a tombstone means: nothing, because its delete came before it, or the delete itself if the
    definition says that no other event tells of deletes."""
    if handling.tombstones == DROP or not isinstance(record.key, dict):
        return TOMBSTONE
    topic = record.topic.split(".")
    schema, table = table_of(
        topic[-2] if len(topic) > 2 else None, topic[-1] if len(topic) > 1 else None, handling, context
    )
    return Change(
        op="d",
        schema=schema,
        table=table,
        before=record.key,
        after=None,
        key=record.key,
        old_key=None,
        fields={},
        key_fields=_fields_of(record.key_schema),
        ts=_time(lambda _: None, "source.", {}, handling, context),
        lsn=None,
        commit_before=None,
        tx_id=None,
        total_order=None,
    )


def named_table(schema: Any, table: Any, handling: Handling, context: LineContext) -> tuple[str | None, str]:
    """Return schema and table as ``table_of`` does, but never a table other than the one that the event
    names.

    The definition may still give its schema.
    """
    named = handling.table_of(context.name)
    if named is not None and (known := _text(table)) is not None and known != named.table:
        return _text(schema), known
    return table_of(schema, table, handling, context)


def table_of(schema: Any, table: Any, handling: Handling, context: LineContext) -> tuple[str | None, str]:
    """Return schema and table: from the event, else from the definition of its file or topic."""
    named = handling.table_of(context.name)
    # The definition wins over a name that comes from the topic alone.
    if named is not None and not (_text(table) and _text(schema)):
        return named.schema, named.table
    if (table_name := _text(table)) is not None:
        return _text(schema), table_name
    raise LineFault(
        "it does not say its table (source.table, __source_table), and nothing says what table comes in "
        f"{shortened(context.name)}",
        "Map the file or topic to its table in the definition of the source (events.tables), or for the flat "
        f"form set {_ADD_FIELDS}.",
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_deleted(value: Any) -> bool:
    """Return the meaning of ``__deleted``. Raises ``LineFault`` if it is neither true nor false."""
    text = str(value).lower() if isinstance(value, str | int) else value
    if text in ("true", "1"):
        return True
    if text in ("false", "0", "", None):
        return False
    raise LineFault("its __deleted is neither true nor false", "Write true or false.")


def _image(value: Any, name: str) -> Document | None:
    if value is not None and not isinstance(value, dict):
        raise LineFault(f"its {name} is no JSON object", "Land events of the JSON converter.")
    return value


def _old_key(record: Record) -> Document | None:
    """Return the key before a key change: Debezium's header on the ``c`` of the new key."""
    header = record.headers.get(OLD_KEY)
    if isinstance(header, str):
        try:
            header = parse_row(header)
        except Unreadable:
            return None
    key, _ = unwrapped(header)
    return key if isinstance(key, dict) else None


def _fields_of(schema: Document) -> dict[str, Document]:
    """Return the schemas of the fields in ``schema``, by name."""
    fields = schema.get("fields")
    return {
        each["field"]: each
        for each in (fields if isinstance(fields, list) else ())
        if isinstance(each, dict) and isinstance(each.get("field"), str)
    }


def row_fields(schema: Document) -> dict[str, Document]:
    """Return the schemas of a row's columns, by name, from the ``schema`` of an envelope."""
    fields = _fields_of(schema)
    return _fields_of(fields.get("after") or fields.get("before") or {})


def _time(
    member: Callable[[str], Any], prefix: str, row: Document, handling: Handling, context: LineContext
) -> datetime:
    """Return the commit time at its finest resolution; else the time in a column, else that of
    ``context``."""
    for name, divisor in (("ts_us", 1), ("ts_ns", 1000), ("ts_ms", None)):
        time = _whole(member(name), prefix + name)
        if time is not None:
            return _moment(time * 1000 if divisor is None else time // divisor, prefix + name)
    for name in handling.time_columns:
        if row.get(name) is not None:
            return _of_column(row[name], name)
    if context.moment is not None:
        return context.moment
    raise LineFault(
        f"it has no commit time ({prefix}ts_ms)",
        "Name the columns that say when in the definition of the source (events.time_columns), or for the "
        f"flat form set {_ADD_FIELDS}.",
    )


def _of_column(value: Any, name: str) -> datetime:
    """Return a time in a column: ISO 8601 (UTC if it has no zone), or milliseconds since 1970."""
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            pass
    elif isinstance(value, int) and not isinstance(value, bool):
        return _moment(value * 1000, name)
    raise LineFault(
        f"its column {name!r}, which says when it was, is no time",
        "Name a column of ISO 8601 times or of milliseconds as events.time_columns.",
    )


def _moment(micros: int, name: str) -> datetime:
    try:
        return _START + timedelta(microseconds=micros)
    except OverflowError:
        raise LineFault(f"its {name} is no time", "Correct it where it was made.") from None


def _whole(value: Any, name: str) -> int | None:
    """Return a whole number that is given as a number or as text, as Debezium's flat form has it."""
    if value is None or value == "":
        return None
    number = whole_number(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise LineFault(f"its {name} is no whole number", "Correct it where it was made.")
    if not -(1 << 63) <= number < 1 << 63:
        raise LineFault(f"its {name} does not fit 64 bits", "Correct it where it was made.")
    return number


def _commit_before(sequence: Any) -> int | None:
    """Return ``source.sequence[0]``; the sequence is a JSON array, usually inside a text."""
    if isinstance(sequence, str):
        try:
            sequence = parse_row(sequence)
        except Unreadable:
            sequence = "?"
    if sequence is None:
        return None
    if not isinstance(sequence, list) or not sequence:
        raise LineFault("its source.sequence is no list of two LSNs", "Correct it where it was made.")
    commit_before = _whole(sequence[0], "source.sequence[0]")
    if commit_before is not None and not 0 <= commit_before < 1 << 63:
        raise LineFault("its source.sequence[0] is no LSN", "Correct it where it was made.")
    return commit_before
