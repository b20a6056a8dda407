"""How far whole deliveries of rows without a cursor bring the watermark, and where a later one lands.

A whole snapshot says all of its table at its moment. So a source of such tables is complete up to the lowest
of the moments that its tables have reached. Each batch records these moments (``FileSpan.snapshots``), so the
next delivery reads one manifest, not all.

A snapshot may come of a moment whose window the watermark has passed. That window may be sealed, and a sealed
window would keep all of its rows in quarantine. So it lands in the window of the watermark, which no removal
has reached: none begins before the window has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Self

from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.windows import KEY_FORMAT, WindowGrid


@dataclass(frozen=True)
class LandedSnapshots:
    """The whole snapshots that have landed in a source without cursors.

    ``moments``: by table (``schema.table``), the latest moment of one. Tables that only an earlier version
    has landed are missing.
    """

    moments: Mapping[str, datetime] = field(default_factory=dict)

    @classmethod
    def of(cls, store: LandingStore) -> Self:
        """Return those that have landed in ``store``. Before a delivery lands, hold its lock."""
        return cls(store.whole_snapshots())

    def with_one(self, table: str, moment: datetime) -> Self:
        """Return these and a whole snapshot of ``table``. One that is older than the last changes nothing."""
        reached = self.moments.get(table)
        return type(self)({**self.moments, table: moment if reached is None else max(reached, moment)})

    def complete(self, tables: Collection[str]) -> datetime | None:
        """Return up to when a source with ``tables`` is complete; None if a table has no moment yet."""
        if not all(each in self.moments for each in tables):
            return None
        return min((self.moments[each] for each in tables), default=None)

    def holding(self, tables: Collection[str]) -> list[str]:
        """Return which of ``tables`` hold the watermark: those without a moment, else those with the lowest.
        Empty if all are equal."""
        complete = self.complete(tables)
        if complete is None:
            return sorted(each for each in tables if each not in self.moments)
        found = sorted(each for each in tables if self.moments[each] == complete)
        return found if len(found) < len(tables) else []


def window_of_snapshot(moment: datetime, watermark: datetime | None, grid: WindowGrid) -> str | None:
    """Return the window of a snapshot of ``moment`` if the ``watermark`` has passed that of its moment; else
    None."""
    if watermark is None or grid.truncate(moment) >= grid.truncate(watermark):
        return None
    return grid.truncate(watermark).strftime(KEY_FORMAT)
