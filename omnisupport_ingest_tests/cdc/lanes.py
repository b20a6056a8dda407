"""Run many random histories in one Spark job. Each history is a lane: it has keys of its own in one shared
table.

What ends a whole table ends the rows of every lane. So the lanes share these events, and are interleaved in
log order with them and with each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import types as T

from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest_tests.oracle import histories
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position
from omnisupport_ingest_tests.oracle.oracle import current_state

SHAPE = histories.SHAPE
CONTRACT = TableContract(
    name=SHAPE.name,
    version="1.0.0",
    source="support_desk",
    schema="public",
    table=SHAPE.name,
    title="Tickets",
    description="Tickets with a composite key and one column that may be long.",
    owner="team:support",
    key=("lane", "id"),
    columns=(
        Column("lane", "bigint", nullable=False),
        Column("id", "bigint", nullable=False),
        *(Column(name, "text") for name in SHAPE.columns),
    ),
    soft_delete_column=None,
    allowed_lateness=timedelta(hours=1),
    max_lateness=timedelta(days=7),
    path="tickets.json",
    fingerprint="0" * 64,
)

_LANES_PER_LSN = 1000
_SCHEMA = T.StructType([*RAW_TYPE.fields, T.StructField("withheld", T.BooleanType())])
_START = datetime(2026, 11, 1, tzinfo=UTC)


@dataclass(frozen=True)
class State:
    """What oracle and Spark are compared in: a row's end and its resolved values.

    ``deleted_at`` is the commit time of the event that ended the life. Two things that are not promised are
    left out: the values of a row that may not exist, and what a deleted row shows in a lane with quarantined
    events.
    """

    is_deleted: bool
    deleted_at: datetime | None
    existence_unresolved: bool
    values: tuple[tuple[str, str | None], ...]

    def is_part_of(self, other: State) -> bool:
        """Whether this state differs from ``other`` only in columns that are unresolved here."""
        return replace(self, values=()) == replace(other, values=()) and set(self.values) <= set(other.values)


def in_lanes(rng: Random, count: int, *, whole_table_withheld: bool = False) -> list[Event]:
    """Return ``count`` random histories as lanes of one history, every other one with withheld events.

    They share a truncate and a snapshot end, and half of them a snapshot end of their key range, between
    their own events in log order. With ``whole_table_withheld`` also a truncate and a snapshot end in
    quarantine.
    """
    events = []
    for lane in range(1, count + 1):
        soup = histories.soup(rng, shape=SHAPE, withheld=lane % 2 == 0, whole_table=False)
        events += [_in_lane(event, lane) for event in soup]
    shared = [("t", 2, False), ("b", 4, False)]
    if whole_table_withheld:
        shared += [("t", 3, True), ("b", 5, True)]
    for op, lsn, withheld in shared:
        at = Position(1, lsn * _LANES_PER_LSN, 0)
        events.append(Event(at, op, SHAPE.name, None, _START, quarantined=withheld))
    at = Position(1, 3 * _LANES_PER_LSN, 2)
    events.append(Event(at, "b", SHAPE.name, None, _START, scope=(("1",), (str(count // 2),))))
    rng.shuffle(events)
    return events


def in_one_lane(events: Iterable[Event]) -> list[Event]:
    return [_in_lane(event, 0, lanes=1) for event in events]


def _in_lane(event: Event, lane: int, lanes: int = _LANES_PER_LSN) -> Event:
    def key_of(key: Key | None) -> Key | None:
        return None if key is None else (str(lane), *key)

    at = event.at._replace(commit_lsn=event.at.commit_lsn * lanes + lane)
    scope = None if event.scope is None else ((str(lane), *event.scope[0]), (str(lane), *event.scope[1]))
    return replace(event, at=at, key=key_of(event.key), moved_from=key_of(event.moved_from), scope=scope)


def with_distinct_times(events: list[Event]) -> list[Event]:
    """Return ``events`` with a distinct commit time per position, so that times identify events."""
    ranks = {at: rank for rank, at in enumerate(sorted({event.at for event in events}))}
    return [replace(event, source_ts=_START + timedelta(seconds=ranks[event.at])) for event in events]


def frame(spark: SparkSession, events: Iterable[Event], windows: dict[tuple[int, int], str]) -> DataFrame:
    """Return the events as the fold takes them. ``windows``: by transaction (epoch, commit LSN)."""
    rows = [
        (
            windows[event.at[:2]],
            *event.at,
            event.op,
            event.source_ts,
            None,
            None,
            "public",
            event.table,
            _key_text(event.key),
            _image_text(event.before, event.moved_from or event.key),
            _image_text(event.after, event.key) if event.scope is None else scope_text(event.scope),
            sorted(event.unchanged),
            _key_text(event.moved_from),
            *(None, None, None, None, None),
            "batch",
            event.source_ts,
            *(None, None, None, None),
            event.quarantined,
        )
        for event in events
    ]
    return spark.createDataFrame(rows, _SCHEMA)


def expected(events: list[Event]) -> dict[Key, State]:
    """Return the current state that the oracle computes."""
    times = {event.at: event.source_ts for event in events}
    with_withheld = _lanes_with_withheld(events)
    return {
        key: _state(
            row.is_deleted,
            None if row.deleted_at is None else times[row.deleted_at],
            row.existence_unresolved,
            {} if row.is_deleted and key[0] in with_withheld else row.values,
        )
        for key, row in current_state(events, SHAPE).items()
    }


def folded(current: DataFrame, events: list[Event]) -> dict[Key, State]:
    """Return the current state that Spark computed."""
    with_withheld = _lanes_with_withheld(events)
    return {
        (str(row["lane"]), str(row["id"])): _folded_state(row, shown=str(row["lane"]) not in with_withheld)
        for row in current.collect()
    }


def _lanes_with_withheld(events: list[Event]) -> frozenset[str]:
    keys = {event.key for event in events if event.key is not None}
    reaching = [event for event in events if event.key is None and event.quarantined]
    in_doubt = {key for key in keys if any(event.reaches(key) for event in reaching)}
    withheld = {event.key for event in events if event.key is not None and event.quarantined}
    return frozenset(key[0] for key in in_doubt | withheld)


def _folded_state(row: Row, *, shown: bool) -> State:
    unresolved = set(row["_cdc_unresolved"])
    deleted_at = row["_cdc_deleted_at"]
    values = {name: row[name] for name in SHAPE.columns if name not in unresolved}
    return _state(
        row["_cdc_is_deleted"],
        None if deleted_at is None else deleted_at.astimezone(UTC),
        EXISTENCE in unresolved,
        values if shown or not row["_cdc_is_deleted"] else {},
    )


def _state(is_deleted: bool, deleted_at: datetime | None, doubtful: bool, values: Image) -> State:
    return State(is_deleted, deleted_at, doubtful, () if doubtful else tuple(sorted(values.items())))


def scope_text(scope: tuple[Key, Key]) -> str:
    """Return a key range as the text that its snapshot end carries."""
    first, last = scope
    kinds = ["integer"] * max(len(first), len(last))
    return json.dumps({"kinds": kinds, "from": list(first), "to": list(last)})


def _key_text(key: Key | None) -> str | None:
    return None if key is None else _compact(list(key))


def _image_text(image: Image | None, key: Key | None) -> str | None:
    """Return a row image as it lands, with the key's columns in it."""
    if image is None or key is None:
        return None
    return _compact({**dict(zip(CONTRACT.key, key, strict=True)), **image})


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
