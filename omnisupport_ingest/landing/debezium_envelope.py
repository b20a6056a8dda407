"""Show a landed event in the envelope that Debezium's PostgreSQL connector writes (``landing tail``).

Only the envelope is translated. Values stay the text that landed; Debezium would give them types.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from omnisupport_ingest.landing.rows import LandedEvent

OPERATIONS = frozenset("crudtm")
"""Operations that Debezium has too. The end of a snapshot (``b``) is ours alone."""

UNAVAILABLE = "__debezium_unavailable_value"
"""What Debezium writes for a value that was not sent (its ``unavailable.value.placeholder``)."""

_EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Origin:
    """Facts of the source that every envelope of a batch repeats.

    ``version`` is that of this program. ``database`` is empty for deliveries of files, whose ``connector`` is
    ``file``.
    """

    version: str
    connector: str
    source: str
    database: str
    landed_at: datetime


def envelope(event: LandedEvent, origin: Origin) -> dict[str, Any]:
    """Return ``event`` as the value of a Debezium record.

    ``ts_ms`` is when the batch landed, ``source.ts_ms`` the commit time. ``before`` has only the columns that
    the source sent (under the default replica identity: the key). A column that was not sent is
    ``UNAVAILABLE`` in ``after``. A key-changing update is a ``d`` and a ``c``, as in Debezium; the old row is
    in the ``d`` alone.

    Raises:
        ValueError: Debezium does not have the operation.
    """
    if event.op not in OPERATIONS:
        raise ValueError(f"Debezium has no operation {event.op!r}")
    source = _source(event, origin)
    landed = _microseconds(origin.landed_at)
    if event.op == "m":
        return {
            "op": "m",
            "ts_ms": landed // 1000,
            "source": source,
            "transaction": None,
            "message": json.loads(event.after or "null"),
        }
    return {
        "before": json.loads(event.before) if event.before and event.op in "ud" else None,
        "after": _after(event),
        "source": source,
        "transaction": None,
        "op": event.op,
        "ts_ms": landed // 1000,
        "ts_us": landed,
        "ts_ns": landed * 1000,
    }


def _source(event: LandedEvent, origin: Origin) -> dict[str, Any]:
    committed = _microseconds(event.source_ts)
    # A snapshot row has no LSN of its own, so it takes that of its snapshot.
    lsn = event.lsn if event.lsn is not None else event.commit_lsn or None
    return {
        "version": origin.version,
        "connector": origin.connector,
        "name": origin.source,
        "ts_ms": committed // 1000,
        "snapshot": "true" if event.op == "r" else "false",
        "db": origin.database,
        "sequence": _sequence(event, lsn),
        "ts_us": committed,
        "ts_ns": committed * 1000,
        "schema": event.source_schema,
        "table": event.source_table,
        "txId": event.tx_id,
        "lsn": lsn,
        "xmin": None,
        "origin": None,
        "origin_lsn": None,
    }


def _sequence(event: LandedEvent, lsn: int | None) -> str | None:
    """Return a commit LSN and the event's own LSN, both as text.

    The first is the commit LSN of the event's own transaction. Debezium writes that of the previous
    transaction, which an event does not know. Both rise with the stream.
    """
    if lsn is None:
        return None
    commit = None if event.op == "r" else str(event.commit_lsn)
    return json.dumps([commit, str(lsn)], separators=(",", ":"))


def _after(event: LandedEvent) -> dict[str, Any] | None:
    if event.after is None:
        return None
    image: dict[str, Any] = json.loads(event.after)
    return image | dict.fromkeys(event.unchanged or (), UNAVAILABLE)


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH_START) // timedelta(microseconds=1)
