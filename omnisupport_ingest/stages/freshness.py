"""How far behind is what people read: per published table, not per source.

A source may have landed a second ago while a table still shows what it showed ten minutes ago: its run
failed, waits, or takes long. So a table's lag is counted from the oldest landed change of it that it does
not show; where it shows all of them, it is as far as landing is. Landing and the tables' logs answer this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.stages.published import upstream_of


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
    dimension: TableSnapshot | None,
    published: TableSnapshot | None,
    batches: Sequence[Manifest],
) -> Freshness:
    """The freshness of the published table of ``contract``.

    ``dimension`` and ``published``: None where they are not there. ``batches``: what has landed, as
    ``LandingStore.landed`` gives it.
    """
    shown = _Shown(contract, dimension, published)
    unshown = [batch for batch in batches if not shown.has(batch)]
    marks = [batch.arrival.watermark for batch in batches if batch.arrival.watermark is not None]
    landed_to = marks[-1] if marks else None
    waits_since = [_before(batch) for batch in unshown]
    return Freshness(min(waits_since, default=landed_to), landed_to, len(unshown))


def _before(batch: Manifest) -> datetime:
    """Up to when a table that lacks ``batch`` is complete at least."""
    if batch.stream is None:
        return batch.arrival.landed_at
    # The first batch of all found no watermark.
    return batch.arrival.watermark_before or batch.stream.first_commit_ts or batch.arrival.landed_at


class _Shown:
    """Which batches a published table shows."""

    def __init__(
        self, contract: TableContract, dimension: TableSnapshot | None, published: TableSnapshot | None
    ) -> None:
        self._table = contract.full_name
        state = published.state(WHOLE_TABLE) if published is not None else None
        self._published = frozenset(state.batches) if state else frozenset()
        units = upstream_of(dimension, contract).units if dimension is not None else frozenset()
        newer = units - frozenset(state.inputs if state else ())
        # Windows whose content is another than the one that was published.
        self._newer = {unit.partition("@")[0] for unit in newer}
        self._held: dict[str, frozenset[str]] = {}
        for window in dimension.windows() if dimension is not None else ():
            found = dimension.state(window) if dimension is not None else None
            self._held[window] = frozenset(found.batches) if found else frozenset()

    def has(self, batch: Manifest) -> bool:
        windows = {file.window for file in batch.files if self._table in file.rows_per_table}
        return all(
            batch.batch_id in self._held.get(window, ())
            and (window not in self._newer or batch.batch_id in self._published)
            for window in windows
        )
