"""Reading again only what differs: a snapshot of a table whose earlier rows the lake still has.

Every chunk is compared with the lake: by a checksum that the server works out (``row_checksum``), and where
that differs or there is none, row by row. An equal chunk lands as an empty batch. Another one is read once
more and lands whole, as in any snapshot. There is no snapshot end, because not everything was read: each row
of the lake that was in no chunk is ended by a delete of its own at the same position. An equal row keeps its
state in the lake: the stream of the epoch, which begins below every chunk, has all changes since.
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
    Landing,
    LookedAt,
    PlannedChunk,
)


class LakeRows(Protocol):
    """The rows of one table in the lake."""

    @property
    def scratch(self) -> Path:
        """An existing folder for files of source rows."""

    def has(
        self, checksum: RowChecksum, by: Sequence[str], start: Sequence[str] | None, end: Sequence[str] | None
    ) -> bool:
        """Whether the living rows with keys above ``start``, up to and with ``end``, have ``checksum``; None
        is open.

        ``by``: the columns that the bounds are values of. False where rows are unresolved, or where the lake
        cannot tell.
        """

    def same(self, rows: Path) -> bool:
        """Whether the lake has every row of the file ``rows`` (``write_text_rows``) unchanged."""

    def unmet(self) -> Sequence[str]:
        """Return the keys (JSON arrays) of the living rows that were in none of those files and ranges."""


class Lake(Protocol):
    """The tables of a lake that a source is compared with."""

    def pin(self) -> None:
        """Hold the tables as they are. ``IngestError`` unless everything that landed has been taken in."""

    def rows(self, table: TableContract, /) -> AbstractContextManager[LakeRows]:
        """Return the rows of one table, as they were held."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """The result for one table. Of ``chunks``, ``by_rows`` were compared row by row; ``read_again`` differed
    and landed ``rows`` rows. ``ended`` rows are gone from the source.
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
        landing: Landing,
        landed: Callable[[Manifest], None],
    ) -> None:
        """``landed`` is called with each batch, once durable."""
        self._reader, self._landing, self._landed = reader, landing, landed

    def run(self, table: TableContract, plan: SnapshotPlan, lake: LakeRows) -> Recovered:
        """Land what differs. Raises ``Stopped`` or ``SourceUnavailable``; the table then counts as unread."""
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
        looked_at = self._by_checksum(chunk, lake)
        again, by_rows = False, looked_at is None
        if looked_at is None:
            rows = lake.scratch / f"{chunk.number}.parquet"
            looked_at = self._reader.read_text(chunk, rows)
            again = not lake.same(rows)
            # No failpoint: scratch that is removed, also that of a killed process, before it is made again.
            rows.unlink()
        batch = self._reader.read(chunk) if again else self._land_empty(chunk, looked_at)
        self._landed(batch)
        return _Compared(looked_at, batch, again, by_rows)

    def _by_checksum(self, chunk: PlannedChunk, lake: LakeRows) -> LookedAt | None:
        """Return the server's look at the chunk if the lake has the same checksum, else None."""
        table, plan = chunk.table, chunk.plan
        by_key = set(plan.by) <= set(table.key)
        if not has_checksum(table) or not (by_key or plan.chunks == 1):
            return None
        looked_at, checksum = self._reader.read_checksum(chunk)
        return looked_at if lake.has(checksum, plan.by, *chunk.bounds) else None

    def _land_empty(self, chunk: PlannedChunk, looked_at: LookedAt) -> Manifest:
        landing = self._landing
        with BatchWriter(landing.store, landing.grid, chunk.plan.epoch, chunk.batch_id) as writer:
            span = chunk.span(looked_at.low, looked_at.high, looked_at.clock)
            return writer.seal(chunk=span, relations=(looked_at.relation,))

    def _end(
        self, table: TableContract, plan: SnapshotPlan, read: Sequence[_Compared], gone: Sequence[str]
    ) -> Manifest:
        """Land a delete of each key in ``gone``, below every change that a chunk had not seen."""
        lowest = min((each.looked_at for each in read), key=lambda looked_at: looked_at.low)
        high = max(each.batch.chunk.high for each in read if each.batch.chunk is not None)
        landing = self._landing
        first = landing.ordinals.take(len(gone))
        chunk_id = f"{plan.snapshot_id}-{table.name}-{plan.chunks:06d}"
        with BatchWriter(landing.store, landing.grid, plan.epoch, plan.boundary_id) as writer:
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
    """A compared chunk: what was read of it (``looked_at``), and its batch, which has rows only if it was
    read ``again``.

    ``by_rows``: it was compared row by row.
    """

    looked_at: LookedAt
    batch: Manifest
    again: bool
    by_rows: bool
