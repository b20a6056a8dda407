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
