"""The random histories through every way in, and that what a way loses is found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.proof import ways
from omnisupport_ingest_tests.proof.altered import CHANGES
from omnisupport_ingest_tests.proof.run import ProofFailed
from omnisupport_ingest_tests.proof.tally import IN_WAYS, Tally
from omnisupport_ingest_tests.proof.ways import (
    WAYS,
    BroughtIn,
    Turn,
    by_debezium,
    prove_ways,
    record_of,
    tellable,
)

SEEDS = range(40, 42)
FILES = ways.files.__name__


@pytest.fixture(scope="module")
def filed(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> BroughtIn:
    """The home that the histories have come into as files."""
    parts = ways.delivered(SEEDS, by_debezium(tellable(SEEDS)))
    turn = Turn.of(FILES, SEEDS)
    return ways.brought_in(ways.files, parts, turn, tmp_path_factory.mktemp("ways") / FILES, spark)


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", [each for each in WAYS if each != FILES])
def test_a_way_in_ends_in_the_dimensions_of_the_oracle(way: str, spark: SparkSession, tmp_path: Path) -> None:
    seen = Tally()
    prove_ways(SEEDS, tmp_path, spark, (way,), tally=seen)
    assert seen.things[f"events by {way}"] > 40
    assert way not in (ways.CAPTURE, ways.CURSOR) or any(seen.things[change] for change in CHANGES)


@pytest.fixture
def by_files(filed: BroughtIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files have been brought in already."""
    monkeypatch.setattr(ways, "brought_in", lambda *_: filed)


@pytest.mark.slow
@pytest.mark.usefixtures("by_files")
def test_files_end_in_the_dimensions_of_the_oracle(spark: SparkSession, tmp_path: Path) -> None:
    seen = Tally()
    prove_ways(SEEDS, tmp_path, spark, (FILES,), tally=seen)
    assert seen.things["events by files"] > 40


@pytest.mark.slow
@pytest.mark.usefixtures("by_files")
def test_an_event_that_a_way_changes_is_found(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle is told something else of the last update of a row than its file says."""
    told = by_debezium(tellable(SEEDS))
    last = {(each.table, each.key): each for each in told if each.key is not None}
    spoilt = next(
        each
        for each in reversed(told)
        if each in last.values()
        and each.op == "u"
        and "body" in (each.after or {})
        # No policy drops this column of this table.
        and each.table == "tickets"
    )
    other = replace(spoilt, after={**(spoilt.after or {}), "body": "another"})
    monkeypatch.setattr(ways, "by_debezium", lambda _: [other if each == spoilt else each for each in told])
    with pytest.raises(ProofFailed, match="By the way files") as found:
        prove_ways(SEEDS, tmp_path, spark, (FILES,), tally=Tally())
    assert str(spoilt.key) in str(found.value)


def test_the_histories_keep_what_the_ways_are_about() -> None:
    told = tellable(range(100))
    kinds = Counter(event.op for event in told)
    assert all(kinds[op] > 20 for op in "crud") and kinds["t"] > 0
    assert sum(event.moved_from is not None for event in told) > 50
    assert sum(bool(event.unchanged) for event in told) > 500
    assert sum(bool(event.before) for event in told) > 20
    placed = by_debezium(told)
    assert [each.at for each in placed] == sorted({each.at for each in placed})
    assert all(record_of(each).value["transaction"]["total_order"] > 0 for each in placed)


def test_the_tally_has_every_way() -> None:
    assert tuple(f"events by {way}" for way in WAYS) == IN_WAYS
