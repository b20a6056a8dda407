"""What a published table shows of its dimension: by window, the batches that it was made from."""

from __future__ import annotations

from dataclasses import dataclass, field

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.stages.published import newer_windows


@dataclass(frozen=True)
class Shown:
    """``newer``: windows of whose rows the published table does not show what the dimension holds now."""

    dimension: TableSnapshot | None
    newer: frozenset[str]
    then: TableSnapshot | None
    _held: dict[tuple[str, bool], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, dimension: TableSnapshot | None, published: TableSnapshot | None) -> Shown:
        """``dimension`` and ``published``: null where they are not there."""
        if dimension is None:
            return cls(None, frozenset(), None)
        state = published.state(WHOLE_TABLE) if published is not None else None
        newer = newer_windows(state, dimension)
        return cls(dimension, newer, made_from(dimension, state) if newer else dimension)

    def in_window(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that are shown."""
        held = self._batches(window, now=True)
        return held & self._batches(window, now=False) if window in self.newer else held

    def has(self, batch: Manifest, table: str) -> bool:
        """Whether the events of ``table`` (schema and name) in ``batch`` are shown."""
        windows = {file.window for file in batch.files if table in file.rows_per_table}
        return all(batch.batch_id in self.in_window(window) for window in windows)

    def _batches(self, window: str, *, now: bool) -> frozenset[str]:
        snapshot = self.dimension if now else self.then
        if (window, now) not in self._held:
            state = snapshot.state(window) if snapshot is not None else None
            self._held[window, now] = frozenset(state.batches) if state is not None else frozenset()
        return self._held[window, now]


def made_from(dimension: TableSnapshot, published: WindowState | None) -> TableSnapshot | None:
    """The version of the dimension that was published last; null if there is none any more."""
    version = published.checkpoint.upstream_version if published is not None else None
    if published is None or version is None or published.upstream_table_id != dimension.table_id:
        return None
    if version == dimension.version:
        return dimension
    try:
        return TableSnapshot(dimension.table, DeltaTable(str(dimension.table.folder), version=version))
    except DeltaError:
        return None
