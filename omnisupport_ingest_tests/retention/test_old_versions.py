"""Versions that ended longer ago than the contract keeps them leave the history, and nothing returns them."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta

import pytest

from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.key_files import SEALED
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.removed import HISTORY, Removed
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.layers.story import SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.retention.test_killed import REMOVE, killed, opened
from omnisupport_ingest_tests.retention.test_story import DAY, as_of_first, put, take_all, told


def make(story: Story, spark, **how):  # type: ignore[no-untyped-def]
    return history.materialize(story.workspace, spark, story.contract, "run", **how)


def versions(story: Story, spark) -> list[tuple[int, str | None, str | None]]:  # type: ignore[no-untyped-def]
    table = story.workspace.history(story.contract).open()
    rows = table.read(spark, table.all_files()).orderBy("id", "_cdc_valid_from_position").collect()
    return [(row["id"], row["title"], row["_cdc_closed_by"]) for row in rows]


def apply(story: Story) -> list[tuple[str, int]]:
    carried = carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
    return [(each.layer, each.windows) for each in carried]


def as_recorded(story: Story) -> bool:
    """Whether the checkpoint is of the rows in the files."""
    snapshot = story.workspace.history(story.contract).open()
    state = snapshot.state("")
    assert state is not None
    held = hash_of_files([file.uri for file in snapshot.all_files()], "_cdc_row_hash")
    return (state.checkpoint.content_hash, state.checkpoint.rows) == (str(held), held.count)


def old_story(folder, spark) -> Story:  # type: ignore[no-untyped-def]
    story = told(folder, {"history": "P8D"})
    story.land(
        put(10, 1, "first", op="c"),
        put(11, 2, "goes", id=2, op="c"),
        put(12, 3, "stays", id=3, op="c"),
        put(20, 61, "second"),
        Commit(21, 70, [Change("d", 2)]),
    )
    story.land(put(30, 11 * DAY, "third"))
    take_all(story, spark)
    make(story, spark)
    return story


def test_old_versions_leave_once_open_ones_stay_and_no_rebuild_or_late_event_brings_them_back(
    tmp_path, spark
):
    story = old_story(tmp_path, spark)
    all_of_them = [(1, "first", "u"), (1, "second", "u"), (1, "third", None)]
    assert versions(story, spark) == [*all_of_them, (2, "goes", "d"), (3, "stays", None)]

    plan = plan_retention(story.workspace, SOURCE)
    (found,) = plan.versions
    # By the watermark, and by whole hours: eight days before eleven days on.
    assert (found.table, found.versions, found.files) == ("notes", 2, 1)
    assert timedelta(0) <= START + timedelta(days=3) - found.ended_before <= timedelta(hours=1)
    assert not Removed.open(story.workspace, SOURCE).removals, "a plan changes nothing"
    assert len(versions(story, spark)) == 5

    assert apply(story) == [(HISTORY, 1)]
    assert apply(story) == []
    left = [(1, "second", "u"), (1, "third", None), (3, "stays", None)]
    assert versions(story, spark) == left
    assert as_recorded(story)
    removed = Removed.open(story.workspace, SOURCE)
    assert removed.ended_before("notes") == found.ended_before and not removed.unfinished
    assert removed.ended_before("other") is None
    assert {row["id"]: row["title"] for row in as_of_first(story, spark)} == {
        1: "first",
        2: "goes",
        3: "stays",
    }, "as-of reads events"

    version = story.workspace.history(story.contract).open().version
    make(story, spark)
    assert story.workspace.history(story.contract).open().version == version
    in_place = make(story, spark, replay=True).content_hash
    assert versions(story, spark) == left

    # A late event has its key made again from all its events; what is old by now does not come back.
    story.land_again(put(15, 30, "late"), put(16, 11 * DAY - 60, "late too", id=3))
    take_all(story, spark)
    late = make(story, spark)
    assert versions(story, spark) == [
        (1, "second", "u"),
        (1, "third", None),
        (3, "stays", "u"),
        (3, "late too", None),
    ]
    assert late.content_hash != in_place
    assert make(story, spark, replay=True).content_hash == late.content_hash
    assert as_recorded(story)


def test_of_a_key_with_very_many_versions_the_sealed_files_go_too(tmp_path, spark, monkeypatch):
    monkeypatch.setattr(history, "ROWS_PER_FILE", 4)
    story = told(tmp_path, {"history": "P8D"})
    story.land(put(10, 1, "v0", op="c"))
    story.land(*(put(20 + n, n * DAY / 2, f"v{n}") for n in range(1, 31)))
    take_all(story, spark)
    make(story, spark)
    files = {file.path for file in story.workspace.history(story.contract).open().all_files()}
    assert len([path for path in files if SEALED in path]) == 6
    assert apply(story) == [(HISTORY, 1)]
    # Fifteen days on and eight days back; v13 ended then.
    assert [title for _, title, _ in versions(story, spark)] == [f"v{n}" for n in range(13, 31)]
    after = {file.path for file in story.workspace.history(story.contract).open().all_files()}
    assert len([path for path in after if SEALED in path]) == 3 and len(after & files) == 3
    assert as_recorded(story)
    story.land(put(60, 15 * DAY, "next"))
    take_all(story, spark)
    done = make(story, spark)
    assert make(story, spark, replay=True).content_hash == done.content_hash


@pytest.fixture(scope="module")
def old_home(tmp_path_factory, spark):  # type: ignore[no-untyped-def]
    story = old_story(tmp_path_factory.mktemp("old"), spark)
    return story.workspace.settings.home, story.contracts


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        "lake.ledger.after@retention_ledger",
        "lake.commit.after@retention_ledger",
        "lake.place.before@dim_notes_history",
        "lake.place.after@dim_notes_history",
        "lake.commit.before@dim_notes_history",
        "lake.commit.after@dim_notes_history",
    ],
)
def test_a_removal_of_versions_killed_at_a_gate_is_ended_by_the_next_call(old_home, tmp_path, spark, point):
    home = tmp_path / "home"
    shutil.copytree(old_home[0], home, symlinks=True)
    killed(REMOVE, point, home, old_home[1])
    workspace = opened(home, old_home[1])
    (contract,) = workspace.contracts.of_source(SOURCE)
    table = workspace.history(contract)
    begun = bool(Removed.open(workspace, SOURCE).removals)
    assert begun == (point != "lake.ledger.after@retention_ledger")
    carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test")
    removed = Removed.open(workspace, SOURCE)
    assert [each.layer for each in removed.removals] == [HISTORY] and not removed.unfinished
    snapshot = table.open()
    held = hash_of_files([file.uri for file in snapshot.all_files()], "_cdc_row_hash")
    state = snapshot.state("")
    assert state is not None and state.checkpoint.content_hash == str(held) and held.count == 3
    assert carry_out(workspace, plan_retention(workspace, SOURCE), removed_by="test") == []
    assert history.materialize(workspace, spark, contract, "run", replay=True).rows == 3


def test_the_command_line_shows_what_would_leave_a_history_and_what_it_kept(old_home, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(old_home[0], home, symlinks=True)
    with environment(home=str(home), contracts_dir=str(old_home[1]), window="minutes:1"):
        kept = command("retention", "show").out
        assert "versions that ended longer ago leave" in kept
        assert "Dagster's runs" in kept and "OMNISUPPORT_RUNS_KEPT_DAYS" in kept
        (document,) = json.loads(command("retention", "plan", "--json").out)
        (found,) = document["old_versions"]
        assert (found["table"], found["versions"], found["keep"]) == ("notes", 2, "P8D")
        shown = command("retention", "plan").out
        assert "history of notes, kept P8D: 2 versions to go that ended before 2026-01-04" in shown
        assert "Nothing was removed." in command("retention", "apply").out
        assert (
            "removed from history: 1 table, 1 file"
            in command("retention", "apply", "--yes", "--by", "ana").out
        )
        assert "to go that ended" not in command("retention", "plan").out
