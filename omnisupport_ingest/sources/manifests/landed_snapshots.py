"""How far whole deliveries of rows without a cursor bring the watermark, and where a later one lands.

A whole snapshot says all of its table at its moment. So a source of such tables is complete up to the lowest
of the moments that its tables have reached. Each batch records these moments (``FileSpan.snapshots``), so the
next delivery reads one manifest, not all.

A delivery stands above every earlier one, whatever moment it is of. If the watermark has passed the window of
its moment, that window may be sealed, and a sealed window would keep all of its rows in quarantine. So it
lands in the window of the watermark, which no removal has reached: none begins before the window has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.windows import KEY_FORMAT, WindowGrid


@dataclass(frozen=True)
class LandedSnapshots:
    """The whole snapshots that have landed in a source.

    ``moments``: by table (``schema.table``), the latest moment of one. Tables that only an earlier version
    has landed are missing. ``watermark``: of the source; None before the first.
    """

    moments: Mapping[str, datetime] = field(default_factory=dict)
    watermark: datetime | None = None

    @classmethod
    def of(cls, store: LandingStore, epoch: int) -> Self:
        """Return those that have landed in ``store`` until ``epoch``. Nothing may land meanwhile."""
        standings = [each for each in store.epoch_standings() if each.epoch <= epoch]
        watermark = store.watermark_until(epoch)
        last = next((each for each in reversed(standings) if each.file_ordinal is not None), None)
        if last is None or last.file_ordinal is None:
            return cls(watermark=watermark)
        # Ordinals rise from delivery to delivery. The clock of landing may be set back.
        position = Position(last.epoch, Lsn(0), last.file_ordinal)
        newest = store.reaching(last.epoch, position, position)
        file = store.read(newest[-1].batch_id).file if newest else None
        return cls((file.snapshots if file is not None else None) or {}, watermark)

    def with_one(self, table: str, moment: datetime) -> Self:
        """Return these and a whole snapshot of ``table``. One that is older than the last changes nothing."""
        reached = self.moments.get(table)
        latest = moment if reached is None else max(reached, moment)
        return type(self)({**self.moments, table: latest}, self.watermark)

    def complete(self, tables: Collection[str]) -> datetime | None:
        """Return up to when a source with ``tables`` is complete; None if a table has no moment yet."""
        if not all(each in self.moments for each in tables):
            return None
        return min((self.moments[each] for each in tables), default=None)

    def window_of(self, moment: datetime, grid: WindowGrid) -> str | None:
        """Return the window of a delivery of ``moment`` if that is not the window of its moment, because the
        watermark has passed it; else None."""
        if self.watermark is None or grid.truncate(moment) >= grid.truncate(self.watermark):
            return None
        return grid.truncate(self.watermark).strftime(KEY_FORMAT)
