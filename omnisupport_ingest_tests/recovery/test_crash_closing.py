"""A run is killed while it closes a window: the window is as before or closed, and its rows stay."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import finish, open_workspace, run_layers, start
from omnisupport_ingest_tests.recovery.traces import contents, tables

pytestmark = pytest.mark.crash

COMMITS = (
    Commit(10, 1, [Change("c", 1, {"title": "one", "body": "long"}), Change("c", 2, {"title": "two"})]),
    Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))]),
    Commit(30, 61, [Change("d", 2), Change("c", 3, {"title": "x" * 21, "body": None})]),
    Commit(40, 62, [Change("u", 1, {"title": "eins"}, unchanged=("body",))]),
)
LATER = Commit(1000, 2 * 60 * 60, [Change("c", 4, {"title": "later", "body": None})])
LATER_WINDOW = "2026-01-01T1400"

# The failpoint, and the layers whose windows are closed when it has struck.
DEATHS = [
    ("lake.write.after@raw", ""),
    ("lake.place.after@raw", ""),
    ("lake.commit.before@raw", ""),
    ("lake.commit.after@raw", "raw"),
    ("lake.place.after@deduped", "raw"),
    ("lake.commit.after@deduped", "raw deduped"),
    ("lake.state.after@net_changes", "raw deduped"),
]


def closed_layers(workspace: Workspace) -> set[str]:
    """The layers that have closed both windows; fails where one is closed and the other is not."""
    found = set()
    for name, table in tables(workspace):
        if name in ("raw", "deduped", "net_changes"):
            snapshot = table.open()
            states = [snapshot.state(window) for window in (FIRST, SECOND)]
            (is_closed,) = {state is not None and state.closed for state in states}
            if is_closed:
                found.add(name)
    return found


def test_a_run_killed_while_it_closes_windows_leaves_them_as_before_or_closed(
    tmp_path: Path, spark: SparkSession, warm: str
):
    folder = tmp_path / "told"
    story = Story(folder)
    story.clock = START + timedelta(hours=3)
    for commit in COMMITS:
        story.land(commit)
        run_layers(story.workspace, spark)
    story.land(LATER)
    run_layers(story.workspace, spark, [LATER_WINDOW])
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST, SECOND)
    before = contents(story.workspace)
    for failpoint, layers in DEATHS:
        process = start(folder, failpoint=failpoint, remote=warm)
        assert finish(process) == -signal.SIGKILL, (folder / "pipeline.log").read_text()[-2000:]
        workspace = open_workspace(folder)
        assert contents(workspace) == before
        assert closed_layers(workspace) == set(layers.split())
        assert pending_windows(workspace, SOURCE).windows == (FIRST, SECOND)
    process = start(folder, remote=warm)
    assert finish(process) == 0, (folder / "pipeline.log").read_text()[-2000:]
    workspace = open_workspace(folder)
    assert closed_layers(workspace) == {"raw", "deduped", "net_changes"}
    assert pending_windows(workspace, SOURCE).windows == ()
    for name, table in tables(workspace):
        sweep(table, timedelta(0))
        if name in ("raw", "deduped"):
            snapshot = table.open()
            assert [len(snapshot.files(window)) for window in (FIRST, SECOND)] == [1, 1]
    assert contents(workspace) == before
