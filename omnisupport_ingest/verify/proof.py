"""Compare source and dimensions at one LSN, row by row and column by column.

A temporary slot exports a snapshot of the source and names its LSN. Once everything below that LSN has gone
through every layer, the dimension must hold the same rows as the source. If a dimension has newer events by
then, they are first applied to the source's rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb

from omnisupport_ingest import progress
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.layers.checkpoints import Counts
from omnisupport_ingest.layers.events.event_copies import duplicates_in_other_forms
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.histories.consumed_events import files_named
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.processes import scratch_folder
from omnisupport_ingest.read.compare import Comparison

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import WrittenRows


def events_per_table(workspace: Workspace, source: str) -> dict[str, Counts]:
    """Return the counts of each source table (``schema.table``) that has events; ``""`` counts messages
    without a table.

    Of raw, only judged events count: those that landed later are not of the compared version. Sealed windows
    (``layers.removed``) are left out.
    """
    judged, raw = EventFiles.opened(workspace, source), workspace.raw(source).open()
    # A sealed window has no raw events any more, so it is not compared.
    sealed = Removed.open(workspace, source).sealed
    taken = [
        str(file)
        for window in judged.deduped.windows()
        if window not in sealed
        if (state := judged.deduped.state(window)) is not None
        for file in files_named(raw, window, state.inputs)
    ]
    distinct = "count(DISTINCT (epoch, commit_lsn, ordinal, event_hash))"
    counts: dict[str, Counts] = {}
    for table, events, different in _ask(f"{_TABLE}, count(*), {distinct}", taken):
        counts[table] = counts.get(table, Counts()) + Counts(raw=events, duplicates=events - different)
    if workspace.subjects.made:
        contracts = tuple(workspace.contracts.of_source(source))
        with scratch_folder(workspace.home.run, _SCRATCH) as scratch:
            more_of = duplicates_in_other_forms(taken, contracts, workspace.subjects, scratch)
        for table, more in more_of.items():
            counts[table] = counts.get(table, Counts()) + Counts(duplicates=more)
    for table, events in _ask(
        f"{_TABLE}, count(*)", [file.uri for file in judged.withheld if file.window not in sealed]
    ):
        counts[table] = counts.get(table, Counts()) + Counts(quarantined=events)
    accepted: dict[str, list[LakeFile]] = {}
    for file in judged.deduped.all_files():
        if file.window not in sealed:
            accepted.setdefault(dict(file.partition)["source_table"] or "", []).append(file)
    for name, files in accepted.items():
        alike = [table for table in counts if table.rpartition(".")[2] == name]
        # The schemas are told apart only if tables of two schemas have the same name.
        if len(alike) == 1:
            rows = {alike[0]: sum(file.rows for file in files)}
        else:
            by_schema = _ask("source_schema, count(*)", [file.uri for file in files])
            rows = {name if schema is None else f"{schema}.{name}": events for schema, events in by_schema}
        for table, events in rows.items():
            counts[table] = counts.get(table, Counts()) + Counts(deduped=events)
    return counts


_TABLE = "coalesce(source_schema || '.' || source_table, '')"


def _ask(columns: str, files: Iterable[str]) -> list[tuple[Any, ...]]:
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    if not listed:
        return []
    with duckdb.connect() as connection:
        query = f"SELECT {columns} FROM read_parquet([{listed}], hive_partitioning = false) GROUP BY 1"
        # No failpoint: a database in memory.
        return connection.execute(query).fetchall()


_SCRATCH = "proof-"
"""Prefix of folders with rows during a comparison; the identity of the process follows."""

SAMPLE = 1000
"""Default number of keys per table in a sample."""


class ProofNotReached(IngestError):
    """The lake did not get to the LSN of the comparison in time.

    Fix: Start capture and the pipeline (``omnisupport-ingest up``), or look at their logs.
    """


@dataclass(frozen=True)
class Proof:
    """The outcome of a comparison at ``lsn``; ``events`` and ``tables`` have an entry per table.

    ``sample``: about how many keys per table were compared; None if every row was. ``events`` exist only in
    the latter case.
    """

    lsn: Lsn
    events: dict[str, Counts]
    tables: dict[str, Comparison]
    sample: int | None = None

    @property
    def holds(self) -> bool:
        """Whether no table differs, no live row has an unresolved column, and the events add up."""
        return all(each.holds for each in self.tables.values()) and all(
            each.raw == each.deduped + each.duplicates + each.quarantined for each in self.events.values()
        )


@dataclass(frozen=True)
class _Expected:
    """The rows of one source table at the LSN of the comparison, in the Parquet file ``path``."""

    contract: TableContract
    path: Path
    rows: WrittenRows


def prove(
    workspace: Workspace,
    spark: Callable[[], SparkSession],
    *,
    advance: Callable[[Lsn], None] | None = None,
    seconds: float = 300.0,
    tables: Sequence[str] = (),
    sample: int | None = None,
) -> Proof:
    """Compare tables of the PostgreSQL source with their dimensions, at one LSN.

    Args:
        spark: returns a session; called only if a dimension has newer events than the LSN, or if net
            changes wait for their merge, which is then made.
        advance: called with the LSN, again and again, while the lake is behind it. Without it, capture
            and pipeline must be running.
        seconds: how long the lake may take to reach the LSN.
        tables: names of contracts; all of the source if empty.
        sample: compare about this many keys per table; None compares every row.

    Raises:
        ProofNotReached: the lake has not reached the LSN after ``seconds``.
        TableIncomplete: a table has no state at the LSN, because its snapshot was read later.
    """
    from omnisupport_ingest.read.protected_rows import protect_rows
    from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
    from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import write_rows_at

    source, publication = workspace.settings.source, workspace.settings.publication
    dsn = source_dsn(workspace.settings, workspace.home)
    contracts = [each for each in workspace.contracts.of_source(source) if not tables or each.name in tables]
    secrets = workspace.secrets(contracts)
    with scratch_folder(workspace.home.run, _SCRATCH) as scratch:
        expected = []
        with consistent_snapshot(dsn) as (lsn, snapshot):
            for contract in progress.each(contracts, lambda each: f"reading {each.name} at the source"):
                path = scratch / f"{contract.name}.parquet"
                rows = write_rows_at(dsn, publication, snapshot, contract, path, sample=sample)
                protect_rows(contract, path, secrets)
                expected.append(_Expected(contract, path, rows))
        progress.reached(f"waiting until the lake is at LSN {lsn}")
        # The slot of the snapshot has been dropped, so waiting retains no WAL.
        _Wait(workspace, contracts, lsn).until_over(advance or (lambda _lsn: time.sleep(0.5)), seconds)
        _require_complete(workspace, source, contracts, lsn)
        _merge_what_waits(workspace, spark, contracts)
        compared = {
            each.contract.name: _compare(workspace, spark, each, lsn, sample)
            for each in progress.each(expected, lambda each: f"comparing {each.contract.name}")
        }
    if sample is not None:
        return Proof(lsn, {}, compared, sample)
    progress.reached("counting the events of every layer")
    counted = events_per_table(workspace, source)
    return Proof(lsn, {each.name: counted.get(each.full_name, Counts()) for each in contracts}, compared)


class _Wait:
    """Waits until everything below ``lsn`` has landed and the tables of ``contracts`` have it.

    It does not wait for batches that land later: while the source has traffic, there are always some.
    """

    def __init__(self, workspace: Workspace, contracts: Sequence[TableContract], lsn: Lsn) -> None:
        self._workspace, self._contracts, self._lsn = workspace, contracts, lsn
        self._source = workspace.settings.source
        self._awaited: frozenset[str] | None = None
        self._versions: dict[str, int] | None = None

    def until_over(self, advance: Callable[[Lsn], None], seconds: float) -> None:
        """Call ``advance`` until the wait is over. Raises ``ProofNotReached`` after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self._is_over():
            if time.monotonic() > deadline:
                raise self._not_reached(seconds)
            advance(self._lsn)

    def _is_over(self) -> bool:
        from omnisupport_ingest.layers.scheduling.pending import pending_windows

        landed = self._landed()
        if landed is None or landed < self._lsn:
            return False
        pending = pending_windows(self._workspace, self._source)
        if pending.nothing:
            return True
        if self._versions is None:
            # A window that a run is making again still has what was judged before.
            lacking = pending.batch_ids.union(pending.half_done)
            self._awaited = lacking if self._awaited is None else self._awaited & lacking
            if self._awaited:
                return False
            self._versions = self._newest_net_changes()
        return all(self._is_shown(each) for each in self._contracts)

    def _landed(self) -> Lsn | None:
        store = self._workspace.landing(self._source)
        epoch = store.current_epoch()
        last = store.last_stream(epoch.number) if epoch else None
        return last.stream.end_lsn if last and last.stream else None

    def _newest_net_changes(self) -> dict[str, int]:
        found = ((each.name, self._workspace.net_changes(each).look()) for each in self._contracts)
        return {name: snapshot.version for name, snapshot in found if snapshot is not None}

    def _is_shown(self, contract: TableContract) -> bool:
        """Whether the dimension shows the net changes that were the newest when the wait began, or waits for
        something other than a run that has written net changes and not yet the dimension."""
        from omnisupport_ingest.lake.layout import WHOLE_TABLE
        from omnisupport_ingest.layers.dimension.delayed_merge import waiting_merge
        from omnisupport_ingest.layers.dimension.shown_net_changes import newer_windows
        from omnisupport_ingest.layers.type_changes import waiting

        # The dimension is read first: the net changes that it names then exist when they are read.
        dimension = self._workspace.dimension(contract).look()
        net_changes = self._workspace.net_changes(contract).look()
        held = [each for each in (net_changes, dimension) if each is not None]
        if net_changes is None or any(waiting(self._workspace, contract, each) for each in held):
            return True
        state = dimension.state(WHOLE_TABLE) if dimension is not None else None
        if waiting_merge(contract, state, net_changes) is not None:
            # The comparison merges it first.
            return True
        shown = state.checkpoint.upstream_version if state is not None else None
        newest = (self._versions or {}).get(contract.name, net_changes.version)
        return (shown is not None and shown >= newest) or not newer_windows(state, net_changes)

    def _not_reached(self, seconds: float) -> ProofNotReached:
        landed = self._landed()
        where = f"After {seconds:.0f} s the lake is not at {self._lsn} of the source"
        if self._awaited is None:
            return ProofNotReached(
                f"{where}; landing is at {landed or 'nothing'}.",
                fix="Start capture (omnisupport-ingest up), or look at its log.",
            )
        return ProofNotReached(
            f"{where}: what had landed below it is not in every layer yet.",
            fix="Start the pipeline (omnisupport-ingest up), or look at its runs and logs.",
        )


def _merge_what_waits(
    workspace: Workspace, spark: Callable[[], SparkSession], contracts: Sequence[TableContract]
) -> None:
    """Make the merges that a contract delays: only the dimensions are compared."""
    from omnisupport_ingest.lake.layout import WHOLE_TABLE
    from omnisupport_ingest.layers.dimension import dimensions
    from omnisupport_ingest.layers.dimension.delayed_merge import waiting_merge

    for contract in contracts:
        net_changes, dimension = workspace.net_changes(contract).look(), workspace.dimension(contract).look()
        if net_changes is None or dimension is None:
            continue
        if waiting_merge(contract, dimension.state(WHOLE_TABLE), net_changes) is not None:
            dimensions.update(workspace, spark(), contract.merged_at_once, "verify")


def _require_complete(
    workspace: Workspace, source: str, contracts: Sequence[TableContract], lsn: Lsn
) -> None:
    """Refuse tables without a known state at ``lsn``: they would differ although the lake is right."""
    from omnisupport_ingest.read.as_of import require_complete

    epoch = workspace.landing(source).current_epoch()
    assert epoch is not None, "the stream of an epoch has landed"
    require_complete(workspace, source, contracts, Position(epoch.number, lsn, 0))


def _compare(
    workspace: Workspace,
    spark: Callable[[], SparkSession],
    expected: _Expected,
    lsn: Lsn,
    sample: int | None,
) -> Comparison:
    from omnisupport_ingest.layers.histories.consumed_events import DimensionVersion
    from omnisupport_ingest.read.brought_forward import MovedOn
    from omnisupport_ingest.read.compare import Sample, changed_since, compare

    contract, rows = expected.contract, expected.rows
    epoch = workspace.landing(contract.source).current_epoch()
    assert epoch is not None
    dimension = DimensionVersion.newest(workspace, contract, epoch.number, lsn)
    # Checked again for the fixed version: a snapshot of the table may have landed meanwhile.
    _require_complete(workspace, contract.source, [contract], lsn)
    chosen = Sample(rows.below, dimension.accepted, dimension.withheld, epoch.number, lsn.value)
    by_key, of_the_table = changed_since(contract, chosen)
    if not of_the_table and (sample is not None or not by_key):
        # A sample leaves out the keys that have changed since the snapshot.
        live = rows.live if sample is not None else None
        return compare(contract, expected.path, dimension.files, sample=chosen, source_live=live)
    table = workspace.dimension(contract).folder
    return MovedOn(contract, expected.path, dimension.files, chosen, of_the_table > 0, table).compare(spark())


def require_progress(workspace: Workspace) -> None:
    """Raise ``IngestError`` if neither a platform nor a capture runs that could bring the lake up to the
    source."""
    from omnisupport_ingest.runtime.home_lock import holder, takes_in
    from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning
    from omnisupport_ingest.sources.postgres.session.lease import take_lease

    if takes_in(holder(workspace.home)):
        return
    try:
        take_lease(workspace.home.run, workspace.settings.source).release()
    except CaptureRunning:
        return
    raise IngestError(
        f"Neither the platform nor a capture runs on {workspace.home.path}, so the lake would never get to "
        "where the source is now.",
        fix="Run `omnisupport-ingest sync --verify full`, or start `omnisupport-ingest up` and verify again.",
    )
