"""The simulation of scale: its queues obey the laws of queues, and the page has what it prints."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import click
import pytest
from click.testing import CliRunner

from bench.scale import ASSUMPTIONS, PAGE, main, read_assumptions, tables, with_tables
from bench.scale_model import Deployment, files_touched, simulate

GIVEN = read_assumptions(ASSUMPTIONS)
STEADY = replace(
    GIVEN.deployments[0],
    changes_per_second=1000,
    cores=1,
    peak=1.0,
    random_share=0.0,
    window_minutes=10_000,
    # No file of a dimension costs anything worth telling.
    rows_per_file=1e12,
)
BARE = replace(
    GIVEN.costs,
    **dict.fromkeys(
        ("run_cpu", "file_cpu", "file_row_cpu", "planning_cpu_per_file", "layers_cpu_per_million"), 0
    ),
    run_seconds=0,
)


@pytest.mark.parametrize("deployment", GIVEN.deployments, ids=lambda each: each.name)
def test_what_waits_is_the_rate_times_the_lag(deployment: Deployment):
    """Little's law: both sides are counted apart, one by the clock and one as each change is shown."""
    found = simulate(deployment, GIVEN.costs)
    if found.growth:
        assert found.mean_lag > 3600
        return
    rate = found.changes / found.seconds
    assert rate == pytest.approx(deployment.slot_rate, rel=0.02)
    assert found.waiting == pytest.approx(rate * found.mean_lag, rel=0.05)


@pytest.mark.parametrize("seconds", [4.0, 10.0, 40.0])
def test_runs_of_one_length_show_a_change_after_one_and_a_half(seconds: float):
    """A change waits for the end of the run before, half of one at the mean, and then for its own."""
    found = simulate(STEADY, replace(BARE, run_seconds=seconds))
    assert found.mean_lag == pytest.approx(1.5 * seconds, abs=0.6)
    assert found.lag_p95 == pytest.approx(1.95 * seconds, abs=1.1)
    assert found.growth == 0


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1, 2.0])
def test_capture_is_lost_above_what_it_lands_and_by_as_much(load: float):
    landed = 1000.0
    found = simulate(
        replace(STEADY, changes_per_second=load * landed), replace(BARE, capture_changes_per_second=landed)
    )
    assert found.growth == pytest.approx(max(0.0, load - 1) * landed, rel=0.05, abs=1)
    assert (found.capture_waiting < landed) == (load < 1)


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1, 1.5])
def test_a_lake_is_lost_where_changes_alone_cost_more_than_its_cores(load: float):
    """What a run costs whatever it brings does no harm: runs become larger."""
    costs = replace(BARE, layers_cpu_per_million=load * 1000, run_seconds=5, batches_per_run=1e9)
    found = simulate(STEADY, costs)
    assert bool(found.growth) == (load > 1)
    if load > 1:
        # Of runs that double in length the mean over thirds is near the true slope, not at it.
        assert found.growth == pytest.approx(STEADY.slot_rate * (1 - 1 / load), rel=0.5)
    else:
        # A run is as long as what came in the one before: L = 5 + load * L.
        assert found.mean_lag == pytest.approx(1.5 * 5 / (1 - load), rel=0.1)


def test_a_run_that_takes_so_many_batches_at_most_limits_what_is_taken_in():
    costs = replace(BARE, run_seconds=100, batches_per_run=50)
    found = simulate(STEADY, costs)
    assert found.growth == pytest.approx(STEADY.slot_rate / 2, rel=0.05)


def test_more_cores_and_later_merges_never_cost_more():
    each_run, later = GIVEN.deployments[2], GIVEN.deployments[3]
    assert later.merge_seconds > 0 and replace(later, merge_seconds=0, name=each_run.name) == each_run
    now, merged_later = simulate(each_run, GIVEN.costs), simulate(later, GIVEN.costs)
    assert merged_later.cpu["dimensions"] < now.cpu["dimensions"] / 5
    lags = [simulate(replace(each_run, cores=cores), GIVEN.costs).mean_lag for cores in (8, 16, 64)]
    assert lags == sorted(lags, reverse=True)


@pytest.mark.parametrize(("files", "changes"), [(1, 3), (10, 5), (200, 100), (200, 2000)])
def test_files_touched_are_those_on_which_balls_fall(files: int, changes: int):
    of = replace(
        STEADY,
        random_share=1.0,
        rows_per_file=1000,
        row_bytes=500,
        slots=1,
        dimension_tb=files * 1000 * 500 / 1e12,
    )
    chance = Random(1)
    rounds = 300
    hit = sum(len({chance.randrange(files) for _ in range(changes)}) for _ in range(rounds)) / rounds
    assert files_touched(of, changes) == pytest.approx(hit, rel=0.03)
    assert files_touched(replace(of, random_share=0.0), 2500) == 3
    assert files_touched(of, 0) == 0


def test_compaction_is_what_a_window_held():
    costs = replace(BARE, compaction_cpu_per_million=1000)
    found = simulate(replace(STEADY, window_minutes=10), costs)
    assert found.cpu["compaction"] == pytest.approx(STEADY.slot_rate * 1000 / 1e6, rel=0.1)
    assert simulate(replace(STEADY, window_minutes=10), costs) == found
    assert math.isfinite(found.mean_lag)


def test_the_page_has_what_the_simulation_prints():
    text = PAGE.read_text()
    assert with_tables(text, tables(GIVEN)) == text, "make it anew: python -m bench.scale --write"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("row_bytes = 500", "row_bites = 500"), "row_bites, row_bytes is missing or too much"),
        (("slots = 1\n", "slots = 0\n"), "slots is 0. Write more than 0"),
        (("value = 7.1", 'value = "7"'), "capture_cpu_per_million.value is '7'. Write a number"),
        (("value = 7.1", "value = -1"), "is -1. Write a number, 0 or more"),
        (("[unit_costs]", "[unit_costs"), "cannot be read"),
    ],
)
def test_wrong_assumptions_are_named_with_their_place(tmp_path: Path, change: tuple[str, str], told: str):
    file = tmp_path / "mine.toml"
    file.write_text(ASSUMPTIONS.read_text().replace(*change, 1))
    with pytest.raises(click.ClickException, match=told.replace(".", r"\.")):
        read_assumptions(file)
    assert CliRunner().invoke(main, ["--assumptions", str(file)]).exit_code == 1
