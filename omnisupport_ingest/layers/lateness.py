"""Which windows a batch reached late, and which windows are closed, from manifests and contracts.

No event is read for that: for each window, a batch's manifest has the watermark it found and the tables of
its events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.cdc.lateness import allowed_of_source, closes_at, is_late
from omnisupport_ingest.contracts.model import DEFAULT_ALLOWED_LATENESS, TableContract
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowGrid


@dataclass(frozen=True, slots=True)
class LateArrival:
    """Events of one batch that landed in a window that was closed for their table."""

    window: str
    batch_id: str
    events: int


class Lateness:
    """Lateness of one source, by its contracts."""

    def __init__(self, grid: WindowGrid, contracts: Iterable[TableContract]) -> None:
        known = tuple(contracts)
        self._grid = grid
        self._allowed = {each.full_name: each.allowed_lateness for each in known}
        self._longest_allowed = allowed_of_source(known)
        self._least_allowed = min((*self._allowed.values(), DEFAULT_ALLOWED_LATENESS), default=timedelta(0))

    @classmethod
    def of(cls, workspace: Workspace, source: str) -> Lateness:
        return cls(workspace.grid, workspace.contracts.of_source(source))

    def closed(self, window: str, watermark: datetime | None) -> bool:
        """Whether ``window`` is closed at ``watermark`` for every table of the source."""
        if window == OUT_OF_RANGE:
            return False
        return is_late(watermark, self._grid.end_of(window), self._longest_allowed)

    def closes_at(self, window: str) -> datetime:
        """The watermark at which ``window`` closes."""
        return closes_at(self._grid.end_of(window), self._longest_allowed)

    def may_be_late(self, window: str, watermark: datetime | None) -> bool:
        """Whether events that found ``watermark`` may be late in ``window``, for some table."""
        return window != OUT_OF_RANGE and is_late(watermark, self._grid.end_of(window), self._least_allowed)

    def late_parts(self, parts: Iterable[LandedPart]) -> tuple[LateArrival, ...]:
        """Return the late events among those of ``parts``, counted by window and batch."""
        found: dict[tuple[str, str], int] = {}
        for part in parts:
            late = self._late_events(part.mark_before, part.window, part.rows_per_table)
            if late:
                found[part.window, part.batch_id] = found.get((part.window, part.batch_id), 0) + late
        return tuple(LateArrival(*which, events) for which, events in sorted(found.items()))

    def late_batches(self, parts: Iterable[LandedPart]) -> frozenset[str]:
        """Return the batches among those of ``parts`` that have late events."""
        return frozenset(each.batch_id for each in self.late_parts(parts))

    def _late_events(self, mark: datetime | None, window: str, rows_per_table: Mapping[str, int]) -> int:
        if mark is None or window == OUT_OF_RANGE:
            return 0
        end = self._grid.end_of(window)
        if not is_late(mark, end, self._least_allowed):
            return 0
        return sum(
            rows
            for table, rows in rows_per_table.items()
            if is_late(mark, end, self._allowed.get(table, DEFAULT_ALLOWED_LATENESS))
        )
