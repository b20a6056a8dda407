"""The asset graph: one landing, raw and deduped asset per source, a dimension and a published table
per contract.

Each body calls its stage for the windows of the run, however many, and mirrors the checkpoints
into Dagster. A stage that finds nothing to do returns its checkpoints all the same, so every
partition of a run is materialized.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import dagster as dg
from dagster_pyspark import LazyPySparkResource

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.metadata import checkpoint_metadata
from omnisupport_ingest.defs.tables import published_lineage, table_metadata
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.runtime.spark_errors import named_spark_errors
from omnisupport_ingest.stages import deduped, dimensions, published, raw
from omnisupport_ingest.stages.checkpoints import with_found
from omnisupport_ingest.stages.idempotency import LOGIC_VERSION
from omnisupport_ingest.stages.late_replay import BY_HAND, refuse_backfill
from omnisupport_ingest.stages.retyping import waits
from omnisupport_ingest.stages.workspace import Workspace

_LAKE_KINDS = {"spark", "deltalake"}


def build_assets(
    workspace: Workspace, partitions: dg.PartitionsDefinition[str]
) -> list[dg.AssetSpec | dg.AssetsDefinition]:
    """Every asset of every source that has contracts."""
    found: list[dg.AssetSpec | dg.AssetsDefinition] = []
    for source in workspace.contracts.sources():
        found += [
            landing_asset(workspace=workspace, source=source),
            raw_asset(workspace=workspace, source=source, partitions=partitions),
            deduped_asset(workspace=workspace, source=source, partitions=partitions),
        ]
        for contract in workspace.contracts.of_source(source):
            found += [
                dimension_asset(workspace=workspace, contract=contract, partitions=partitions),
                published_asset(workspace=workspace, contract=contract),
            ]
    return found


def landing_asset(*, workspace: Workspace, source: str) -> dg.AssetSpec:
    """What capture writes: not materialized by Dagster, observed by the sensor."""
    kinds = {"postgres", "parquet"} if source == workspace.settings.source else {"file", "parquet"}
    return dg.AssetSpec(
        keys.landing_key(source),
        description=f"Batches of {source}: immutable data files, each batch with a manifest. Written outside "
        "of Dagster; the sensor observes how far they reach.",
        group_name=keys.LANDING,
        kinds=kinds,
        owners=_owners(workspace, source),
    )


def raw_asset(
    *, workspace: Workspace, source: str, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetsDefinition:
    """``raw_cdc_staging`` of one source."""
    key, spec = keys.raw_key(source), workspace.raw(source).spec

    @dg.asset(
        key=key,
        deps=[keys.landing_key(source)],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        description=spec.description,
        group_name=keys.RAW,
        kinds=_LAKE_KINDS,
        owners=_owners(workspace, source),
        metadata=table_metadata(spec),
        code_version=str(LOGIC_VERSION),
        pool=keys.pool_of(key),
    )
    def materialize_raw(
        context: dg.AssetExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> None:
        started = time.monotonic()
        with named_spark_errors(workspace.settings):
            done = raw.materialize(
                workspace,
                pyspark.spark_session,
                source,
                context.partition_keys,
                context.run_id,
                replay=_replays(context, workspace),
            )
        _mirror(context, done, started)

    return materialize_raw


def deduped_asset(
    *, workspace: Workspace, source: str, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetsDefinition:
    """``deduped_events`` of one source; its quarantine is committed with it."""
    key, spec = keys.deduped_key(source), workspace.deduped(source).spec

    @dg.asset(
        key=key,
        deps=[keys.raw_key(source)],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        description=f"{spec.description} Events not accepted are in the table quarantine beside it.",
        group_name=keys.DEDUPED,
        kinds=_LAKE_KINDS,
        owners=_owners(workspace, source),
        metadata=table_metadata(spec),
        code_version=_code_version(workspace.contracts.of_source(source)),
        pool=keys.pool_of(key),
    )
    def materialize_deduped(
        context: dg.AssetExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> None:
        started = time.monotonic()
        with named_spark_errors(workspace.settings):
            done = deduped.materialize(
                workspace,
                pyspark.spark_session,
                source,
                context.partition_keys,
                context.run_id,
                replay=_replays(context, workspace),
            )
        _mirror(context, done, started)

    return materialize_deduped


def dimension_asset(
    *, workspace: Workspace, contract: TableContract, partitions: dg.PartitionsDefinition[str]
) -> dg.AssetsDefinition:
    """``dim_<table>``: the net change of each window."""
    key, spec = keys.dimension_key(contract), workspace.dimension(contract).spec

    @dg.asset(
        key=key,
        # Where the table waits for a person nothing is made, and no other table's step or run fails for it.
        output_required=False,
        dagster_type=keys.NO_VALUE,
        deps=[keys.deduped_key(contract.source)],
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        description=f"{contract.description} {spec.description}",
        group_name=keys.DIMENSIONS,
        kinds=_LAKE_KINDS,
        owners=[contract.owner],
        tags=_tags(contract),
        metadata=table_metadata(spec, contract),
        code_version=_code_version([contract]),
        pool=keys.pool_of(key),
    )
    def materialize_dimension(
        context: dg.AssetExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> Iterator[dg.Output[None]]:
        started = time.monotonic()
        if _waits(context, workspace, contract):
            return
        with named_spark_errors(workspace.settings):
            done = dimensions.materialize(
                workspace,
                pyspark.spark_session,
                contract,
                context.partition_keys,
                context.run_id,
                replay=_replays(context, workspace),
            )
        _mirror(context, done, started)
        yield dg.Output(None)

    return materialize_dimension


def published_asset(*, workspace: Workspace, contract: TableContract) -> dg.AssetsDefinition:
    """The current state of one table, for any engine; not partitioned."""
    key, spec = keys.published_key(contract), workspace.published(contract).spec

    @dg.asset(
        key=key,
        output_required=False,
        dagster_type=keys.NO_VALUE,
        deps=[keys.dimension_key(contract)],
        description=f"{contract.description} {spec.description}",
        group_name=keys.PUBLISHED,
        kinds=_LAKE_KINDS,
        owners=[contract.owner],
        tags=_tags(contract),
        metadata={**table_metadata(spec, contract), **published_lineage(contract)},
        code_version=_code_version([contract]),
        pool=keys.pool_of(key),
    )
    def materialize_published(
        context: dg.AssetExecutionContext,
        workspace: dg.ResourceParam[Workspace],
        pyspark: LazyPySparkResource,
    ) -> Iterator[dg.Output[None]]:
        started = time.monotonic()
        if _waits(context, workspace, contract):
            return
        with named_spark_errors(workspace.settings):
            done = published.materialize(
                workspace,
                pyspark.spark_session,
                contract,
                context.run_id,
                replay=_replays(context, workspace),
            )
        context.add_asset_metadata(checkpoint_metadata(done, duration_seconds=time.monotonic() - started))
        yield dg.Output(None)

    return materialize_published


def _waits(context: dg.AssetExecutionContext, workspace: Workspace, contract: TableContract) -> bool:
    found = waits(workspace, contract)
    if found is None:
        return False
    told = f"{found.problem} Fix: {found.fix}"
    context.log.error(told)
    # A check that follows what is not made is skipped in this run.
    context.instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=keys.published_key(contract),
            check_name=keys.COMPLETE,
            passed=False,
            severity=dg.AssetCheckSeverity.WARN,
            description=told,
        )
    )
    return True


def _mirror(context: dg.AssetExecutionContext, done: Sequence[Checkpoint], started: float) -> None:
    duration = time.monotonic() - started
    for checkpoint in done:
        if _by_hand(context):
            checkpoint = with_found(checkpoint, BY_HAND)
        context.add_asset_metadata(
            checkpoint_metadata(checkpoint, duration_seconds=duration), partition_key=checkpoint.window
        )


def _replays(context: dg.AssetExecutionContext, workspace: Workspace) -> bool:
    """Whether the run makes its windows again; ``BackfillsRefused`` where the decision table forbids it."""
    if _by_hand(context):
        refuse_backfill(workspace.decisions)
    return keys.TAKE_NEW_TAG not in context.run.tags


def _by_hand(context: dg.AssetExecutionContext) -> bool:
    """Whether somebody asked for the run; the sensors' runs take in what is new, or what came late."""
    return not {keys.TAKE_NEW_TAG, keys.LATE_TAG} & context.run.tags.keys()


def _owners(workspace: Workspace, source: str) -> list[str]:
    return sorted({contract.owner for contract in workspace.contracts.of_source(source)})


def _tags(contract: TableContract) -> Mapping[str, str]:
    return {"contract_version": contract.version}


def _code_version(contracts: Sequence[TableContract]) -> str:
    """Changes when the logic or any of ``contracts`` does."""
    prints: list[Any] = [LOGIC_VERSION, *(contract.fingerprint for contract in contracts)]
    return f"{LOGIC_VERSION}-{sha256(repr(prints).encode()).hexdigest()[:12]}"
