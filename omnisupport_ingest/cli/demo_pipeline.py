"""The second half of the demo: wait for the sensor's runs, replay a window, prove the result.

Nothing here moves data. The daemon that the demo started does, as it does under ``up``; these steps
ask it, watch it, and compare.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from omnisupport_ingest.cli.demo_run import Demo, progress
from omnisupport_ingest.cli.proof import Proof, prove
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.stages import checkpoints
from omnisupport_ingest.stages.pending import Pending, pending_windows
from omnisupport_ingest.stages.workspace import Workspace

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from omnisupport_ingest.lake.table import LakeTable

_STEP_SECONDS = 600.0
"""Longest that a step of the demo waits for the daemon."""

_LOOK_SECONDS = 0.5


class DemoStuck(IngestError):
    """The platform did not do its part of the demo, or cannot."""


@dataclass(frozen=True)
class Replay:
    """A window's backfill: its id, and the content hash of every table before it."""

    window: str
    backfill_id: str
    before: dict[str, str]


def wait_for_the_sensor(demo: Demo) -> None:
    """Until everything that the source has committed so far is in every layer."""
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn

    workspace = _workspace(demo)
    target = current_wal_lsn(source_dsn(demo.settings, demo.home))
    with progress(demo.console) as bar:
        row = bar.add_task("Sensor runs: batches in every layer", total=None)

        def done() -> bool:
            pending = _pending(workspace, demo.settings.source)
            bar.update(row, completed=pending.landed - pending.batches, total=pending.landed)
            landed = pending.stream_end
            return landed is not None and landed >= target and pending.nothing

        _wait(demo, done, "the sensor's runs")


def start_a_replay(demo: Demo) -> Replay:
    """Launch a partition backfill of the first window of the workload, through every layer."""
    from omnisupport_ingest.definitions import build_definitions
    from omnisupport_ingest.defs.backfills import launch_backfill

    workspace = _workspace(demo)
    source = demo.settings.source
    _wait(demo, lambda: bool(_replayable(workspace, source)), "the first window in every layer")
    # The window with most events has most to lose.
    window = max(_replayable(workspace, source), key=lambda each: each.deduped).window
    with _instance(demo) as instance:
        backfill_id = launch_backfill(
            instance,
            build_definitions(workspace).resolve_asset_graph(),
            source,
            [window],
            reason="demo: replay of a finished window",
        )
    demo.console.print(f"Backfill {backfill_id}: replaying window {window} through every layer …")
    return Replay(window, backfill_id, _hashes(workspace, source, window))


def finish_the_replay(demo: Demo, replay: Replay) -> None:
    """Wait for the backfill and say what it changed; ``DemoStuck`` if it failed or changed anything."""
    from omnisupport_ingest.defs.backfills import backfill_status

    workspace = _workspace(demo)
    with _instance(demo) as instance:
        _wait(demo, lambda: backfill_status(instance, replay.backfill_id).finished, "the backfill")
        status = backfill_status(instance, replay.backfill_id)
    if not status.succeeded:
        raise DemoStuck(
            f"Backfill {replay.backfill_id} ended as {status.status}: {status.error or 'see its runs'}.",
            fix="Open the UI (omnisupport-ingest up), page Backfills, and read the log of its runs.",
        )
    after = _hashes(workspace, demo.settings.source, replay.window)
    changed = sorted(table for table, content in replay.before.items() if after[table] != content)
    if changed:
        raise DemoStuck(
            f"The replay of window {replay.window} changed the content of {', '.join(changed)}.",
            fix="This must not happen: keep the home, and report it with the logs below it.",
        )
    demo.console.print(f"Replay of {replay.window}: {len(after)} tables, every content hash as before.")


def prove_the_result(demo: Demo) -> Proof:
    """Source and dimensions at one LSN, row by row; capture and sensor go on meanwhile."""
    from omnisupport_ingest.runtime.spark import session

    demo.console.print("Comparing source and dimensions at one LSN …")
    spark = session(demo.settings)
    try:
        return prove(_workspace(demo), lambda: spark)
    finally:
        # A client that is still open when the server goes would retry for minutes.
        spark.stop()


def _workspace(demo: Demo) -> Workspace:
    return Workspace.open(demo.settings)


def _pending(workspace: Workspace, source: str) -> Pending:
    """What is not committed yet; ``DemoStuck`` where waiting for it would be in vain."""
    pending = pending_windows(workspace, source)
    # Behind a hole that a later epoch has repaired, the platform goes on.
    if pending.hole is not None and pending.hole.later_epoch is None:
        raise DemoStuck(str(pending.hole), fix=pending.hole.fix)
    return pending


def _tables(workspace: Workspace, source: str) -> Iterator[LakeTable]:
    yield workspace.raw(source)
    yield workspace.deduped(source)
    for contract in workspace.contracts.of_source(source):
        yield workspace.net_changes(contract)


def _replayable(workspace: Workspace, source: str) -> list[Checkpoint]:
    """The checkpoints of windows with events that every layer holds."""
    behind = _pending(workspace, source).windows
    committed = checkpoints.read([workspace.deduped(source)])
    return [each for each in committed if each.deduped and each.window not in behind]


def _hashes(workspace: Workspace, source: str, window: str) -> dict[str, str]:
    return {
        table.spec.path: checkpoints.report(table, [window])[0].content_hash
        for table in _tables(workspace, source)
    }


@contextmanager
def _instance(demo: Demo) -> Iterator[DagsterInstance]:
    """The Dagster instance that the demo's daemon works on."""
    from omnisupport_ingest.runtime.dagster_home import dagster_environment

    os.environ.update(dagster_environment(demo.settings, demo.home))
    from dagster import DagsterInstance

    with DagsterInstance.get() as instance:
        yield instance


def _wait(demo: Demo, done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _STEP_SECONDS
    while not done():
        demo.supervisor.check()
        if time.monotonic() > deadline:
            raise DemoStuck(
                f"Waited {_STEP_SECONDS:.0f} s for {what}.",
                fix=f"Read the logs in {demo.home.logs}; then run the demo again, it goes on from here.",
            )
        time.sleep(_LOOK_SECONDS)
