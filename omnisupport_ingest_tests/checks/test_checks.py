"""Checks that read landing and the tables' logs, without Spark where they need none."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.checks import content_checks
from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit, Story, events
from omnisupport_ingest_tests.recovery.pipeline import run_layers

INSERT = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})])
OTHER = Commit(10, 1, [Change("c", 1, {"title": "another", "body": "text"})])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def test_a_gap_in_the_chain_is_red_and_names_both_ends(story: Story):
    story.land(INSERT)
    gone = story.land(Commit(20, 2, [Change("d", 1)]))
    story.land(Commit(30, 3, [Change("c", 1, {"title": "two", "body": None})]))
    assert checks.chain_unbroken(story.workspace, SOURCE).passed
    (story.store.folder / "manifests" / f"{gone.batch_id}.json").unlink()
    found = checks.chain_unbroken(story.workspace, SOURCE)
    assert not found.passed
    assert "0/A" in found.summary
    assert "0/14" in found.summary
    assert "Fix: Restore the manifest and the data of the missing batch" in found.summary


def test_an_event_from_before_the_first_window_is_red(story: Story):
    story.land(INSERT)
    assert checks.sentinel_empty(story.workspace, SOURCE).passed
    story.land(Commit(20, -90_000, [Change("d", 1)]))
    found = checks.sentinel_empty(story.workspace, SOURCE)
    assert (found.passed, found.numbers) == (False, {"events": 1})


@pytest.mark.parametrize(("minutes", "fresh"), [(1, True), (14, True), (16, False)])
def test_the_watermark_of_the_newest_batch_must_be_near_the_clock(story: Story, minutes, fresh):
    story.land(INSERT)
    found = checks.watermark_fresh(story.workspace, SOURCE, START + timedelta(minutes=minutes))
    assert found.passed is fresh


def test_what_people_read_is_stale_where_it_is_far_behind_a_landing_that_is_fresh(story: Story, spark):
    def fresh(minutes: float):
        now = START + timedelta(minutes=minutes)
        return checks.tables_fresh(story.workspace, SOURCE, now)[story.contract.name]

    assert fresh(60).passed, "nothing has landed"
    story.land(INSERT)
    assert not fresh(16).passed
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    assert fresh(1).numbers["unshown_batches"] == 1, "the dimension is not made yet"
    dimensions.update(story.workspace, spark, story.contract, "run")
    assert fresh(1).passed
    assert fresh(1).numbers["unshown_batches"] == 0
    run_layers(story.workspace, spark, [FIRST], SOURCE, replay=True)
    assert not fresh(16).passed, "a replay of an old window makes no table fresher"

    story.clock = START + timedelta(minutes=20)
    story.land_idle(15)
    story.land(Commit(20, 1195, [Change("u", 1, {"title": "two"}, unchanged=("body",))]))
    now = START + timedelta(minutes=20)
    assert checks.watermark_fresh(story.workspace, SOURCE, now).passed
    found = fresh(20)
    assert not found.passed
    assert found.numbers == {
        "lag_seconds": 1199.0,
        "behind_landing_seconds": 1194.0,
        "unshown_batches": 1,
        "allowed_lag_seconds": 900.0,
    }
    assert "20 minutes behind" in found.summary
    # Where nothing of the table has landed since, it is as fresh as landing is.
    other = story.workspace.contracts.of_source(SOURCE)[0]
    assert other is story.contract


def test_no_stream_means_no_watermark_to_be_stale(story: Story):
    assert checks.watermark_fresh(story.workspace, SOURCE, START).passed


def test_checks_of_tables_that_are_not_there_yet_pass(story: Story):
    assert checks.counts_add_up(story.workspace, SOURCE).passed
    assert checks.no_collisions(story.workspace, SOURCE).passed


def test_a_table_is_incomplete_until_stream_and_dimension_are_past_its_snapshot(story: Story, spark):
    def complete() -> tuple[bool, str]:
        found = checks.tables_complete(story.workspace, SOURCE)[story.contract.name]
        return found.passed, found.summary

    read = Commit(5, 0, [Change("r", 1, {"title": "one", "body": "text"})])
    assert complete() == (True, "Nothing has landed yet.")
    story.land_chunk(read, high=15)
    assert complete()[1].startswith("The snapshot of table notes in epoch 1 is not finished. Fix: Start ")
    story.land_boundary(read, high=15)
    story.land(INSERT)
    passed, summary = complete()
    assert not passed
    assert "has landed up to 0/A and must pass 0/F. Fix: Wait, capture is still behind: 5 bytes" in summary

    story.land(Commit(15, 2, [Change("u", 1, {"title": "two"}, unchanged=("body",))]))
    assert complete()[1].startswith("The dimension does not show 4 batches yet")
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    assert complete()[0] is False
    dimensions.update(story.workspace, spark, story.contract, "run")
    assert complete() == (True, "The stream has passed the snapshot of epoch 1.")

    LostChanges(story.store.folder, 1).add(story.contract.name, "was out", Lsn(12))
    assert complete()[1].startswith("Changes of table notes from 0/C on may be missing in epoch 1 (was out)")

    story.store.begin_epoch("the slot was lost", None)
    assert complete()[1].startswith("Table notes has not been read in epoch 2.")


def test_a_collision_turns_red_and_its_unknown_cells_do_too(story: Story, spark):
    story.land(INSERT)
    end = Lsn(11)
    story._seal(events(OTHER), StreamSpan(Lsn(10), end, end, end, 1, START, START))
    story.land(Commit(20, 2, [Change("u", 1, {"title": "three"}, unchanged=("body",))]))
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run")
    dimensions.update(story.workspace, spark, story.contract, "run")

    found = checks.no_collisions(story.workspace, SOURCE)
    assert (found.passed, found.numbers) == (
        False,
        {"quarantined_collision": 2, "collisions_unreviewed": 2},
    )
    assert FIRST in found.summary
    accounted = checks.counts_add_up(story.workspace, SOURCE)
    assert accounted.passed
    assert (accounted.numbers["raw"], accounted.numbers["quarantined"]) == (3, 2)

    unresolved = content_checks.no_unresolved_cells(story.workspace, spark, story.contract)
    assert (unresolved.passed, unresolved.numbers) == (False, {"rows_unresolved": 1, "cells_unresolved": 1})
    assert content_checks.keys_unique(story.workspace, spark, story.contract).passed
    assert content_checks.meets_contract(story.workspace, spark, story.contract).passed
