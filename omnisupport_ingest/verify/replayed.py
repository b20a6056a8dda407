"""Replays a finished window through every layer: no table's content may change.

The Dagster daemon replays the window by a backfill. The content of the window is compared by its hash in
every table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.layers import checkpoints
from omnisupport_ingest.layers.pending import pending_windows

if TYPE_CHECKING:
    from omnisupport_ingest.lake.table import LakeTable
    from omnisupport_ingest.layers.workspace import Workspace


@dataclass(frozen=True)
class StartedReplay:
    """The backfill that replays ``window``. ``before``: path of each table → content hash of the window."""

    source: str
    window: str
    backfill_id: str
    before: dict[str, str]


def replayable(workspace: Workspace, source: str) -> list[Checkpoint]:
    """Return the checkpoints of windows that have accepted events and are in every layer."""
    # Of all batches: a window may be behind for the last one of very many.
    behind = pending_windows(workspace, source, limit=sys.maxsize).windows
    committed = checkpoints.read([workspace.deduped(source)])
    return [each for each in committed if each.deduped and each.window not in behind]


def start_replay(workspace: Workspace, source: str, launch: Callable[[str], str]) -> StartedReplay:
    """Start the replay of the replayable window with the most events.

    ``launch``: called with the window; starts its backfill and returns the backfill's id.
    """
    window = max(replayable(workspace, source), key=lambda each: each.deduped).window
    # The hashes are read first: the backfill may be fast.
    before = _content_hashes(workspace, source, window)
    return StartedReplay(source, window, launch(window), before)


def changed_tables(workspace: Workspace, replay: StartedReplay) -> list[str]:
    """Return the paths of tables whose content the replay changed; empty if all is well."""
    after = _content_hashes(workspace, replay.source, replay.window)
    return sorted(table for table, content in replay.before.items() if after.get(table) != content)


def _content_hashes(workspace: Workspace, source: str, window: str) -> dict[str, str]:
    hashes = {}
    for table in _tables(workspace, source):
        snapshot = table.look()
        # A table without new events has no part of an open window.
        state = snapshot.state(window) if snapshot is not None else None
        if state is not None:
            hashes[table.spec.path] = state.checkpoint.content_hash
    return hashes


def _tables(workspace: Workspace, source: str) -> Iterator[LakeTable]:
    yield workspace.raw(source)
    yield workspace.deduped(source)
    for contract in workspace.contracts.of_source(source):
        yield workspace.net_changes(contract)
