"""Events of an older epoch that land when a newer one has begun: known already, or for a person to look at.

What was frozen at landing decides, so the order in which landed batches are processed does not.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.layers.story import (
    FIRST,
    SECOND,
    SOURCE,
    START,
    THIRD,
    Change,
    Commit,
    Story,
    events,
)

WINDOWS = [FIRST, SECOND, THIRD]
ACCEPTED = "accepted"

OLD = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})])
SURPRISE = Commit(30, 3, [Change("c", 3, {"title": "three", "body": "text"})])
READ_AGAIN = Commit(20, 2, [Change("r", 1, {"title": "one", "body": "text"})])
NEW = Commit(40, 4, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])

Verdicts = dict[tuple[str, int, int, int, int], str]
"""(batch, epoch, commit LSN, ordinal, event hash) → ``accepted`` or the reason for quarantine."""


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def judge(story: Story, spark: SparkSession, windows: Iterable[str] = WINDOWS) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, list(windows), "run")


def verdicts(story: Story, spark: SparkSession) -> Verdicts:
    """How each event that was not dropped as a duplicate was judged."""
    accepted, quarantine = story.workspace.deduped(SOURCE).open(), story.workspace.quarantine(SOURCE).open()
    rows = [(row, ACCEPTED) for row in accepted.read(spark, accepted.all_files()).collect()]
    rows += [(row, row["reason"]) for row in quarantine.read(spark, quarantine.all_files()).collect()]
    return {
        (row["batch_id"], row["epoch"], row["commit_lsn"], row["ordinal"], row["event_hash"]): verdict
        for row, verdict in rows
    }


def by_event(judged: Verdicts) -> set[tuple[int, int, str]]:
    return {(epoch, lsn, verdict) for (_, epoch, lsn, _, _), verdict in judged.items()}


def counts(story: Story) -> Counter[str]:
    found: Counter[str] = Counter()
    snapshot = story.workspace.deduped(SOURCE).open()
    for window in snapshot.windows():
        state = snapshot.state(window)
        assert state is not None
        found.update(duplicates=state.checkpoint.duplicates, raw=state.checkpoint.raw)
    return found


def test_what_lands_first_after_a_newer_epoch_began_waits_for_a_person(story, spark):
    story.land(OLD)
    story.land_chunk(READ_AGAIN, epoch=2)
    story.land_boundary(READ_AGAIN, epoch=2)
    late = story.land(SURPRISE)
    story.land(NEW, epoch=2)
    judge(story, spark)
    assert by_event(verdicts(story, spark)) == {
        (1, 10, ACCEPTED),
        (2, 20, ACCEPTED),
        (1, 30, "older_epoch"),
        (2, 40, ACCEPTED),
    }
    table = story.workspace.quarantine(SOURCE).open()
    (row,) = table.read(spark, table.all_files()).collect()
    assert (row["detector"], row["review_state"], row["batch_id"]) == ("epoch", "open", late.batch_id)
    assert row["newest_epoch_before"] == 2

    found = checks.epochs_in_order(story.workspace, SOURCE)
    assert (found.passed, found.numbers) == (False, {"events": 1})
    assert FIRST in found.summary

    net_changes.materialize(story.workspace, spark, story.contract, WINDOWS, "run")
    dimensions.update(story.workspace, spark, story.contract, "run")
    shown = story.workspace.dimension(story.contract).open()
    live = shown.read(spark, shown.all_files()).where("NOT _cdc_is_deleted").collect()
    assert [(row["id"], row["title"], row["body"]) for row in live] == [(1, "uno", "text")]


def test_a_second_copy_of_what_landed_in_time_is_a_duplicate(story, spark):
    story.land(OLD)
    story.land(NEW, epoch=2)
    # A clock that went back does not make the copy the first one.
    story.clock -= timedelta(hours=1)
    story.land_again(OLD)
    judge(story, spark)
    assert by_event(verdicts(story, spark)) == {(1, 10, ACCEPTED), (2, 40, ACCEPTED)}
    assert counts(story)["duplicates"] == 1
    assert checks.epochs_in_order(story.workspace, SOURCE).passed


def test_snapshot_rows_and_boundaries_of_an_older_epoch_are_no_exception(story, spark):
    story.land(NEW, epoch=2)
    story.land_chunk(READ_AGAIN, epoch=1)
    story.land_boundary(READ_AGAIN, epoch=1)
    judge(story, spark)
    assert by_event(verdicts(story, spark)) == {(1, 20, "older_epoch"), (2, 40, ACCEPTED)}


def test_batches_of_the_old_epoch_that_landed_in_time_are_ordinary_however_late_they_are_processed(
    story, spark
):
    story.land(OLD)
    story.store.begin_epoch("the slot was lost", None)
    story.store.begin_epoch("and once more", None)
    story.land(SURPRISE)
    story.land_chunk(READ_AGAIN, epoch=2)
    story.land_boundary(READ_AGAIN, epoch=2)
    judge(story, spark)
    assert set(verdicts(story, spark).values()) == {ACCEPTED}


def test_what_came_too_late_and_differs_from_what_is_known_is_a_collision(story, spark):
    story.land(OLD)
    story.land(NEW, epoch=2)
    story.land_again(Commit(10, 1, [Change("c", 1, {"title": "another", "body": "text"})]))
    judge(story, spark)
    assert by_event(verdicts(story, spark)) == {(1, 10, "collision"), (2, 40, ACCEPTED)}


def test_a_batch_whose_manifest_did_not_record_it_counts_as_landed_in_time(story, spark):
    story.land(NEW, epoch=2)
    late = story.land(SURPRISE)
    file = story.store.folder / "manifests" / f"{late.batch_id}.json"
    document = json.loads(file.read_bytes()) | {"format_version": 1}
    del document["arrival"]["newest_epoch_before"], document["stream"]["recovered_from"]
    file.write_text(json.dumps(document))
    judge(story, spark)
    assert by_event(verdicts(story, spark)) == {(1, 30, ACCEPTED), (2, 40, ACCEPTED)}


class TestRebuild:
    """Landing is told at random: epochs overlap, copies come late, contents collide, clocks go back."""

    @pytest.mark.drawn(1)
    @pytest.mark.slow
    @pytest.mark.parametrize("seed", [1, 2])
    def test_any_order_of_runs_gives_the_verdicts_of_the_first(self, tmp_path, spark, seed):
        rng = Random(seed)
        first = Story(tmp_path / "first")
        expected: dict[tuple[int, int, str], list[str]] = {}
        begun = 0
        batches = 14
        runs = {batches - 1, *rng.sample(range(batches), 3)}
        for number in range(batches):
            epoch = rng.choice([1, 1, 1 + number // 6, 1 + number // 6])
            commits = _commits(rng)
            first.clock = START + timedelta(minutes=rng.randrange(1, 60))
            _land(first, [event for commit in commits for event in events(commit, epoch)], epoch)
            for commit in commits:
                known = expected.setdefault((epoch, commit.lsn, str(commit.changes[0].values["title"])), [])
                known.append("older_epoch" if begun > epoch else ACCEPTED)
            begun = max(begun, epoch)
            if number in runs:
                judge(first, spark)
        judged = verdicts(first, spark)
        assert by_event(judged) == _expected(expected)
        assert {"older_epoch", "collision", ACCEPTED} == set(judged.values())
        assert counts(first)["duplicates"] > 3

        whole = Story(tmp_path / "whole")
        shutil.copytree(first.store.folder, whole.store.folder, dirs_exist_ok=True)
        for window in rng.sample(WINDOWS, 3):
            judge(whole, spark, [window])
        assert verdicts(whole, spark) == judged

        shuffled = Story(tmp_path / "shuffled")
        shutil.copytree(first.store.folder / "data", shuffled.store.folder / "data", dirs_exist_ok=True)
        manifests = sorted((first.store.folder / "manifests").iterdir())
        rng.shuffle(manifests)
        for number, manifest in enumerate(manifests):
            shutil.copy(manifest, shuffled.store.folder / "manifests")
            if number % 5 == 4 or number == batches - 1:
                judge(shuffled, spark, rng.sample(WINDOWS, 3))
        assert verdicts(shuffled, spark) == judged


def _commits(rng: Random) -> list[Commit]:
    """Transactions that are partly those of other batches, and now and then have another content."""
    found = []
    for lsn in sorted(rng.sample(range(1, 40), 6)):
        title = "another" if rng.random() < 0.05 else "one"
        found.append(Commit(lsn, lsn % 3 * 60 + 1, [Change("c", lsn, {"title": title, "body": None})]))
    return found


def _land(story: Story, found: list[LandedEvent], epoch: int) -> None:
    before = story._ends.get(epoch, Lsn(0))
    end = Lsn(before.value + 1)
    story._seal(found, StreamSpan(before, end, end, end, 1, START, START), epoch)


def _expected(landed: dict[tuple[int, int, str], list[str]]) -> set[tuple[int, int, str]]:
    """The verdicts by the rule as it is written: the copy that landed first decides."""
    contents = Counter((epoch, lsn) for epoch, lsn, _ in landed)
    return {
        (epoch, lsn, "collision" if contents[epoch, lsn] > 1 else arrivals[0])
        for (epoch, lsn, _), arrivals in landed.items()
    }
