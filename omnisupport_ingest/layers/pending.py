"""What has landed and is not yet committed in every layer: the work a sensor asks for.

The answer is read from landing and from the tables' own logs, so a lost, rewound or failed cursor
skips nothing, and a window that a changed contract made stale is pending again.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

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
from omnisupport_ingest.landing.standing import Place
from omnisupport_ingest.layers import raw
from omnisupport_ingest.layers.delayed_merge import waiting_merge
from omnisupport_ingest.layers.lateness import LateArrival, Lateness
from omnisupport_ingest.layers.net_changes import units_above
from omnisupport_ingest.layers.quarantine_files import QuarantineFiles, named_by
from omnisupport_ingest.layers.retyping import waiting
from omnisupport_ingest.layers.seen import Seen
from omnisupport_ingest.layers.shown import shows
from omnisupport_ingest.layers.versions import LawVersions, is_current, of_contract
from omnisupport_ingest.layers.window_facts import Standing, numbers_of, standing_of
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import OUT_OF_RANGE

T = TypeVar("T")

HOLE_FOUND = CHAIN_LSN.found(STREAM_HOLE)
"""A batch of the stream does not continue where the one before it ended."""

_LOOKS = 5
"""How often to look for versions of two tables that belong together while others commit."""

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
        self,
        snapshot: TableSnapshot | None,
        versions: Callable[[str], tuple[str, ...]],
        decisions: DecisionTable,
    ) -> None:
        self._snapshot = snapshot
        self._versions = versions
        self._decisions = decisions

    def waits(self, workspace: Workspace, contract: TableContract) -> bool:
        """Whether the table takes nothing in before a person has decided about its types."""
        return self._snapshot is not None and bool(waiting(workspace, contract, self._snapshot))

    def windows(self) -> Sequence[str]:
        return self._snapshot.windows() if self._snapshot is not None else ()

    def state(self, window: str) -> WindowState | None:
        return self._snapshot.state(window) if self._snapshot is not None else None

    def has_files(self, window: str) -> bool:
        return self._snapshot is not None and bool(self._snapshot.files(window))

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


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A window that waits for something: ``untaken`` files that some layer has not taken, with the ``late``
    ones; ``open`` in some layer, which ``may_close``; ``half_done`` by a run that made it again;
    ``uncertain`` while a commit to another window may yet tell what its quarantine files are."""

    untaken: tuple[Place, ...]
    late: tuple[LateArrival, ...]
    open: bool
    may_close: bool
    half_done: bool
    uncertain: bool


class _Look:
    """What one look at a source finds, by what an earlier one has ``seen``."""

    def __init__(self, workspace: Workspace, source: str, seen: Seen[_Unsettled]) -> None:
        self._workspace, self._seen = workspace, seen
        self._landing = workspace.landing(source)
        self._contracts = workspace.contracts.of_source(source)
        self._lateness = Lateness.of(workspace, source)
        self._apart = workspace.decisions.action(LATE) == REPLAY_WINDOW
        # Landing first: what lands meanwhile is news of the next look.
        news = self._landing.news(seen.era, seen.number)
        self.landed = self._landing.landed()
        self._laws = LawVersions(workspace, source)
        self._files = self._event_files(source)
        self._layers = self._open_layers(source)
        everything, apart = self._judged_by()
        changed = seen.changed(news, everything, apart)
        if changed is not None:
            changed |= {window for window, found in seen.unsettled.items() if found.uncertain}
        # A window that has lost all that landed in it is not known any more, but was.
        for window in self._known().union(seen.unsettled) if changed is None else changed:
            seen.settle(window, self._unsettled(window), self._numbers(window))
        seen.settled(news, everything, apart)
        self.windows: Mapping[str, _Unsettled] = dict(seen.unsettled)

    def closing(self, busy: Collection[str]) -> list[str]:
        """The windows that are closed by now, in order, and are still open in some layer. Busy ones wait."""
        return [
            window
            for window, found in sorted(self.windows.items())
            if found.open and found.may_close and window not in busy and self.is_passed(window)
        ]

    def is_passed(self, window: str) -> bool:
        """Whether the watermark has closed ``window`` by now."""
        return self._lateness.closed(window, self.landed.watermark)

    def unmerged(self, now: datetime) -> set[str]:
        """For each table whose net changes the dimension does not show whole, and that may not wait any
        longer at ``now``, one window to run again."""
        for contract in self._contracts:
            self._seen.newest(self._workspace.dimension(contract))
        found = self._seen.once(
            "unmerged", lambda: _unmerged(self._workspace, self._contracts, self._seen.newest)
        )
        return {window for window, due in found if due is None or due <= now}

    def _event_files(self, source: str) -> QuarantineFiles | None:
        deduped, quarantine = self._workspace.deduped(source), self._workspace.quarantine(source)
        for _ in range(_LOOKS):
            judged, held = self._seen.newest(deduped), self._seen.newest(quarantine)
            if judged is None or judged.is_newest():
                break
        return None if held is None else QuarantineFiles(judged, held)

    def _open_layers(self, source: str) -> list[_Layer]:
        workspace, newest, decisions = self._workspace, self._seen.newest, self._workspace.decisions
        self._folded = {each: newest(workspace.net_changes(each)) for each in self._contracts}
        self._net_changes = {
            each: snapshot
            for each, snapshot in self._folded.items()
            if snapshot is None or not waiting(workspace, each, snapshot)
        }
        judged = self._files.deduped if self._files is not None else newest(workspace.deduped(source))
        return [
            _Layer(newest(workspace.raw(source)), lambda _: raw.VERSIONS, decisions),
            _Layer(
                judged,
                self._judged_versions(judged),
                decisions,
            ),
            *(
                _Layer(snapshot, partial(_of_any_window, of_contract(each)), decisions)
                for each, snapshot in self._net_changes.items()
            ),
        ]

    def _judged_versions(self, judged: TableSnapshot | None) -> Callable[[str], tuple[str, ...]]:
        def versions(window: str) -> tuple[str, ...]:
            state = judged.state(window) if judged is not None else None
            return self._laws.of_held(window, state, partial(self.landed.parts, window))

        return versions

    def _judged_by(self) -> tuple[tuple[object, ...], Mapping[str, tuple[str, ...]]]:
        """What every window is judged by, and what some windows are besides."""
        contracts = tuple(each.fingerprint for each in self._contracts)
        taking = tuple(each.name for each in self._net_changes)
        laws = raw.VERSIONS, self._laws.common(), contracts, self._workspace.decisions.fingerprint
        return (*laws, taking, self._apart), self._laws.apart()

    def _known(self) -> set[str]:
        tables = [layer.windows() for layer in self._layers]
        if self._files is not None:
            tables.append(self._files.quarantine.windows())
        return {*self._landing.windows(), *(window for windows in tables for window in windows)}

    def _unsettled(self, window: str) -> _Unsettled | None:
        held = frozenset.intersection(*(layer.held(window) for layer in self._layers))
        untaken = self.landed.untaken(window, held)
        late = _untaken(self._lateness.late_parts(untaken), self._layers) if self._apart else []
        found = _Unsettled(
            tuple(sorted({part.place for part in untaken})),
            tuple(late),
            any(layer.is_open(window) for layer in self._layers),
            all(layer.may_close(window) for layer in self._layers),
            self._is_half_done(window),
            self._is_uncertain(window),
        )
        return found if found.untaken or found.open or found.half_done or found.uncertain else None

    def _numbers(self, window: str) -> Mapping[str, int]:
        """What the window comes to."""
        raw_layer, judged = self._layers[0], self._layers[1].state(window)
        withheld = self._files is not None and bool(named_by(judged) or self._files.quarantine.files(window))
        return numbers_of(
            raw_layer.state(window),
            judged,
            [each.state(window) if each is not None else None for each in self._folded.values()],
            listed=window != OUT_OF_RANGE
            and (raw_layer.has_files(window) or bool(self.landed.parts(window))),
            withheld=withheld,
            late_events=self._late_events(window),
        )

    def _late_events(self, window: str) -> int:
        marks = (each.mark for each in self.landed.epochs if each.mark is not None)
        if not self._lateness.may_be_late(window, max(marks, default=None)):
            return 0
        return sum(each.events for each in self._lateness.late_parts(self.landed.parts(window)))

    def _is_uncertain(self, window: str) -> bool:
        if self._files is None:
            return False
        named = named_by(self._files.state(window))
        return any(file.path not in named for file in self._files.quarantine.files(window))

    def _is_half_done(self, window: str) -> bool:
        """Whether some run made ``window`` again and not to the end: what it ended before has the same
        batches everywhere, but not the same content."""
        files = self._files
        if files is None or files.deduped is None:
            return False
        if files.unsettled(window) is not None:
            return True
        above = files.state(window)
        if above is None:
            return False
        accepted: dict[str | None, list[str]] = {}
        for file in files.deduped.files(window):
            accepted.setdefault(dict(file.partition)["source_table"], []).append(file.path)
        for contract, net_changes in self._net_changes.items():
            state = net_changes.state(window) if net_changes is not None else None
            if state is not None:
                units = units_above(accepted.get(contract.table, ()), above)
                if frozenset(state.inputs) != units or state.upstream_table_id != files.deduped.table_id:
                    return True
        return False


def pending_windows(
    workspace: Workspace, source: str, *, limit: int = 500, now: datetime | None = None
) -> Pending:
    """Compare what landed from ``source`` with what every layer has committed.

    Net changes that wait for their merge as their contract allows are not pending, until it is due (``now``:
    null is this moment). ``Workspace.merging_at_once`` lets none wait.
    What an earlier call of this workspace found settled is not looked at again before something lands in it,
    a table commits to it, or what it is judged by changes.
    """
    moment = now or datetime.now(UTC)
    return _asked(workspace, source, lambda look, _: _pending(workspace, source, look, limit, moment))


def standing_of_windows(workspace: Workspace, source: str) -> Standing:
    """What all windows of ``source`` come to. It looks as ``pending_windows`` does."""

    def standing(look: _Look, seen: Seen[_Unsettled]) -> Standing:
        late = _pending(workspace, source, look, 1, datetime.now(UTC)).late_windows
        return standing_of(seen.index, look.is_passed, late, sorted(look.windows))

    return _asked(workspace, source, standing)


def _asked(workspace: Workspace, source: str, question: Callable[[_Look, Seen[_Unsettled]], T]) -> T:
    memory: Seen[_Unsettled] = workspace.seen(source)

    def looked() -> T:
        with memory as seen:
            return question(_Look(workspace, source, seen), seen)

    return memory.ask(looked)


def _pending(workspace: Workspace, source: str, look: _Look, limit: int, now: datetime) -> Pending:
    untaken: dict[str, set[str]] = {}
    places: dict[str, Place] = {}
    for window, found in look.windows.items():
        for place in found.untaken:
            batch_id = place[-1]
            untaken.setdefault(batch_id, set()).add(window)
            places[batch_id] = place
    first = heapq.nsmallest(limit, untaken, key=places.__getitem__)
    late = sorted(
        (each for found in look.windows.values() for each in found.late),
        key=lambda each: (places[each.batch_id], each.window),
    )
    windows = {window for batch_id in first for window in untaken[batch_id]}
    if not untaken:
        windows |= look.unmerged(now)
    late_windows = {each.window for each in late}
    busy = late_windows.union(*untaken.values())
    windows |= set(look.closing(busy)[:limit])
    half_done = sorted(window for window, found in look.windows.items() if found.half_done)
    windows |= set([window for window in half_done if window not in busy][:limit])
    landed = look.landed
    newest = workspace.landing(source).read(landed.last.batch_id) if landed.last is not None else None
    held_up = landed.hole is not None and workspace.decisions.action(HOLE_FOUND.scenario) == STOP
    return Pending(
        windows=() if held_up else tuple(sorted(windows - late_windows)),
        batches=len(untaken),
        landed=landed.count,
        last_batch_id=newest.batch_id if newest else None,
        last_lsn=_end(newest),
        watermark=newest.arrival.watermark if newest else None,
        hole=landed.hole,
        stream_end=landed.stream_end,
        recoveries=sum(each.recoveries for each in landed.epochs),
        late_windows=() if held_up else tuple(sorted(late_windows)),
        late=() if held_up else tuple(late),
    )


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


def _unmerged(
    workspace: Workspace,
    contracts: tuple[TableContract, ...],
    newest: Callable[[LakeTable], TableSnapshot | None],
) -> tuple[tuple[str, datetime | None], ...]:
    """Windows to run again, each with the moment from which on; null: at once."""
    windows = []
    for contract in contracts:
        net_changes, dimension = (
            newest(workspace.net_changes(contract)),
            newest(workspace.dimension(contract)),
        )
        if net_changes is None or not net_changes.windows():
            continue
        if any(waiting(workspace, contract, each) for each in (net_changes, dimension) if each is not None):
            continue
        state = dimension.state(WHOLE_TABLE) if dimension else None
        if state is None or not shows(state, net_changes, contract):
            waits = waiting_merge(contract, state, net_changes)
            windows.append((net_changes.windows()[-1], None if waits is None else waits.due))
    return tuple(windows)


def _end(batch: Manifest | None) -> str | None:
    if batch is None:
        return None
    if batch.stream is not None:
        return str(batch.stream.end_lsn)
    return str(batch.chunk.high) if batch.chunk is not None else None
