"""An estimate of the disk space of a home: bytes by layer, growth, and when the disk is full.

It walks no folder, so it is cheap. The tables' logs have the size of every file in use. The size of landing
is estimated from the manifests of its newest batches and the total numbers of events and batches. Growth is
measured on the windows of the last days, in the layers that are stored by window; the other layers are
assumed to grow at the same rate.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from deltalake.exceptions import DeltaError

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.withdrawn import readable_withdrawn
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.kept_positions import bytes_kept
from omnisupport_ingest.landing.names import chunk_prefix, offsets_prefix, stream_prefix
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.removed import LANDING, Removed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import has_landed, landed_sources
from omnisupport_ingest.windows import OUT_OF_RANGE

LOOKS_BACK = timedelta(days=7)
"""Growth is measured on the windows of this time."""

_LEAST = timedelta(hours=1)
"""For a younger lake no growth per day is given."""

_SAMPLED = 32
"""Batches of each kind from which the size of landing is estimated."""

_MANIFEST_BYTES = 3_000
"""Approximate bytes of a manifest, its line in the index, and its folder."""


@dataclass(frozen=True, slots=True)
class DiskForecast:
    """An estimate of disk space.

    ``layers``: bytes in use by layer. ``per_day``: growth in bytes per day; None for a lake younger than an
    hour. ``free``: bytes left on the disk of the home. ``days``: when that disk is full; None if growth is
    unknown or zero. ``settled``: the home is older than the days on which growth is measured, so growth does
    not include the first reading of its tables, which happens once.
    """

    layers: Mapping[str, int]
    per_day: int | None
    free: int
    days: float | None
    settled: bool = False


def disk_forecast(workspace: Workspace, now: datetime) -> DiskForecast:
    """Estimate for all sources of the home at ``now`` (timezone-aware): withdrawn tables, too, and sources
    whose contracts are gone."""
    layers: Counter[str] = Counter()
    recent, by_window = 0, 0
    since = max(now - LOOKS_BACK, workspace.grid.first)
    withdrawn = readable_withdrawn(workspace.settings, workspace.contracts)
    named = (*workspace.contracts.sources(), *(each.source for each in withdrawn))
    for source in dict.fromkeys((*named, *landed_sources(workspace.home.path))):
        # A landing that cannot be read is reported elsewhere; it must not hide the rest.
        with suppress(IngestError):
            if has_landed(workspace.home.path, source):
                layers[LANDING] += _landing_bytes(workspace, source)
        contracts = [
            *workspace.contracts.of_source(source),
            *(each for each in withdrawn if each.source == source),
        ]
        for layer, table in _tables(workspace, source, contracts):
            # So is a table whose log cannot be read.
            sizes: Counter[str] = Counter()
            with suppress(DeltaError):
                sizes = _sizes(table)
            for window, size in sizes.items():
                layers[layer] += size
                if window:
                    by_window += size
                    recent += size if _begins(workspace, window, since) else 0
    free = shutil.disk_usage(workspace.home.path).free
    if now - since < _LEAST or not by_window:
        return DiskForecast(dict(layers), None, free, None)
    days = (now - since) / timedelta(days=1)
    per_day = sum(layers.values()) * recent / by_window / days
    settled = now - workspace.grid.first > LOOKS_BACK
    return DiskForecast(dict(layers), round(per_day), free, free / per_day if per_day else None, settled)


def _tables(
    workspace: Workspace, source: str, contracts: Iterable[TableContract]
) -> list[tuple[str, LakeTable]]:
    found = [
        ("raw", workspace.raw(source)),
        ("deduped", workspace.deduped(source)),
        ("quarantine", workspace.quarantine(source)),
    ]
    for contract in contracts:
        found += [
            ("net_changes", workspace.net_changes(contract)),
            ("dimensions", workspace.dimension(contract)),
            ("history", workspace.history(contract)),
        ]
    return found


def _sizes(table: LakeTable) -> Counter[str]:
    """Return the bytes of the files in use by window; for a table stored by key, all under ``""``."""
    found: Counter[str] = Counter()
    snapshot = table.look()
    for file in snapshot.all_files() if snapshot is not None else ():
        found[file.window if table.spec.partition_by else ""] += file.bytes
    return found


def _begins(workspace: Workspace, window: str, since: datetime) -> bool:
    return window != OUT_OF_RANGE and workspace.grid.end_of(window) > since


def _landing_bytes(workspace: Workspace, source: str) -> int:
    store = workspace.landing(source)
    landed = store.landed()
    events = sum(each.events for each in landed.epochs)
    removals = Removed.open(workspace, source).of(LANDING).values()
    gone = sum(each.events for each in removals)
    left = round(max(0, events - gone) * _bytes_per_event(store))
    kept = 0 if landed.captured else bytes_kept(sum(each.files for each in removals), gone)
    return left + kept + landed.count * _MANIFEST_BYTES


def _bytes_per_event(store: LandingStore) -> float:
    """Return the mean bytes per event in the newest batches of each kind."""
    size, events = 0, 0
    epoch = max((each.epoch for each in store.epoch_standings()), default=0)
    for prefix in (stream_prefix(epoch), chunk_prefix(epoch), offsets_prefix(epoch), "f-"):
        for name in itertools.islice(store.newest_first(prefix), _SAMPLED):
            batch = store.read(name)
            size += sum(file.bytes for file in batch.files)
            events += batch.rows
    return size / events if events else 0.0
