"""Net changes → ``dim_<table>``: the current state, one row per key, updated in place.

Net changes since the last update are merged into the rows of the keys they touch. Only the files that hold
these rows are rewritten, so the cost follows the keys touched. Keys of windows that were made again, and keys
that depend on another key's life, are folded from the net changes of all windows. A window that was made
again with the same rows touches no key.

Before the written rows are committed, they pass the contract's pandera gate. Row rules have judged the events
one by one; the gate judges the resulting rows. If rows fail, the table stays as it was. For most files a
check of whole columns shows that every rule is kept; of the others the gate reads the rows.

A contract may let net changes wait, so that one update merges many (``delayed_merge``).

A contract may have deleted rows purged after a time. They are left out here alone: the net changes keep what
ended them, so nothing that arrives later brings them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.current import current_type
from omnisupport_ingest.cdc.fold import table_columns_of
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.stored import stored_type
from omnisupport_ingest.cdc.table_ends import AppliedTableEnds, TableEnds
from omnisupport_ingest.cdc.updating import UpdateRules
from omnisupport_ingest.contracts.column_rules import surely_kept
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint, MergeCost
from omnisupport_ingest.lake.fresh_files import ROWS_PER_GROUP
from omnisupport_ingest.lake.key_files import ROWS_PER_FILE
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile, StagedFile
from omnisupport_ingest.lake.read import read_paths
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import retrying
from omnisupport_ingest.layers.batch_facts import BatchFacts
from omnisupport_ingest.layers.checkpoints import Identity, report
from omnisupport_ingest.layers.dimension import net_changes
from omnisupport_ingest.layers.dimension.delayed_merge import MERGES_KEPT, waiting_merge
from omnisupport_ingest.layers.dimension.keyed_update import KeyedUpdate
from omnisupport_ingest.layers.dimension.range_update import FilesToUpdate, Way
from omnisupport_ingest.layers.dimension.refold_by_tasks import KeysToMake, made_again
from omnisupport_ingest.layers.dimension.shown_net_changes import (
    judging_rules_of,
    net_facts,
    purged_before,
    purged_of,
    shown_since,
    versions_of,
)
from omnisupport_ingest.layers.dimension.table_news import TableLayer
from omnisupport_ingest.layers.dimension.tied_keys import (
    files_with_ties,
    keyless_in,
    keys_in,
    refolded,
    tied_keys_in,
)
from omnisupport_ingest.layers.dimension.update_tasks import FilesUpdated, Sent, update_files
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.type_changes import require_types
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest.wording import counted

LAYER = "dimension"


_OTHERS_REPORTED = 500
"""Most windows besides its own that a run reports. The nightly job shows the others in Dagster
(``defs/checkpoints.py``)."""


class GateClosed(IngestError):
    """Rows that a dimension would show break its contract. The dimension stays as it was.

    Fix: Correct the contract, or the rows at the source; then run the windows again.
    """


def materialize(
    workspace: Workspace,
    spark: SparkSession,
    contract: TableContract,
    windows: Sequence[str],
    run_id: str,
    *,
    replay: bool = False,
) -> list[Checkpoint]:
    """Fold the events of ``windows`` into net changes, then merge these into the dimension.

    These are two commits. If the run dies in between, the net changes are ahead, and the next call merges
    them or lets them wait as the contract allows. With ``replay`` the windows are folded again, and the
    difference is merged at once; if they are all windows that can be folded, all rows of the dimension are
    made again. Returns the checkpoint of each window's net changes, in order; then those of other windows
    that a failed run had folded and not merged.
    """
    done = net_changes.materialize(workspace, spark, contract, windows, run_id, replay=replay)
    if replay:
        held = set(workspace.net_changes(contract).open().windows()) - {OUT_OF_RANGE}
        # Sealed windows have only net changes left, which a rebuild of the whole table uses.
        held -= Removed.open(workspace, contract.source).sealed
        merged = _merge(workspace, spark, contract.merged_at_once, run_id, whole=held <= set(windows))
    else:
        merged = _merge(workspace, spark, contract, run_id)
    # With a delayed merge, a waiting window was reported when it was folded.
    others = sorted(merged - {*windows, OUT_OF_RANGE}) if contract.delayed_merge is None else []
    folded = workspace.net_changes(contract)
    if others:
        # One that another program has rewritten has no state until it is made again.
        newest = folded.open()
        others = [window for window in others if newest.state(window) is not None][-_OTHERS_REPORTED:]
    return [*done, *report(folded, others)]


def update(
    workspace: Workspace, spark: SparkSession, contract: TableContract, run_id: str, *, whole: bool = False
) -> Checkpoint:
    """Bring the dimension up to date with its net changes.

    Writes nothing if the table shows all net changes already, or if the contract lets the rest wait. With
    ``whole`` all its rows are made again.
    """
    _merge(workspace, spark, contract, run_id, whole=whole)
    return report(workspace.dimension(contract), [WHOLE_TABLE])[0]


def _merge(
    workspace: Workspace, spark: SparkSession, contract: TableContract, run_id: str, *, whole: bool = False
) -> frozenset[str]:
    """Do the work of ``update``; return the windows whose net changes were merged, if that is known.

    Rows that break the contract close the gate. If they may come from a window that waits to be judged by
    this contract, the dimension stays as it was until that is done, and no error is raised.
    """
    table, folded = workspace.dimension(contract), workspace.net_changes(contract)
    merged = frozenset[str]()

    def attempt(snapshot: TableSnapshot) -> None:
        nonlocal merged
        require_types(workspace, contract, snapshot)
        held = folded.open()
        update = _Update(spark, contract, snapshot, held, whole=whole)
        if not update.is_due or update.may_wait(datetime.now(UTC)):
            return
        try:
            update.commit(Identity(LAYER, contract.source, run_id))
        except GateClosed:
            if not _judges_again(workspace, contract, held):
                raise
            return
        merged = update.windows

    retrying(attempt, table)
    return merged


def _judges_again(workspace: Workspace, contract: TableContract, net_changes: TableSnapshot) -> bool:
    """Whether windows of ``net_changes`` were judged by another contract and wait to be judged again."""
    layer = TableLayer(contract, net_changes, workspace.decisions)
    sealed = Removed.open(workspace, contract.source).sealed
    # A replay also visits windows in which nothing has landed; no later run does.
    return any(
        layer.is_stale(window) and bool(layer.taken(window))
        for window in net_changes.windows()
        if window not in sealed
    )


class _Update(KeyedUpdate):
    """One update of a dimension."""

    layer = LAYER

    def __init__(
        self,
        spark: SparkSession,
        contract: TableContract,
        snapshot: TableSnapshot,
        net_changes: TableSnapshot,
        *,
        whole: bool,
    ) -> None:
        super().__init__(spark, contract, snapshot, net_changes)
        self._net_changes = net_changes
        self._carried = AppliedTableEnds.parse(self._before.carried) if self._before is not None else None
        changes = shown_since(self._before, net_changes)
        # Without news there is nothing to write, so the table is not opened for the keys of its files.
        news = changes is None or bool(changes.windows or changes.same)
        quiet = not news and contract.purge_deleted_after is None
        stale = (
            whole
            or bool(snapshot.retyped)
            or self._before is None
            or self._carried is None
            or (not quiet and self._held is None)
            # A replay also repairs: rows that another program changed are made again.
            or (changes is not None and bool(changes.same) and self._written_by_others)
            or judging_rules_of(self._before.versions) != set(of_contract(contract))
        )
        if not stale and changes is not None and changes.gone:
            # A truncate that a rebuilt window has lost, or has gained, may affect any row.
            again = [*changes.gone, *(f for w in changes.replaced for f in net_changes.files(w))]
            stale = any(True for _ in keyless_in(again)) or _most(again, snapshot)
        self._whole = stale or changes is None
        self._changes = changes

    @property
    def windows(self) -> frozenset[str]:
        """The windows whose net changes the dimension did not show before; empty if that is not known."""
        if self._before is None:
            return frozenset(self._net_changes.windows())
        return frozenset() if self._changes is None else self._changes.windows

    @property
    def is_due(self) -> bool:
        if self._whole or self._changes is None or self._before is None or self._changes_rows:
            return True
        # Record windows rebuilt with the same rows, so that nobody compares them again.
        return bool(self._changes.same) or self._far_behind

    @property
    def _changes_rows(self) -> bool:
        """Whether net changes were added or removed, or deleted rows are to be purged."""
        came = self._changes is None or bool(self._changes.windows)
        return self._whole or came or self._purged != purged_of(self._before)

    def may_wait(self, now: datetime) -> bool:
        """Whether the contract lets the due update wait at ``now``, so that a later run merges it with
        more."""
        if self._whole or self._contract.delayed_merge is None:
            return False
        waits = waiting_merge(self._contract, self._before, self._net_changes, self._changes)
        return waits is not None and now < waits.due

    @cached_property
    def _facts(self) -> BatchFacts:
        return net_facts(None if self._whole else self._before, self._net_changes, self._changes)

    @cached_property
    def _purged(self) -> datetime | None:
        return purged_before(self._contract, self._facts.watermark)

    @cached_property
    def _added(self) -> tuple[LakeFile, ...]:
        return self._net_changes.all_files() if self._whole or self._changes is None else self._changes.added

    def _versions(self) -> tuple[str, ...]:
        return versions_of(self._contract, self._purged)

    def _batch_facts(self) -> BatchFacts:
        return self._facts

    def _carried_text(self) -> str:
        return self._carried_after.to_text()

    @cached_property
    def _carried_after(self) -> AppliedTableEnds:
        """The truncates and snapshot ends applied to the rows, including those of this update."""
        return self._carried_before.with_more(tuple(keyless_in(self._added)))

    @property
    def _carried_before(self) -> AppliedTableEnds:
        return AppliedTableEnds() if self._whole or self._carried is None else self._carried

    def _merges(self, updated: FilesUpdated) -> tuple[MergeCost, ...]:
        before = self._before.checkpoint if self._before is not None else None
        if before is None or not self._changes_rows or self._whole:
            return () if before is None else before.merges
        keys = max(updated.removed.count, updated.added.count)
        rewritten = len({file.path for file in self._files}.intersection(updated.replaced))
        cost = MergeCost(keys, before.rows, rewritten, len(self._files))
        return (*before.merges, cost)[-MERGES_KEPT:]

    def _updated(self, draft: Path) -> FilesUpdated:
        if not self._changes_rows:
            return FilesUpdated()
        contract, known, carried = self._contract, self._carried_before, self._carried_after
        new_ends = TableEnds.collect(carried.applied - known.applied)
        purge_deleted_before = None if self._purged is None else columnar.micros_of(self._purged)
        rules = UpdateRules(
            table_columns=table_columns_of(contract),
            schema=arrow_schema(stored_type(contract), without=()),
            soft_delete_column=contract.soft_delete_column,
            ends=carried.ends,
            new_ends=new_ends,
            purge_deleted_before=purge_deleted_before,
            rows_may_be_purged=contract.purge_deleted_after is not None and not self._whole,
        )
        look_at_all = bool(self._files or self._fresh) and (
            carried.applied != known.applied or self._purged != purged_of(self._before)
        )
        target = FilesToUpdate(
            self._files,
            self._order,
            draft,
            rules,
            contract.rows_per_file or ROWS_PER_FILE,
            doubts=partial(_doubted, contract=contract),
            fresh=self._fresh,
            way=self._way(look_at_all=look_at_all),
            rows_per_group=ROWS_PER_GROUP if contract.deletion_vectors else None,
        )
        doubted = bool(carried.ends.doubts or any(ends.doubts for _, ends in carried.ends.ranged))
        with self._made_again(doubted=doubted) as again:

            def attempt(refold: DataFrame | None) -> FilesUpdated:
                with self._sent(refold, doubted=doubted) as sent:
                    return update_files(replace(sent, again=again or ()), target, look_at_all=look_at_all)

            return self._until_settled(self._tied(with_changed=again is None), attempt)

    def _way(self, *, look_at_all: bool) -> Way:
        """Return what becomes of the files of replaced rows.

        Windows may have been rebuilt for an erasure. Then no file may keep an old row of their keys.
        """
        has_marks = bool(self._fresh) or any(file.vector is not None for file in self._files)
        if not self._contract.deletion_vectors:
            return Way.RETURN if has_marks else Way.REWRITE
        if self._changes is not None and self._changes.gone:
            return Way.ERASE if has_marks else Way.REWRITE
        return Way.REWRITE if look_at_all or not self._files else Way.MARK

    @cached_property
    def _changed(self) -> tuple[LakeFile, ...]:
        """Files of net changes of rebuilt windows, from before and after."""
        if self._whole or self._changes is None or not self._changes.gone:
            return ()
        now = [file for window in self._changes.replaced for file in self._net_changes.files(window)]
        return (*self._changes.gone, *now)

    @contextmanager
    def _made_again(self, *, doubted: bool) -> Iterator[Sequence[LakeFile] | None]:
        """Yield the files that make the rows of rebuilt windows' keys; None if ``tied_keys`` has to fold
        them."""
        changed = KeysToMake(self._contract, self._changed)
        if not self._changed or doubted or not changed.are_few:
            yield () if not self._changed else None
            return
        files = self._net_changes.all_files()
        with made_again(self._spark, self._snapshot.table, changed, files) as again:
            yield again

    def _tied(self, *, with_changed: bool) -> DataFrame | None:
        """Return the keys that cannot be merged; None if there are none. ``with_changed``: add the keys of
        windows that were made again."""
        found = []
        with_ties = files_with_ties(self._added)
        if with_ties:
            found.append(tied_keys_in(self._net_changes.read(self._spark, with_ties)))
        if with_changed and self._changed:
            found.append(keys_in(self._net_changes, self._spark, self._changed))
        if not found:
            return None
        keys = found[0]
        for more in found[1:]:
            keys = keys.unionByName(more)
        return keys

    @contextmanager
    def _sent(self, refold: DataFrame | None, *, doubted: bool) -> Iterator[Sent]:
        contract = self._contract
        sent = Sent(self._spark, self._added, folded_type(contract), stored_type(contract))
        if refold is None:
            yield sent
            return
        with refolded(
            self._spark,
            self._net_changes,
            contract,
            refold,
            deleted_since=self._purged,
            doubted=doubted,
        ) as again:
            yield replace(sent, refolded=again)

    def _require(self, files: Sequence[StagedFile], updated: FilesUpdated) -> None:
        # Nobody has looked at files that another run placed here before.
        looked_at = {file.name for file in updated.written} - updated.doubted
        doubted = tuple(file for file in files if Path(file.path).name not in looked_at)
        if doubted:
            _gate(self._spark, self._snapshot, self._contract, doubted)


def _most(files: list[LakeFile], snapshot: TableSnapshot) -> bool:
    """Whether ``files`` have so many rows that making the whole table is less work."""
    held = sum(file.rows for file in snapshot.files(WHOLE_TABLE))
    return sum(file.rows for file in files) > max(held, 10_000)


def known_live_rows(rows: DataFrame) -> DataFrame:
    """Return the rows that the contract's rules apply to: those alive with every cell known."""
    unresolved = F.coalesce(F.size("_cdc_unresolved"), F.lit(0))
    return rows.where(~F.col("_cdc_is_deleted") & (unresolved <= 0))


def _doubted(rows: pa.Table, contract: TableContract) -> bool:
    """Whether the gate must read stored ``rows``; nearly always their columns show that they pass."""
    return not surely_kept(_known_live(rows, contract), contract)


def _known_live(rows: pa.Table, contract: TableContract) -> pa.Table:
    """Return what ``known_live_rows`` does, for stored ``rows``, with the columns of ``contract``."""
    unresolved = pc.fill_null(pc.list_value_length(rows["_cdc_unresolved"]), 0)
    shown = pc.and_(pc.equal(unresolved, 0), pc.invert(rows["_cdc_is_deleted"]))
    shown_columns = rows.select([each.name for each in contract.columns])
    # A filter copies all texts, though nearly always every row is shown.
    return shown_columns if pc.all(shown).as_py() else shown_columns.filter(shown)


def _gate(
    spark: SparkSession, snapshot: TableSnapshot, contract: TableContract, staged: tuple[StagedFile, ...]
) -> None:
    # pandera takes seconds to import, so only an update of a dimension imports it.
    from omnisupport_ingest.contracts.pandera_schema import ROWS_AT_ONCE, failures, failures_of_few

    files = [str(snapshot.table.folder / file.path) for file in staged]
    if sum(file.rows for file in staged) <= ROWS_AT_ONCE:
        # A single call judges these rows, so no Spark job is started.
        schema = arrow_schema(current_type(contract), without=())
        rows = pa.concat_tables(
            pq.ParquetFile(file).read().select(schema.names).cast(schema) for file in files
        )
        broken = failures_of_few(_known_live(rows, contract), contract)
    else:
        frame = read_paths(spark, current_type(contract), files)
        broken = failures(known_live_rows(frame), contract)
    if broken:
        rules = ", ".join(f"{name} ({counted(count, 'row')})" for name, count in broken.items())
        raise GateClosed(
            f"The current state of {contract.full_name} does not meet its contract: {rules}. "
            "The dimension stays as it was.",
            fix=f"Look at the rows of net_changes/{contract.name} that break it; correct the contract or its "
            "source, and run the windows again.",
        )
