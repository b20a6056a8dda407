"""One small home of each kind, as ``make prove`` runs hundreds of histories in many."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.proof.history import lane
from omnisupport_ingest_tests.proof.run import draw, prove


@pytest.mark.parametrize("seeds", [range(30)], ids=str)
def test_every_layer_is_what_the_oracle_comes_to(seeds, spark: SparkSession, tmp_path: Path):
    tally = prove(draw(seeds, slots=3), tmp_path, spark, say=lambda _: None)
    assert tally.comparisons >= 3


def test_a_lane_is_the_same_whenever_it_is_drawn():
    assert lane(7, epochs=2, sure_order=False) == lane(7, epochs=2, sure_order=False)


def test_the_histories_hold_what_they_are_meant_to():
    told = [each for seed in range(200) for each in lane(seed, epochs=2, sure_order=False)]
    events = [each.event for each in told]
    assert {event.op for event in events} == set("crudtbm")
    assert {event.at.epoch for event in events} == {1, 2}
    assert any(each.unreadable for each in told)
    assert any(each.misplaced for each in told)
    assert any(event.identity for event in events)
    assert any(event.moved_from and event.unchanged for event in events)
    assert any(event.after and None in event.after.values() for event in events)
    contents = {(event.at, event.identity, event.content) for event in events}
    assert len({(at, identity) for at, identity, _ in contents}) < len(contents)


def test_many_rows_live_again_without_what_their_life_before_knew():
    """What a fold that forgets where a life begins would leak; a home without it proves nothing of that."""
    leaks = 0
    for seed in range(60):
        told = [each.event for each in lane(seed, epochs=1, sure_order=True)]
        rows = {(event.table, event.key) for event in told if event.key is not None}
        for table, key in rows:
            own = sorted((e for e in told if (e.table, e.key) == (table, key)), key=lambda e: e.at)
            last = next((n for n in range(len(own) - 1, -1, -1) if own[n].op in "crd"), 0)
            leaks += bool(own[last].op == "d" and own[last + 1 :] and own[-1].unchanged)
    assert leaks > 60
