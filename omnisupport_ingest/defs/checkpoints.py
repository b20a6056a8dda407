"""Filling an empty Dagster instance from the lake: partitions as materialized, with their checkpoints.

The tables' own logs are the truth and materialization metadata mirrors them, so an event log that
was purged or deleted loses nothing but the history of runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import dagster as dg

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.metadata import checkpoint_metadata
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.stages import checkpoints as lake_checkpoints
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE


def rebuild_materializations(instance: dg.DagsterInstance, workspace: Workspace) -> int:
    """Report what the lake holds and ``instance`` does not know of; returns how many were reported.

    The sentinel window is left out: it is no partition.
    """
    reported = 0
    for key, table, partitioned in _tables(workspace):
        known = _known(instance, key, partitioned=partitioned)
        for checkpoint in lake_checkpoints.read([table]):
            partition = checkpoint.window if partitioned else None
            if partition in known or partition == OUT_OF_RANGE:
                continue
            with gate("dagster.materialization", key.to_user_string()):
                instance.report_runless_asset_event(_materialization(key, checkpoint, partition))
            reported += 1
    return reported


def _tables(workspace: Workspace) -> Iterator[tuple[dg.AssetKey, LakeTable, bool]]:
    for source in workspace.contracts.sources():
        yield keys.raw_key(source), workspace.raw(source), True
        yield keys.deduped_key(source), workspace.deduped(source), True
    for contract in workspace.contracts:
        yield keys.dimension_key(contract), workspace.net_changes(contract), True
        yield keys.published_key(contract), workspace.dimension(contract), False
        yield keys.history_key(contract), workspace.history(contract), False


def _known(instance: dg.DagsterInstance, key: dg.AssetKey, *, partitioned: bool) -> set[str | None]:
    if partitioned:
        return {*instance.get_materialized_partitions(key)}
    return {None} if instance.get_latest_materialization_event(key) is not None else set()


def _materialization(
    key: dg.AssetKey, checkpoint: Checkpoint, partition: str | None
) -> dg.AssetMaterialization:
    return dg.AssetMaterialization(
        key,
        partition=partition,
        description="Read from the table's own log.",
        metadata=checkpoint_metadata(checkpoint),
    )
