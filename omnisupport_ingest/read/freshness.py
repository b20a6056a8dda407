"""How far behind is what people read: per dimension, not per source.

A source may have landed a second ago while a table still shows what it showed ten minutes ago: its run
failed, waits, or takes long. So a table's lag is counted from the oldest landed change of it that it does
not show; where it shows all of them, it is as far as landing is. Landing and the tables' logs answer this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import Landed, LandingStore
from omnisupport_ingest.layers.shown import Shown


@dataclass(frozen=True, slots=True)
class Freshness:
    """``complete_to`` (UTC): the table shows what was committed before; of deliveries of files and chunks
    of snapshots, what landed before. None where nothing of a stream has landed, and nothing waits.

    ``landed_to``: the landed watermark. ``unshown_batches``: landed batches with events of the table that
    it does not show.
    """

    complete_to: datetime | None
    landed_to: datetime | None
    unshown_batches: int

    def lag_seconds(self, now: datetime) -> float | None:
        """How far the table is behind ``now`` (timezone-aware), None where nothing can be behind."""
        return None if self.complete_to is None else round((now - self.complete_to).total_seconds(), 1)

    @property
    def behind_landing_seconds(self) -> float | None:
        """How far the table is behind what has landed, None without a watermark."""
        if self.complete_to is None or self.landed_to is None:
            return None
        return max(0.0, round((self.landed_to - self.complete_to).total_seconds(), 1))


def freshness(
    contract: TableContract,
    net_changes: TableSnapshot | None,
    dimension: TableSnapshot | None,
    landing: LandingStore,
    landed: Landed,
) -> Freshness:
    """The freshness of the dimension of ``contract``.

    ``net_changes`` and ``dimension``: None where they are not there. ``landed``: in ``landing``.
    """
    shown = Shown.of(net_changes, dimension)
    unshown = {
        part.batch_id: part
        for window in landing.windows()
        for part in landed.untaken(window, shown.in_window(window))
        if contract.full_name in part.rows_per_table
    }
    marked = [each.marked.mark for each in landed.epochs if each.marked is not None]
    landed_to = marked[-1] if marked else None
    waits_since = [_before(part, landing) for part in unshown.values()]
    return Freshness(min(waits_since, default=landed_to), landed_to, len(unshown))


def _before(part: LandedPart, landing: LandingStore) -> datetime:
    """Up to when a table that lacks the batch of ``part`` is complete at least."""
    if part.begins is None:
        return part.landed_at
    if part.mark_before is not None:
        return part.mark_before
    # The first batch of all found no watermark.
    stream = landing.read(part.batch_id).stream
    return stream.first_commit_ts if stream and stream.first_commit_ts else part.landed_at
