"""What has landed and is not yet committed in every layer: the work a sensor asks for.

The answer is read from landing and from the tables' own logs, so a lost, rewound or failed cursor
skips nothing, and a window that a changed contract made stale is pending again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.table import LakeTable, TableSnapshot
from omnisupport_ingest.landing.chain import Hole
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.stages import deduped, dimensions, raw
from omnisupport_ingest.stages.published import upstream_of
from omnisupport_ingest.stages.workspace import Workspace

_LOOK_SECONDS = 0.2
"""How often to look whether a batch has landed; it costs one call of the file system."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Windows with work to do, in order, and where landing stands.

    ``windows``: of the first ``limit`` batches that some layer has not committed. ``batches``: how
    many batches that is in all. ``last_batch_id``, ``last_lsn`` and ``watermark``: of the newest
    landed batch. ``stream_end``: up to where the WAL stream has landed. ``hole``: what holds back
    later batches.
    """

    windows: tuple[str, ...]
    batches: int
    landed: int
    last_batch_id: str | None
    last_lsn: str | None
    watermark: datetime | None
    hole: Hole | None
    stream_end: Lsn | None = None


@dataclass(frozen=True)
class _Layer:
    """A table as it stands, null before its first commit, and the versions it should be made with."""

    snapshot: TableSnapshot | None
    versions: tuple[str, ...]

    def held(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that the layer holds; none if it is stale."""
        state = self.snapshot.state(window) if self.snapshot is not None else None
        return frozenset(state.batches) if state and state.versions == self.versions else frozenset()


def pending_windows(workspace: Workspace, source: str, *, limit: int = 500) -> Pending:
    """Compare what landed from ``source`` with what every layer has committed."""
    landed = workspace.landing(source).landed()
    contracts = workspace.contracts.of_source(source)
    layers = [
        _Layer(_open(table), versions)
        for table, versions in (
            (workspace.raw(source), raw.VERSIONS),
            (workspace.deduped(source), deduped.versions_of(contracts)),
            *((workspace.dimension(each), dimensions.versions_of(each)) for each in contracts),
        )
    ]
    held: dict[str, frozenset[str]] = {}
    waiting: dict[str, set[str]] = {}
    for batch in landed.batches:
        for window in batch.windows:
            if window not in held:
                held[window] = frozenset.intersection(*(layer.held(window) for layer in layers))
            if batch.batch_id not in held[window]:
                waiting.setdefault(batch.batch_id, set()).add(window)
    windows = {window for batch_id in list(waiting)[:limit] for window in waiting[batch_id]}
    if not waiting:
        windows |= _unpublished(workspace, contracts)
    newest = landed.batches[-1] if landed.batches else None
    return Pending(
        windows=tuple(sorted(windows)),
        batches=len(waiting),
        landed=len(landed.batches),
        last_batch_id=newest.batch_id if newest else None,
        last_lsn=_end(newest),
        watermark=newest.arrival.watermark if newest else None,
        hole=landed.hole,
        stream_end=max((batch.stream.end_lsn for batch in landed.batches if batch.stream), default=None),
    )


def pending_soon(workspace: Workspace, source: str, *, limit: int = 500, patience: float) -> Pending:
    """``pending_windows``; with nothing pending, the same again when a batch lands within ``patience`` s.

    Whoever asks every few seconds hears of a new batch at once, not at the next question.
    """
    landing = workspace.landing(source)
    give_up = time.monotonic() + patience
    while True:
        before = landing.last_change()
        pending = pending_windows(workspace, source, limit=limit)
        if pending.windows:
            return pending
        while landing.last_change() == before:
            if time.monotonic() >= give_up:
                return pending
            time.sleep(_LOOK_SECONDS)


def _open(table: LakeTable) -> TableSnapshot | None:
    return table.open() if table.exists else None


def _unpublished(workspace: Workspace, contracts: tuple[TableContract, ...]) -> set[str]:
    """For each dimension that its published table does not show whole, one window to run again."""
    windows = set()
    for contract in contracts:
        dimension = _open(workspace.dimension(contract))
        if dimension is None or not dimension.windows():
            continue
        published = _open(workspace.published(contract))
        state = published.state(WHOLE_TABLE) if published else None
        if state is None or frozenset(state.inputs) != upstream_of(dimension, contract).units:
            windows.add(dimension.windows()[-1])
    return windows


def _end(batch: Manifest | None) -> str | None:
    if batch is None:
        return None
    if batch.stream is not None:
        return str(batch.stream.end_lsn)
    return str(batch.chunk.high) if batch.chunk is not None else None
