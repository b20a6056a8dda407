"""What has landed and is not yet committed in every layer: the work for which a sensor requests runs.

The answer is read from landing and from the tables' own logs. So a lost, rewound or wrong cursor skips
nothing, and a window that a changed contract made stale is pending again.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from omnisupport_ingest.contracts.decision_table import (
    CHAIN_LSN,
    LATE,
    REPLAY_WINDOW,
    STOP,
    STREAM_GAP,
)
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.json_values import compact, to_plain
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.snapshot import TableSnapshot, look_for_empty
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.standing import LandingOrder
from omnisupport_ingest.layers.dimension.delayed_merge import waiting_merge
from omnisupport_ingest.layers.dimension.shown_net_changes import purged_before, purged_of, shows
from omnisupport_ingest.layers.dimension.table_news import Layer, SourceLayers, TableLayer
from omnisupport_ingest.layers.events import raw
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles, named_by
from omnisupport_ingest.layers.events.sealed_policies import SealedPolicies
from omnisupport_ingest.layers.lateness import LateArrival, Lateness
from omnisupport_ingest.layers.plan import repeats_writes
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.scheduling.window_numbers import (
    FORMER,
    LayerStates,
    Standing,
    numbers_of,
    standing_of,
)
from omnisupport_ingest.layers.survey_cache import SurveyCache
from omnisupport_ingest.layers.type_changes import waiting
from omnisupport_ingest.layers.versions import RulesVersions, kinds_that_wait
from omnisupport_ingest.layers.withheld_numbers import withheld_numbers
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import OUT_OF_RANGE

T = TypeVar("T")

GAP_FOUND = CHAIN_LSN.found(STREAM_GAP)
"""Finding: a batch of the stream does not continue where the previous one ended."""

_LOOKS = 5
"""How often to look for versions of two tables that belong together, while others commit."""

_DIGITS = 16

_LOOK_SECONDS = 0.2
"""Seconds between looks for a new batch; a look costs one call of the file system."""


@dataclass(frozen=True, slots=True)
class Pending:
    """Windows with work to do, in order, and where landing stands.

    ``windows``: those with events of the first ``limit`` batches that a run has to take in; those
    that have closed since their last commit; and those that an interrupted run rebuilt only in part.
    ``late_windows``: windows to be replayed because events (``late``) landed in them after they had closed;
    they are not among ``windows``. ``batches``: how many batches wait in all; ``batch_ids``: their names.
    ``last_batch_id``, ``last_lsn`` and ``watermark``: of the newest landed batch. ``recoveries``: how often
    capture continued after a crash before a confirmation. ``stream_end``: up to where the WAL stream has
    landed. ``gap``: the gap that holds back later batches. ``tables``: the contracts whose tables have news
    in ``windows``; a run over these windows needs to visit no other table (``table_news``).
    ``half_done``: windows that a run has rebuilt in some layers only. ``digest``: a digest of the batches
    that wait and of the versions by which windows are judged and folded; empty if none is pending.
    """

    windows: tuple[str, ...]
    batches: int
    landed: int
    last_batch_id: str | None
    last_lsn: str | None
    watermark: datetime | None
    gap: Gap | None
    stream_end: Lsn | None = None
    recoveries: int = 0
    late_windows: tuple[str, ...] = ()
    late: tuple[LateArrival, ...] = ()
    tables: tuple[str, ...] = ()
    batch_ids: frozenset[str] = field(default=frozenset(), repr=False)
    half_done: tuple[str, ...] = ()
    digest: str = ""

    @property
    def nothing(self) -> bool:
        """Whether every layer has committed everything that may be taken."""
        return not self.windows and not self.late_windows


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A window that waits for something.

    ``untaken``: landed files that some layer awaits; ``late``: the late arrivals among them. ``half_done``:
    an interrupted run rebuilt it only in part. ``news``: the tables with news by either. ``open``: some layer
    has not closed it; ``may_close``: a run would close it; ``unclosed``: the tables that run must visit.
    ``uncertain``: a commit to another window may still change what is known of its quarantine files.
    """

    untaken: tuple[LandingOrder, ...]
    late: tuple[LateArrival, ...]
    news: tuple[str, ...]
    open: bool
    may_close: bool
    unclosed: tuple[str, ...]
    half_done: bool
    uncertain: bool

    def text(self) -> str:
        """Return this as text, for ``of_text`` in another process."""
        return compact([to_plain(getattr(self, each.name)) for each in fields(self)])

    @classmethod
    def of_text(cls, text: str) -> _Unsettled:
        untaken, late, news, is_open, may_close, unclosed, half_done, uncertain = json.loads(text)
        return cls(
            tuple((first, second, third, name) for first, second, third, name in untaken),
            tuple(LateArrival(**each) for each in late),
            tuple(news),
            is_open,
            may_close,
            tuple(unclosed),
            half_done,
            uncertain,
        )


_Tables = tuple[
    Sequence[tuple[TableContract, TableSnapshot | None]], tuple[TableLayer, ...], tuple[TableContract, ...]
]
"""The net changes of each contract (None: not made), those that take part as layers, and the contracts that
wait for a person."""


class _Survey:
    """The state of a source as one look finds it. ``seen``: the results of the previous look."""

    def __init__(
        self, workspace: Workspace, source: str, seen: SurveyCache[_Unsettled], *, more: bool = True
    ) -> None:
        """``more``: as in ``SurveyCache.changed``."""
        self._workspace, self._seen = workspace, seen
        self._landing = workspace.landing(source)
        self._contracts = workspace.contracts.of_source(source)
        self._lateness = Lateness.of(workspace, source)
        self._apart = workspace.decisions.action(LATE) == REPLAY_WINDOW
        self._watermark = workspace.closing_watermark(source)
        # Read landing first: what lands afterwards is news for the next survey.
        news = self._landing.news(seen.era, seen.number)
        self.landed = self._landing.landed()
        self._versions = RulesVersions(workspace, source)
        self._files = self._event_files(source)
        self._layers = self._open_layers(source)
        self._policies = SealedPolicies(workspace, source, self._versions) if self._removed.sealed else None
        everything, apart = self._judged_by()
        changed = seen.changed(news, everything, apart, read=_Unsettled.of_text, more=more)
        if changed is not None:
            changed |= {window for window, found in seen.unsettled.items() if found.uncertain}
        # A window that has lost everything is not known any more, but may be unsettled from before.
        for window in self._known().union(seen.unsettled) if changed is None else changed:
            # Most tables have nothing in a window: one query finds them.
            look_for_empty((each for _, each in self._folded if each is not None), window)
            seen.settle(window, self._unsettled(window), self._numbers(window))
        seen.settled(news, everything, apart, write=_Unsettled.text)
        self.windows: Mapping[str, _Unsettled] = dict(seen.unsettled)
        self._rules = everything, sorted(apart.items())

    @property
    def late(self) -> list[LateArrival]:
        """Late arrivals that wait for the replay of their windows."""
        return [each for found in self.windows.values() for each in found.late]

    @property
    def held_up(self) -> bool:
        """Whether a gap in the stream holds everything back until it is repaired, by the decision table."""
        gap = self.landed.gap
        broken = gap is not None and not gap.is_repaired
        return broken and self._workspace.decisions.action(GAP_FOUND.scenario) == STOP

    def closing(self, busy: Collection[str]) -> list[str]:
        """Windows below the watermark that some layer has yet to close, in order, without the busy ones."""
        return [
            window
            for window, found in sorted(self.windows.items())
            if found.open and found.may_close and window not in busy and self.is_passed(window)
        ]

    def digest(self, untaken: Collection[str]) -> str:
        """Return a digest of the versions of every window, of those that some windows have apart, and of the
        batches that wait."""
        return hashlib.sha256(repr((self._rules, sorted(untaken))).encode()).hexdigest()[:_DIGITS]

    @property
    def tables(self) -> frozenset[str]:
        """The names of all tables of the source."""
        return self._layers.names

    def is_passed(self, window: str) -> bool:
        """Whether ``window`` is closed: the watermark has passed its end."""
        return self._lateness.closed(window, self._watermark)

    def unmerged(self, now: datetime) -> dict[str, str]:
        """Return tables whose dimension lacks net changes that may not wait any longer at ``now``: name of
        the table → one window to run again."""
        found = {}
        for contract, net_changes in self._folded:
            dimension = self._seen.newest(self._workspace.dimension(contract))
            waits = self._seen.once(
                f"unmerged {contract.name}",
                partial(_unmerged, self._workspace, contract, net_changes, dimension),
                of=(contract, net_changes, dimension),
            )
            if waits is not None and (waits.due is None or waits.due <= now):
                found[contract.name] = waits.window
            elif (window := self._purging(contract, net_changes, dimension)) is not None:
                found[contract.name] = window
        return found

    def _purging(
        self, contract: TableContract, net_changes: TableSnapshot | None, dimension: TableSnapshot | None
    ) -> str | None:
        """Return the window whose run would purge rows that are due, for a table without news; None if there
        is nothing to purge.

        The net changes of such a table know only the watermark of their last visit.
        """
        if contract.purge_deleted_after is None or net_changes is None or dimension is None:
            return None
        judged = self._layers.events[1]
        windows = [each for each in judged.windows() if each != OUT_OF_RANGE]
        if not windows:
            return None
        if any(waiting(self._workspace, contract, each) for each in (net_changes, dimension)):
            # The tables wait for a person. A run would purge nothing, and would be requested again at once.
            return None
        above, held = judged.state(windows[-1]), net_changes.state(windows[-1])
        shown = dimension.state(WHOLE_TABLE)
        if above is None or shown is None or (held is not None and set(held.batches) == set(above.batches)):
            return None
        due, done = purged_before(contract, above.checkpoint.watermark), purged_of(shown)
        return windows[-1] if due is not None and (done is None or done < due) else None

    def _event_files(self, source: str) -> QuarantineFiles | None:
        deduped, quarantine = self._workspace.deduped(source), self._workspace.quarantine(source)
        for number in range(_LOOKS):
            if number and self._workspace.looks is not None:
                self._workspace.looks.begin()
            judged, held = self._seen.newest(deduped), self._seen.newest(quarantine)
            if judged is None or self._seen.once("at one moment", judged.is_newest, of=(judged, held)):
                break
        self._judged = judged
        return None if held is None else QuarantineFiles(judged, held)

    def _open_layers(self, source: str) -> SourceLayers:
        workspace, newest, decisions = self._workspace, self._seen.newest, self._workspace.decisions
        self._folded, tables, parked = self._seen.once_looked(workspace.looks, self._look_at_tables)
        judged = self._judged
        # Read raw before the record. The record is written first, so it explains whatever raw has lost.
        held = newest(workspace.raw(source))
        removed = self._removed = Removed.open(workspace, source)
        return SourceLayers(
            events=(
                Layer(
                    held,
                    lambda _: raw.VERSIONS,
                    decisions,
                    lasting=removed.trimmed,
                    sealed=removed.sealed,
                ),
                Layer(judged, self._judged_versions(judged), decisions, sealed=removed.sealed),
            ),
            tables=tables,
            parked=parked,
        )

    def _look_at_tables(self) -> _Tables:
        """Look at the net changes of every table."""
        workspace = self._workspace
        # A list, not a mapping by contract: hashing a contract costs more than the look at its table.
        folded = [
            (each, self._seen.newest(workspace.net_changes(each), each.fingerprint))
            for each in self._contracts
        ]
        parked = tuple(
            each for each, snapshot in folded if snapshot is not None and waiting(workspace, each, snapshot)
        )
        return (
            folded,
            tuple(
                TableLayer(each, snapshot, workspace.decisions)
                for each, snapshot in folded
                if each not in parked
            ),
            parked,
        )

    def _judged_versions(self, judged: TableSnapshot | None) -> Callable[[str], tuple[str, ...]]:
        def versions(window: str) -> tuple[str, ...]:
            state = judged.state(window) if judged is not None else None
            return self._versions.of_held(window, state, partial(self.landed.parts, window))

        return versions

    def _judged_by(self) -> tuple[tuple[object, ...], Mapping[str, tuple[str, ...]]]:
        """What decides about every window, and the further versions that some windows have.

        If it changes, all windows are looked at again.
        """
        decisions = self._workspace.decisions
        contracts = tuple(each.fingerprint for each in self._contracts)
        taking = tuple(each.contract.name for each in self._layers.tables)
        rules_in_force = (
            raw.VERSIONS,
            self._versions.common(),
            contracts,
            decisions.fingerprint,
            # Not in the fingerprint, as no verdict depends on it.
            sorted(kinds_that_wait(decisions)),
        )
        noted = len(self._policies.noted) if self._policies is not None else 0
        return (*rules_in_force, taking, self._apart, noted), self._versions.apart()

    def _known(self) -> set[str]:
        tables = [layer.windows() for layer in self._layers.all]
        if self._files is not None:
            tables.append(self._files.quarantine.windows())
        return {*self._landing.windows(), *(window for windows in tables for window in windows)}

    def _unsettled(self, window: str) -> _Unsettled | None:
        layers = self._layers
        untaken, news = layers.awaited(window, self.landed.untaken(window, layers.held(window)))
        half_done = layers.half_done(window, self._files) if self._files is not None else frozenset()
        half_done |= self._behind_policies(window)
        unclosed = layers.unclosed(window)
        # What lands in a sealed window goes to quarantine, so no replay is needed.
        replayed = self._apart and window not in self._removed.sealed
        found = _Unsettled(
            tuple(sorted({part.landing_order for part in untaken})),
            layers.untaken(self._lateness.late_parts(untaken), untaken) if replayed else (),
            tuple(sorted(news | half_done)),
            bool(unclosed) or any(layer.is_open(window) for layer in layers.events),
            all(layer.may_close(window) for layer in layers.all),
            tuple(sorted(unclosed)),
            bool(half_done) or (self._files is not None and self._files.unsettled(window) is not None),
            self._is_uncertain(window),
        )
        return found if found.untaken or found.open or found.half_done or found.uncertain else None

    def _behind_policies(self, window: str) -> frozenset[str]:
        """The tables whose policies for personal data a sealed window does not have yet."""
        state = self._layers.events[1].state(window)
        if self._policies is None or state is None or window not in self._removed.sealed:
            return frozenset()
        return frozenset(each.name for each in self._policies.behind(state))

    def _kept_values(self, window: str, judged: WindowState | None) -> dict[str, int]:
        """A number for each column of which a sealed window has values by another policy than its own."""
        if self._policies is None or judged is None or window not in self._removed.sealed:
            return {}
        files = self._judged.files(window) if self._judged is not None else ()
        tables = {dict(file.partition).get("source_table") for file in files}
        return {f"{FORMER}{name} {policy}": 1 for name, policy in self._policies.kept(judged, tables).items()}

    def _numbers(self, window: str) -> Mapping[str, int]:
        """The numbers about the window, for the index."""
        raw_layer, judged = self._layers.events[0], self._layers.events[1].state(window)
        files, digest = self._files, self._versions.reviews.digest(window)
        withheld = files is not None and bool(named_by(judged) or files.quarantine.files(window))
        in_quarantine = withheld_numbers(files, window, digest) if files is not None and withheld else {}
        numbers = numbers_of(
            LayerStates(
                raw_layer.state(window),
                judged,
                [each.state(window) if each is not None else None for _, each in self._folded],
            ),
            listed=window != OUT_OF_RANGE
            and (raw_layer.has_files(window) or bool(self.landed.parts(window))),
            withheld=withheld,
            late_events=self._late_events(window),
            sealed=window in self._removed.sealed,
        )
        return {**numbers, **in_quarantine, **self._kept_values(window, judged)}

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


def pending_windows(
    workspace: Workspace, source: str, *, limit: int = 500, now: datetime | None = None
) -> Pending:
    """Compare what landed from ``source`` with what every layer has committed.

    Net changes that the contract lets wait are not pending until their merge is due at ``now`` (None: this
    moment). ``Workspace.merging_at_once`` lets none wait. A window that an earlier call of this workspace
    found settled is looked at again only after something lands in it, a table commits to it, or its rules
    change.
    """
    moment = now or datetime.now(UTC)
    return _surveyed(workspace, source, lambda survey, _: _pending(workspace, source, survey, limit, moment))


def standing_of_windows(workspace: Workspace, source: str) -> Standing:
    """Return the totals over all windows of ``source``; the checks of a run read these.

    It looks as ``pending_windows`` does, but opens no table without a commit since anybody's last look.
    """

    def standing(survey: _Survey, seen: SurveyCache[_Unsettled]) -> Standing:
        late = () if survey.held_up else sorted({each.window for each in survey.late})
        return standing_of(seen.index, survey.is_passed, tuple(late), sorted(survey.windows))

    return _surveyed(workspace, source, standing, more=False)


def held_at(workspace: Workspace, source: str, moment: datetime) -> Counter[str] | None:
    """As ``WindowIndex.held_at``."""
    return _surveyed(workspace, source, lambda _, seen: seen.index.held_at(moment), more=False)


def _surveyed(
    workspace: Workspace,
    source: str,
    question: Callable[[_Survey, SurveyCache[_Unsettled]], T],
    *,
    more: bool = True,
) -> T:
    memory: SurveyCache[_Unsettled] = workspace.seen(source)

    def looked() -> T:
        with memory as seen:
            if workspace.looks is not None:
                seen.catch_up(workspace.looks, workspace.home.lake)
            return question(_Survey(workspace, source, seen, more=more), seen)

    return memory.ask(looked)


def _pending(workspace: Workspace, source: str, survey: _Survey, limit: int, now: datetime) -> Pending:
    untaken: dict[str, set[str]] = {}
    places: dict[str, LandingOrder] = {}
    for window, found in survey.windows.items():
        for place in found.untaken:
            batch_id = place[-1]
            untaken.setdefault(batch_id, set()).add(window)
            places[batch_id] = place
    late = sorted(
        survey.late,
        key=lambda each: (places[each.batch_id], each.window),
    )
    late_windows = {each.window for each in late}
    # A replay takes the late windows. Until it does, or while it fails, all other work goes on.
    ordinary = {batch_id: rest for batch_id, of in untaken.items() if (rest := of - late_windows)}
    first = heapq.nsmallest(limit, ordinary, key=places.__getitem__)
    windows = {window for batch_id in first for window in ordinary[batch_id]}
    unmerged = survey.unmerged(now)
    if not ordinary:
        windows |= set(unmerged.values())
    busy = late_windows.union(*untaken.values())
    closing = set(survey.closing(busy)[:limit])
    half_done = sorted(window for window, found in survey.windows.items() if found.half_done)
    windows |= closing | set([window for window in half_done if window not in busy][:limit])
    windows -= late_windows
    # Any run over a table merges everything that waits there.
    news = set(unmerged).union(
        *(survey.windows[window].news for window in windows if window in survey.windows),
        *(survey.windows[window].unclosed for window in closing),
    )
    if windows and repeats_writes(workspace.decisions):
        # The run judges the events again, so every table must fold them again.
        news |= survey.tables
    landed = survey.landed
    newest = workspace.landing(source).read(landed.last.batch_id) if landed.last is not None else None
    held_up = survey.held_up
    return Pending(
        windows=() if held_up else tuple(sorted(windows)),
        batches=len(untaken),
        landed=landed.count,
        last_batch_id=newest.batch_id if newest else None,
        last_lsn=_end(newest),
        watermark=newest.arrival.watermark if newest else None,
        gap=landed.gap,
        stream_end=landed.stream_end,
        recoveries=sum(each.recoveries for each in landed.epochs),
        late_windows=() if held_up else tuple(sorted(late_windows)),
        late=() if held_up else tuple(late),
        tables=tuple(sorted(news)) if windows and not held_up else (),
        batch_ids=frozenset(untaken),
        half_done=tuple(half_done),
        digest=survey.digest(untaken) if windows else "",
    )


def pending_soon(
    workspace: Workspace,
    source: str,
    *,
    limit: int = 500,
    patience: float,
    ended: Callable[[], bool] = lambda: False,
) -> Pending:
    """Return ``pending_windows``. If nothing is pending, wait up to ``patience`` seconds for a batch to land.

    So a caller that asks every few seconds learns of a new batch at once, and not at its next call. It does
    not wait once ``ended()`` is true.
    """
    landing = workspace.landing(source)
    give_up = time.monotonic() + patience
    while True:
        before = landing.last_change()
        pending = pending_windows(workspace, source, limit=limit)
        if not pending.nothing:
            return pending
        while landing.last_change() == before:
            if time.monotonic() >= give_up or ended():
                return pending
            time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class _Unmerged:
    """A ``window`` to run again once ``due`` has passed; None: at once."""

    window: str
    due: datetime | None


def _unmerged(
    workspace: Workspace,
    contract: TableContract,
    net_changes: TableSnapshot | None,
    dimension: TableSnapshot | None,
) -> _Unmerged | None:
    """Return what a dimension lacks of its net changes; None if it lacks nothing, or waits for a person."""
    last = net_changes.last_window() if net_changes is not None else None
    if net_changes is None or last is None:
        return None
    if any(waiting(workspace, contract, each) for each in (net_changes, dimension) if each is not None):
        return None
    state = dimension.state(WHOLE_TABLE) if dimension else None
    if state is not None and shows(state, net_changes, contract):
        return None
    waits = waiting_merge(contract, state, net_changes)
    return _Unmerged(last, None if waits is None else waits.due)


def _end(batch: Manifest | None) -> str | None:
    if batch is None:
        return None
    if batch.stream is not None:
        return str(batch.stream.end_lsn)
    return str(batch.chunk.high) if batch.chunk is not None else None
