"""Events as a test tells them: Debezium's envelope, and the flat form."""

from __future__ import annotations

import json
from typing import Any

from omnisupport_ingest_tests.sources.debezium.recorded import START

TS = int(START.timestamp() * 1000) + 3_600_000


def customer(id: int, **values: object) -> dict[str, Any]:
    return {"id": id, "email": "a@example.com"} | values


def envelope(
    op: str,
    row: dict[str, Any] | None,
    *,
    lsn: int | None = 1000,
    before_lsn: int | None = 900,
    order: int | None = None,
    ts: int = TS,
    table: str = "customers",
    before: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A plain change; ``before_lsn`` is ``sequence[0]``."""
    sequence = [None if before_lsn is None else str(before_lsn), str(lsn)]
    return {
        "before": row if op == "d" else before,
        "after": None if op == "d" else row,
        "source": {
            "ts_ms": ts,
            "schema": "public",
            "table": table,
            "txId": 7,
            "lsn": lsn,
            "sequence": json.dumps(sequence) if lsn is not None else None,
        },
        "transaction": None if order is None else {"id": "7:1", "total_order": order},
        "op": op,
        "ts_ms": ts + 50,
    }


def flat(op: str, row: dict[str, Any], *, ts: int = TS, **about: object) -> dict[str, Any]:
    """The flat form, as ``add.fields=op,source.ts_ms,source.table`` makes it."""
    return row | {
        "__op": op,
        "__source_ts_ms": ts,
        "__source_db": "samples",
        "__source_table": "customers",
        "__deleted": "true" if op == "d" else "false",
        **{f"__source_{name}": value for name, value in about.items()},
    }


def flattened(change: dict[str, Any], *, op: bool = True, deleted: bool = True) -> dict[str, Any]:
    """The flat form of an ``envelope``, with all that says where it stands. ``op``, ``deleted``: with it."""
    row, source = change["after"] or change["before"], change["source"]
    is_deleted = change["op"] == "d"
    return (
        row
        | ({"__op": change["op"]} if op else {})
        | {f"__source_{name}": source[name] for name in ("ts_ms", "schema", "table", "lsn", "sequence")}
        | {"__source_db": "samples", "__source_txId": source["txId"]}
        | {f"__transaction_{name}": each for name, each in (change["transaction"] or {}).items()}
        | ({"__deleted": "true" if is_deleted else "false"} if deleted else {})
    )


def schema_of(change: dict[str, Any], fields: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The schema beside a value, with ``fields`` as those of a row."""
    row = [{"field": name, "optional": True, **each} for name, each in fields.items()]
    if "source" not in change:
        return {"type": "struct", "fields": row, "optional": False, "name": "s.Value"}
    images = [
        {"type": "struct", "fields": row, "optional": True, "field": each} for each in ("before", "after")
    ]
    about = {"type": "struct", "fields": [], "version": 1, "field": "source"}
    return {"type": "struct", "fields": [*images, about, {"type": "string", "field": "op"}], "version": 2}
