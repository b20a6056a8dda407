"""What a dimension shows of its net changes: by window, the batches that it was made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.stages.dimensions import newer_windows


@dataclass(frozen=True)
class Shown:
    """``newer``: windows of whose rows the dimension does not show what the net changes hold now."""

    net_changes: TableSnapshot | None
    newer: frozenset[str]
    then: TableSnapshot | None
    _held: dict[tuple[str, bool], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, net_changes: TableSnapshot | None, dimension: TableSnapshot | None) -> Shown:
        """``net_changes`` and ``dimension``: null where they are not there."""
        if net_changes is None:
            return cls(None, frozenset(), None)
        state = dimension.state(WHOLE_TABLE) if dimension is not None else None
        newer = newer_windows(state, net_changes)
        return cls(net_changes, newer, made_from(net_changes, state) if newer else net_changes)

    def in_window(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that are shown."""
        held = self._batches(window, now=True)
        return held & self._batches(window, now=False) if window in self.newer else held

    def has(self, batch: Manifest, table: str) -> bool:
        """Whether the events of ``table`` (schema and name) in ``batch`` are shown."""
        windows = {file.window for file in batch.files if table in file.rows_per_table}
        return all(batch.batch_id in self.in_window(window) for window in windows)

    def _batches(self, window: str, *, now: bool) -> frozenset[str]:
        snapshot = self.net_changes if now else self.then
        if (window, now) not in self._held:
            state = snapshot.state(window) if snapshot is not None else None
            self._held[window, now] = frozenset(state.batches) if state is not None else frozenset()
        return self._held[window, now]


def made_from(net_changes: TableSnapshot, dimension: WindowState | None) -> TableSnapshot | None:
    """The version of the net changes that the dimension shows; null if there is none any more."""
    version = dimension.checkpoint.upstream_version if dimension is not None else None
    if dimension is None or version is None or dimension.upstream_table_id != net_changes.table_id:
        return None
    if version == net_changes.version:
        return net_changes
    try:
        return TableSnapshot(net_changes.table, DeltaTable(str(net_changes.table.folder), version=version))
    except DeltaError:
        return None
