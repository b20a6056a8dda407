"""Fills an empty Dagster instance from the lake: reports the materialized partitions with their checkpoints.

The tables' own logs are the truth, and materialization metadata repeats them. So purging or deleting
Dagster's event log loses only the history of runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import dagster as dg

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.metadata import checkpoint_metadata, dimension_metadata
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers import checkpoints as lake_checkpoints
from omnisupport_ingest.layers.dimension.delayed_merge import waiting_merge
from omnisupport_ingest.layers.dimension.shown_net_changes import Shown
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE


def rebuild_materializations(instance: dg.DagsterInstance, workspace: Workspace) -> int:
    """Report to ``instance`` the windows of the lake that it does not know; return how many.

    The sentinel window is left out: it is no partition.
    """
    reported = 0
    for each in _assets(workspace):
        known = _known(instance, each.key, partitioned=each.partitioned)
        for checkpoint in lake_checkpoints.read([each.table]):
            partition = checkpoint.window if each.partitioned else None
            if partition in known or partition == OUT_OF_RANGE or checkpoint.window in each.without:
                continue
            with failpoint("dagster.materialization", each.key.to_user_string()):
                instance.report_runless_asset_event(
                    dg.AssetMaterialization(
                        each.key,
                        partition=partition,
                        description="Read from the table's own log.",
                        metadata={**checkpoint_metadata(checkpoint), **each.extra_metadata},
                    )
                )
            reported += 1
    return reported


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asset:
    """An asset and the table that has its checkpoints.

    ``without``: windows that the table does not show yet. ``extra_metadata``: what every materialization
    shows besides its checkpoint.
    """

    key: dg.AssetKey
    table: LakeTable
    partitioned: bool = True
    without: frozenset[str] = frozenset()
    extra_metadata: Mapping[str, dg.MetadataValue] = field(default_factory=dict)


def _assets(workspace: Workspace) -> Iterator[_Asset]:
    for source in workspace.contracts.sources():
        yield _Asset(key=keys.raw_key(source), table=workspace.raw(source))
        yield _Asset(key=keys.deduped_key(source), table=workspace.deduped(source))
    for contract in workspace.contracts:
        net_changes = workspace.net_changes(contract)
        yield _Asset(
            key=keys.dimension_key(contract),
            table=net_changes,
            without=_not_merged(workspace, contract),
            extra_metadata=dimension_metadata(workspace, contract),
        )
        yield _Asset(key=keys.history_key(contract), table=workspace.history(contract), partitioned=False)


def _not_merged(workspace: Workspace, contract: TableContract) -> frozenset[str]:
    """Return the windows that the dimension should show and does not.

    Windows that wait for a delayed merge are not among them: they count as materialized.
    """
    folded, dimension = workspace.net_changes(contract).look(), workspace.dimension(contract).look()
    state = dimension.state(WHOLE_TABLE) if dimension is not None else None
    if folded is not None and waiting_merge(contract, state, folded) is not None:
        return frozenset()
    return Shown.of(folded, dimension).newer


def _known(instance: dg.DagsterInstance, key: dg.AssetKey, *, partitioned: bool) -> set[str | None]:
    if partitioned:
        return {*instance.get_materialized_partitions(key)}
    return {None} if instance.get_latest_materialization_event(key) is not None else set()
