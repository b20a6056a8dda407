"""Makes landed events from rows: positions, windows, and the recognition of versions that have landed before.

A row lands as ``r``, which has the whole version but not the operation that made it. Its window is that of
the contract's event-time column, or else of its cursor. It depends only on the row, so a version that is read
again has the same window. Some rows go to the home's first window: rows older than it, rows without a time,
and rows further ahead of the clock than any clock error explains. Their values are right; only their time
says nothing. (When such a future time has come, the row is read with its own window; ``Batches`` leaves it in
the first.)
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.landing.rows import EVENT_SCHEMA, LandedEvent
from omnisupport_ingest.landing.writer import BLOCK_BYTES, BLOCK_ROWS, EventBlock
from omnisupport_ingest.sources.query.cursor import (
    END_ORDINAL,
    CursorColumn,
    CursorKind,
    micros,
    moment_of,
    ordinals,
)
from omnisupport_ingest.sources.query.reader import Rows
from omnisupport_ingest.sources.query.state import LandedVersion
from omnisupport_ingest.windows import KEY_FORMAT, MAX_AHEAD, WindowGrid

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Micros = npt.NDArray[np.int64]

_TIME = EVENT_SCHEMA.field("source_ts").type
_EARLIEST, _LATEST = datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)
"""Times are limited to this range, which every reader of the lake supports."""


@dataclass
class Known:
    """The comparison of rows with landed versions. ``again``: number of rows that had landed unchanged.
    ``behind``: rows with a lower cursor than a landed version of their key. ``new``: versions to remember."""

    again: int = 0
    behind: int = 0
    new: list[LandedVersion] = field(default_factory=list)


@dataclass(frozen=True)
class RowEvents:
    """Makes the events of one table in one epoch.

    ``as_landed``: converts events (a table of ``EVENT_SCHEMA``) to the form that is written; a lookback
    compares that form. ``schema_number``: as of ``cursor.ordinals``.
    """

    table: TableContract
    cursor: CursorColumn
    grid: WindowGrid
    epoch: int
    as_landed: Callable[[pa.Table], pa.Table] = lambda events: events
    schema_number: int = 0

    def of(
        self, rows: Rows, known: Mapping[str, Sequence[LandedVersion]], tally: Known, remember: int
    ) -> pa.Table:
        """Return the events of ``rows``, as a table of ``EVENT_SCHEMA``, without those that are already in
        ``known``.

        Adds to ``tally``; versions with a cursor of at least ``remember`` are added as versions to remember.
        """
        of_each = {
            "ordinal": ordinals(rows.cursors, self.schema_number),
            "source_ts": self._times(rows).cast(_TIME),
            "key": rows.keys,
            "after": rows.images,
            "identity": pc.binary_join_element_wise(identity_start(self.table), rows.keys, "]", ""),
        }
        of_all = {
            "epoch": self.epoch,
            "commit_lsn": 0,
            "op": "r",
            "source_schema": self.table.schema,
            "source_table": self.table.table,
        }
        arrays = [
            of_each[each.name]
            if each.name in of_each
            else pa.repeat(pa.scalar(of_all.get(each.name), each.type), len(rows))
            for each in EVENT_SCHEMA
        ]
        events = self.as_landed(pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA))
        kept, misplaced = self._compared(rows, events.column("after"), known, tally, remember)
        place = EVENT_SCHEMA.get_field_index("misplaced")
        events = events.set_column(place, EVENT_SCHEMA.field(place), misplaced)
        return events if kept is None else events.filter(kept)

    def end(self, began: datetime) -> LandedEvent:
        """Return the end of a full reading, which ends rows of older epochs. ``began``: when the epoch
        began."""
        return LandedEvent(
            self.epoch, 0, END_ORDINAL, "b", began, None, None, self.table.schema, self.table.table,
            None, None, None, None, None, None, identity_start(self.table) + "]",
        )  # fmt: skip

    def delete(self, key: str, ordinal: int, noticed: datetime) -> LandedEvent:
        """Return the delete of ``key``, found at the time ``noticed``; the time of the deletion is
        unknown."""
        return LandedEvent(
            self.epoch, 0, ordinal, "d", noticed, None, None, self.table.schema, self.table.table,
            key, None, None, None, None, None, f"{identity_start(self.table)}{key}]",
        )  # fmt: skip

    def _times(self, rows: Rows) -> pa.Int64Array:
        """Return the event time of each row in microseconds; it does not depend on the time of reading."""
        times = rows.times
        if self.cursor.kind is CursorKind.TIME:
            times = pc.coalesce(times, rows.cursors)
        times = pc.fill_null(times, micros(self.grid.first))
        return pc.min_element_wise(pc.max_element_wise(times, micros(_EARLIEST)), micros(_LATEST))

    def _compared(
        self,
        rows: Rows,
        images: pa.ChunkedArray,
        known: Mapping[str, Sequence[LandedVersion]],
        tally: Known,
        remember: int,
    ) -> tuple[pa.BooleanArray | None, pa.BooleanArray]:
        """Return which rows land (null: all), and which of them come after a later version of their key.

        ``images``: the images of the rows, as they land.
        """
        nothing = pa.nulls(len(rows), pa.bool_())
        numbers = rows.cursors
        highest = pc.max(numbers).as_py()
        if highest is None or (not known and highest < remember):
            return None, nothing
        lands, behind = np.ones(len(rows), np.bool_), np.zeros(len(rows), np.bool_)
        looked_at = zip(rows.keys.to_pylist(), numbers.to_pylist(), images, strict=True)
        for number, (key, cursor, image) in enumerate(looked_at):
            versions = known.get(key, ())
            if cursor is None or (cursor < remember and not versions):
                continue
            version = LandedVersion(key, cursor, image_hash(image.as_py()))
            if version in versions:
                lands[number] = False
                tally.again += 1
                continue
            if any(each.cursor > cursor for each in versions):
                behind[number] = True
                tally.behind += 1
            tally.new.append(version)
        return pa.array(lands), pc.if_else(pa.array(behind), True, None) if behind.any() else nothing


def identity_start(table: TableContract) -> str:
    """Return the beginning of the identities of the table's events; the key and ``]`` follow."""
    return compact([table.schema, table.table])[:-1] + ","


def image_hash(image: str) -> int:
    """Return a hash of a row, 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(image.encode(), digest_size=8).digest(), signed=True)


class ContentHash:
    """The SHA-256 of events, added in parts. The same rows, read again in one epoch, have the same hash."""

    def __init__(self, epoch: int, source: str) -> None:
        self._found = hashlib.sha256(json.dumps([epoch, source]).encode())

    def add(self, part: pa.Table) -> None:
        """Add some events."""
        # Arrow writes directly into the hash: copying the events would cost more than hashing them.
        with pa.ipc.new_stream(pa.PythonFile(_Hashed(self._found), "w"), part.schema) as stream:
            stream.write_table(part.combine_chunks())

    def hexdigest(self) -> str:
        """Return the hash of all events so far, as hexadecimal digits."""
        return self._found.hexdigest()


class _Hashed(io.RawIOBase):
    """A file that stores nothing: what is written to it goes into ``digest``."""

    def __init__(self, digest: hashlib._Hash) -> None:
        self._digest, self._size = digest, 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: ReadableBuffer) -> int:
        self._digest.update(content)
        size = memoryview(content).nbytes
        self._size += size
        return size


@dataclass(frozen=True, slots=True)
class RowWindows:
    """The window of each row of one epoch that lands at ``landed_at``.

    ``rows_from``: as of ``EpochRecord``. A row without a time has that of the home's first window, and stays
    there.
    """

    grid: WindowGrid
    landed_at: datetime
    rows_from: datetime | None = None

    def of(self, moment: datetime) -> str:
        """Return the window of a row with the time ``moment``; ``numbers`` does the same for many rows."""
        first = self.grid.first
        ahead = moment > self.landed_at + MAX_AHEAD
        if not ahead and moment != first:
            moment = max(moment, first, self.rows_from or first)
        return self.grid.truncate(first if ahead else moment).strftime(KEY_FORMAT)

    def numbers(self, times: Micros) -> Micros:
        """Return the number of the window of each of ``times``, in microseconds since 1970.

        Every window begins at a multiple of its size, because sizes divide the hour or are a day, and all
        times are UTC.
        """
        first = micros(self.grid.first)
        earliest = max(first, micros(self.rows_from or self.grid.first))
        timeless = (times == first) | self.ahead(times)
        return np.where(timeless, first, np.maximum(times, earliest)) // self.size

    def ahead(self, times: Micros) -> npt.NDArray[np.bool_]:
        """Return which ``times`` are further ahead of the clock than any clock error explains."""
        return times > micros(self.landed_at + MAX_AHEAD)

    @property
    def size(self) -> int:
        """The length of a window in microseconds."""
        return int(self.grid.size.length.total_seconds() * 1_000_000)


def blocks(events: pa.Table, windows: RowWindows) -> Iterator[EventBlock]:
    """Yield ``events`` as blocks of one window each, in the order of the windows; inside a block the order
    stays.

    The highest time of a block shows how far the source is. It is never after the landing, and a time that is
    too far ahead does not count.
    """
    if not events.num_rows:
        return
    size = windows.size
    times = np.asarray(events.column("source_ts").combine_chunks().cast(pa.int64()))
    numbers = windows.numbers(times)
    times = np.where(windows.ahead(times), micros(windows.grid.first), times)
    if (numbers[1:] < numbers[:-1]).any():
        # Windows by the cursor rise with the rows; windows by another column do not.
        order = np.argsort(numbers, kind="stable")
        events, times, numbers = events.take(pa.array(order)), times[order], numbers[order]
    most = max(1, min(BLOCK_ROWS, BLOCK_BYTES * events.num_rows // events.nbytes))
    bounds = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    for first, last in zip([0, *bounds.tolist()], [*bounds.tolist(), len(numbers)], strict=True):
        number = int(numbers[first])
        window = moment_of(number * size).strftime(KEY_FORMAT)
        for start in range(first, last, most):
            stop = min(start + most, last)
            rows = stop - start
            yield EventBlock(
                window,
                rows,
                events.nbytes * rows // events.num_rows,
                min(moment_of(int(times[start:stop].max())), windows.landed_at),
                partial(events.slice, start, rows),
            )
