"""Targets in Dagster: an asset per table of a warehouse, and a sensor that requests a sync when the current
state has changed.

Ingest runs do not write to targets: a warehouse that does not answer fails only its own run. The sensor
requests another run every few minutes while the target is not at the version of the lake and no run of it
waits or goes on. It also requests one an hour after the last, because only a sync sees that a target was
restored, emptied or moved to another server.
"""

import time

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.metadata import docs_metadata
from omnisupport_ingest.defs.run_history import unfinished
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_home import BESIDE_TAG, TARGET
from omnisupport_ingest.targets.standing import LastSyncs, last_syncs
from omnisupport_ingest.targets.sync import sync_target
from omnisupport_ingest.wording import counted

RETRY_SECONDS = 300
"""After this time, another run with the same work is requested."""

LOOK_SECONDS = 3600
"""This long after its last sync a target is synced again, even if the lake has not changed."""

_INTERVAL_SECONDS = 15
_VERSION, _TABLE, _TARGET = "delta_version", "table_id", "target"
"""Metadata keys of a sync: the version and the table of the lake, and the target."""


def build_targets(workspace: Workspace, source: str) -> dg.Definitions:
    """Return the target assets of ``source``, their job and sensor; empty if no contract names a target."""
    contracts = [each for each in workspace.contracts.of_source(source) if each.target is not None]
    if not contracts:
        return dg.Definitions()
    name = f"targets_{source}"
    job = dg.define_asset_job(
        name,
        selection=dg.AssetSelection.assets(*map(keys.target_key, contracts)),
        description=f"Writes to the targets of {source} what they lack.",
        executor_def=run_executor,
        tags={keys.SOURCE_TAG: source, BESIDE_TAG: TARGET},
    )

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a sync of a target of {source} when its current state has changed, and an "
        "hour after its last sync.",
    )
    def due(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult | dg.SkipReason:
        now, workspace = time.time(), workspace.current()
        # A run without a selection is of every target.
        busy = [run.asset_selection for run in unfinished(context.instance, name)]
        free = [
            each
            for each in contracts
            if not any(selection is None or keys.target_key(each) in selection for selection in busy)
        ]
        found = [_request(context.instance, workspace, contract, now) for contract in free]
        requests = [each for each in found if each is not None]
        if not requests:
            if synced := len(contracts) - len(free):
                return dg.SkipReason(
                    f"{counted(synced, 'target')} of {len(contracts)}: a sync runs or waits."
                )
            return dg.SkipReason(
                "Every target was synced within the last hour, at the version of its current state."
            )
        with failpoint("sensor.answer"):
            return dg.SensorResult(run_requests=requests)

    return dg.Definitions(
        assets=[target_asset(contract) for contract in contracts], jobs=[job], sensors=[due]
    )


def target_asset(contract: TableContract) -> dg.AssetsDefinition:
    """Return the asset of a warehouse's table that follows the current state of ``contract``."""
    assert contract.target is not None
    key = keys.target_key(contract)

    @dg.asset(
        key=key,
        dagster_type=keys.NO_VALUE,
        deps=[keys.dimension_key(contract)],
        description=f"{contract.description} Its current state in another PostgreSQL, as "
        f"{contract.target.schema}.{contract.target.table}.",
        group_name=contract.source,
        kinds={"postgres"},
        owners=[contract.owner],
        tags={keys.LAYER_TAG: keys.TARGETS},
        metadata=docs_metadata("targets.md"),
        pool=keys.pool_of(key),
    )
    @unquoted
    def sync(context: dg.AssetExecutionContext, workspace: dg.ResourceParam[Workspace]) -> dg.Output[None]:
        started = time.monotonic()
        done = sync_target(workspace, contract)
        context.add_asset_metadata(
            {
                _VERSION: dg.MetadataValue.int(done.delta_version),
                _TABLE: dg.MetadataValue.text(done.table_id),
                _TARGET: dg.MetadataValue.text(_target(contract)),
                "rows_written": dg.MetadataValue.int(done.written),
                "rows_deleted": dg.MetadataValue.int(done.deleted),
                "seconds": dg.MetadataValue.float(round(time.monotonic() - started, 3)),
            }
        )
        return dg.Output(None)

    return sync


def _request(
    instance: dg.DagsterInstance, workspace: Workspace, contract: TableContract, now: float
) -> dg.RunRequest | None:
    snapshot = workspace.dimension(contract).look()
    if snapshot is None:
        return None
    key = keys.target_key(contract)
    event = instance.get_latest_materialization_event(key)
    done = event.asset_materialization if event is not None else None
    metadata = done.metadata if done is not None else {}
    synced = [metadata[name].value if name in metadata else None for name in (_VERSION, _TABLE, _TARGET)]
    target = _target(contract)
    looked_at = event is not None and now < event.timestamp + LOOK_SECONDS
    last = last_syncs(workspace.home, contract)
    if last is not None and _failed_just_now(last, now):
        # However many versions come meanwhile.
        return None
    # A sync by hand has failed since, or its note is of an earlier one.
    unsettled = last is not None and (last.problem != "" or last.version != snapshot.version)
    if looked_at and not unsettled and synced == [snapshot.version, snapshot.table_id, target]:
        return None
    attempt = int(now) // RETRY_SECONDS
    return dg.RunRequest(
        run_key=f"{'/'.join(key.path)}/{target}/{snapshot.table_id}/{snapshot.version}/{attempt}",
        asset_selection=[key],
    )


def _failed_just_now(last: LastSyncs, now: float) -> bool:
    failed_at = last.failed_at if last.problem else None
    return failed_at is not None and now < failed_at.timestamp() + RETRY_SECONDS


def _target(contract: TableContract) -> str:
    """Return a text that identifies the target: the setting of its connection, schema and table."""
    policy = contract.target
    assert policy is not None
    return f"{policy.connection_env or policy.connection_file} {policy.schema}.{policy.table}"
