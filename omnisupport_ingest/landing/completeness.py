"""Whether a table's snapshot is whole, and the stream has passed all of it.

The rows of a snapshot were read while the source went on. Until the stream has passed the highest
LSN at which a chunk was read (``high``), what is known of the table is no state that the source ever
had: the table is incomplete, and its history starts there. Nor is it such a state where changes are missing,
until what was read since has them (``lost_changes``). Landing alone answers this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnisupport_ingest.landing.lost_changes import LostStretch
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.snapshot_plans import SCHEMA_ONLY, is_whole
from omnisupport_ingest.position import Lsn, Position

_START_CAPTURE = (
    "Start capture (omnisupport-ingest up) and wait until it has read the table. With the snapshot mode "
    "schema_only or never it does so when it is asked to: omnisupport-ingest source snapshot TABLE"
)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Why a table is not complete. ``problem`` names the table, ``fix`` is what a person can do.

    ``bytes_behind``: of WAL that the stream has still to land, where that is what is missing.
    """

    table: str
    problem: str
    fix: str
    bytes_behind: int | None = None


def is_captured(batches: Iterable[Manifest]) -> bool:
    """Whether a source is read by snapshot and stream. A delivery of files lands whole or not at all."""
    return any(batch.file is None for batch in batches)


def incomplete_now(
    batches: Iterable[Manifest], table: str, epoch: int, lost: Iterable[LostStretch]
) -> Incomplete | None:
    """Return why the newest state of ``table`` is incomplete; None if it is complete.

    ``batches``: what downstream may take, in any order; chunks and the last stream batch are enough
    (``Landed.around_snapshots``). ``table``: the name
    that chunks have for it. ``epoch``: the newest that is recorded; a table that it has not read
    again is incomplete, for nothing proves what became of its rows. ``lost``: of that epoch, read after
    ``batches``, so that none is overlooked.
    """
    landed = _InEpoch.of(batches, table, epoch)
    unknown = landed.unread() or landed.lost(lost)
    if unknown is not None:
        return unknown
    return landed.behind(max(chunk.high for chunk in landed.chunks))


def incomplete_at(
    batches: Iterable[Manifest], table: str, position: Position, lost: Iterable[LostStretch]
) -> Incomplete | None:
    """Why the state of ``table`` below ``position`` is not known for certain; None if it is.

    ``batches``, ``table`` and ``lost`` as in ``incomplete_now``. The table's snapshot must lie below
    ``position`` as a whole, no other one may be under way there, the stream of its epoch must have landed
    up to it, and no changes may be missing there.
    """
    landed = _InEpoch.of(batches, table, position.epoch)
    unread = landed.unread()
    if unread is not None:
        return unread
    start = min(high for _, high in landed.finished())
    if not _passed(start, position):
        return Incomplete(
            table,
            f"Table {table} has no state at {position.commit_lsn} in epoch {position.epoch}: its history "
            f"there starts at {start}, where its snapshot was read.",
            f"Ask for {start} or later; `verify` run again does.",
        )
    missing = landed.lost(lost, position)
    if missing is not None:
        return missing
    reading = [chunk.high for chunk in landed.chunks if _reading(chunk, position)]
    if reading:
        return Incomplete(
            table,
            f"Table {table} has no state at {position.commit_lsn} in epoch {position.epoch}: a snapshot of "
            f"it was being read there, up to {max(reading)}.",
            f"Ask for {max(reading)} or later; `verify` run again does.",
        )
    # Of the transaction at the position itself, only the events below the position count.
    return landed.behind(position.commit_lsn, inclusive=position.ordinal > 0)


def chunks_of(batches: Iterable[Manifest], table: str, epoch: int) -> list[Manifest]:
    """The chunks of ``table`` in ``epoch``. A layer that has taken them all, and the batches of the stream
    that begin below their highest ``high``, is past the snapshot."""
    return [
        batch
        for batch in batches
        if batch.epoch == epoch and batch.chunk is not None and batch.chunk.table == table
    ]


@dataclass(frozen=True, slots=True)
class _InEpoch:
    """What has landed of one table's snapshots in one epoch, and how far that epoch's stream has."""

    table: str
    epoch: int
    chunks: tuple[ChunkSpan, ...]
    stream_end: Lsn | None

    @classmethod
    def of(cls, batches: Iterable[Manifest], table: str, epoch: int) -> _InEpoch:
        in_epoch = [batch for batch in batches if batch.epoch == epoch]
        chunks = [
            batch.chunk
            for batch in in_epoch
            if batch.chunk is not None
            and batch.chunk.table == table
            and batch.chunk.snapshot_id != SCHEMA_ONLY
        ]
        ends = [batch.stream.end_lsn for batch in in_epoch if batch.stream is not None]
        return cls(table, epoch, tuple(chunks), max(ends, default=None))

    def unread(self) -> Incomplete | None:
        """Return the report that no snapshot of the table is complete, or None."""
        if self.finished():
            return None
        chunks = [chunk for chunk in self.chunks if chunk.scope is None]
        if not chunks:
            when = f"in epoch {self.epoch}" if self.epoch else "yet"
            problem = f"Table {self.table} has not been read {when}."
            return Incomplete(self.table, problem, _START_CAPTURE)
        if any(chunk.boundary for chunk in chunks):
            return Incomplete(
                self.table,
                f"The snapshot of table {self.table} in epoch {self.epoch} has ended, but a batch of its "
                "rows is missing from landing.",
                "Restore that batch from a backup of the landing folder. If there is none, read the table "
                f"again: omnisupport-ingest source snapshot {self.table}",
            )
        problem = f"The snapshot of table {self.table} in epoch {self.epoch} is not finished."
        return Incomplete(self.table, problem, _START_CAPTURE)

    def finished(self) -> list[tuple[Lsn, Lsn]]:
        """The lowest ``low`` and the highest ``high`` of each snapshot of all of the table that is in landing
        as a whole."""
        snapshots: dict[str, list[ChunkSpan]] = {}
        for chunk in self.chunks:
            if chunk.scope is not None:
                continue
            snapshots.setdefault(chunk.snapshot_id, []).append(chunk)
        return [
            (min(chunk.low for chunk in chunks), max(chunk.high for chunk in chunks))
            for chunks in snapshots.values()
            if is_whole(chunks)
        ]

    def lost(self, stretches: Iterable[LostStretch], position: Position | None = None) -> Incomplete | None:
        """Return the report that changes may be missing in the state at ``position`` (None: the newest), or
        None."""
        for stretch in stretches:
            if stretch.table != self.table or not _above(stretch.lost_from, position):
                continue
            known = self._known_again(stretch)
            if not known:
                return Incomplete(
                    self.table,
                    f"Changes of table {self.table} from {stretch.lost_from} on may be missing in epoch "
                    f"{self.epoch} ({stretch.reason}), and it has not been read since as a whole.",
                    "Capture reads it again by itself, or says what has to be done for that: "
                    "omnisupport-ingest source status"
                    + ("" if position is None else f". Or ask for {stretch.lost_from} or earlier."),
                )
            if position is not None and not any(_passed(high, position) for high in known):
                return Incomplete(
                    self.table,
                    f"Table {self.table} has no state at {position.commit_lsn} in epoch {self.epoch}: "
                    f"changes of it between {stretch.lost_from} and {min(known)} may be missing "
                    f"({stretch.reason}).",
                    f"Ask for {min(known)} or later, or for {stretch.lost_from} or earlier; `verify` run "
                    "again does the first.",
                )
        return None

    def _known_again(self, stretch: LostStretch) -> list[Lsn]:
        """Return the LSNs from which later reads cover what ``stretch`` lacks; empty without such a read."""
        known = [] if stretch.mended is None else [stretch.mended]
        if stretch.lost_to is not None:
            known += [high for low, high in self.finished() if low >= stretch.lost_to]
        return known

    def behind(self, goal: Lsn, *, inclusive: bool = False) -> Incomplete | None:
        """Return the report that the stream has not landed up to ``goal``, or None.

        ``inclusive``: a commit at ``goal`` counts.
        """
        end = self.stream_end
        if end is not None and (end > goal if inclusive else end >= goal):
            return None
        missing = None if end is None else goal.value - end.value
        landed = "has landed nothing" if end is None else f"has landed up to {end}"
        wait = "" if missing is None else f": {missing:,} bytes"
        return Incomplete(
            self.table,
            f"Table {self.table} is incomplete: the stream of epoch {self.epoch} {landed} and must pass "
            f"{goal}.",
            f"Wait, capture is still behind{wait}. If it is not running, start it (omnisupport-ingest up).",
            missing,
        )


def _passed(high: Lsn, position: Position) -> bool:
    """Whether everything that a snapshot read up to ``high`` found lies below ``position``."""
    return high < position.commit_lsn or (high == position.commit_lsn and position.ordinal >= 0)


def _above(lsn: Lsn, position: Position | None) -> bool:
    """Whether the events below ``position`` may be some that committed at ``lsn`` or above it."""
    if position is None:
        return True
    return lsn < position.commit_lsn or (lsn == position.commit_lsn and position.ordinal > 0)


def _reading(chunk: ChunkSpan, position: Position) -> bool:
    """Whether ``position`` lies above the rows of ``chunk``, but not above all that its read saw."""
    return _passed(chunk.low, position) and not _passed(chunk.high, position)
