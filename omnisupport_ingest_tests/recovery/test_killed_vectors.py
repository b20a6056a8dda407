"""An update by deletion vectors is killed at each of its failpoints, and ends as one that never was."""

from __future__ import annotations

import copy
import signal
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.key_files import is_fresh
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import CONTRACT, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_layers import state
from omnisupport_ingest_tests.recovery.pipeline import finish, open_workspace, run_layers, start

ROWS = 3_000
MANY = Commit(10, 1, [Change("c", n, {"title": f"t{n}", "body": "b"}) for n in range(1, ROWS + 1)])
# So many rows, so far apart, that their vector does not fit in the log entry.
SOME = Commit(20, 2, [Change("u", n, {"title": "new"}, unchanged=("body",)) for n in range(1, ROWS, 17)])
POINTS = [
    f"{name}.{moment}"
    for name, moment in product(
        ("lake.write", "lake.place", "lake.vectors", "lake.state", "lake.commit"), ("before", "after")
    )
]


@pytest.mark.slow
def test_an_update_killed_at_every_failpoint_ends_as_one_that_never_was(
    tmp_path: Path, spark: SparkSession, warm: str
) -> None:
    story = Story(tmp_path / "told")
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"]["deletion_vectors"] = True
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    story.land(MANY)
    run_layers(story.workspace, spark)
    before = {file.path for file in story.workspace.dimension(story.contract).open().all_files()}
    story.land(SOME)
    for point in POINTS:
        process = start(tmp_path / "told", failpoint=f"{point}@dim_notes", remote=warm)
        assert finish(process) == -signal.SIGKILL, (
            point,
            (tmp_path / "told/pipeline.log").read_text()[-2000:],
        )
    process = start(tmp_path / "told", remote=warm)
    assert finish(process) == 0, (tmp_path / "told/pipeline.log").read_text()[-2000:]
    workspace = open_workspace(tmp_path / "told")
    assert pending_windows(workspace, SOURCE).windows == ()
    story.workspace = workspace
    table = workspace.dimension(story.contract)
    for _ in range(2):
        snapshot = table.open()
        files = snapshot.all_files()
        assert before < {file.path for file in files}
        assert [is_fresh(file.path) for file in files].count(True) == 1
        assert sum(file.rows for file in files) == ROWS
        changed = {key for key, row in state(story, spark).items() if row[0] == "new"}
        assert changed == set(range(1, ROWS, 17))
        sweep(table, timedelta(0))
    assert len(list(table.folder.rglob("*.bin"))) == 1
