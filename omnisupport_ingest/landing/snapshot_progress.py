"""How far a snapshot is, how fast it is, and how long it will take: from its plan and its landed chunks.

Landing does not record when the reading of a chunk began. ``ReadingTime`` takes the later of two recorded
times. One is the server's clock at the chunk's low watermark. It can be much too early: several chunks share
one watermark while the source writes no WAL or has a long transaction open. The other is the landing of the
chunks whose rows were read before. Their ordinals show which these are, because ordinals are assigned as rows
are read. A chunk without rows has no ordinal, and counts as read after the last landing before its own.
Chunks of one table that are read in parallel overlap a little; each second counts once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan, SnapshotPlans, plans_in_force
from omnisupport_ingest.landing.store import LandingStore


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """A snapshot that is not finished: ``done`` of ``chunks`` have landed, with ``rows`` rows.

    Attributes:
        scope: the key range that is read, for people; None: the whole table.
        compared: all chunks are read, but only those that differ from the lake land, and ``rows`` counts
            these.
        rows_left: about how many rows are still to be read.
        seconds: seconds spent reading the chunks that have landed.
    """

    table: str
    scope: str | None
    reason: str
    planned_at: datetime
    compared: bool
    chunks: int
    done: int
    rows: int
    rows_left: int
    seconds: float

    @property
    def rows_per_second(self) -> float | None:
        """Rows read per second; None before any row has landed, or if only rows that differ land."""
        return self.rows / self.seconds if self.seconds and self.rows and not self.compared else None

    @property
    def seconds_left(self) -> float | None:
        """Seconds of reading left at the present rate; None while the rate is not known."""
        if self.compared:
            return self.seconds / self.done * (self.chunks - self.done) if self.done else None
        rate = self.rows_per_second
        return None if rate is None else self.rows_left / rate


def progress(plan: SnapshotPlan, landed: Mapping[int, Manifest], reading: ReadingTime) -> SnapshotProgress:
    """Return the progress of the snapshot of ``plan``. ``landed``: its landed chunks by number."""
    return SnapshotProgress(
        plan.table,
        None if plan.scope is None else str(plan.scope),
        plan.reason,
        plan.planned_at,
        plan.compared,
        plan.chunks,
        len(landed),
        sum(batch.rows for batch in landed.values()),
        (plan.chunks - len(landed)) * _rows_of_a_chunk(plan, landed),
        _seconds_compared(plan, landed) if plan.compared else reading.seconds(landed.values()),
    )


def _seconds_compared(plan: SnapshotPlan, landed: Mapping[int, Manifest]) -> float:
    """Return the seconds from the making of the plan to the last landed chunk.

    Tables are planned and compared one by one, and a stopped comparison is planned again. A chunk may be read
    up to three times, and only the last time is recorded.
    """
    last = max((batch.arrival.landed_at for batch in landed.values()), default=plan.planned_at)
    return max(0.0, (last - plan.planned_at).total_seconds())


def _rows_of_a_chunk(plan: SnapshotPlan, landed: Mapping[int, Manifest]) -> int:
    """Return the average number of rows of the landed chunks without the last chunk, which may be smaller; if
    there are none, the planned number."""
    full = [batch.rows for number, batch in landed.items() if number < plan.chunks - 1]
    return (round(sum(full) / len(full)) if full else 0) or plan.rows


def snapshots_under_way(
    store: LandingStore, epoch: int, server_ahead: timedelta = timedelta(0)
) -> list[SnapshotProgress]:
    """Return the snapshots of ``epoch`` that were planned and are not finished, by table.

    ``server_ahead``: by how much the clock of the source's server is ahead of ours.
    """
    plans = [
        plan
        for plan in plans_in_force(SnapshotPlans(store.folder).all(epoch))
        if not store.exists(plan.boundary_id)
    ]
    if not plans:
        return []
    prefix = chunk_prefix(epoch)
    batches = {name: store.read(name) for name in store.batch_ids(prefix)}
    reading = ReadingTime(batches.values(), server_ahead)
    under_way = []
    for plan in sorted(plans, key=lambda plan: (plan.table, plan.boundary_ordinal)):
        names = {chunk: plan.batch_id(chunk) for chunk in range(plan.chunks)}
        landed = {chunk: batches[name] for chunk, name in names.items() if name in batches}
        under_way.append(progress(plan, landed, reading))
    return under_way


class ReadingTime:
    """Computes how long the chunks of one epoch took to read."""

    def __init__(self, landed: Iterable[Manifest], server_ahead: timedelta) -> None:
        """``landed``: every landed chunk of the epoch, of all tables. ``server_ahead``: by how much the
        server's clock is ahead of the clock that set ``landed_at``."""
        # A snapshot end has an ordinal from before the first row, and lands after the last one.
        chunks = [each for each in landed if each.chunk is not None and not each.chunk.boundary]
        with_rows = sorted((_last_ordinal(each), each.arrival.landed_at) for each in chunks if each.files)
        self._ordinals = [ordinal for ordinal, _ in with_rows]
        self._landed_by = list(accumulate((at for _, at in with_rows), max))
        self._landings = sorted(each.arrival.landed_at for each in chunks)
        self._server_ahead = server_ahead

    def seconds(self, chunks: Iterable[Manifest]) -> float:
        """Return the seconds in which at least one of ``chunks`` was being read."""
        total = timedelta(0)
        covered: datetime | None = None
        for begin, end in sorted((self._began(each), each.arrival.landed_at) for each in chunks):
            start = begin if covered is None else max(begin, covered)
            # If a clock was set back, a chunk ends before it begins.
            total += max(timedelta(0), end - start)
            covered = end if covered is None else max(covered, end)
        return total.total_seconds()

    def _began(self, batch: Manifest) -> datetime:
        """Return the latest time that is known to lie before the reading of a chunk began."""
        assert batch.chunk is not None, "a chunk of a snapshot"
        began = batch.chunk.clock - self._server_ahead
        before = self._landed_before(batch)
        return began if before is None else max(began, before)

    def _landed_before(self, batch: Manifest) -> datetime | None:
        """Return when the last of the chunks that were read before ``batch`` landed; None if there is
        none."""
        if batch.files:
            earlier = bisect_left(self._ordinals, min(file.first.ordinal for file in batch.files))
            return self._landed_by[earlier - 1] if earlier else None
        earlier = bisect_left(self._landings, batch.arrival.landed_at)
        return self._landings[earlier - 1] if earlier else None


def _last_ordinal(batch: Manifest) -> int:
    return max(file.last.ordinal for file in batch.files)
