"""A snapshot that lands only the chunks in which the source differs from the lake.

Every chunk is compared with the lake: first by a checksum that the server computes (``row_checksum``); row by
row if the checksums differ or there is none. An equal chunk lands as an empty batch. A differing chunk is
read once more and lands whole, as in any snapshot. There is no snapshot end, because not every row has
landed. Instead, each row of the lake that is in no chunk is ended by its own delete, at the position that the
end would have. An equal row keeps its state in the lake: the stream of the epoch begins below every chunk, so
it contains all changes since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import RowChecksum, has_checksum
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.postgres.snapshot.chunk_reader import (
    ChunkReader,
    PlannedChunk,
    ReadContext,
    UnlandedRead,
)


class LakeRows(Protocol):
    """The rows of one table in the lake."""

    @property
    def scratch(self) -> Path:
        """An existing folder for files of source rows."""

    def has(
        self, checksum: RowChecksum, by: Sequence[str], start: Sequence[str] | None, end: Sequence[str] | None
    ) -> bool:
        """Whether the living rows with keys above ``start``, up to and including ``end``, have ``checksum``.

        ``by``: the columns of the bounds; a bound of None is open. False if rows are unresolved, or if the
        lake cannot order these keys.
        """

    def same(self, rows: Path) -> bool:
        """Whether the lake has every row of the file ``rows`` (from ``write_text_rows``) unchanged."""

    def unmet(self) -> Sequence[str]:
        """Return the keys (JSON arrays) of living rows that were in no file and no range compared so far."""


class Lake(Protocol):
    """The tables of a lake that a source is compared with."""

    def pin(self) -> None:
        """Pin the tables as they are now. Raises ``IngestError`` unless they include all that landed."""

    def rows(self, table: TableContract, /) -> AbstractContextManager[LakeRows]:
        """Return the rows of one table, as they were at ``pin``."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result for one table.

    Of its ``chunks``, ``by_rows`` were compared row by row, and ``read_again`` differed and landed ``rows``
    rows in total. ``ended``: number of rows of the lake that are gone from the source.
    """

    table: str
    chunks: int
    by_rows: int
    read_again: int
    rows: int
    ended: int


class ComparedReading:
    """Compares and reads tables by their plans, one chunk after the other."""

    def __init__(
        self,
        reader: ChunkReader,
        context: ReadContext,
        landed: Callable[[Manifest], None],
    ) -> None:
        """``landed``: called with each batch when it is durable."""
        self._reader, self._context, self._landed = reader, context, landed

    def run(self, table: TableContract, plan: SnapshotPlan, lake: LakeRows) -> Recovered:
        """Land the differing chunks. If interrupted, the table counts as unread. Raises as ``read`` does."""
        read = [self._chunk(PlannedChunk(table, plan, number), lake) for number in range(plan.chunks)]
        gone = lake.unmet()
        self._landed(self._end(table, plan, read, gone))
        again = [each for each in read if each.again]
        return Recovered(
            table.name,
            plan.chunks,
            sum(each.by_rows for each in read),
            len(again),
            sum(each.batch.rows for each in again),
            len(gone),
        )

    def _chunk(self, chunk: PlannedChunk, lake: LakeRows) -> _Compared:
        unlanded = self._by_checksum(chunk, lake)
        again, by_rows = False, unlanded is None
        if unlanded is None:
            rows = lake.scratch / f"{chunk.number}.parquet"
            unlanded = self._reader.read_text(chunk, rows)
            again = not lake.same(rows)
            # No failpoint: a scratch file; what a killed process left is removed before the next use.
            rows.unlink()
        batch = self._reader.read(chunk) if again else self._land_empty(chunk, unlanded)
        self._landed(batch)
        return _Compared(unlanded, batch, again, by_rows)

    def _by_checksum(self, chunk: PlannedChunk, lake: LakeRows) -> UnlandedRead | None:
        """Return the read of the chunk's checksum if the lake has the same checksum, else None."""
        table, plan = chunk.table, chunk.plan
        by_key = set(plan.by) <= set(table.key)
        if not has_checksum(table) or not (by_key or plan.chunks == 1):
            return None
        unlanded, checksum = self._reader.read_checksum(chunk)
        return unlanded if lake.has(checksum, plan.by, *chunk.bounds) else None

    def _land_empty(self, chunk: PlannedChunk, unlanded: UnlandedRead) -> Manifest:
        context = self._context
        with BatchWriter(context.store, context.grid, chunk.plan.epoch, chunk.batch_id) as writer:
            span = chunk.span(unlanded.low, unlanded.high, unlanded.clock)
            return writer.seal(chunk=span, relations=(unlanded.relation,))

    def _end(
        self, table: TableContract, plan: SnapshotPlan, read: Sequence[_Compared], gone: Sequence[str]
    ) -> Manifest:
        """Land a delete for each key in ``gone``, below all changes that the chunks did not see."""
        lowest = min((each.unlanded for each in read), key=lambda unlanded: unlanded.low)
        high = max(each.batch.chunk.high for each in read if each.batch.chunk is not None)
        context = self._context
        first = context.ordinals.take(len(gone))
        chunk_id = f"{plan.snapshot_id}-{table.name}-{plan.chunks:06d}"
        with BatchWriter(context.store, context.grid, plan.epoch, plan.boundary_id) as writer:
            for number, key in enumerate(gone):
                event = LandedEvent(
                    plan.epoch, lowest.low.value, first + number, "d", lowest.clock, None, None,
                    table.schema, table.table, key, None, None, None, None, chunk_id,
                )  # fmt: skip
                writer.add(event)
            span = ChunkSpan(
                plan.snapshot_id, table.name, plan.chunks, 1, lowest.low, high, lowest.clock, boundary=True
            )
            return writer.seal(chunk=span)


@dataclass(frozen=True, slots=True)
class _Compared:
    """A compared chunk. ``unlanded``: the read that was compared. ``batch``: has rows only if the chunk was
    read ``again``. ``by_rows``: it was compared row by row."""

    unlanded: UnlandedRead
    batch: Manifest
    again: bool
    by_rows: bool
