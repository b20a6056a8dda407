"""Tables of withdrawn contracts: their bytes are in the forecast of the disk, and old files are swept."""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path

from pyspark.sql import SparkSession

from omnisupport_ingest.retention.forecast import disk_forecast
from omnisupport_ingest.retention.old_files import old_files, sweep_old_files, swept_sources
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers


def test_withdrawn_tables_are_in_the_forecast_and_swept(tmp_path: Path, spark: SparkSession) -> None:
    story = Story(tmp_path / "told")
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})]))
    run_layers(story.workspace, spark, [FIRST])
    before = disk_forecast(story.workspace, story.clock).layers
    assert before["dimensions"] and before["net_changes"]
    other = copy.deepcopy(CONTRACT)
    other["x-cdc"] |= {"table": "other"}
    (story.contracts / "other.json").write_text(json.dumps(other))
    withdrawn = story.contracts.parent / "withdrawn"
    withdrawn.mkdir()
    (story.contracts / "notes.json").rename(withdrawn / f"{SOURCE}.notes.json")
    (withdrawn / f"{SOURCE}.broken.json").write_text("no contract, and no reason to stop")

    workspace = open_workspace(tmp_path / "told")
    after = disk_forecast(workspace, story.clock).layers
    assert after["dimensions"] == before["dimensions"] and after["net_changes"] == before["net_changes"]
    left = workspace.home.lake / SOURCE / "dim_notes" / "left.parquet"
    left.write_bytes(b"of a run that died")
    long_ago = time.time() - 3 * 86_400
    os.utime(left, (long_ago, long_ago))
    (found,) = old_files(workspace, SOURCE)
    assert (found.table, found.count) == (f"{SOURCE}/dim_notes", 1)
    assert sweep_old_files(workspace, SOURCE) == 1 and not left.exists()


def test_old_files_of_a_retired_source_are_swept(tmp_path: Path) -> None:
    story = Story(tmp_path / "told")
    other = copy.deepcopy(CONTRACT)
    other["x-cdc"] |= {"source": "other"}
    (story.contracts / "other.json").write_text(json.dumps(other))
    story.workspace.deduped(SOURCE).open()
    withdrawn = story.contracts.parent / "withdrawn"
    withdrawn.mkdir()
    (story.contracts / "notes.json").rename(withdrawn / f"{SOURCE}.notes.json")
    workspace = open_workspace(tmp_path / "told")
    assert workspace.contracts.sources() == ("other",) and swept_sources(workspace) == [SOURCE, "other"]
    left = workspace.home.lake / SOURCE / "deduped_events" / "left.parquet"
    left.write_bytes(b"of a run that died")
    long_ago = time.time() - 3 * 86_400
    os.utime(left, (long_ago, long_ago))
    assert sum(sweep_old_files(workspace, each) for each in swept_sources(workspace)) == 1
    assert not left.exists()
