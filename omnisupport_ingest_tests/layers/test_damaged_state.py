"""The state of a window is damaged: a run makes the window again, and the tables are as before."""

from __future__ import annotations

from pathlib import Path

import pytest
from deltalake import DeltaTable

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story

WINDOWS = (FIRST, SECOND)


def run(story: Story, spark) -> dict[str, str]:
    """One run of every layer; the content hash of each window of each table."""
    found = [
        *raw.materialize(story.workspace, spark, SOURCE, WINDOWS, "run"),
        *deduped.materialize(story.workspace, spark, SOURCE, WINDOWS, "run"),
        *net_changes.materialize(story.workspace, spark, story.contract, WINDOWS, "run"),
        dimensions.update(story.workspace, spark, story.contract, "run"),
    ]
    return {f"{each.table} {each.window}": each.content_hash for each in found}


def states(table: LakeTable) -> list[Path]:
    return [Path(uri) for uri in DeltaTable(str(table.folder)).file_uris() if layout.is_state(uri)]


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["raw", "deduped", "net_changes", "dimension"])
def test_the_next_run_makes_a_window_with_a_damaged_state_again(tmp_path: Path, spark, layer: str) -> None:
    story = Story(tmp_path)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": "long"})]))
    story.land(Commit(20, 61, [Change("u", 1, {"title": "two"}, unchanged=("body",))]))
    before = run(story, spark)
    assert not pending_windows(story.workspace, SOURCE).windows
    named = getattr(story.workspace, layer)
    table: LakeTable = named(SOURCE if layer in ("raw", "deduped") else story.contract)
    for path in states(table):
        path.write_bytes(b"damaged")

    # A new process: what one has read of a state it may keep.
    story.workspace = story.workspace.open(story.workspace.settings)
    assert pending_windows(story.workspace, SOURCE).windows
    assert run(story, spark) == before
    assert not pending_windows(story.workspace, SOURCE).windows
    for path in states(table):
        assert path.read_bytes() != b"damaged"
    assert DeltaTable(str(table.folder)).to_pyarrow_table().num_rows > 0
