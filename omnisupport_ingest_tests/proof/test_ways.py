"""The random histories through every way in, and that what a way loses is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.oracle.model import Event
from omnisupport_ingest_tests.proof import ways
from omnisupport_ingest_tests.proof.run import ProofFailed
from omnisupport_ingest_tests.proof.ways import WAYS, by_debezium, prove_ways, record_of, tellable

SEEDS = range(40, 42)


@pytest.fixture(scope="module")
def plain(spark: SparkSession) -> Iterator[SparkSession]:
    """Plans are large and rows few: finding better plans on the way would take most of the time."""
    adaptive = spark.conf.get("spark.sql.adaptive.enabled")
    spark.conf.set("spark.sql.adaptive.enabled", "false")
    yield spark
    spark.conf.set("spark.sql.adaptive.enabled", str(adaptive))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_way_in_ends_in_the_dimensions_of_the_oracle(way: str, plain: SparkSession, tmp_path: Path) -> None:
    assert prove_ways(SEEDS, tmp_path, plain, (way,)) > 40


@pytest.mark.slow
def test_an_event_that_a_way_changes_is_found(
    plain: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update of a row says something else in its file than the oracle was told."""
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

    def other(event: Event) -> ways.Record:
        if event != spoilt:
            return record_of(event)
        return record_of(replace(event, after={**(event.after or {}), "body": "another"}))

    monkeypatch.setattr(ways, "record_of", other)
    with pytest.raises(ProofFailed, match="By the way files") as found:
        prove_ways(SEEDS, tmp_path, plain, ("files",))
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
