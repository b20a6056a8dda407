"""The demo's waiting: it ends at once where nothing would ever come."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.cli import demo_pipeline
from omnisupport_ingest.cli.demo_pipeline import DemoStuck
from omnisupport_ingest_tests.stages.story import SOURCE, Change, Commit, Story


def test_a_hole_ends_the_demo_until_a_new_epoch_has_begun(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for lsn in (10, 20, 30):
        batch = story.land(Commit(lsn, 1, [Change("c", lsn, {"title": "one", "body": None})]))
        if lsn == 20:
            gone = story.store.folder / "manifests" / f"{batch.batch_id}.json"
    assert demo_pipeline._pending(story.workspace, SOURCE).landed == 3
    gone.unlink()
    with pytest.raises(DemoStuck, match="The chain of epoch 1 is broken") as raised:
        demo_pipeline._pending(story.workspace, SOURCE)
    assert "capture --new-epoch" in raised.value.fix
    story.store.begin_epoch("a batch is missing", None)
    assert demo_pipeline._pending(story.workspace, SOURCE).landed == 1
