"""The asset graph: one landing, raw and deduped asset per source, a dimension per contract.

The tables are data (``TableAsset``), and one factory makes an asset of each. The asset's body calls the layer
for all windows of the run and reports the checkpoints to Dagster. A layer that finds nothing to do returns
its checkpoints too, so every partition of a run is materialized.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import SparkSession

from omnisupport_ingest import tracing
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, Sources
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.backfills import BackfillRefused, refuse_range
from omnisupport_ingest.defs.freshness import service_level_metadata
from omnisupport_ingest.defs.metadata import (
    add_to_materializations,
    checkpoint_metadata,
    dimension_metadata,
    docs_metadata,
)
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.defs.tables import source_lineage, source_metadata, table_metadata
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.standing_task import standing_task
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest.layers.checkpoints import with_found
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.plan import LOGIC_VERSION
from omnisupport_ingest.layers.removed import Removed, refuse_sealed
from omnisupport_ingest.layers.scheduling.late_replay import BY_HAND, refuse_backfill
from omnisupport_ingest.layers.type_changes import waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import has_session, has_slot_to_spare, is_apart, session_apart
from omnisupport_ingest.runtime.spark_errors import named_spark_errors
from omnisupport_ingest.wording import counted

_LAKE_KINDS = {"spark", "deltalake"}

_warned: set[tuple[str, str]] = set()
"""Runs and sources that this process has warned of sealed windows; a run is one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssetRun:
    """What a layer gets from a run. ``windows``: empty for a table that is not partitioned."""

    workspace: Workspace
    spark: SparkSession
    windows: Sequence[str]
    run_id: str
    replay: bool
    merge_now: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAsset:
    """A table of the lake as an asset: what Dagster shows of it, and the layer that makes it.

    ``docs_page``: a page of ``docs/``, with its anchor. ``upstream``: the asset from which it is made.
    ``contract``: gives its columns; None for a table with the events of all ``contracts``. ``make``: runs the
    layer. ``is_long``: whether the run, which may be a replay, has minutes of work that nobody waits for.
    ``extra_metadata``: what every materialization shows besides the checkpoint of its window.
    """

    key: dg.AssetKey
    upstream: dg.AssetKey
    layer: str
    spec: TableSpec
    description: str
    docs_page: str
    code_version: str
    contracts: Sequence[TableContract]
    contract: TableContract | None = None
    partitions: dg.PartitionsDefinition[str] | None
    lineage: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[AssetRun], Sequence[Checkpoint]]
    is_long: Callable[[Workspace, bool], bool] = lambda _, __: False
    extra_metadata: Callable[[Workspace], Mapping[str, dg.MetadataValue]] = lambda _: {}


def build_assets(
    workspace: Workspace, partitions: dg.PartitionsDefinition[str], sources: Sources
) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    """Return every asset of every source that has contracts."""
    found: list[dg.AssetSpec | dg.AssetsDefinition] = []
    for source in workspace.contracts.sources():
        found.append(landing_asset(workspace=workspace, definition=sources.find(source)))
        tables = _tables_of_source(workspace, source, partitions)
        for contract in workspace.contracts.of_source(source):
            tables.append(_dimension(workspace, contract, partitions))
        found += map(lake_asset, tables)
    return found


def landing_asset(*, workspace: Workspace, definition: SourceDefinition) -> dg.AssetSpec:
    """Return the asset of landing, which capture writes: a sensor observes it, and Dagster does not
    materialize it."""
    source = definition.name
    kinds = {"postgres", "parquet"} if definition.kind is SourceKind.LOG else {"file", "parquet"}
    return dg.AssetSpec(
        keys.landing_key(source),
        description=f"Batches of {source}: immutable data files, each batch with a manifest. Written outside "
        "of Dagster; the sensor observes how far they reach.",
        group_name=source,
        kinds=kinds,
        owners=_owners(workspace.contracts.of_source(source)),
        tags={keys.LAYER_TAG: keys.LANDING},
        metadata={
            **source_metadata(workspace.contracts.of_source(source)),
            **docs_metadata("architecture.md#landing-batch-and-manifest"),
        },
    )


def _tables_of_source(
    workspace: Workspace, source: str, partitions: dg.PartitionsDefinition[str]
) -> list[TableAsset]:
    """Return the layers that hold the events of every table of ``source``."""
    contracts = workspace.contracts.of_source(source)
    raw_spec, deduped_spec = workspace.raw(source).spec, workspace.deduped(source).spec
    return [
        TableAsset(
            key=keys.raw_key(source),
            upstream=keys.landing_key(source),
            layer=keys.RAW,
            docs_page="architecture.md#tables",
            spec=raw_spec,
            description=raw_spec.description,
            code_version=str(LOGIC_VERSION),
            contracts=contracts,
            partitions=partitions,
            make=lambda run: raw.materialize(
                run.workspace, run.spark, source, run.windows, run.run_id, replay=run.replay
            ),
        ),
        TableAsset(
            key=keys.deduped_key(source),
            upstream=keys.raw_key(source),
            layer=keys.DEDUPED,
            docs_page="late_data.md#the-decision-table",
            spec=deduped_spec,
            description=f"{deduped_spec.description} Events not accepted are in the table quarantine beside "
            "it.",
            code_version=_code_version(contracts),
            contracts=contracts,
            partitions=partitions,
            make=lambda run: deduped.materialize(
                run.workspace, run.spark, source, run.windows, run.run_id, replay=run.replay
            ),
        ),
    ]


def _dimension(
    workspace: Workspace, contract: TableContract, partitions: dg.PartitionsDefinition[str]
) -> TableAsset:
    """Return ``dim_<table>``, the current state: it shows a window once the window's net changes are
    merged."""
    spec = workspace.dimension(contract).spec
    return TableAsset(
        key=keys.dimension_key(contract),
        upstream=keys.deduped_key(contract.source),
        layer=keys.DIMENSIONS,
        docs_page="query.md#current-state",
        spec=spec,
        description=f"{contract.description} {spec.description}",
        code_version=_code_version([contract]),
        contracts=(contract,),
        contract=contract,
        partitions=partitions,
        lineage={**source_lineage(contract), **service_level_metadata(contract)},
        make=lambda run: dimensions.materialize(
            run.workspace,
            run.spark,
            contract.merged_at_once if run.merge_now else contract,
            run.windows,
            run.run_id,
            replay=run.replay,
        ),
        extra_metadata=lambda opened: dimension_metadata(opened, contract),
    )


def lake_asset(table: TableAsset) -> dg.AssetsDefinition:
    """Return the asset of one table of the lake."""
    contract = table.contract

    @dg.asset(
        key=table.key,
        # A table that waits for a person makes nothing, and does not fail the step of another table or the
        # run.
        output_required=contract is None,
        dagster_type=keys.NO_VALUE,
        deps=[table.upstream],
        partitions_def=table.partitions,
        backfill_policy=dg.BackfillPolicy.single_run() if table.partitions is not None else None,
        description=table.description,
        group_name=table.key.path[0],
        kinds=_LAKE_KINDS,
        owners=_owners(table.contracts),
        tags={keys.LAYER_TAG: table.layer, **({"contract_version": contract.version} if contract else {})},
        metadata={
            **table_metadata(table.spec, contract),
            **table.lineage,
            **docs_metadata(table.docs_page),
        },
        code_version=table.code_version,
        pool=keys.pool_of(table.key),
    )
    @unquoted
    def materialize(
        context: dg.AssetExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> Iterator[dg.Output[None]]:
        started = time.monotonic()
        workspace = workspace.looking_once(f"{context.run_id}, {table.spec.path}, {context.retry_number}")
        if contract is not None and _waits(context, workspace, contract):
            return
        replay = keys.TAKE_NEW_TAG not in context.run.tags
        windows: Sequence[str] = ()
        if table.partitions is not None:
            windows = _windows(context, table.partitions, replay=replay)
            _refuse_replay(context, workspace, replay=replay)
        with (
            tracing.span("table", table=table.spec.path, windows=len(windows), replay=replay),
            named_spark_errors(workspace.settings),
            _one_task(workspace, _session(table, workspace, pyspark, replay=replay), replay=replay) as spark,
        ):
            done = table.make(
                AssetRun(
                    workspace=workspace,
                    spark=spark,
                    windows=windows,
                    run_id=context.run_id,
                    replay=replay,
                    merge_now=keys.MERGE_NOW_TAG in context.run.tags,
                )
            )
        _mirror(context, done, started, table.extra_metadata(workspace))
        yield dg.Output(None)

    return materialize


def _session(
    table: TableAsset, workspace: Workspace, pyspark: LazyPySparkResource, *, replay: bool
) -> SparkSession:
    """Return the session of the run; the first table of the run chooses it."""
    if not has_session() and table.is_long(workspace, replay):
        return session_apart(workspace.settings)
    spark: SparkSession = pyspark.spark_session
    return spark


@contextmanager
def _one_task(workspace: Workspace, spark: SparkSession, *, replay: bool) -> Iterator[SparkSession]:
    """Yield the session. In an ingest run, one standing Spark task does the small pieces of work of the
    layers."""
    if replay or is_apart() or not has_slot_to_spare(workspace.settings):
        yield spark
        return
    with standing_task(spark):
        yield spark


def _waits(context: dg.AssetExecutionContext, workspace: Workspace, contract: TableContract) -> bool:
    found = waits(workspace, contract)
    if found is None:
        return False
    # The table's check reports it too.
    context.log.error(f"{found.problem} Fix: {found.fix}")
    return True


def _mirror(
    context: dg.AssetExecutionContext,
    done: Sequence[Checkpoint],
    started: float,
    more: Mapping[str, dg.MetadataValue],
) -> None:
    duration, entries = time.monotonic() - started, dict[str | None, Mapping[str, dg.MetadataValue]]()
    of_run = set(
        context.partition_keys if context.has_partition_key_range or context.has_partition_key else ()
    )
    for checkpoint in done:
        partition = checkpoint.window if checkpoint.window != WHOLE_TABLE else None
        if partition in of_run and _by_hand(context):
            checkpoint = with_found(checkpoint, BY_HAND)
        entries[partition] = {**checkpoint_metadata(checkpoint, duration_seconds=duration), **more}
    for partition in entries.keys() - {None, *of_run}:
        # Net changes of an earlier run, which failed after it had folded the window.
        context.log_event(
            dg.AssetMaterialization(context.asset_key, partition=partition, metadata=entries.pop(partition))
        )
    add_to_materializations(context, entries)


def _windows(
    context: dg.AssetExecutionContext, partitions: dg.PartitionsDefinition[str], *, replay: bool
) -> Sequence[str]:
    """Return the windows of the run; ``BackfillRefused`` if it names none, or one that is no partition.

    A run without windows would record a materialization without a partition, and Dagster would show it as the
    newest.
    """
    source = context.asset_key.path[0]
    if not (context.has_partition_key_range or context.has_partition_key):
        raise BackfillRefused(
            f"The run names no window of {source}: it was launched without a partition.",
            fix="Choose partitions: in the UI, select the assets of the source and press Materialize. Or run "
            "`omnisupport-ingest replay`.",
        )
    asked = context.partition_key_range
    # The clock of the sensor that requests runs may be ahead of this machine's, so the last window of an
    # ingest run may be ahead.
    if replay or asked.end < asked.start or not partitions.has_partition_key(asked.start):
        refuse_range(partitions, asked.start, asked.end, source)
    windows: Sequence[str] = context.partition_keys
    return windows


def _refuse_replay(context: dg.AssetExecutionContext, workspace: Workspace, *, replay: bool) -> None:
    """Raise if the windows of the run may not be rebuilt.

    Raises ``BackfillsRefused`` if the decision table forbids it, and ``WindowSealed`` if all windows are
    sealed.
    """
    if _by_hand(context):
        refuse_backfill(workspace.decisions)
    if replay:
        _leave_sealed(context, workspace)


def _leave_sealed(context: dg.AssetExecutionContext, workspace: Workspace) -> None:
    """Warn of the sealed windows of a replay, which are not rebuilt; ``WindowSealed`` if all are sealed."""
    source, windows = context.asset_key.path[0], context.partition_keys
    sealed = sorted(Removed.open(workspace, source).sealed.intersection(windows))
    if len(sealed) == len(windows):
        refuse_sealed(workspace, source, windows)
    if sealed and (context.run_id, source) not in _warned:
        # Every table of the run comes here, and all leave out the same windows.
        _warned.add((context.run_id, source))
        named = f"{sealed[0]} to {sealed[-1]}" if len(sealed) > 1 else sealed[0]
        context.log.warning(f"Left as sealed: {counted(len(sealed), 'window')} of {source}, {named}.")


def _by_hand(context: dg.AssetExecutionContext) -> bool:
    """Return whether a person started the run, not a sensor for new batches or late events."""
    return not {keys.TAKE_NEW_TAG, keys.LATE_TAG} & context.run.tags.keys()


def _owners(contracts: Sequence[TableContract]) -> list[str]:
    return sorted({contract.owner for contract in contracts})


def _code_version(contracts: Sequence[TableContract]) -> str:
    """Return a version that changes when the logic or any of ``contracts`` changes."""
    parts: list[Any] = [LOGIC_VERSION, *(contract.fingerprint for contract in contracts)]
    return f"{LOGIC_VERSION}-{sha256(repr(parts).encode()).hexdigest()[:12]}"
