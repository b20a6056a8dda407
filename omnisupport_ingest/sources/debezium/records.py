"""A line as a change: the record around it, the schema beside it, Debezium's envelope or the flat form.

A line is the value of a Kafka record, or the whole record (``topic``, ``key``, ``value``,
``headers``); key and value stand alone or as ``{"schema": …, "payload": …}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from omnisupport_ingest.contracts.pg_values import whole_number
from omnisupport_ingest.foreign import Unreadable, parse_row
from omnisupport_ingest.sources.debezium.changes import (
    HEARTBEAT,
    MARKER,
    MESSAGE,
    SCHEMA_CHANGE,
    TOMBSTONE,
    Change,
    Passed,
)
from omnisupport_ingest.sources.debezium.faults import LineFault

OPERATIONS = frozenset("crudt")

_START = datetime(1970, 1, 1, tzinfo=UTC)
_FLAT_NAMES = frozenset(
    {"__op", "__deleted", "__table", "__db", "__schema", "__lsn", "__txId", "__sequence", "__name"}
    | {"__connector", "__version", "__snapshot", "__xmin", "__origin", "__origin_lsn"}
    | {"__ts_ms", "__ts_us", "__ts_ns"}
)
_FLAT_PREFIXES = ("__source_", "__transaction_", "__debezium")
_ADD_FIELDS = "add.fields=op,source.ts_ms,source.schema,source.table,source.lsn,source.sequence"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Record:
    """A record taken apart: values without their schemas, which stand beside them."""

    topic: str
    key: Any
    key_schema: Document
    value: Any
    value_schema: Document
    headers: Document = field(default_factory=dict)


def read_line(line: bytes) -> Change | Passed:
    """The change in one line of JSON, or what else the line is; ``LineFault`` if it is neither."""
    record = _record(_parse(line))
    value = record.value
    if value is None:
        return TOMBSTONE
    if not isinstance(value, dict):
        raise _neither()
    if "__op" in value or "__deleted" in value:
        return _of_flat(record, value)
    if isinstance(value.get("source"), dict) and isinstance(value.get("op"), str):
        return MESSAGE if value["op"] == "m" else _of_envelope(record, value)
    if record.topic.startswith("__debezium-heartbeat") or value.keys() == {"ts_ms"}:
        return HEARTBEAT
    if value.get("status") in ("BEGIN", "END") and "id" in value:
        return MARKER
    if "ddl" in value or "tableChanges" in value:
        return SCHEMA_CHANGE
    raise _neither()


def _parse(line: bytes) -> Any:
    try:
        return parse_row(line)
    except Unreadable as why:
        raise LineFault(
            f"it is not a JSON document in UTF-8 that can be read: {why}",
            "Write one event per line; `jq -c .` does that for a pretty-printed file, `jq -c '.[]'` for an "
            "array.",
        ) from None


def _neither() -> LineFault:
    return LineFault(
        "it is neither a Debezium change event (op, source, before, after) nor its flat form (__op, "
        "__source_ts_ms …)",
        "Take lines of other kinds out of the file; for the flat form, set " + _ADD_FIELDS + " on the "
        "transform.",
    )


def _record(document: Any) -> _Record:
    whole = (
        isinstance(document, dict)
        and "value" in document
        and ("topic" in document or "key" in document)
        and not document.keys() & {"op", "__op", "__deleted"}
    )
    if not whole:
        value, schema = _unwrapped(document)
        return _Record("", None, {}, value, schema)
    key, key_schema = _unwrapped(document.get("key"))
    value, value_schema = _unwrapped(document["value"])
    topic = document.get("topic")
    return _Record(
        topic if isinstance(topic, str) else "",
        key,
        key_schema,
        value,
        value_schema,
        _headers(document.get("headers")),
    )


def _unwrapped(document: Any) -> tuple[Any, Document]:
    if isinstance(document, dict) and document.keys() == {"schema", "payload"}:
        schema = document["schema"]
        return document["payload"], schema if isinstance(schema, dict) else {}
    return document, {}


def _headers(headers: Any) -> Document:
    if isinstance(headers, dict):
        return headers
    pairs = headers if isinstance(headers, list) else []
    return {
        each["key"]: each.get("value")
        for each in pairs
        if isinstance(each, dict) and isinstance(each.get("key"), str)
    }


def _of_envelope(record: _Record, value: Document) -> Change:
    source, op = value["source"], value["op"]
    if op not in OPERATIONS:
        raise LineFault("its op is none of c, r, u, d, t and m", "Take the line out, or correct its op.")
    transaction = value.get("transaction")
    table = source.get("table")
    if not isinstance(table, str) or not table:
        raise LineFault("its source names no table", "Land events of PostgreSQL tables only.")
    schema = source.get("schema")
    return Change(
        op=op,
        schema=schema if isinstance(schema, str) and schema else None,
        table=table,
        before=_image(value.get("before"), "before"),
        after=_image(value.get("after"), "after"),
        key=record.key if isinstance(record.key, dict) else None,
        old_key=_old_key(record),
        fields=_row_fields(record.value_schema),
        key_fields=_fields(record.key_schema),
        ts=_time(source, ""),
        lsn=_whole(source.get("lsn"), "source.lsn"),
        commit_before=_commit_before(source.get("sequence")),
        tx_id=_whole(source.get("txId"), "source.txId"),
        total_order=_whole(transaction.get("total_order"), "transaction.total_order")
        if isinstance(transaction, dict)
        else None,
    )


def _of_flat(record: _Record, value: Document) -> Change:
    def about(name: str) -> Any:
        return value.get(f"__source_{name}", value.get(f"__{name}"))

    row = {name: held for name, held in value.items() if not _is_about(name)}
    op = "d" if _truth(value.get("__deleted")) else value.get("__op")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise LineFault("it has no __op that is one of c, r, u, d and t", f"Set {_ADD_FIELDS}.")
    topic = record.topic.split(".")
    table = about("table") or (topic[-1] if len(topic) > 1 else None)
    if not isinstance(table, str) or not table:
        raise LineFault("it does not say its table (__source_table)", f"Set {_ADD_FIELDS}.")
    schema = about("schema") or (topic[-2] if len(topic) > 2 else None)
    fields = {name: held for name, held in _fields(record.value_schema).items() if not _is_about(name)}
    return Change(
        op=op,
        schema=schema if isinstance(schema, str) else None,
        table=table,
        before=row if op == "d" else None,
        after=row if op in "cur" else None,
        key=record.key if isinstance(record.key, dict) else None,
        old_key=_old_key(record),
        fields=fields,
        key_fields=_fields(record.key_schema),
        ts=_time(value, "__source_"),
        lsn=_whole(about("lsn"), "__source_lsn"),
        commit_before=_commit_before(about("sequence")),
        tx_id=_whole(about("txId"), "__source_txId"),
        total_order=_whole(value.get("__transaction_total_order"), "__transaction_total_order"),
    )


def _is_about(name: str) -> bool:
    return name in _FLAT_NAMES or name.startswith(_FLAT_PREFIXES)


def _truth(value: Any) -> bool:
    return value is True or value == "true"


def _image(value: Any, name: str) -> Document | None:
    if value is not None and not isinstance(value, dict):
        raise LineFault(f"its {name} is no JSON object", "Land events of the JSON converter.")
    return value


def _old_key(record: _Record) -> Document | None:
    """The key that a row had before its key changed: Debezium's header on the ``c`` of the new key."""
    held = record.headers.get("__debezium.oldkey")
    if isinstance(held, str):
        try:
            held = parse_row(held)
        except Unreadable:
            return None
    key, _ = _unwrapped(held)
    return key if isinstance(key, dict) else None


def _fields(schema: Document) -> dict[str, Document]:
    fields = schema.get("fields")
    return {
        each["field"]: each
        for each in (fields if isinstance(fields, list) else ())
        if isinstance(each, dict) and isinstance(each.get("field"), str)
    }


def _row_fields(schema: Document) -> dict[str, Document]:
    fields = _fields(schema)
    return _fields(fields.get("after") or fields.get("before") or {})


def _time(holder: Document, prefix: str) -> datetime:
    """The commit time, as finely as it is told."""
    for name, divisor in (("ts_us", 1), ("ts_ns", 1000), ("ts_ms", None)):
        told = _whole(holder.get(prefix + name), prefix + name)
        if told is None:
            continue
        micros = told * 1000 if divisor is None else told // divisor
        try:
            return _START + timedelta(microseconds=micros)
        except OverflowError:
            raise LineFault(f"its {prefix}{name} is no time", "Correct it where it was made.") from None
    raise LineFault(
        f"it has no commit time ({prefix or 'source.'}ts_ms)",
        f"Set {_ADD_FIELDS}." if prefix else "Land events of Debezium's PostgreSQL connector.",
    )


def _whole(value: Any, name: str) -> int | None:
    """A number, or its text, as Debezium's flat form may have it."""
    if value is None or value == "":
        return None
    found = whole_number(value) if isinstance(value, str) else value
    if isinstance(found, bool) or not isinstance(found, int):
        raise LineFault(f"its {name} is no whole number", "Correct it where it was made.")
    if not -(1 << 63) <= found < 1 << 63:
        raise LineFault(f"its {name} does not fit 64 bits", "Correct it where it was made.")
    return found


def _commit_before(sequence: Any) -> int | None:
    """``source.sequence[0]``; the sequence comes as a JSON array, as a rule inside a text."""
    if isinstance(sequence, str):
        try:
            sequence = parse_row(sequence)
        except Unreadable:
            sequence = "?"
    if sequence is None:
        return None
    if not isinstance(sequence, list) or not sequence:
        raise LineFault("its source.sequence is no list of two LSNs", "Correct it where it was made.")
    found = _whole(sequence[0], "source.sequence[0]")
    if found is not None and not 0 <= found < 1 << 63:
        raise LineFault("its source.sequence[0] is no LSN", "Correct it where it was made.")
    return found
