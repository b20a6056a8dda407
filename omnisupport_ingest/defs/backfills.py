"""Launches partition backfills without the web server, by private names of Dagster.

Dagster has no public Python call for this. A test runs this module against the installed version, so an
upgrade that moves a private name fails there and not in production.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph_subset import AssetGraphSubset
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.partitions.subset import PartitionsSubset
from dagster._core.execution.backfill import BulkActionsFilter, BulkActionStatus, PartitionBackfill
from dagster._core.utils import make_new_backfill_id

from omnisupport_ingest.defs import keys
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.scheduling.late_replay import EndedReplay
from omnisupport_ingest.wording import counted

_FINISHED = (
    BulkActionStatus.COMPLETED,
    BulkActionStatus.COMPLETED_SUCCESS,
    BulkActionStatus.COMPLETED_FAILED,
    BulkActionStatus.FAILED,
    BulkActionStatus.CANCELED,
)
_FAILED_READ = 50
"""More attempts than a window has before it waits the longest."""

CANCELLED = BulkActionStatus.CANCELED.value
_SUCCEEDED = (BulkActionStatus.COMPLETED, BulkActionStatus.COMPLETED_SUCCESS)


class BackfillRefused(IngestError):
    """A backfill or a run names no window, or one that Dagster does not know; or no backfill has the id.

    Fix: Name windows between the home's first and now, by their start in UTC, the earlier end of a range
    first. The UI lists the ids under Backfills.
    """


@dataclass(frozen=True, slots=True)
class BackfillStatus:
    """The state of a backfill. ``status``: Dagster's word; ``finished`` and ``succeeded``: what it means.

    ``ended_at``: None while it is unfinished.
    """

    backfill_id: str
    status: str
    finished: bool
    succeeded: bool
    error: str | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Backfill:
    """A replay of ``windows`` through every layer of ``source``.

    ``reason``: becomes its title and a tag. ``dimension``: the only dimension to rebuild, after the layers
    upstream; None: all.
    """

    source: str
    windows: Sequence[str]
    reason: str
    description: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    dimension: dg.AssetKey | None = None


def launch_backfill(
    instance: dg.DagsterInstance,
    graph: BaseAssetGraph[Any],
    wanted: Backfill,
    *,
    backfill_id: str | None = None,
) -> str:
    """Request ``wanted`` from the Dagster daemon, one run per range without a gap; return the backfill's id.

    ``graph``: the assets of the code location. With a ``backfill_id``, repeated calls launch one backfill.
    Raises ``BackfillRefused`` if a window is not a partition.
    """
    if backfill_id is not None and instance.get_backfill(backfill_id) is not None:
        return backfill_id
    source, windows = wanted.source, sorted(set(wanted.windows))
    subsets: dict[dg.AssetKey, PartitionsSubset] = {}
    of_windows: dict[dg.PartitionsDefinition[Any], PartitionsSubset] = {}
    for key in graph.materializable_asset_keys:
        if key.path[0] != source:
            continue
        if wanted.dimension not in (None, key) and key not in (
            keys.raw_key(source),
            keys.deduped_key(source),
        ):
            continue
        partitions = graph.get(key).partitions_def
        if partitions is None:
            # Histories have no windows; they have a job of their own.
            continue
        if partitions not in of_windows:
            # All tables have the same windows, and there may be thousands.
            of_windows[partitions] = _subset(partitions, windows, source)
        subsets[key] = of_windows[partitions]
    if not subsets or not windows:
        raise BackfillRefused(
            f"There is nothing to backfill for {source!r} and {counted(len(windows), 'window')}.",
            fix=f"Name at least one window, and one of these sources: {', '.join(_sources(graph))}.",
        )
    backfill_id = backfill_id or make_new_backfill_id()
    backfill = PartitionBackfill.from_asset_graph_subset(
        backfill_id=backfill_id,
        backfill_timestamp=time.time(),
        tags={keys.SOURCE_TAG: source, keys.REASON_TAG: wanted.reason, **wanted.tags},
        dynamic_partitions_store=instance,
        asset_graph_subset=AssetGraphSubset.create_empty_subset()._replace(
            partitions_subsets_by_asset_key=subsets
        ),
        title=wanted.reason,
        description=wanted.description or f"Replay of {counted(len(windows), 'window')} of {source}.",
        run_config=None,
    )
    with failpoint("dagster.backfill", backfill_id):
        instance.add_backfill(backfill)
    return backfill_id


def _subset(
    partitions: dg.PartitionsDefinition[Any], windows: Sequence[str], source: str
) -> PartitionsSubset:
    _refuse_unknown(partitions, windows, source)
    return partitions.subset_with_partition_keys(windows)


def refuse_range(partitions: dg.PartitionsDefinition[Any], first: str, last: str, source: str) -> None:
    """Raise ``BackfillRefused`` if ``first`` to ``last`` is not a range of partitions.

    Dagster itself would treat a range that ends before it begins, or lies in the future, as one without
    windows.
    """
    _refuse_unknown(partitions, [first, last], source)
    # Keys sort as their times do.
    if last < first:
        raise BackfillRefused(
            f"The range of windows ends before it begins: {first} to {last}.",
            fix=f"Name the earlier window first: {last} to {first}.",
        )


def _refuse_unknown(partitions: dg.PartitionsDefinition[Any], windows: Sequence[str], source: str) -> None:
    unknown = [window for window in windows if not partitions.has_partition_key(window)]
    if unknown:
        first, last = partitions.get_first_partition_key(), partitions.get_last_partition_key()
        raise BackfillRefused(
            f"{unknown[0]!r} is not a window that {source} has had so far.",
            fix="Name windows by their start in UTC, like 2026-01-31T0900, between the home's first "
            f"window ({first}) and now ({last}).",
        )


def backfill_status(instance: dg.DagsterInstance, backfill_id: str) -> BackfillStatus:
    """Return the state of the backfill; ``BackfillRefused`` if there is none of this id."""
    backfill = instance.get_backfill(backfill_id)
    if backfill is None:
        raise BackfillRefused(
            f"There is no backfill {backfill_id!r} in this Dagster instance.",
            fix="Look for its id on the backfills page.",
        )
    return _status(backfill)


def _status(backfill: PartitionBackfill) -> BackfillStatus:
    finished = backfill.status in _FINISHED
    # One that failed before its first run may have no end.
    ended = backfill.backfill_end_timestamp or backfill.backfill_timestamp
    return BackfillStatus(
        backfill_id=backfill.backfill_id,
        status=backfill.status.value,
        finished=finished,
        succeeded=backfill.status in _SUCCEEDED,
        error=backfill.error.message if backfill.error is not None else None,
        ended_at=datetime.fromtimestamp(ended, UTC) if finished else None,
    )


def find_backfill(instance: dg.DagsterInstance, backfill_id: str) -> BackfillStatus | None:
    """Return the state of the backfill; None if there is none of this id."""
    return None if instance.get_backfill(backfill_id) is None else backfill_status(instance, backfill_id)


def windows_in_backfills(instance: dg.DagsterInstance, source: str) -> frozenset[str]:
    """Return the windows of ``source`` that unfinished backfills cover."""
    unfinished = [status for status in BulkActionStatus if status not in _FINISHED]
    backfills = instance.get_backfills(BulkActionsFilter(statuses=unfinished))
    return frozenset[str]().union(*(_windows_of(each, source) for each in backfills))


def ended_late_backfills(instance: dg.DagsterInstance, source: str, since: datetime) -> list[EndedReplay]:
    """Return the ended backfills of late windows of ``source``: the last that failed or were cancelled, and
    those that were requested after ``since`` and succeeded."""
    mine = {keys.SOURCE_TAG: source}
    failed = BulkActionsFilter(statuses=[each for each in _FINISHED if each not in _SUCCEEDED], tags=mine)
    backfills = [*instance.get_backfills(failed, limit=_FAILED_READ)]
    if backfills:
        succeeded = BulkActionsFilter(statuses=list(_SUCCEEDED), tags=mine, created_after=since)
        backfills += instance.get_backfills(succeeded)
    return [
        EndedReplay(windows, status.ended_at, status.succeeded, status.status == CANCELLED)
        for backfill in backfills
        if keys.LATE_TAG in backfill.tags
        and (windows := _windows_of(backfill, source))
        and (status := _status(backfill)).ended_at is not None
    ]


def _windows_of(backfill: PartitionBackfill, source: str) -> frozenset[str]:
    data, key = backfill.asset_backfill_data, keys.raw_key(source)
    if data is None or key not in data.target_subset.asset_keys:
        return frozenset()
    return frozenset(data.target_subset.get_partitions_subset(key).get_partition_keys())


def _sources(graph: BaseAssetGraph[Any]) -> list[str]:
    return sorted({key.path[0] for key in graph.materializable_asset_keys})
