"""Run the kernels of the fold alone: plain Python on Arrow batches, divided in any way, without Spark.

What Spark does around them is done here by the simplest means: rows of one group go to one worker, in batches
of any size; texts become typed columns; columns that a key change did not send are taken from the life that
it ended. One Spark test of each (``test_fold_properties``) shows that Spark does the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from random import Random
from typing import Any

import orjson
import pyarrow as pa

from omnisupport_ingest.cdc import columnar, late_images
from omnisupport_ingest.cdc.current_rows import EXISTENCE, current_groups
from omnisupport_ingest.cdc.event_fold import ENDED, KEY, TableColumns, fold_groups
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.late_images import IMAGES, ROW
from omnisupport_ingest.cdc.row_fold import merge_groups
from omnisupport_ingest.cdc.table_ends import TableEnds, table_ends_in
from omnisupport_ingest.contracts.model import PositionRange
from omnisupport_ingest_tests.cdc.lanes import scope_text
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, Position, Row, TableShape

Rows = list[dict[str, Any]]

_NUMERIC = pa.decimal128(12, 2)

EVENTS = pa.schema(
    [
        pa.field("window", pa.string()),
        pa.field("key", pa.string()),
        pa.field("op", pa.string()),
        pa.field("epoch", pa.int32()),
        pa.field("commit_lsn", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("source_ts", columnar.TIME),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("unchanged", pa.list_(pa.string())),
        pa.field("moved_from_key", pa.string()),
        pa.field("batch_id", pa.string()),
        pa.field("landed_at", columnar.TIME),
        pa.field("withheld", pa.bool_()),
    ]
)
"""Schema of what ``fold.to_fold`` gives the kernel."""

_TYPES: dict[str, tuple[pa.DataType, Callable[[str], Any]]] = {
    "text": (pa.string(), str),
    "bigint": (pa.int64(), int),
    "numeric": (_NUMERIC, lambda text: None if text == "NaN" else Decimal(text)),
    "timestamptz": (columnar.TIME, lambda text: None if "inf" in text else datetime.fromisoformat(text)),
    "boolean": (pa.bool_(), {"t": True, "f": False}.__getitem__),
}
"""Type → its Arrow type, and a function from text to value; None where the type cannot hold it."""


@dataclass(frozen=True)
class Table:
    """A table under test: its key, and the types of all its columns."""

    oracle: TableShape
    key: tuple[str, ...]
    types: Mapping[str, str]
    defaults: tuple[tuple[str, str | None], ...] = ()
    other_keys: tuple[PositionRange, ...] = ()

    @property
    def shape(self) -> TableColumns:
        return TableColumns(tuple(self.types), self.key, self.defaults, self.other_keys)


@dataclass(frozen=True)
class Cut:
    """How work is divided: number of workers, most rows of a batch, and the order of arrival.

    ``few``: at most so many events are folded group by group (``fold_groups``).
    """

    workers: int = 1
    batch_rows: int = 1000
    seed: int | None = None
    few: int = 0

    def parts(self, table: pa.Table, by: Sequence[str]) -> Iterator[list[pa.RecordBatch]]:
        """Return the batches of each worker; rows that agree in ``by`` go to one worker."""
        rows = list(range(table.num_rows))
        if self.seed is not None:
            Random(self.seed).shuffle(rows)
        places = list(zip(*(table[name].to_pylist() for name in by), strict=True))
        for worker in range(self.workers):
            mine = [row for row in rows if zlib.crc32(repr(places[row]).encode()) % self.workers == worker]
            yield table.take(pa.array(mine, pa.int64())).combine_chunks().to_batches(self.batch_rows)


def events_table(events: Iterable[Event], table: Table, windows: Mapping[tuple[int, int], str]) -> pa.Table:
    """Return the events as ``fold.to_fold`` does. ``windows``: by transaction (epoch, commit LSN)."""
    of_table = [event for event in events if event.table == table.oracle.name]
    accepted = {(event.at, event.identity) for event in of_table if not event.quarantined}
    kept = [each for each in of_table if not (each.quarantined and (each.at, each.identity) in accepted)]
    rows = [_event_row(event, table, windows[event.at[:2]], number) for number, event in enumerate(kept)]
    left = [row for row in rows if row["moved_from_key"] is not None and not row["withheld"]]
    rows += [{**row, "key": row["moved_from_key"], "op": OLD_KEY_ENDED} for row in left]
    return pa.Table.from_pylist(rows, schema=EVENTS)


def fold(events: pa.Table, table: Table, cut: Cut = Cut()) -> pa.Table:
    """Return the folded rows, typed."""
    groups = cut.parts(events, ("window", "key"))
    folded = _run(groups, lambda part: fold_groups(part, table.shape, few=cut.few))
    return _typed(folded, table)


def fold_late(
    events: pa.Table, table: Table, numbers_read: list[int] | None = None, *, most_images: int = 1_000
) -> pa.Table:
    """Return the folded rows, typed, of events whose images are read late, ``most_images`` at a time.
    ``numbers_read`` gets the numbers read."""

    def images(numbers: Any) -> pa.Table:
        if numbers_read is not None:
            numbers_read.extend(numbers.tolist())
        return events.select(IMAGES).take(pa.array(numbers)).combine_chunks()

    narrow = events.drop_columns(list(IMAGES)).append_column(ROW, pa.array(range(len(events))))
    parts = late_images.fold_late(narrow.combine_chunks(), images, table.shape, most_images=most_images)
    folded = pa.Table.from_batches([batch for part in parts for batch in part])
    return _typed(folded.combine_chunks(), table)


def merged(parts: Sequence[pa.Table], table: Table, cut: Cut = Cut()) -> pa.Table:
    """Return folded rows merged to one per group."""
    together = pa.concat_tables(parts)
    groups = cut.parts(together, ("window", "_cdc_key"))
    return _run(groups, lambda part: merge_groups(part, table.shape, few=cut.few), together.schema)


def current(rows: pa.Table, table: Table, cut: Cut = Cut()) -> Rows:
    """Return one row per key: columns of ``current.lives_type``, filled along key changes."""
    kinds = rows["_cdc_kind"].to_pylist()
    keyed = [row for row, kind in enumerate(kinds) if kind in (KEY, ENDED)]
    ends = TableEnds.collect(table_ends_in(rows))
    groups = cut.parts(rows.take(pa.array(keyed, pa.int64())), ("_cdc_key",))
    found = _run(groups, lambda part: current_groups(part, table.shape, ends))
    lives = found.to_pylist(maps_as_pydicts="strict") if found.num_rows else []
    old = {
        (row["_cdc_key"], _position(row["_cdc_ended_at"])): row for row in lives if row["_cdc_kind"] == ENDED
    }
    return [_filled(row, old) for row in lives if row["_cdc_kind"] == KEY]


@dataclass(frozen=True)
class State:
    """What oracle and kernels are compared in.

    ``ended_at``: commit time of what ended the life. ``last``: operation and position of the last event of a
    row that certainly lives. Values of a row that may not exist are left out.
    """

    ended_at: datetime | None
    doubtful: bool
    last: tuple[str, Position] | None
    values: tuple[tuple[str, str | None], ...]

    def is_part_of(self, other: State) -> bool:
        """Whether this state differs from ``other`` only in columns that are unresolved here."""
        return replace(self, values=()) == replace(other, values=()) and set(self.values) <= set(other.values)


def states(rows: Rows, table: Table) -> dict[Key, State]:
    """Return the current state that the kernels computed."""
    found = {}
    for row in rows:
        unresolved = set(row["_cdc_unresolved"])
        exact = dict(row["_cdc_exact"] or {})
        values = {
            name: exact.get(name, _text(row[name], table.types[name]))
            for name in table.oracle.columns
            if name not in unresolved
        }
        last = (row["_cdc_op"], Position(*_position(row["_cdc_position"]) or ()))
        key = tuple(json.loads(row["_cdc_key"]))
        assert key == tuple(exact.get(name, _text(row[name], table.types[name])) for name in table.key)
        found[key] = _state(row["_ended_time"], EXISTENCE in unresolved, last, values)
    return found


def expected(rows: Mapping[Key, Row], events: Iterable[Event]) -> dict[Key, State]:
    """Return the current state that the oracle computes."""
    times, ops = {}, {}
    for event in sorted(events, key=lambda each: ("dcru".find(each.op), not each.quarantined)):
        times[event.at] = event.source_ts
        ops[event.at, event.key] = event.op
    return {
        key: _state(
            None if row.deleted_at is None else times[row.deleted_at],
            row.existence_unresolved,
            (ops.get((row.last, key), ""), row.last),
            row.values,
        )
        for key, row in rows.items()
    }


def without_shown(found: Mapping[Key, State], events: Iterable[Event]) -> dict[Key, State]:
    """Leave out what ended rows show if anything is in quarantine: it is not promised then."""
    if not any(event.quarantined for event in events):
        return dict(found)
    return {key: replace(s, values=()) if s.ended_at is not None else s for key, s in found.items()}


def same_rows(table: pa.Table) -> Rows:
    """Return the rows of keys in a fixed order without hashes, to compare content.

    Lives that key changes ended are compared by what they lead to.
    """
    rows = table.drop_columns(["_cdc_row_hash"]).to_pylist(maps_as_pydicts="strict")
    for row in rows:
        for name in ("_cdc_unresolved", "_cdc_deletes"):
            row[name] = sorted(row[name] or (), key=repr)
        for name in ("_cdc_column_positions", "_cdc_exact"):
            row[name] = sorted((row[name] or {}).items(), key=repr)
    return sorted((row for row in rows if row["_cdc_kind"] != ENDED), key=repr)


def _state(
    ended_at: datetime | None, doubtful: bool, last: tuple[str, Position], values: Mapping[str, str | None]
) -> State:
    certain = ended_at is None and not doubtful
    shown = () if doubtful else tuple(sorted(values.items()))
    return State(ended_at, doubtful, last if certain else None, shown)


def _event_row(event: Event, table: Table, window: str, number: int) -> dict[str, Any]:
    return {
        "window": window,
        "key": key_text(event.key),
        "op": event.op,
        **dict(zip(("epoch", "commit_lsn", "ordinal"), event.at, strict=True)),
        "source_ts": event.source_ts,
        "before": image_text(event.before, event.moved_from or event.key, table),
        "after": image_text(event.after, event.key, table)
        if event.scope is None
        else scope_text(event.scope),
        "unchanged": sorted(event.unchanged),
        "moved_from_key": key_text(event.moved_from),
        "batch_id": f"batch {number % 3}",
        "landed_at": event.source_ts,
        "withheld": event.quarantined,
    }


def key_text(key: Key | None) -> str | None:
    return None if key is None else json.dumps(list(key), separators=(",", ":"), ensure_ascii=False)


def image_text(image: Image | None, key: Key | None, table: Table) -> str | None:
    """Return a row image as it lands, with the key's columns in it."""
    if image is None or key is None:
        return None
    return orjson.dumps({**dict(zip(table.key, key, strict=True)), **image}).decode()


def _run(
    parts: Iterable[list[pa.RecordBatch]],
    kernel: Callable[[list[pa.RecordBatch]], Iterable[pa.RecordBatch]],
    schema: pa.Schema | None = None,
) -> pa.Table:
    batches = [batch for part in parts for batch in kernel(part)]
    if not batches:
        return pa.table({}) if schema is None else schema.empty_table()
    return pa.Table.from_batches([batch.cast(schema or batches[0].schema) for batch in batches])


def _typed(folded: pa.Table, table: Table) -> pa.Table:
    """Type the values as ``fold.with_types`` does, and keep the texts of those that a type cannot hold."""
    texts = {name: folded[name].to_pylist() for name in table.types}
    columns = {name: folded[name] for name in folded.column_names}
    exact: list[list[tuple[str, str]]] = [[] for _ in range(folded.num_rows)]
    for name, kind in table.types.items():
        arrow, of_text = _TYPES[kind]
        values = [None if text is None else of_text(text) for text in texts[name]]
        for row, (text, value) in enumerate(zip(texts[name], values, strict=True)):
            if text is not None and value is None:
                exact[row].append((name, text))
        columns[name] = pa.array(values, arrow)
    hashes = pa.array([0] * folded.num_rows, pa.int64())
    return pa.table({**columns, "_cdc_exact": columnar.text_maps(exact), "_cdc_row_hash": hashes})


def _text(value: Any, kind: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    return {True: "t", False: "f"}[value] if kind == "boolean" else str(value)


def _position(value: Mapping[str, int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value.values())


def _filled(row: dict[str, Any], old: Mapping[tuple[str, Any], dict[str, Any]]) -> dict[str, Any]:
    """Fill a row as ``current.fill_unsent`` does, one life after the other."""
    row = {**row, "_cdc_exact": dict(row["_cdc_exact"] or {})}
    still_open = set(row["_open"] or ())
    place = row["_from_key"], _position(row["_from_at"])
    while still_open and place[0] is not None and place in old:
        life = old[place]
        fills = still_open - set(life["_cdc_unresolved"])
        for name in fills:
            row[name] = life[name]
            if name in (life["_cdc_exact"] or {}):
                row["_cdc_exact"][name] = life["_cdc_exact"][name]
        row["_cdc_unresolved"] = [name for name in row["_cdc_unresolved"] if name not in fills]
        still_open = (still_open - fills) & set(life["_open"] or ())
        place = life["_from_key"], _position(life["_from_at"])
    return row
