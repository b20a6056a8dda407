"""Withheld events of sealed windows lose their values: no byte of them is left, and no table changes."""

from __future__ import annotations

import shutil
from typing import Any

import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.checks.lake_checks import counts_add_up
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.removed import QUARANTINE, RAW, Removed
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.old_files import sweep_old_files
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.retention.test_killed import REMOVE, killed, opened
from omnisupport_ingest_tests.retention.test_story import DAY, put, rows, take_all, told

SECRET = "s3cret-of-somebody-else"
"""Longer than the contract allows a title to be."""


def decided(folder, spark) -> Story:  # type: ignore[no-untyped-def]
    """An event with the secret was discarded and its window sealed; another one came too late for it."""
    story = told(folder, {"landing": "P7D", "raw": "P10D", "quarantine": "P12D"})
    story.land(
        put(10, 1, "first", op="c"),
        put(11, 2, "fine", id=2, op="c"),
        Commit(12, 3, [Change("u", 2, {"title": SECRET}, unchanged=("body",))]),
    )
    story.land(put(30, 11 * DAY, "a week on"))
    take_all(story, spark)
    (row,) = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    decide(story.workspace, SOURCE, "discard", [row.event], reviewer="ana", why="looked at")
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    apply(story)
    assert Removed.open(story.workspace, SOURCE).sealed == {FIRST}
    story.land_again(Commit(15, 4, [Change("u", 1, {"title": "late s3cret", "body": "s3cret"})]))
    story.land(put(40, 13 * DAY, "later"))
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    history.materialize(story.workspace, spark, story.contract, "run")
    return story


def apply(story: Story) -> dict[str, int]:
    carried = carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
    return {each.layer: each.files for each in carried}


def hashes(story: Story) -> list[str]:
    """Of the net changes of the window, the dimension and the history."""
    net = story.workspace.net_changes(story.contract).open().state(FIRST)
    tables = (story.workspace.dimension(story.contract), story.workspace.history(story.contract))
    states = [net, *(table.open().state("") for table in tables)]
    return [state.checkpoint.content_hash for state in states if state is not None]


def events(story: Story) -> list[dict[str, Any]]:
    """The withheld events of the window."""
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None
    return [row for file in files.of(FIRST) for row in pq.ParquetFile(file.uri).read().to_pylist()]


def images(story: Story) -> list[tuple[int, str, str | None]]:
    return sorted((row["commit_lsn"], row["op"], row["after"]) for row in events(story))


def test_values_of_withheld_events_leave_sealed_windows_and_everything_else_stays(tmp_path, spark):
    story = decided(tmp_path, spark)
    before, shown = hashes(story), rows(story, spark)
    assert len(before) == 3 and shown[2][1] == ("title",)
    plan = plan_retention(story.workspace, SOURCE)
    (found,) = plan.values
    assert (found.table, found.window, found.events, found.undecided) == ("notes", FIRST, 2, 1)
    assert SECRET in str(images(story))

    assert apply(story)[QUARANTINE] == found.files
    assert images(story) == [
        (12, "u", '{"id":null,"title":null}'),
        (15, "u", '{"id":null,"title":null,"body":null}'),
    ]
    assert not plan_retention(story.workspace, SOURCE).values
    assert [each.layer for each in Removed.open(story.workspace, SOURCE).removals].count(QUARANTINE) == 1
    # The net changes of the window are folded again, from the same events without their values.
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    take_all(story, spark)
    made = history.materialize(story.workspace, spark, story.contract, "run")
    assert hashes(story) == before and rows(story, spark) == shown
    assert counts_add_up(story.workspace, SOURCE).passed
    again = history.materialize(story.workspace, spark, story.contract, "run", replay=True)
    assert again.content_hash == made.content_hash == before[2]
    states = {
        row.state for row in quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    }
    assert states == {"discarded", "open"}

    # What still comes for the window loses its values with the next call.
    story.land_again(Commit(16, 5, [Change("u", 1, {"title": "s3cret too", "body": "x"})]))
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    assert apply(story)[QUARANTINE] == 1
    assert [text for _, _, text in images(story)][-1] == '{"id":null,"title":null,"body":null}'


def test_the_line_of_a_file_by_which_a_withheld_event_came_leaves_with_its_values(tmp_path, spark):
    story = decided(tmp_path, spark)
    apply(story)
    line = {"title": "a s3cret of a file", "body": "s3cret"}
    story.land_file(Commit(17, 6, [Change("u", 1, line)]))
    story.land_file(Commit(18, 7, [Change("d", 1)]))
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    envelopes = [row["envelope"] for row in events(story) if row["envelope"] is not None]
    assert len(envelopes) == 2 and "s3cret" in str(envelopes)

    (found,) = plan_retention(story.workspace, SOURCE).values
    assert found.events == 2
    assert apply(story)[QUARANTINE] == found.files
    # The story's own form of an identity names its event by the row; that of a real file has a hash there.
    assert "s3cret" not in str([{**row, "identity": None} for row in events(story)])
    assert all(row["envelope"] is None for row in events(story))
    assert not plan_retention(story.workspace, SOURCE).values


def test_while_raw_has_the_window_its_quarantine_keeps_its_values_and_it_is_said(tmp_path, spark):
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D", "quarantine": "P10D"})
    story.land(put(10, 1, SECRET, op="c"))
    story.land(put(30, 11 * DAY, "later"))
    take_all(story, spark)
    plan = plan_retention(story.workspace, SOURCE)
    told_why = {(each.layer, each.why) for each in plan.refused}
    assert not plan.values and (RAW, "1 of its events in quarantine wait for a decision") in told_why
    assert any(layer == QUARANTINE and "raw has its events" in why for layer, why in told_why)
    assert SECRET in str(images(story))


@pytest.fixture(scope="module")
def old_home(tmp_path_factory, spark):  # type: ignore[no-untyped-def]
    story = decided(tmp_path_factory.mktemp("old"), spark)
    return story.workspace.settings.home, story.contracts


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        "lake.commit.after@retention_ledger",
        "lake.commit.before@quarantine",
        "lake.commit.after@quarantine",
        "lake.commit.before@deduped_events",
        "lake.commit.after@deduped_events",
        "lake.commit.before@quarantine:2",
    ],
)
def test_a_removal_of_values_killed_at_a_gate_is_ended_by_the_next_call(old_home, tmp_path, point):
    home = tmp_path / "home"
    shutil.copytree(old_home[0], home, symlinks=True)
    killed(REMOVE, point, home, old_home[1])
    workspace = opened(home, old_home[1])
    assert [each.layer for each in Removed.open(workspace, SOURCE).unfinished] == [QUARANTINE]
    carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test")
    removed = Removed.open(workspace, SOURCE)
    assert not removed.unfinished and not plan_retention(workspace, SOURCE).values
    files = QuarantineFiles.newest(workspace, SOURCE)
    assert files is not None and files.unsettled(FIRST) is None
    held = [pq.ParquetFile(file.uri).read().to_pylist() for file in files.of(FIRST)]
    assert sum(map(len, held)) == 2 and "s3cret" not in str(held)
    sweep_old_files(workspace, SOURCE)
    assert QuarantineFiles.newest(workspace, SOURCE).of(FIRST) == files.of(FIRST)  # type: ignore[union-attr]


def test_the_command_line_shows_whose_values_would_go(old_home, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(old_home[0], home, symlinks=True)
    with environment(home=str(home), contracts_dir=str(old_home[1]), window="minutes:1"):
        shown = command("retention", "plan").out
        assert (
            f"quarantine of notes, kept P12D: values of 2 events (1 undecided, and sealed) to go: {FIRST}"
            in shown
        )
        done = command("retention", "apply", "--yes", "--by", "ana").out
        assert "removed from quarantine: 1 window" in done
        assert "values of" not in command("retention", "plan").out
