"""How far a snapshot has come, how fast, and how long it will take, by its plan and by what has landed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.reading_time import ReadingTime
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan, SnapshotPlans, that_count
from omnisupport_ingest.landing.store import LandingStore


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """A snapshot that is not finished: ``done`` of ``chunks`` have landed, with ``rows`` rows.

    ``scope``: the range of keys that it is of, for people; None: the whole table. ``compared``: ``rows`` are
    those of chunks that differed from the lake, though the others were read too. ``rows_left``: about as
    many are still to be read. ``seconds``: for how long the chunks that have landed were being read.
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
    """Return the progress of the snapshot of ``plan``; ``landed``: its landed chunks by number."""
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
    """Since the plan: tables are planned and compared one by one, and one that is stopped is planned anew.

    A chunk may be looked at three times, and only the last time is on record.
    """
    last = max((batch.arrival.landed_at for batch in landed.values()), default=plan.planned_at)
    return max(0.0, (last - plan.planned_at).total_seconds())


def _rows_of_a_chunk(plan: SnapshotPlan, landed: Mapping[int, Manifest]) -> int:
    """As many as in those that were read on average, else as planned. The last has what is left over."""
    full = [batch.rows for number, batch in landed.items() if number < plan.chunks - 1]
    return (round(sum(full) / len(full)) if full else 0) or plan.rows


def snapshots_under_way(
    store: LandingStore, epoch: int, server_ahead: timedelta = timedelta(0)
) -> list[SnapshotProgress]:
    """The snapshots of ``epoch`` that were planned and are not finished, by table.

    ``server_ahead``: by how much the clock of the source's server is ahead of ours.
    """
    plans = [
        plan
        for plan in that_count(SnapshotPlans(store.folder).all(epoch))
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
