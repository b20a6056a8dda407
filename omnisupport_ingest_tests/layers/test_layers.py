"""From landed batches to the dimension, on real Spark and real Delta tables."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc import ordinary
from omnisupport_ingest.contracts.decision_table import CONTRACT_CHANGE, DUPLICATE_WRITE, WAIT
from omnisupport_ingest.lake import file_tasks, staged_frames, standing_task
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.dimension.dimensions import GateClosed
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_soon, pending_windows
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import TableIncomplete, read_as_of, require_complete
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story

pytestmark = pytest.mark.usefixtures("spark")

INSERT = Commit(
    10, 1, [Change("c", 1, {"title": "one", "body": "long"}), Change("c", 2, {"title": "two", "body": "B2"})]
)
UPDATE = Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])
MOVE = Commit(30, 61, [Change("d", 1), Change("c", 9, {"title": "uno"}, unchanged=("body",), moved_from=1)])
DELETE = Commit(40, 62, [Change("d", 2)])
EMPTY = Commit(5, 0, [])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def run(story: Story, spark: SparkSession, *windows: str, replay: bool = False) -> dict[str, list]:
    arguments = (story.workspace, spark, SOURCE, windows, "run")
    found = {
        "raw": raw.materialize(*arguments, replay=replay),
        "deduped": deduped.materialize(*arguments, replay=replay),
        "net_changes": net_changes.materialize(
            story.workspace, spark, story.contract, windows, "run", replay=replay
        ),
    }
    found["dimension"] = [dimensions.update(story.workspace, spark, story.contract, "run", whole=replay)]
    return found


def state(story: Story, spark: SparkSession) -> dict[int, tuple]:
    snapshot = story.workspace.dimension(story.contract).open()
    rows = snapshot.read(spark, snapshot.files("")).collect()
    return {
        row["id"]: (row["title"], row["body"], row["_cdc_is_deleted"], row["_cdc_unresolved"]) for row in rows
    }


FINAL = {1: ("uno", "long", True, []), 2: ("two", "B2", True, []), 9: ("uno", "long", False, [])}


def hashes(found: dict[str, list]) -> dict[str, list[str]]:
    return {layer: [each.content_hash for each in checkpoints] for layer, checkpoints in found.items()}


@pytest.mark.quick
def test_a_key_change_across_windows_takes_the_unsent_column_from_the_old_key(story, spark):
    story.land(INSERT, UPDATE)
    story.land(MOVE, DELETE)
    run(story, spark, FIRST, SECOND)
    assert state(story, spark) == FINAL


@pytest.mark.slow
def test_batch_by_batch_and_all_at_once_give_the_same_content_in_every_layer(tmp_path, spark):
    steps, whole = Story(tmp_path / "steps"), Story(tmp_path / "whole")
    for commit in (INSERT, UPDATE, MOVE, DELETE):
        steps.land(commit)
        found = run(steps, spark, FIRST, SECOND)
    for commit in (INSERT, UPDATE, MOVE, DELETE):
        whole.land(commit)
    assert hashes(found) == hashes(run(whole, spark, FIRST, SECOND))
    assert state(steps, spark) == FINAL


@pytest.mark.quick
def test_running_again_commits_nothing_and_a_replay_gives_the_same_hash_in_a_new_generation(story, spark):
    story.land(INSERT, UPDATE, MOVE, DELETE)
    first = run(story, spark, FIRST, SECOND)
    again = run(story, spark, FIRST, SECOND)
    for layer, checkpoints in again.items():
        # A run that was asked for again says so, and nothing else of it is new.
        assert [each.scenarios.get(DUPLICATE_WRITE, 0) for each in checkpoints] == (
            [0] if layer == "dimension" else [1, 1]
        ), layer
        told = [replace(each, scenarios={}, detectors={}) for each in checkpoints]
        assert told == [replace(each, scenarios={}, detectors={}) for each in first[layer]]
    replayed = run(story, spark, FIRST, SECOND, replay=True)
    assert hashes(replayed) == hashes(first)
    for layer, checkpoints in replayed.items():
        for now, before in zip(checkpoints, first[layer], strict=True):
            assert now.generation > before.generation
    assert state(story, spark) == FINAL


def test_whole_columns_single_events_and_several_tasks_give_the_same_content(tmp_path, spark, monkeypatch):
    odd = Commit(
        50, 63, [Change("u", 9, {"title": None, "body": "short"}), Change("c", 7, {"title": "x" * 201})]
    )
    found = []
    for few, of_a_task in product((0, 1000), (0, 1000)):
        monkeypatch.setattr(ordinary, "FEW", few)
        # Large work is done by whole columns and by compiled plans, and by more than one task.
        monkeypatch.setattr(staged_frames, "COMPILED_FROM", few)
        monkeypatch.setattr(file_tasks, "FEW_ROWS", of_a_task)
        story = Story(tmp_path / f"{few}-{of_a_task}")
        story.land(INSERT, UPDATE, MOVE, DELETE, odd)
        found.append((hashes(run(story, spark, FIRST, SECOND)), state(story, spark)))
    assert all(each == found[0] for each in found)


def test_a_small_run_is_one_job_for_each_layer(story, spark):
    story.land(INSERT, UPDATE)
    run(story, spark, FIRST)
    story.land(Commit(30, 3, [Change("u", 1, {"title": "three"}, unchanged=("body",))]))
    jobs = {}
    for name, layer, of in (
        ("raw", raw, SOURCE),
        ("deduped", deduped, SOURCE),
        ("net", net_changes, story.contract),
    ):
        spark.sparkContext.setJobGroup(f"small {name}", "one run")
        layer.materialize(story.workspace, spark, of, [FIRST], "run")
        jobs[name] = len(spark.sparkContext.statusTracker().getJobIdsForGroup(f"small {name}"))
    spark.sparkContext.setJobGroup("small dimension", "one run")
    dimensions.update(story.workspace, spark, story.contract, "run")
    jobs["dimension"] = len(spark.sparkContext.statusTracker().getJobIdsForGroup("small dimension"))
    # The columns of the rows that were written show that they pass the gate.
    assert jobs == {"raw": 1, "deduped": 1, "net": 1, "dimension": 1}
    assert state(story, spark)[1][0] == "three"


def test_a_first_snapshot_is_one_job_of_the_dimension_though_its_boundary_stands_among_its_rows(story, spark):
    rows = {number: {"title": f"t{number}", "body": "b"} for number in range(1, 9)}
    read = Commit(10, 1, [Change("r", number, values) for number, values in rows.items()])
    story.land_chunk(read)
    story.land_boundary(read)
    raw.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    held = story.workspace.net_changes(story.contract).open().files(FIRST)
    assert [file.rows for file in held] == [9]
    spark.sparkContext.setJobGroup("first snapshot", "one run")
    dimensions.update(story.workspace, spark, story.contract, "run")
    jobs = spark.sparkContext.statusTracker().getJobIdsForGroup("first snapshot")
    assert len(jobs) == 1
    assert state(story, spark) == {number: (f"t{number}", "b", False, []) for number in range(1, 9)}


def test_a_small_run_of_the_platform_is_one_job_and_commits_the_same(tmp_path, spark):
    update = Commit(30, 3, [Change("u", 1, {"title": "three"}, unchanged=("body",))])
    found, jobs = [], []
    for stays in (False, True):
        story = Story(tmp_path / f"{stays}")
        story.land(INSERT, UPDATE)
        run(story, spark, FIRST)
        story.land(update)
        spark.sparkContext.setJobGroup(f"whole {stays}", "one run")
        with standing_task.standing_task(spark) if stays else nullcontext():
            done = hashes(run(story, spark, FIRST))
        standing_task.release()
        spark.sparkContext.setJobGroup("apart", "not counted")
        versions = [table.open().version for table in story.workspace.tables() if table.exists]
        found.append((done, state(story, spark), versions))
        jobs.append(len(spark.sparkContext.statusTracker().getJobIdsForGroup(f"whole {stays}")))
    assert found[0] == found[1]
    assert jobs == [4, 1]


@pytest.mark.quick
def test_a_second_delivery_is_kept_in_raw_and_dropped_as_duplicate_downstream(story, spark):
    story.land(INSERT, UPDATE)
    first = run(story, spark, FIRST)
    story.land_again(INSERT, UPDATE)
    second = run(story, spark, FIRST)
    (raw_now,), (deduped_now,) = second["raw"], second["deduped"]
    assert raw_now.rows == 6
    assert (deduped_now.raw, deduped_now.deduped, deduped_now.duplicates, deduped_now.quarantined) == (
        6,
        3,
        3,
        0,
    )
    assert second["net_changes"][0].content_hash == first["net_changes"][0].content_hash


@pytest.mark.quick
def test_two_contents_at_one_position_are_both_quarantined_and_are_withheld(story, spark):
    story.land(INSERT)
    story.land(UPDATE)
    story.land_again(Commit(20, 2, [Change("u", 1, {"title": "another"}, unchanged=("body",))]))
    found = run(story, spark, FIRST)
    assert (found["deduped"][0].deduped, found["deduped"][0].quarantined) == (2, 2)
    assert state(story, spark)[1] == (None, "long", False, ["title"])


@pytest.mark.quick
def test_an_event_that_breaks_a_row_rule_is_quarantined_until_a_later_one_carries_the_column(story, spark):
    story.land(INSERT, Commit(20, 2, [Change("u", 1, {"title": "x" * 21}, unchanged=("body",))]))
    found = run(story, spark, FIRST)
    assert found["deduped"][0].quarantined == 1
    assert state(story, spark)[1] == (None, "long", False, ["title"])
    story.land(Commit(50, 3, [Change("u", 1, {"title": "short"}, unchanged=("body",))]))
    run(story, spark, FIRST)
    assert state(story, spark)[1] == ("short", "long", False, [])


@pytest.mark.quick
def test_a_truncate_in_one_window_deletes_the_keys_of_another(story, spark):
    story.land(
        INSERT,
        Commit(30, 61, [Change("t")]),
        Commit(31, 62, [Change("c", 2, {"title": "new", "body": None})]),
    )
    run(story, spark, FIRST, SECOND)
    assert state(story, spark) == {1: ("one", "long", True, []), 2: ("new", None, False, [])}


def test_an_older_event_that_arrives_last_overwrites_nothing(story, spark):
    story.land(Commit(20, 2, [Change("u", 1, {"title": "newest", "body": "b"})]))
    run(story, spark, FIRST)
    story.land_again(Commit(10, 1, [Change("c", 1, {"title": "oldest", "body": "a"})]))
    run(story, spark, FIRST)
    assert state(story, spark)[1] == ("newest", "b", False, [])


def test_an_event_far_ahead_of_the_clock_waits_in_the_sentinel_and_stops_nothing(story, spark):
    story.land(
        INSERT, Commit(20, 60 * 60 * 24 * 30, [Change("c", 3, {"title": "from the future", "body": None})])
    )
    run(story, spark, FIRST)
    quarantine = story.workspace.quarantine(SOURCE).open()
    rows = quarantine.read(spark, quarantine.all_files()).collect()
    assert [(row["window"], row["reason"]) for row in rows] == [("out-of-range", "out_of_range")]
    assert state(story, spark)[3] == (None, None, False, ["title", "body"])


def test_a_damaged_batch_file_is_named_and_changes_nothing(story, spark):
    story.land(INSERT)
    run(story, spark, FIRST)
    manifest = story.land(UPDATE)
    path = story.store.path_of(manifest.files[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedBatch, match=path.name):
        run(story, spark, FIRST)
    path.write_bytes(whole)
    run(story, spark, FIRST)
    assert state(story, spark)[1][0] == "uno"


def test_pending_names_the_windows_that_landed_and_are_not_in_every_layer(story, spark):
    assert pending_windows(story.workspace, SOURCE).windows == ()
    story.land(INSERT, MOVE)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST, SECOND)
    arguments = (story.workspace, spark, SOURCE, [FIRST], "run")
    raw.materialize(*arguments)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST, SECOND)
    run(story, spark, FIRST)
    assert pending_windows(story.workspace, SOURCE).windows == (SECOND,)
    run(story, spark, SECOND)
    assert pending_windows(story.workspace, SOURCE).windows == ()


def test_who_asks_with_patience_hears_of_a_batch_that_lands_meanwhile(story):
    assert pending_soon(story.workspace, SOURCE, patience=0.0).windows == ()
    landing = threading.Timer(0.3, story.land, [INSERT])
    landing.start()
    try:
        assert pending_soon(story.workspace, SOURCE, patience=60.0).windows == (FIRST,)
    finally:
        landing.join()


@pytest.mark.slow
def test_another_contract_makes_the_windows_stale_and_judges_them_again(story, spark):
    story.land(INSERT)
    run(story, spark, FIRST)
    stricter = {**story_contract(), "properties": {**story_contract()["properties"]}}
    stricter["properties"]["title"] = {**stricter["properties"]["title"], "maxLength": 2}
    story.write_contract(stricter)
    story.workspace = type(story.workspace).open(story.workspace.settings)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    found = run(story, spark, FIRST)
    assert (found["deduped"][0].deduped, found["deduped"][0].quarantined) == (0, 2)


def story_contract() -> dict:
    from omnisupport_ingest_tests.layers.story import CONTRACT

    return CONTRACT


@pytest.mark.slow
@pytest.mark.quick
def test_the_state_as_of_a_position_is_what_was_shown_when_the_stream_stood_there(story, spark):
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    story.land(INSERT, UPDATE)
    run(story, spark, FIRST)
    then = state(story, spark)
    story.land(MOVE, DELETE)
    run(story, spark, FIRST, SECOND)
    below = Lsn(MOVE.lsn - 1)
    rows = read_as_of(story.workspace, spark, [story.contract], below)[story.contract.name].collect()
    assert {row["id"]: (row["title"], row["body"], row["_cdc_is_deleted"], []) for row in rows} == then


def test_a_state_that_was_never_one_of_the_source_is_refused_by_name(story, spark):
    story.land_chunk(EMPTY, high=15)
    story.land_boundary(EMPTY, high=15)
    story.land(INSERT)
    at = partial(require_complete, story.workspace, SOURCE, [story.contract])
    with pytest.raises(TableIncomplete, match=r"Table notes has no state at 0/A .* starts at 0/F") as early:
        at(Position(1, Lsn(10), 0))
    assert early.value.fix == "Ask for 0/F or later, or for a later time."
    with pytest.raises(TableIncomplete, match="notes, notes have no state at 0/A in epoch 1: the last of"):
        require_complete(story.workspace, SOURCE, [story.contract] * 2, Position(1, Lsn(10), 0))
    with pytest.raises(TableIncomplete, match="Table notes is incomplete") as behind:
        at(Position(1, Lsn(20), 0))
    assert "capture is still behind: 10 bytes" in behind.value.fix
    story.land_idle(20)
    run(story, spark, FIRST)
    at(Position(1, Lsn(20), 0))
    read = read_as_of(story.workspace, spark, [story.contract], Lsn(19))[story.contract.name]
    assert {row["id"] for row in read.collect()} == {1, 2}
    LostChanges(story.store.folder, 1).add(story.contract.name, "was out", Lsn(17))
    with pytest.raises(TableIncomplete, match=r"Changes of table notes from 0/11 on may be missing") as lost:
        at(Position(1, Lsn(20), 0))
    assert "Or ask for 0/11 or earlier" in lost.value.fix
    at(Position(1, Lsn(17), 0))


def test_a_state_behind_a_gap_is_refused_with_the_repair_of_the_gap(story):
    story.land_chunk(EMPTY)
    story.land_boundary(EMPTY)
    story.land(INSERT)
    gone = story.land(UPDATE)
    story.land(MOVE)
    (story.store.folder / "manifests" / f"{gone.batch_id}.json").unlink()
    ask = partial(require_complete, story.workspace, SOURCE, [story.contract])
    ask(Position(1, Lsn(INSERT.lsn), 0))
    with pytest.raises(
        TableIncomplete, match=r"Table notes is incomplete.* The chain of epoch 1 is broken"
    ) as refused:
        ask(Position(1, Lsn(MOVE.lsn), 0))
    assert refused.value.fix.startswith("Restore the manifest")


def test_rows_that_do_not_meet_the_contract_are_not_shown(story, spark):
    story.land(INSERT)
    run(story, spark, FIRST)
    before = state(story, spark)
    title = replace(story.contract.column("title"), max_length=2)
    columns = tuple(title if each.name == "title" else each for each in story.contract.columns)
    # The net changes were made by another contract, so its row rules have let these rows through.
    stricter = replace(story.contract, columns=columns, fingerprint="stricter")
    # They wait to be judged by this one, and the dimension waits with them.
    dimensions.update(story.workspace, spark, stricter, "run")
    assert state(story, spark) == before
    table = story.workspace.decisions
    waits = replace(table.decisions[CONTRACT_CHANGE], action=WAIT)
    never = replace(table, decisions={**table.decisions, CONTRACT_CHANGE: waits})
    with pytest.raises(GateClosed, match="title:max_length"):
        dimensions.update(replace(story.workspace, decisions=never), spark, stricter, "run")
    assert state(story, spark) == before


def test_a_run_reports_the_windows_that_one_before_it_had_folded_and_not_merged(story, spark):
    story.land(INSERT)
    story.land(MOVE)
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, (FIRST, SECOND), "run")
    arguments = (story.workspace, spark, story.contract)
    net_changes.materialize(*arguments, [FIRST], "one that fails now")
    done = dimensions.materialize(*arguments, [SECOND], "run")
    assert [each.window for each in done] == [SECOND, FIRST]
    assert state(story, spark).keys() == {1, 2, 9}
    assert [each.window for each in dimensions.materialize(*arguments, [SECOND], "again")] == [SECOND]
