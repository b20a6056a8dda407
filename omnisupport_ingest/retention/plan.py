"""Plans retention: what it would remove from a source now (windows, files, bytes), what it refuses, and why.

It reads the landing index, the states of windows, the ledger, and the sizes of the files to be removed. About
young windows it reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path

from omnisupport_ingest.cdc.judging import OPEN
from omnisupport_ingest.cdc.life import PositionTuple
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.sweep import freed_by
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.manifest import CURSOR_ORDER, Manifest
from omnisupport_ingest.landing.snapshot_plans import Search, SnapshotPlan, SnapshotPlans, plans_in_force
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.events.quarantine_files import (
    EventsGone,
    QuarantineFiles,
    gone_from_disk,
    named_by,
)
from omnisupport_ingest.layers.removed import LANDING, QUARANTINE, RAW, Removal, Removed
from omnisupport_ingest.layers.scheduling.pending import standing_of_windows
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import keep_of
from omnisupport_ingest.retention.old_versions import OldVersions, old_versions
from omnisupport_ingest.retention.rules import (
    Answer,
    Verdict,
    WindowFacts,
    judge_landing,
    judge_raw,
)
from omnisupport_ingest.retention.superseded_rows import (
    NOTHING_SETTLED,
    NeverJudgedAgain,
    SupersededRows,
    lower,
    superseded_rows,
)
from omnisupport_ingest.retention.withheld_values import WithheldValues, refused_values, withheld_values
from omnisupport_ingest.review.quarantined import Filter, quarantined
from omnisupport_ingest.storage import LOCAL, storage_of
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE

_GONE_FROM_DISK = "a file of it is gone from disk"


@dataclass(frozen=True, slots=True)
class Doomed:
    """What is to leave ``layer`` of one window: ``files`` with ``events``, of batches that landed until
    ``landed_until``. ``bytes``: the disk space that this frees; files of raw that deduped events share free
    none."""

    layer: str
    window: str
    landed_until: datetime
    files: int
    events: int
    bytes: int


@dataclass(frozen=True)
class RetentionPlan:
    """What would be removed, what is refused, and earlier removals that were begun and not finished.

    ``keep``: how long landing and raw are kept; None: without end. ``watermark``: the time from which age is
    counted. ``versions``: history versions that contracts no longer keep. ``values``: values in quarantine
    likewise. ``rows``: net changes likewise, given the ``settled`` windows.
    """

    source: str
    keep: Mapping[str, timedelta | None]
    watermark: datetime | None
    doomed: tuple[Doomed, ...] = ()
    versions: tuple[OldVersions, ...] = ()
    values: tuple[WithheldValues, ...] = ()
    rows: tuple[SupersededRows, ...] = ()
    settled: NeverJudgedAgain = NOTHING_SETTLED
    refused: tuple[Verdict, ...] = ()
    unfinished: tuple[Removal, ...] = ()

    def of(self, layer: str) -> tuple[Doomed, ...]:
        return tuple(each for each in self.doomed if each.layer == layer)


def plan_retention(workspace: Workspace, source: str) -> RetentionPlan:
    """Judge every window of ``source``. Changes nothing."""
    contracts = workspace.contracts.of_source(source)
    keep = {layer: keep_of(contracts, layer) for layer in (LANDING, RAW)}
    looked = _Looked(workspace, source)
    found = (old_versions(workspace, each, looked.watermark) for each in contracts)
    versions = tuple(each for each in found if each is not None)
    values, kept = looked.withheld_values()
    rows, whole = looked.superseded_rows()
    kept += whole
    plan = RetentionPlan(
        source,
        keep,
        looked.watermark,
        versions=versions,
        values=values,
        rows=rows,
        settled=looked.settled,
        refused=kept,
        unfinished=looked.removed.unfinished,
    )
    if keep[LANDING] is None or looked.watermark is None:
        return plan
    doomed: list[Doomed] = []
    refused = list(kept)
    for window in looked.old(min(each for each in keep.values() if each is not None)):
        facts = looked.facts(window)
        landing = judge_landing(facts, keep[LANDING], looked.watermark)
        trimmed = facts.trimmed or landing.answer is Answer.REMOVED
        raw = judge_raw(replace(facts, trimmed=trimmed), keep[RAW], looked.watermark)
        doomed += [looked.doomed(each) for each in (landing, raw) if each.answer is Answer.REMOVED]
        refused += [each for each in (landing, raw) if each.answer is Answer.REFUSED]
    return replace(plan, doomed=tuple(doomed), refused=tuple(refused))


class Judged:
    """Judges windows again as they are now: since the plan, somebody may have erased a row, decided on an
    event, or changed a contract. Then the window is to be judged with its events, so they must stay."""

    def __init__(self, workspace: Workspace, source: str) -> None:
        self.workspace = Workspace.open(workspace.settings)
        """With the contracts as they are now."""
        self._looked = _Looked(self.workspace, source)
        contracts = self.workspace.contracts.of_source(source)
        self._keep = {layer: keep_of(contracts, layer) for layer in (LANDING, RAW)}

    def may_leave(self, layer: str, window: str) -> bool:
        """Return whether what the plan says of ``layer`` (landing or raw) is true still."""
        judge = judge_landing if layer == LANDING else judge_raw
        verdict = judge(self._looked.facts(window), self._keep[layer], self._looked.watermark)
        return verdict.answer is Answer.REMOVED

    def is_reopened(self, window: str) -> bool:
        """Return whether ``window``, whose removal from raw has begun, is to be judged again or decided on,
        and raw has all of its events."""
        facts = self._looked.facts(window)
        return facts.landed == facts.held and (not self._looked.is_current(window) or facts.undecided > 0)


@dataclass(frozen=True)
class _Looked:
    """One look at landing and lake of a source. Facts that concern all windows are read once."""

    workspace: Workspace
    source: str
    removed: Removed = field(init=False)
    watermark: datetime | None = field(init=False)

    def __post_init__(self) -> None:
        # Read the record first: what is removed meanwhile is then refused as not settled, never removed
        # twice.
        object.__setattr__(self, "removed", Removed.open(self.workspace, self.source))
        object.__setattr__(self, "watermark", self.workspace.closing_watermark(self.source))

    def old(self, keep: timedelta) -> Iterator[str]:
        """Yield the windows (without the sentinel) that ended ``keep`` before the watermark and are not
        sealed."""
        sealed, watermark = self.removed.sealed, self.watermark
        for window in self._store.windows():
            if window == OUT_OF_RANGE or window in sealed:
                continue
            if watermark is not None and self.workspace.grid.end_of(window) + keep <= watermark:
                yield window

    def facts(self, window: str) -> WindowFacts:
        parts = self._store.parts(window)
        raw = self._raw.state(window) if self._raw is not None else None
        judged = self._judged.state(window) if self._judged is not None else None
        files = self._raw.files(window) if self._raw is not None else ()
        taken = frozenset(raw.inputs) if raw is not None else frozenset()
        return WindowFacts(
            window=window,
            end=self.workspace.grid.end_of(window),
            closed=judged is not None and judged.closed,
            settled=window not in self._unsettled and self._is_current(window, judged),
            landed=sum(part.rows for part in parts),
            held=sum(file.rows for file in files if self._is_kept(file)),
            all_held={part.batch_id for part in parts} <= taken,
            taking=self._taking(window),
            snapshot=self._snapshot,
            undecided=self._undecided(window) if named_by(judged) else 0,
            judged_whole=self._judged is not None
            and all(map(self._is_kept, self._judged.files(window)))
            and not gone_from_disk(self.workspace.quarantine(self.source), judged),
            trimmed=window in self.removed.trimmed,
            sealed=window in self.removed.sealed,
        )

    def withheld_values(self) -> tuple[tuple[WithheldValues, ...], tuple[Verdict, ...]]:
        """Return the values in quarantine that contracts no longer keep; and which of them stay, and why."""
        given_up = {
            contract: contract.retention.quarantine
            for contract in self.workspace.contracts.of_source(self.source)
            if contract.retention.quarantine is not None
        }
        found: list[WithheldValues] = []
        refused: list[Verdict] = []
        files = QuarantineFiles.newest(self.workspace, self.source) if given_up else None
        if files is None or self._judged is None or self.watermark is None:
            return (), ()
        for window in self._judged.windows():
            if window == OUT_OF_RANGE or not named_by(files.state(window)):
                continue
            for contract, keep in given_up.items():
                if self.workspace.grid.end_of(window) + keep > self.watermark:
                    continue
                try:
                    values = withheld_values(files, contract, window, keep)
                except EventsGone:
                    refused.append(Verdict(QUARANTINE, window, Answer.REFUSED, _GONE_FROM_DISK))
                    break
                if values is None:
                    continue
                if window in self.removed.finally_sealed:
                    found.append(values)
                else:
                    refused.append(refused_values(window, contract.full_name))
        return tuple(found), tuple(refused)

    def superseded_rows(self) -> tuple[tuple[SupersededRows, ...], tuple[Verdict, ...]]:
        """Return the net changes that contracts no longer keep; and the windows that keep all, and why."""
        found: list[SupersededRows] = []
        refused: list[Verdict] = []
        for contract in self._giving_up_rows:
            rows, whole = superseded_rows(self.workspace, contract, self.settled, self.watermark)
            found += [rows] if rows is not None else []
            refused += whole
        return tuple(found), tuple(refused)

    @cached_property
    def settled(self) -> NeverJudgedAgain:
        """The sealed windows; and by epoch the lowest position in all other windows, including the sentinel,
        whose events a person may release. Nothing is read if no contract needs it."""
        above: dict[int, PositionTuple] = {}
        if not self._giving_up_rows:
            return NeverJudgedAgain(self.removed.finally_sealed, above)
        for window in self._store.windows():
            for part in self._store.parts(window) if window not in self.removed.finally_sealed else ():
                lower(above, part)
        return NeverJudgedAgain(self.removed.finally_sealed, above, self._only_rises())

    @cached_property
    def _giving_up_rows(self) -> list[TableContract]:
        contracts = self.workspace.contracts.of_source(self.source)
        return [each for each in contracts if each.retention.net_changes is not None]

    def _only_rises(self) -> bool:
        return self._store.landed().captured or bool(self._store.whole_snapshots())

    def doomed(self, verdict: Verdict) -> Doomed:
        parts = self._store.parts(verdict.window)
        until = max(part.landed_at for part in parts)
        if verdict.layer == RAW:
            assert self._raw is not None, "a window that raw does not hold is refused"
            files = self._raw.files(verdict.window)
            sizes = [freed_by(Path(file.full_path)) for file in files]
            events = sum(file.rows for file in files)
        else:
            sizes, events = list(map(self._size, parts)), sum(part.rows for part in parts)
        return Doomed(verdict.layer, verdict.window, until, len(sizes), events, sum(sizes))

    def is_current(self, window: str) -> bool:
        """Return whether ``window`` was judged by the rules in force."""
        return self._is_current(window, self._judged.state(window) if self._judged is not None else None)

    def _is_current(self, window: str, judged: WindowState | None) -> bool:
        """Whether the window was judged by the rules in force. If not, it still needs its events to be judged
        again, even if the decision table lets it wait for a replay, so that it is not pending."""
        parts = partial(self._store.parts, window)
        return judged is None or judged.versions == self._versions.of_held(window, judged, parts)

    def _is_kept(self, file: LakeFile) -> bool:
        """Whether ``file`` exists with its size in the table's log, so that it can be read again for a
        rebuild."""
        if self._objects is not None:
            return self._objects.get(file.full_path) == file.bytes
        return LOCAL.size(Path(file.full_path)) == file.bytes

    @cached_property
    def _objects(self) -> Mapping[str, int] | None:
        """The objects of raw and deduped with their bytes, listed once; None if the lake is on a local
        disk."""
        if storage_of(self.workspace.home.lake / "any").is_local:
            return None
        return {
            str(each.path): each.bytes
            for table in (self.workspace.raw(self.source), self.workspace.deduped(self.source))
            for each in storage_of(table.folder).listed(table.folder)
        }

    def _size(self, part: LandedPart) -> int:
        path = self._store.folder / part.path
        return storage_of(path).size(path) or 0

    def _undecided(self, window: str) -> int:
        where = Filter(state=OPEN, window=window)
        return len(quarantined(self.workspace, self.source, self._versions.reviews, where))

    @property
    def _store(self) -> LandingStore:
        return self.workspace.landing(self.source)

    def _taking(self, window: str) -> str | None:
        """Why rows that stand by their cursors may land in ``window`` at any time; None if they may not."""
        if self._is_by_cursor and window == self.workspace.grid.first.strftime(KEY_FORMAT):
            return "rows without a time, and rows far ahead of the clock, land in the first window"
        return None

    @cached_property
    def _is_by_cursor(self) -> bool:
        last = (each.last_file for each in self._store.epoch_standings())
        return any(each is not None and each.order == CURSOR_ORDER for each in last)

    @cached_property
    def _raw(self) -> TableSnapshot | None:
        return self.workspace.raw(self.source).look()

    @cached_property
    def _judged(self) -> TableSnapshot | None:
        return self.workspace.deduped(self.source).look()

    @cached_property
    def _unsettled(self) -> frozenset[str]:
        standing = standing_of_windows(self.workspace, self.source)
        return frozenset((*standing.unsettled, *standing.closing, *standing.late, *standing.wrong))

    @cached_property
    def _versions(self) -> RulesVersions:
        return RulesVersions(self.workspace, self.source)

    @cached_property
    def _snapshot(self) -> str | None:
        """The name of a table whose snapshot is not over; None if there is none.

        A snapshot is over when the stream has passed it and was searched for rows that moved while it was
        read.
        """
        landed = self._store.landed()
        epoch = max(
            [*(each.number for each in self._store.epochs()), *(e.epoch for e in landed.epochs)], default=0
        )
        plans = plans_in_force(SnapshotPlans(self._store.folder).all(epoch))
        if not plans and not any(each.chunks for each in landed.epochs):
            return None
        batches = landed.around_snapshots(epoch)
        lost = LostChanges(self._store.folder, epoch).all()
        for contract in self.workspace.contracts.of_source(self.source):
            if incomplete_now(batches, contract.name, epoch, lost) is not None:
                return contract.full_name
            if any(self._needs_stream(plan, batches) for plan in plans if plan.table == contract.name):
                return contract.full_name
        return None

    def _needs_stream(self, plan: SnapshotPlan, batches: Sequence[Manifest]) -> bool:
        """Whether capture must still search the stream for rows that moved during the snapshot."""
        spans = [
            each.chunk
            for each in batches
            if each.chunk is not None and each.chunk.snapshot_id == plan.snapshot_id
        ]
        search = Search.due(spans)
        return search is None or SnapshotPlans(self._store.folder).searched(plan) != search
