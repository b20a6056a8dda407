"""Whether a table is complete: its snapshot has landed as a whole, and the stream has passed it.

The rows of a snapshot were read while the source changed. Until the stream has passed the highest LSN at
which a chunk was read (``high``), the rows together are no state that the source ever had, and the table is
incomplete. Its history starts at that LSN. A table with missed changes (``lost_changes``) is incomplete too,
until a later read covers them. Landing alone answers all this. ``verify`` and ``as_of`` refuse incomplete
tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnisupport_ingest.landing.lost_changes import LostStretch
from omnisupport_ingest.landing.manifest import ChunkSpan, Manifest
from omnisupport_ingest.landing.snapshot_plans import SCHEMA_ONLY, is_whole
from omnisupport_ingest.position import LOWEST_ORDINAL, Lsn, Position

_START_CAPTURE = (
    "Start capture (omnisupport-ingest up) and wait until it has read the table. With the snapshot mode "
    "schema_only or never it does so when it is asked to: omnisupport-ingest source snapshot TABLE"
)


@dataclass(frozen=True, slots=True)
class Incomplete:
    """Why a table is incomplete: ``problem`` names the table, ``fix`` says what a person can do.

    ``bytes_behind``: bytes of WAL that have still to land, if nothing else is missing. ``starts``: where the
    history of the table starts, if the position lies before it.
    """

    table: str
    problem: str
    fix: str
    bytes_behind: int | None = None
    starts: Lsn | None = None


def is_captured(batches: Iterable[Manifest]) -> bool:
    """Whether a source is read by snapshot and stream. A source of delivered files is always complete."""
    return any(batch.file is None for batch in batches)


def incomplete_now(
    batches: Iterable[Manifest], table: str, epoch: int, lost: Iterable[LostStretch]
) -> Incomplete | None:
    """Return why the newest state of ``table`` is incomplete; None if it is complete.

    Args:
        batches: what downstream may take, in any order; chunks and the last stream batch are enough
            (``Landed.around_snapshots``).
        table: its name as in chunks.
        epoch: the newest recorded epoch. A table that this epoch has not read is incomplete: nothing proves
            what became of its rows.
        lost: stretches of missed changes in that epoch. Read them after ``batches``, so that none is
        overlooked.
    """
    landed = _InEpoch.of(batches, table, epoch)
    unknown = landed.unread() or landed.lost(lost)
    if unknown is not None:
        return unknown
    return landed.behind(max(chunk.high for chunk in landed.chunks))


def incomplete_at(
    batches: Iterable[Manifest], table: str, position: Position, lost: Iterable[LostStretch]
) -> Incomplete | None:
    """Return why the state of ``table`` below ``position`` is not certain; None if it is.

    ``batches``, ``table`` and ``lost`` are as in ``incomplete_now``. The state is certain if all of this
    holds: a whole snapshot lies below ``position``, no other snapshot is being read there, the stream of the
    epoch has landed up to it, and no changes are missing there.
    """
    landed = _InEpoch.of(batches, table, position.epoch)
    unread = landed.unread()
    if unread is not None:
        return unread
    below = " below its changes" if position.ordinal < 0 else ""
    at = f"{position.commit_lsn}{below} in epoch {position.epoch}"
    start = min(high for _, high in landed.finished())
    if not _passed(start, position):
        return Incomplete(
            table,
            f"Table {table} has no state at {at}: its history there starts at {start}, where its snapshot "
            "was read.",
            f"Ask for {start} or later, or for a later time.",
            starts=start,
        )
    missing = landed.lost(lost, position)
    if missing is not None:
        return missing
    reading = [chunk.high for chunk in landed.chunks if _reading(chunk, position)]
    if reading:
        return Incomplete(
            table,
            f"Table {table} has no state at {at}: a snapshot of it was being read there, up to "
            f"{max(reading)}.",
            f"Ask for {max(reading)} or later, or for a later time.",
        )
    # Of the transaction at the position, only events below the position count.
    return landed.behind(position.commit_lsn, inclusive=position.ordinal > 0)


def chunks_of(batches: Iterable[Manifest], table: str, epoch: int) -> list[Manifest]:
    """Return the chunks of ``table`` in ``epoch``.

    A layer has the whole snapshot once it has taken all of them, and all stream batches that begin below
    their highest ``high``.
    """
    return [
        batch
        for batch in batches
        if batch.epoch == epoch and batch.chunk is not None and batch.chunk.table == table
    ]


@dataclass(frozen=True, slots=True)
class _InEpoch:
    """The landed chunks of one table in one epoch, and where the landed stream of the epoch ends."""

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
        """Return the lowest ``low`` and the highest ``high`` of each snapshot of the whole table that has
        landed completely."""
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
        """Return the report that changes may be missing in the state at ``position``, or None. Without
        ``position``: in the newest state."""
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
        """Return the LSNs from which on a later read covers ``stretch``; empty without such a read."""
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
    """Whether ``position`` lies above everything that a snapshot saw up to ``high``."""
    return high < position.commit_lsn or (high == position.commit_lsn and position.ordinal >= 0)


def _above(lsn: Lsn, position: Position | None) -> bool:
    """Whether events below ``position`` may have committed at ``lsn`` or above it."""
    if position is None:
        return True
    return lsn < position.commit_lsn or (lsn == position.commit_lsn and position.ordinal > 0)


def _reading(chunk: ChunkSpan, position: Position) -> bool:
    """Whether ``position`` may lie above a row of ``chunk``, but not above everything that its read saw.

    The snapshot end and the rows that stand at one LSN are one step: between them, rows have ended that are
    read again further on.
    """
    begun = chunk.low < position.commit_lsn or (
        chunk.low == position.commit_lsn and position.ordinal > LOWEST_ORDINAL
    )
    return begun and not _passed(chunk.high, position)
