"""An overview of one source: how far its landing is, and how far behind landing every table is.

Reads landing and the tables' logs, without Spark, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from deltalake.exceptions import DeltaError

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.chain import Gap
from omnisupport_ingest.landing.landed import Landed
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.dimension import net_changes
from omnisupport_ingest.layers.dimension.delayed_merge import (
    ScatteredWrites,
    WaitingMerge,
    scattered_writes,
    waiting_merge,
)
from omnisupport_ingest.layers.dimension.dimensions import LAYER as DIMENSION
from omnisupport_ingest.layers.dimension.shown_net_changes import Shown
from omnisupport_ingest.layers.events import deduped, quarantine, raw
from omnisupport_ingest.layers.events.quarantine_files import named_by
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.versions import RulesVersions, of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.freshness import Freshness, ServiceLevel, freshness, service_level
from omnisupport_ingest.read.verified import Verified, verified_of
from omnisupport_ingest.storage import has_landed


@dataclass(frozen=True, slots=True)
class LandingOverview:
    """How far the landing of a source is. ``events`` counts duplicates too.

    ``last_batch_id`` is the newest batch before any gap; ``stream_end`` the end of the landed WAL. ``epoch``
    is the one that began last, None before the first. ``problem`` says why landing cannot be read; then
    everything else is empty.
    """

    epoch: int | None
    epoch_reason: str | None
    batches: int
    events: int
    last_batch_id: str | None
    last_landed_at: datetime | None
    watermark: datetime | None
    stream_end: Lsn | None
    gap: Gap | None
    problem: IngestError | None = None


_Versions = Callable[[str], tuple[str, ...]]
"""Returns the versions with which a window should be made."""

_NOTHING = LandingOverview(None, None, 0, 0, None, None, None, None, None)


@dataclass(frozen=True, slots=True)
class TableOverview:
    """How far a table is.

    Attributes:
        cursor: the highest position taken.
        watermark: the highest of any window.
        pending_windows: windows with something that the table does not hold yet; None if landing cannot be
            read, and for the quarantine, which is committed with the deduped events.
        pending_batches: the same for batches.
        freshness: of a dimension.
        waits: what waits for its merge into a dimension, as the contract allows.
        scattered: of a dimension whose last updates rewrote much for few keys, if its contract lets nothing
            wait and has no deletion vectors.
        level: what is promised of a dimension, and whether it is kept.
        verified: the result of the last comparison of a dimension with its source.
        problem: why its log cannot be read; then only ``verified`` is known of it.
    """

    table: str
    layer: str
    there: bool
    windows: int
    rows: int
    cursor: str | None
    watermark: datetime | None
    pending_windows: int | None
    pending_batches: int | None
    freshness: Freshness | None = None
    waits: WaitingMerge | None = None
    scattered: ScatteredWrites | None = None
    level: ServiceLevel | None = None
    verified: Verified | None = None
    problem: IngestError | None = None

    @property
    def pending(self) -> tuple[int | None, int | None]:
        """Windows and batches."""
        return self.pending_windows, self.pending_batches


@dataclass(frozen=True, slots=True)
class SourceOverview:
    """A source: its landing, and every table in the order in which data passes them. Net changes are among
    them only if their dimension does not show all of them."""

    source: str
    landing: LandingOverview
    tables: tuple[TableOverview, ...]


@dataclass(frozen=True)
class _TableOnDisk:
    """A table as it is on disk, None if it is not there, with the readable states of its windows.

    ``problem``: why it cannot be read; it then looks as if it were not there.
    """

    path: str
    layer: str
    snapshot: TableSnapshot | None
    states: dict[str, WindowState]
    problem: IngestError | None = None


def overview(workspace: Workspace, source: str) -> SourceOverview:
    """Look at everything that belongs to ``source``. A landing or a table that cannot be read hides no other
    table."""
    contracts = workspace.contracts.of_source(source)
    try:
        landing, landed = _landing(workspace, source)
    except IngestError as error:
        tables = _tables(workspace, source, contracts, None)
        unknown = tuple(
            replace(table, pending_windows=None, pending_batches=None, freshness=None, level=None)
            for table in tables
        )
        return SourceOverview(source, replace(_NOTHING, problem=error), unknown)
    return SourceOverview(source, landing, tuple(_tables(workspace, source, contracts, landed)))


def dimension_overview(workspace: Workspace, contract: TableContract) -> SourceOverview:
    """Look at the landing of a source and at one dimension alone. Raises what ``problem`` would have."""
    landing, landed = _landing(workspace, contract.source)
    batches = _Batches(workspace.landing(contract.source), landed) if landed is not None else None
    folded = _on_disk(net_changes.LAYER, workspace.net_changes(contract))
    seen = _on_disk(DIMENSION, workspace.dimension(contract))
    for each in (folded, seen):
        if each.problem is not None:
            raise each.problem
    dimension = _unmerged(seen, folded, contract, batches)
    return SourceOverview(contract.source, landing, (dimension,))


def _landing(workspace: Workspace, source: str) -> tuple[LandingOverview, Landed | None]:
    if not has_landed(workspace.home.path, source):
        return _NOTHING, None
    store = workspace.landing(source)
    landed = store.landed()
    return _landing_of(store, landed), landed


def _landing_of(store: LandingStore, landed: Landed) -> LandingOverview:
    epoch, newest = store.current_epoch(), landed.last
    return LandingOverview(
        epoch=epoch.number if epoch else None,
        epoch_reason=epoch.reason if epoch else None,
        batches=landed.count,
        events=sum(each.events for each in landed.epochs),
        last_batch_id=newest.batch_id if newest else None,
        last_landed_at=max(
            (each.landed_at for each in landed.epochs if each.landed_at is not None), default=None
        ),
        watermark=newest.mark if newest else None,
        stream_end=landed.stream_end,
        gap=landed.gap,
    )


def _tables(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], landed: Landed | None
) -> Iterator[TableOverview]:
    batches = _Batches(workspace.landing(source), landed) if landed is not None else None
    removed = Removed.open(workspace, source)
    landed_once = removed.trimmed | removed.sealed
    raw_layer = _on_disk(raw.LAYER, workspace.raw(source))
    yield _behind(raw_layer, _always(raw.VERSIONS), batches, lasting=landed_once)
    judged = _on_disk(deduped.LAYER, workspace.deduped(source))
    wanted = _of_judged(RulesVersions(workspace, source), judged, batches)
    yield _behind(judged, wanted, batches, lasting=removed.sealed)
    yield _quarantined(_on_disk(quarantine.LAYER, workspace.quarantine(source)), judged)
    for contract in contracts:
        folded = _on_disk(net_changes.LAYER, workspace.net_changes(contract))
        net = _behind(folded, _always(of_contract(contract)), batches, table=contract.full_name)
        dimension = _unmerged(_on_disk(DIMENSION, workspace.dimension(contract)), folded, contract, batches)
        if folded.problem is not None or (net.pending != dimension.pending and dimension.waits is None):
            # A run died between the two, or the dimension waits for a person, or a log is damaged.
            yield net
        verified = verified_of(workspace.home, contract)
        level = None
        if dimension.freshness is not None:
            level = service_level(contract, dimension.freshness, verified, datetime.now(UTC))
        yield replace(dimension, level=level, verified=verified)


def _of_judged(rules_in_force: RulesVersions, judged: _TableOnDisk, batches: _Batches | None) -> _Versions:
    if batches is None:
        return rules_in_force.of
    parts = batches.landed.parts
    return lambda window: rules_in_force.of_held(window, judged.states.get(window), partial(parts, window))


def _always(versions: tuple[str, ...]) -> _Versions:
    return lambda _window: versions


def _on_disk(layer: str, table: LakeTable) -> _TableOnDisk:
    try:
        snapshot = table.look()
    except DeltaError as error:
        return _TableOnDisk(table.spec.path, layer, None, {}, _unreadable(table, error))
    states = {}
    if snapshot is not None:
        of_windows = {window: snapshot.state(window) for window in snapshot.windows()}
        states = {window: state for window, state in of_windows.items() if state is not None}
    return _TableOnDisk(table.spec.path, layer, snapshot, states)


def _unreadable(table: LakeTable, error: DeltaError) -> IngestError:
    # The message of the error may quote statistics, and so values of rows.
    return IngestError(
        f"The log of {table.spec.path} cannot be read ({type(error).__name__}).",
        fix=f"omnisupport-ingest doctor says what to do. The folder of the table: {table.folder}",
    )


@dataclass(frozen=True, slots=True)
class _Batches:
    """What has landed, by window."""

    store: LandingStore
    landed: Landed

    def not_in(
        self,
        taken: Mapping[str, frozenset[str]],
        windows: Iterable[str],
        wanted: Callable[[LandedPart], bool] = lambda _: True,
    ) -> set[tuple[str, str]]:
        """Return each window and batch that ``taken`` lacks, if one of its files is ``wanted``."""
        return {
            (window, part.batch_id)
            for window in windows
            for part in self.landed.untaken(window, taken.get(window, frozenset()))
            if wanted(part)
        }


def _behind(
    seen: _TableOnDisk,
    versions: _Versions,
    batches: _Batches | None,
    *,
    table: str | None = None,
    lasting: frozenset[str] = frozenset(),
) -> TableOverview:
    """Return the overview of a layer with windows. What its windows lack, or hold by other versions, is
    pending.

    ``table``: schema and name, if the layer is the net changes of one table; these await only batches that
    name it. ``lasting`` windows are never made again.
    """
    return _overview(seen, _pending(seen, versions, batches, table=table, lasting=lasting))


def _pending(
    seen: _TableOnDisk,
    versions: _Versions,
    batches: _Batches | None,
    *,
    table: str | None = None,
    lasting: frozenset[str] = frozenset(),
) -> set[tuple[str, str]]:
    if batches is None:
        return set()
    taken = {
        window: frozenset(state.batches)
        for window, state in seen.states.items()
        if window in lasting or state.versions == versions(window)
    }
    stale = seen.states.keys() - taken.keys()

    def wanted(part: LandedPart) -> bool:
        # By the same rule as the sensor (``layers.table_news``).
        return table is None or seen.snapshot is None or table in part.rows_per_table or part.window in stale

    return batches.not_in(taken, batches.store.windows(), wanted)


def _quarantined(seen: _TableOnDisk, judged: _TableOnDisk) -> TableOverview:
    """Return the overview of the quarantine: of files that a window of deduped events names as its own."""
    named = {path for state in judged.states.values() for path in named_by(state)}
    files = [file for file in (seen.snapshot.all_files() if seen.snapshot else ()) if file.path in named]
    windows = {file.window for file in files}
    return replace(_overview(seen, None), windows=len(windows), rows=sum(file.rows for file in files))


def _unmerged(
    seen: _TableOnDisk, folded: _TableOnDisk, contract: TableContract, batches: _Batches | None
) -> TableOverview:
    """Return the overview of a dimension. What its net changes lack is pending, and what they have and it
    does not show.

    A batch without an event of the table changes no content, so it is not pending.
    """
    if seen.problem is not None or folded.problem is not None:
        return _overview(seen, None)
    shown = Shown.of(folded.snapshot, seen.snapshot)
    missing = set(shown.newer)
    taken = {window: shown.in_window(window) for window in missing}
    name = contract.full_name
    unshown: set[tuple[str, str]] = set()
    if batches is not None:
        unshown = batches.not_in(taken, missing, lambda part: name in part.rows_per_table)
    pending = unshown | _pending(folded, _always(of_contract(contract)), batches, table=name)
    windows = missing | {window for window, _ in pending}
    state = seen.states.get(WHOLE_TABLE)
    waits, scattered = None, None
    if folded.snapshot is not None and state is not None:
        waits = waiting_merge(contract, state, folded.snapshot)
        if contract.delayed_merge is None and not contract.deletion_vectors:
            scattered = scattered_writes(state.checkpoint.merges)
    return replace(
        _overview(seen, pending),
        windows=len(folded.states),
        pending_windows=len(windows),
        freshness=(
            freshness(contract, folded.snapshot, seen.snapshot, batches.store, batches.landed)
            if batches
            else None
        ),
        waits=waits,
        scattered=scattered,
    )


def _overview(seen: _TableOnDisk, pending: set[tuple[str, str]] | None) -> TableOverview:
    """``pending``: the windows and batches that the table lacks; None if it can lack none, or if that is not
    known."""
    if seen.problem is not None:
        pending = None
    checkpoints = [state.checkpoint for state in seen.states.values()]
    cursors = [Position.parse(each.cursor) for each in checkpoints if each.cursor]
    marks = [each.watermark for each in checkpoints if each.watermark is not None]
    return TableOverview(
        table=seen.path,
        layer=seen.layer,
        there=seen.snapshot is not None,
        windows=len(seen.snapshot.windows()) if seen.snapshot else 0,
        rows=sum(file.rows for file in seen.snapshot.all_files()) if seen.snapshot else 0,
        cursor=str(max(cursors)) if cursors else None,
        watermark=max(marks, default=None),
        pending_windows=None if pending is None else len({window for window, _ in pending}),
        pending_batches=None if pending is None else len({batch for _, batch in pending}),
        problem=seen.problem,
    )
