"""What has landed and is not yet committed in every layer: the work a sensor asks for.

The answer is read from landing and from the tables' own logs, so a lost, rewound or failed cursor
skips nothing, and a window that a changed contract made stale is pending again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from omnisupport_ingest.contracts.decision_table import (
    CHAIN_LSN,
    LATE,
    REPLAY_WINDOW,
    STOP,
    STREAM_HOLE,
    DecisionTable,
)
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable, TableSnapshot
from omnisupport_ingest.landing.chain import Hole
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.stages import raw
from omnisupport_ingest.stages.dimensions import units_above
from omnisupport_ingest.stages.lateness import LateArrival, Lateness, newest_watermark
from omnisupport_ingest.stages.published import shows, upstream_of
from omnisupport_ingest.stages.quarantine_files import QuarantineFiles
from omnisupport_ingest.stages.retyping import waiting
from omnisupport_ingest.stages.versions import LawVersions, is_current, of_contract
from omnisupport_ingest.stages.workspace import Workspace

HOLE_FOUND = CHAIN_LSN.found(STREAM_HOLE)
"""A batch of the stream does not continue where the one before it ended."""

_LOOK_SECONDS = 0.2
"""How often to look whether a batch has landed; it costs one call of the file system."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Windows with work to do, in order, and where landing stands.

    ``windows``: of the first ``limit`` batches that some layer has not committed, windows that have
    closed since their last commit, and those that a run left half done which made them again.
    ``late_windows``: those to be replayed because events landed
    in them after they had closed, which ``late`` names; they are not among ``windows``. ``batches``:
    how many batches wait in all. ``last_batch_id``, ``last_lsn`` and ``watermark``: of the newest
    landed batch. ``recoveries``: how often capture went on after a crash before a confirmation.
    ``stream_end``: up to where the WAL stream has landed. ``hole``: what holds back
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
    recoveries: int = 0
    late_windows: tuple[str, ...] = ()
    late: tuple[LateArrival, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether every layer has committed everything that may be taken."""
        return not self.windows and not self.late_windows


class _Layer:
    """A table as it stands, null before its first commit, and the versions its windows should have."""

    def __init__(
        self, table: LakeTable, versions: Callable[[str], tuple[str, ...]], decisions: DecisionTable
    ) -> None:
        self._snapshot = _open(table)
        self._versions = versions
        self._decisions = decisions
        self._states: dict[str, WindowState | None] = {}

    def waits(self, workspace: Workspace, contract: TableContract) -> bool:
        """Whether the table takes nothing in before a person has decided about its types."""
        return self._snapshot is not None and bool(waiting(workspace, contract, self._snapshot))

    def windows(self) -> Sequence[str]:
        return self._snapshot.windows() if self._snapshot is not None else ()

    def state(self, window: str) -> WindowState | None:
        if self._snapshot is None:
            return None
        if window not in self._states:
            self._states[window] = self._snapshot.state(window)
        return self._states[window]

    def taken(self, window: str) -> frozenset[str]:
        """The batches of ``window`` that the layer holds, by whatever rules they were taken in."""
        state = self.state(window)
        return frozenset(state.batches) if state is not None else frozenset()

    def held(self, window: str) -> frozenset[str]:
        """The same; none if the window must be made again by other rules."""
        state = self.state(window)
        if state is None or not is_current(state.versions, self._versions(window), self._decisions):
            return frozenset()
        return frozenset(state.batches)

    def is_open(self, window: str) -> bool:
        """Whether the layer holds ``window`` and has not closed it since its last commit."""
        state = self.state(window)
        return state is not None and not state.closed

    def may_close(self, window: str) -> bool:
        """Whether a run over ``window`` would close it here or leave it alone, not make it again."""
        state = self.state(window)
        if state is None:
            return self._snapshot is None or not self._snapshot.files(window)
        return state.versions == self._versions(window)


def pending_windows(workspace: Workspace, source: str, *, limit: int = 500) -> Pending:
    """Compare what landed from ``source`` with what every layer has committed."""
    landed = workspace.landing(source).landed()
    contracts = workspace.contracts.of_source(source)
    layers = _layers(workspace, source, contracts)
    lateness = Lateness.of(workspace, source)
    apart = workspace.decisions.action(LATE) == REPLAY_WINDOW
    held: dict[str, frozenset[str]] = {}
    untaken: dict[str, set[str]] = {}
    late: list[LateArrival] = []
    for batch in landed.batches:
        for window in batch.windows:
            if window not in held:
                held[window] = frozenset.intersection(*(layer.held(window) for layer in layers))
            if batch.batch_id not in held[window]:
                untaken.setdefault(batch.batch_id, set()).add(window)
        if apart and batch.batch_id in untaken:
            late += _untaken(lateness.arrivals(batch), layers)
    windows = {window for batch_id in list(untaken)[:limit] for window in untaken[batch_id]}
    if not untaken:
        windows |= _unpublished(workspace, contracts)
    late_windows = {each.window for each in late}
    busy = late_windows.union(*untaken.values())
    watermark = newest_watermark(landed.batches)
    windows |= set(_closing(layers, lambda window: lateness.closed(window, watermark), busy)[:limit])
    windows |= set(_half_done(workspace, source, contracts, busy)[:limit])
    newest = landed.batches[-1] if landed.batches else None
    held_up = landed.hole is not None and workspace.decisions.action(HOLE_FOUND.scenario) == STOP
    return Pending(
        windows=() if held_up else tuple(sorted(windows - late_windows)),
        batches=len(untaken),
        landed=len(landed.batches),
        last_batch_id=newest.batch_id if newest else None,
        last_lsn=_end(newest),
        watermark=newest.arrival.watermark if newest else None,
        hole=landed.hole,
        stream_end=max((batch.stream.end_lsn for batch in landed.batches if batch.stream), default=None),
        recoveries=sum(1 for batch in landed.batches if batch.stream and batch.stream.recovered_from),
        late_windows=() if held_up else tuple(sorted(late_windows)),
        late=() if held_up else tuple(late),
    )


def _layers(workspace: Workspace, source: str, contracts: tuple[TableContract, ...]) -> list[_Layer]:
    decisions = workspace.decisions
    return [
        _Layer(workspace.raw(source), lambda _: raw.VERSIONS, decisions),
        _Layer(workspace.deduped(source), LawVersions(workspace, source).of, decisions),
        *(
            layer
            for each in contracts
            if not (
                layer := _Layer(
                    workspace.dimension(each), partial(_of_any_window, of_contract(each)), decisions
                )
            ).waits(workspace, each)
        ),
    ]


def _closing(layers: Sequence[_Layer], closed: Callable[[str], bool], busy: Collection[str]) -> list[str]:
    """The windows that are closed by now, in order, and are still open in some layer. Busy ones wait."""
    return [
        window
        for window in sorted({window for layer in layers for window in layer.windows()})
        if window not in busy
        and closed(window)
        and any(layer.is_open(window) for layer in layers)
        and all(layer.may_close(window) for layer in layers)
    ]


def _half_done(
    workspace: Workspace, source: str, contracts: Iterable[TableContract], busy: Collection[str]
) -> list[str]:
    """The windows, in order, that some run made again and not to the end: what it ended before has the
    same batches everywhere, but not the same content. Busy ones are run again anyhow."""
    held = QuarantineFiles.newest(workspace, source)
    if held is None or held.deduped is None:
        return []
    found = set(held.unsettled_windows())
    accepted: dict[tuple[str, str | None], list[str]] = {}
    for file in held.deduped.all_files():
        accepted.setdefault((file.window, dict(file.partition)["source_table"]), []).append(file.path)
    for contract in contracts:
        dimension = _open(workspace.dimension(contract))
        if dimension is None or waiting(workspace, contract, dimension):
            continue
        for window in dimension.windows():
            above, state = held.state(window), dimension.state(window)
            if above is None or state is None:
                continue
            units = units_above(accepted.get((window, contract.table), ()), above)
            if frozenset(state.inputs) != units or state.upstream_table_id != held.deduped.table_id:
                found.add(window)
    return sorted(found - set(busy))


def _of_any_window(versions: tuple[str, ...], _window: str) -> tuple[str, ...]:
    return versions


def _untaken(arrivals: Iterable[LateArrival], layers: Sequence[_Layer]) -> list[LateArrival]:
    """Those of ``arrivals`` that some layer has not taken: a stale window alone is not late."""
    return [
        each for each in arrivals if not all(each.batch_id in layer.taken(each.window) for layer in layers)
    ]


def pending_soon(workspace: Workspace, source: str, *, limit: int = 500, patience: float) -> Pending:
    """``pending_windows``; with nothing pending, the same again when a batch lands within ``patience`` s.

    Whoever asks every few seconds hears of a new batch at once, not at the next question.
    """
    landing = workspace.landing(source)
    give_up = time.monotonic() + patience
    while True:
        before = landing.last_change()
        pending = pending_windows(workspace, source, limit=limit)
        if not pending.nothing:
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
        published = _open(workspace.published(contract))
        if dimension is None or not dimension.windows():
            continue
        if any(waiting(workspace, contract, each) for each in (dimension, published) if each is not None):
            continue
        state = published.state(WHOLE_TABLE) if published else None
        if state is None or not shows(state, upstream_of(dimension, contract)):
            windows.add(dimension.windows()[-1])
    return windows


def _end(batch: Manifest | None) -> str | None:
    if batch is None:
        return None
    if batch.stream is not None:
        return str(batch.stream.end_lsn)
    return str(batch.chunk.high) if batch.chunk is not None else None
