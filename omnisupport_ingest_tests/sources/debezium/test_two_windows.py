"""One position with two commit times: a collision, though the two are of two windows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope

HOUR = 3_600_000
FIRST, SECOND, THIRD = "2026-11-20T1600", "2026-11-20T1700", "2026-11-20T1800"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(tmp_path, "customers")


def change(hours: float = 0, *, name: str = "a", lsn: int = 1000, order: int | None = 1, op: str = "u"):
    """An update of customer 1, committed so many hours after 16:00."""
    return envelope(op, customer(1, name=name), lsn=lsn, order=order, ts=TS + int(hours * HOUR))


def windows(recorder: Recorder) -> dict[str, list[str]]:
    """Window → the names that the customers of its events were given, as the manifests place them."""
    found: dict[str, list[str]] = {}
    for manifest in recorder.inlet.store.manifests():
        for file in manifest.files:
            rows = pq.ParquetFile(recorder.inlet.store.path_of(file)).read().to_pylist()
            found.setdefault(file.window, []).extend(json.loads(row["after"])["name"] for row in rows)
    return {window: sorted(names) for window, names in found.items()}


def test_the_second_commit_time_of_a_position_lands_where_the_first_did(recorder: Recorder) -> None:
    recorder.land_values("one.jsonl", change(), change(2, name="later", lsn=1002))
    landing = recorder.land_values("two.jsonl", change(1, name="b"), change(1, name="other", lsn=1001))
    assert windows(recorder) == {FIRST: ["a", "b"], SECOND: ["other"], THIRD: ["later"]}
    assert landing.tally is not None
    assert landing.tally.in_first_window == 1
    # Its own time counts for the watermark as any other does.
    again = recorder.land_values("three.jsonl", change(2, name="c"))
    assert windows(recorder)[FIRST] == ["a", "b", "c"]
    assert again.manifest.windows == (FIRST,)


def test_two_commit_times_in_one_file_land_in_the_earlier_window(recorder: Recorder) -> None:
    recorder.land_values("one.jsonl", change(1, name="b"), change(), change(2, name="c"))
    assert windows(recorder) == {FIRST: ["a", "b", "c"]}


@pytest.mark.parametrize("order", [1, None])
def test_events_that_share_nothing_but_a_range_of_positions_stay_where_they_are(
    recorder: Recorder, order: int | None
) -> None:
    recorder.land_values("one.jsonl", change(order=order), change(order=order, lsn=1010, name="z"))
    between = recorder.land_values("two.jsonl", change(1, order=order, lsn=1005, name="b"))
    assert between.manifest.windows == (SECOND,)
    assert between.tally is not None
    assert between.tally.in_first_window == 0


def test_an_identity_of_its_own_is_another_event(recorder: Recorder) -> None:
    """Without ``total_order`` several rows share a position; they differ in key or operation."""
    recorder.land_values("one.jsonl", change(order=None))
    recorder.land_values("two.jsonl", envelope("u", customer(2, name="b"), ts=TS + HOUR))
    recorder.land_values("three.jsonl", change(1, order=None, name="c"))
    assert windows(recorder) == {FIRST: ["a", "c"], SECOND: ["b"]}


def test_another_epoch_has_other_positions(recorder: Recorder) -> None:
    recorder.land_values("one.jsonl", change())
    recorder.land_values("two.jsonl", change(1, name="b"), new_epoch="the connector was set up anew")
    assert windows(recorder) == {FIRST: ["a"], SECOND: ["b"]}


def test_a_time_that_no_window_holds_is_no_way_around(recorder: Recorder) -> None:
    long_ago = -1000
    recorder.land_values("one.jsonl", change())
    recorder.land_values("two.jsonl", change(long_ago, name="b"))
    recorder.land_values("three.jsonl", change(long_ago, name="c", lsn=2000))
    recorder.land_values("four.jsonl", change(1, name="d", lsn=2000))
    assert windows(recorder) == {FIRST: ["a", "b"], OUT_OF_RANGE: ["c", "d"]}


def test_an_event_that_comes_again_when_the_clock_is_right_finds_its_own_window(recorder: Recorder) -> None:
    """It had no window while the landing clock was behind; one commit time is no contradiction."""
    recorder.land_values("one.jsonl", change(40))
    assert windows(recorder) == {OUT_OF_RANGE: ["a"]}
    recorder.now = recorder.now.replace(day=22)
    recorder.land_values("two.jsonl", change(40), None)
    assert windows(recorder) == {OUT_OF_RANGE: ["a"], "2026-11-22T0800": ["a"]}


def test_files_cut_in_any_way_bring_each_position_into_one_window(tmp_path: Path) -> None:
    for seed in range(5):
        chance = Random(seed)
        recorder = Recorder(tmp_path / str(seed), "customers")
        told = [
            change(chance.choice((0, 0.5, 1, 2)), name=f"{number}", lsn=1000 + chance.randrange(25))
            for number in range(60)
        ]
        cuts = sorted(chance.sample(range(1, 60), 3))
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, 60], strict=True)):
            recorder.land_values(f"{number}.jsonl", *told[start:end])
        placed: dict[int, set[str]] = {}
        for window, names in windows(recorder).items():
            for name in names:
                placed.setdefault(told[int(name)]["source"]["lsn"], set()).add(window)
        assert {len(found) for found in placed.values()} == {1}
        assert sum(map(len, windows(recorder).values())) == 60


def test_both_are_in_quarantine_and_the_check_is_red_after_a_rebuild_too(
    recorder: Recorder, spark: SparkSession
) -> None:
    recorder.land_values("one.jsonl", change(op="c"), change(0.1, lsn=1001), change(2, lsn=1009, name="z"))
    recorder.run(spark)
    workspace = recorder.workspace
    assert checks.no_collisions(workspace, SOURCE).passed
    recorder.land_values("two.jsonl", change(1, lsn=1001, name="b"))

    def told() -> object:
        recorder.run(spark)
        found = quarantined(workspace, SOURCE, ReviewLedger.open(workspace, SOURCE))
        assert not checks.no_collisions(workspace, SOURCE).passed
        assert checks.counts_add_up(workspace, SOURCE).passed
        return sorted((each.window, each.reason, each.source_ts.hour, each.state) for each in found)

    expected = [(FIRST, "collision", 16, "open"), (FIRST, "collision", 17, "open")]
    assert told() == expected
    state = recorder.state(spark, "customers")[1,]
    # A later update settles the row; without it the value would not be known.
    assert (state["name"], EXISTENCE in state["_cdc_unresolved"]) == ("z", False)
    shutil.rmtree(workspace.home.lake)
    assert told() == expected
    assert recorder.state(spark, "customers")[1,] == state
