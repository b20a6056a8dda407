"""How far a snapshot has come, by its plan and by what has landed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans, that_count
from omnisupport_ingest.landing.store import LandingStore


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """A snapshot that is not finished: ``done`` of ``chunks`` have landed, with ``rows`` rows.

    ``scope``: the range of keys that it is of, for people; null: the table.
    ``seconds``: from its plan to the last chunk that landed; null before the first.
    """

    table: str
    scope: str | None
    reason: str
    planned_at: datetime
    chunks: int
    done: int
    rows: int
    seconds: float | None

    @property
    def rows_per_second(self) -> float | None:
        """Over all of it, pauses too."""
        return self.rows / self.seconds if self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """If the chunks still to be read take as long as those that were."""
        if not self.seconds or not self.done:
            return None
        return self.seconds / self.done * (self.chunks - self.done)


def snapshots_under_way(store: LandingStore, epoch: int) -> list[SnapshotProgress]:
    """The snapshots of ``epoch`` that were planned and are not finished, by table."""
    found = []
    plans = that_count(SnapshotPlans(store.folder).all(epoch))
    for plan in sorted(plans, key=lambda plan: (plan.table, plan.boundary_ordinal)):
        if store.exists(plan.boundary_id):
            continue
        names = (plan.batch_id(chunk) for chunk in range(plan.chunks))
        landed = [store.read(name) for name in names if store.exists(name)]
        last = max((batch.arrival.landed_at for batch in landed), default=None)
        found.append(
            SnapshotProgress(
                plan.table,
                None if plan.scope is None else str(plan.scope),
                plan.reason,
                plan.planned_at,
                plan.chunks,
                len(landed),
                sum(batch.rows for batch in landed),
                None if last is None else max(0.0, (last - plan.planned_at).total_seconds()),
            )
        )
    return found
