"""A window waits however much waits before it: the list of windows says so, and no erasure is complete."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.versions import RulesVersions
from omnisupport_ingest.read.window_list import window_list
from omnisupport_ingest.review.certificate import windows_waiting
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story


@pytest.mark.full
def test_a_window_behind_a_backlog_waits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(tmp_path / "told")
    for number in range(1, 502):
        story.land(Commit(number, number / 100, [Change("c", number, {"title": "t", "body": "b"})]))
    story.land(Commit(1000, 90, [Change("c", 1000, {"title": "t", "body": "b"})]))
    waits = pending_windows(story.workspace, SOURCE)
    assert len(waits.windows) == 1
    [(_, behind)] = [sorted(story.store.windows())]
    assert [each.pending for each in window_list(story.workspace, SOURCE).windows] == [True, True]
    # It was judged by all that is known, and something has landed in it since.
    versions = RulesVersions(story.workspace, SOURCE).of(behind)
    judged = SimpleNamespace(state=lambda _window: SimpleNamespace(versions=versions))
    # The first look is the erasure's own; the planner's looks after it see the real tables.
    look, stand_ins = LakeTable.look, iter([judged])
    monkeypatch.setattr(LakeTable, "look", lambda *table: next(stand_ins, None) or look(*table))
    assert windows_waiting(story.workspace, SOURCE, {behind}) == [behind]
