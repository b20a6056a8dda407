"""Late, too late, disordered and repeated events of a file source, as the decision table has them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.decision_table import load_decision_table
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.scenarios import Stopped
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.contracts.decision_tables import write_decision
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story

HOUR, DAY = 3600, 24 * 3600


@pytest.fixture
def story(tmp_path: Path) -> Story:
    story = Story(tmp_path)
    story.clock += timedelta(days=30)
    return story


def put(lsn: int, second: float, title: str, *, id: int = 1, op: str = "u") -> Commit:
    return Commit(lsn, second, [Change(op, id, {"title": title, "body": "text"})])


def decide(story: Story, scenario: str, action: str, *, review: str = "true") -> None:
    """Change one row of the decision table."""
    path = write_decision(story.contracts.parent / "decisions.csv", scenario, action, review=review)
    story.workspace = replace(story.workspace, decisions=load_decision_table(path))


def take(story: Story, spark: SparkSession, windows: tuple[str, ...], *, replay: bool = False) -> None:
    raw.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    deduped.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
    dimensions.update(story.workspace, spark, story.contract, "run")


def take_all(story: Story, spark: SparkSession) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One round of both sensors; the windows that each asked for."""
    pending = pending_windows(story.workspace, SOURCE)
    if pending.windows:
        take(story, spark, tuple(each for each in pending.windows if each != OUT_OF_RANGE) or (FIRST,))
    if pending.late_windows:
        take(story, spark, pending.late_windows, replay=True)
    return pending.windows, pending.late_windows


def titles(story: Story, spark: SparkSession) -> dict[int, str]:
    table = story.workspace.dimension(story.contract).open()
    return {row["id"]: row["title"] for row in table.read(spark, table.all_files()).collect()}


def quarantined(story: Story, spark: SparkSession) -> list[tuple[str, str, str, int | None]]:
    deduped_table, table = story.workspace.deduped(SOURCE).open(), story.workspace.quarantine(SOURCE).open()
    named = {
        path
        for window in deduped_table.windows()
        if (state := deduped_table.state(window)) is not None
        for path in state.companions
    }
    rows = table.read(spark, [file for file in table.all_files() if file.path in named]).collect()
    return sorted((row["reason"], row["detector"], row["review_state"], row["file_row"]) for row in rows)


def scenarios(story: Story, window: str) -> dict[str, int]:
    state = story.workspace.deduped(SOURCE).open().state(window)
    assert state is not None
    return dict(state.checkpoint.scenarios)


@pytest.mark.quick
def test_late_event_is_found_by_the_watermark_and_its_window_is_replayed_apart(story, spark):
    story.land_file(put(10, 1, "first", op="c"), put(20, 61, "second"), put(90, 3 * HOUR, "newest"))
    assert take_all(story, spark) == ((FIRST, SECOND, "2026-01-01T1500"), ())
    late = story.land_file(put(15, 30, "between", id=2, op="c"))
    pending = pending_windows(story.workspace, SOURCE)
    assert (pending.windows, pending.late_windows) == ((), (FIRST,))
    assert [(each.window, each.batch_id, each.events) for each in pending.late] == [(FIRST, late.batch_id, 1)]
    take_all(story, spark)
    assert pending_windows(story.workspace, SOURCE).nothing
    assert titles(story, spark) == {1: "newest", 2: "between"}
    assert scenarios(story, FIRST) == {"late_arrival": 1}
    state = story.workspace.net_changes(story.contract).open().state(FIRST)
    assert (state.checkpoint.keys_changed, state.checkpoint.changed_by) == (1, ("late events",))
    assert state.checkpoint.replaced_hash not in (None, state.checkpoint.content_hash)


@pytest.mark.slow
def test_late_event_that_lies_below_a_newer_one_of_its_key_changes_no_row_of_the_dimension(story, spark):
    story.land_file(put(10, 1, "first", op="c"), put(90, 3 * HOUR, "newest"))
    take_all(story, spark)
    story.land_file(put(15, 30, "between"))
    take_all(story, spark)
    assert titles(story, spark) == {1: "newest"}


def test_replay_that_finds_the_same_is_a_no_op_and_says_so(story, spark):
    story.land_file(put(10, 1, "first", op="c"))
    take_all(story, spark)
    take(story, spark, (FIRST,), replay=True)
    for table in (story.workspace.raw(SOURCE), story.workspace.net_changes(story.contract)):
        checkpoint = table.open().state(FIRST).checkpoint
        assert checkpoint.replaced_hash == checkpoint.content_hash
        assert (checkpoint.keys_changed, checkpoint.changed_by) == (None, ())


def test_events_that_landed_in_time_are_ordinary_work_however_late_they_are_taken(story, spark):
    story.land_file(put(10, 1, "first", op="c"))
    story.land_file(put(90, 3 * DAY, "newest"))
    assert take_all(story, spark) == ((FIRST, "2026-01-04T1200"), ())


def test_copy_of_an_event_that_landed_before_is_dropped_and_counted(story, spark):
    story.land_file(put(10, 1, "first", op="c"), put(20, 31, "second"))
    story.land_file(put(20, 31, "second"))
    take_all(story, spark)
    state = story.workspace.deduped(SOURCE).open().state(FIRST).checkpoint
    assert (state.raw, state.deduped, state.duplicates, state.quarantined) == (3, 2, 1, 0)
    assert scenarios(story, FIRST) == {"duplicate_position": 1}


def test_copy_in_a_closed_window_counts_as_a_copy_not_as_late(story, spark):
    story.land_file(put(10, 1, "first", op="c"), put(90, 3 * HOUR, "newest"))
    take_all(story, spark)
    story.land_file(put(10, 1, "first", op="c"))
    assert take_all(story, spark)[1] == (FIRST,)
    assert scenarios(story, FIRST) == {"duplicate_position": 1}
    assert story.workspace.net_changes(story.contract).open().state(FIRST).checkpoint.changed_by == ()


@pytest.mark.slow
def test_copies_go_to_quarantine_if_the_table_says_so(story, spark):
    decide(story, "duplicate_position", "quarantine", review="false")
    story.land_file(put(10, 1, "first", op="c"))
    story.land_file(put(10, 1, "first", op="c"), put(20, 31, "second"))
    take_all(story, spark)
    assert quarantined(story, spark) == [("duplicate_position", "dedupe_key", "not_needed", 1)]
    assert titles(story, spark) == {1: "second"}


def test_event_beyond_the_contract_s_longest_lateness_waits_for_a_person(story, spark):
    story.land_file(put(10, 1, "first", op="c"), put(90, 8 * DAY, "newest"))
    take_all(story, spark)
    story.land_file(put(15, 30, "between", id=2, op="c"))
    assert take_all(story, spark) == ((), (FIRST,))
    assert quarantined(story, spark) == [("too_late_arrival", "max_lateness", "open", 1)]
    assert titles(story, spark) == {1: "newest", 2: None}, "a withheld event: whether it says so is not known"
    assert scenarios(story, FIRST) == {"late_arrival": 1, "too_late_arrival": 1}


@pytest.mark.slow
def test_event_beyond_the_longest_lateness_is_taken_in_if_the_table_says_so(story, spark):
    decide(story, "too_late_arrival", "replay_window")
    story.land_file(put(10, 1, "first", op="c"), put(90, 8 * DAY, "newest"))
    take_all(story, spark)
    story.land_file(put(15, 30, "between", id=2, op="c"))
    take_all(story, spark)
    assert quarantined(story, spark) == []
    assert titles(story, spark) == {1: "newest", 2: "between"}


@pytest.mark.slow
def test_stream_of_our_own_log_is_late_but_never_too_late(story, spark):
    story.land(Commit(10, 8 * DAY, [Change("c", 1, {"title": "new", "body": None})]))
    take_all(story, spark)
    story.land(Commit(20, 1, [Change("c", 2, {"title": "old", "body": None})]))
    assert take_all(story, spark) == ((), (FIRST,))
    assert titles(story, spark) == {1: "new", 2: "old"}
    assert quarantined(story, spark) == []


@pytest.mark.parametrize(
    ("action", "asked", "kept"),
    [
        ("ingest", ((FIRST,), ()), {1: "newest", 2: "between"}),
        pytest.param("quarantine", ((FIRST,), ()), None, marks=pytest.mark.slow),
    ],
)
def test_late_events_take_the_other_way_that_the_table_names(story, spark, action, asked, kept):
    decide(story, "late_arrival", action)
    story.land_file(put(10, 1, "first", op="c"), put(90, 3 * HOUR, "newest"))
    take_all(story, spark)
    story.land_file(put(15, 30, "between", id=2, op="c"))
    assert take_all(story, spark) == asked
    if kept is not None:
        assert titles(story, spark) == kept
    else:
        assert quarantined(story, spark) == [("late_arrival", "watermark_gap", "open", 1)]


def test_event_out_of_order_in_its_file_is_quarantined_where_no_order_is_certain(story, spark):
    story.land_file(put(20, 31, "later", op="c"), put(10, 1, "earlier"), order="time", misplaced=[2])
    take_all(story, spark)
    assert quarantined(story, spark) == [("out_of_order_event", "sequence_or_ts", "open", 2)]


def test_event_out_of_order_in_its_file_is_sorted_in_if_the_table_accepts_it(story, spark):
    decide(story, "out_of_order_event", "accept")
    story.land_file(put(20, 31, "later", op="c"), put(10, 1, "earlier"), order="time", misplaced=[2])
    take_all(story, spark)
    assert quarantined(story, spark) == []
    assert titles(story, spark) == {1: "later"}


def test_files_that_arrive_in_another_order_are_never_quarantined(story, spark):
    story.land_file(put(30, 61, "third"))
    story.land_file(put(20, 31, "second"))
    story.land_file(put(10, 1, "first", op="c"))
    take_all(story, spark)
    assert quarantined(story, spark) == []
    assert titles(story, spark) == {1: "third"}


@pytest.mark.parametrize(
    ("scenario", "title", "misplaced"), [("row_rule", "x" * 21, ()), ("out_of_order_event", "short", (1,))]
)
def test_window_is_not_judged_where_the_table_says_stop(story, spark, scenario, title, misplaced):
    decide(story, scenario, "stop")
    story.land_file(put(10, 1, title, op="c"), order="time", misplaced=misplaced)
    with pytest.raises(Stopped, match=scenario):
        take_all(story, spark)
    assert not story.workspace.deduped(SOURCE).open().windows()


@pytest.mark.slow
def test_changed_decision_judges_the_windows_again_or_lets_them_wait(story, spark):
    story.land_file(put(20, 31, "later", op="c"), put(10, 1, "earlier"), order="time", misplaced=[2])
    take_all(story, spark)
    decide(story, "out_of_order_event", "accept")
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    take_all(story, spark)
    state = story.workspace.deduped(SOURCE).open().state(FIRST)
    assert state.checkpoint.changed_by == ("decision table",)
    assert state.checkpoint.scenarios == {"contract_change": 1}
    assert state.checkpoint.detectors == {"contract_change": "contract_version"}
    assert quarantined(story, spark) == []


def test_write_asked_for_again_writes_nothing_or_writes_again_as_the_table_says(story, spark):
    story.land_file(put(10, 1, "first", op="c"))
    take_all(story, spark)
    before = story.workspace.raw(SOURCE).open().version
    take(story, spark, (FIRST,))
    for layer in (raw, deduped):
        (checkpoint,) = layer.materialize(story.workspace, spark, SOURCE, (FIRST,), "again")
        assert (checkpoint.scenarios["duplicate_event"], checkpoint.detectors["duplicate_event"]) == (
            1,
            "idempotency_key",
        )
    assert story.workspace.raw(SOURCE).open().version == before
    decide(story, "duplicate_event", "replay_window")
    (checkpoint,) = raw.materialize(story.workspace, spark, SOURCE, (FIRST,), "again")
    assert checkpoint.scenarios["duplicate_event"] == 1
    (checkpoint,) = raw.materialize(story.workspace, spark, SOURCE, (FIRST,), "again", replay=True)
    assert checkpoint.scenarios == {}, "it was asked for as a replay"
    again = story.workspace.raw(SOURCE).open()
    assert again.version > before
    assert again.state(FIRST).checkpoint.replaced_hash == again.state(FIRST).checkpoint.content_hash


@pytest.mark.slow
def test_rebuild_from_landing_reaches_the_verdicts_of_the_first_run(story, spark, tmp_path):
    story.land_file(put(10, 1, "first", op="c"), put(90, 8 * DAY, "newest"))
    take_all(story, spark)
    story.land_file(put(15, 30, "too late", id=2, op="c"))
    story.land_file(put(80, 8 * DAY - 2 * HOUR, "late", id=3, op="c"))
    take_all(story, spark)
    found = quarantined(story, spark), titles(story, spark)
    hashes = _hashes(story)
    story.workspace.home.lake.rename(tmp_path / "old-lake")
    while not pending_windows(story.workspace, SOURCE).nothing:
        take_all(story, spark)
    assert (quarantined(story, spark), titles(story, spark)) == found
    assert _hashes(story) == hashes


def test_window_closes_when_the_watermark_has_passed_its_end_by_what_is_allowed(story):
    story.land_file(put(10, 1, "first", op="c"), put(20, 60 + HOUR - 1, "second"))
    lateness = Lateness.of(story.workspace, SOURCE)
    assert not lateness.closed(FIRST, story.store.landed().watermark)
    story.land_file(put(30, 60 + HOUR, "third"))
    assert lateness.closed(FIRST, story.store.landed().watermark)
    assert not lateness.closed(SECOND, story.store.landed().watermark)


def _hashes(story: Story) -> dict[tuple[str, str], str]:
    tables = (story.workspace.raw, story.workspace.deduped)
    opened = [table(SOURCE).open() for table in tables] + [story.workspace.net_changes(story.contract).open()]
    return {
        (each.table.spec.path, window): each.state(window).checkpoint.content_hash
        for each in opened
        for window in each.windows()
    }


@pytest.mark.parametrize(("action", "asked"), [("hold_back", (FIRST,)), ("stop", ())])
def test_gap_in_the_stream_holds_back_what_lies_above_it_or_the_whole_source(story, action, asked):
    decide(story, "stream_gap", action)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": None})]))
    missing = story.land(Commit(20, 2, [Change("c", 2, {"title": "two", "body": None})]))
    story.land(Commit(30, 61, [Change("c", 3, {"title": "three", "body": None})]))
    (story.store.folder / "manifests" / f"{missing.batch_id}.json").unlink()
    pending = pending_windows(story.workspace, SOURCE)
    assert pending.gap is not None
    assert pending.windows == asked


def test_late_batches_that_wait_for_their_replay_hold_back_no_other_window(story: Story) -> None:
    story.land(put(10, 2 * HOUR, "open", op="c"))
    late = [story.land(put(20 + n, n, "late", id=n + 2, op="c")) for n in range(5)]
    story.land(put(90, 2 * HOUR + 60, "behind the late ones"))
    pending = pending_windows(story.workspace, SOURCE, limit=2)
    assert pending.late_windows == (FIRST,)
    assert pending.windows == ("2026-01-01T1400", "2026-01-01T1401")
    assert pending.batch_ids >= {each.batch_id for each in late}


def test_a_merge_that_is_due_does_not_wait_for_a_replay(
    story: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    story.land(put(10, 2 * HOUR, "open", op="c"))
    with monkeypatch.context() as killed:
        killed.setattr(dimensions, "update", lambda *_: None)
        take_all(story, spark)
    (window,) = pending_windows(story.workspace, SOURCE).windows
    story.land(put(20, 1, "late", id=2, op="c"))
    pending = pending_windows(story.workspace, SOURCE)
    assert (pending.windows, pending.late_windows) == ((window,), (FIRST,))
