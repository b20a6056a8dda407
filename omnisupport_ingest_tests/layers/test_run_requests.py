"""Which windows become runs, as a truth table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.layers.scheduling.run_requests import MOST_EMPTY, plan_runs, replay_ranges, retry_at
from omnisupport_ingest.windows import KEY_FORMAT, OUT_OF_RANGE, WindowGrid, WindowRange, WindowSize

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
GRID = WindowGrid(WindowSize(60), NOON)


def key(hour: int) -> str:
    return (NOON + timedelta(hours=hour)).strftime(KEY_FORMAT)


def span(first: int, last: int) -> WindowRange:
    return WindowRange(key(first), key(last))


@pytest.mark.parametrize(
    ("pending", "in_progress", "ranges", "running", "ahead"),
    [
        pytest.param([], [], [], [], [], id="nothing pending"),
        pytest.param([0], [], [span(0, 0)], [], [], id="one window"),
        pytest.param([2, 0, 1], [], [span(0, 2)], [], [], id="neighbours are one range, in any order"),
        pytest.param([0, 2], [], [span(0, 0), span(2, 2)], [], [], id="a gap makes two ranges"),
        pytest.param([0, 1, 2], [span(1, 1)], [span(0, 0), span(2, 2)], [1], [], id="a run splits them"),
        pytest.param([0, 1], [span(0, 3)], [], [0, 1], [], id="a run covers all"),
        pytest.param(
            [4], [span(0, 3)], [span(4, 4)], [], [], id="a run of other windows is no reason to wait"
        ),
        pytest.param([4, 5, 6], [], [span(4, 5)], [], [6], id="a window that is no partition yet waits"),
        pytest.param([6], [span(6, 6)], [], [6], [], id="ahead, but running: named once"),
    ],
)
def test_plan(pending, in_progress, ranges, running, ahead):
    plan = plan_runs(GRID, [key(hour) for hour in pending], in_progress=in_progress, newest=key(5))
    assert plan.ranges == tuple(ranges)
    assert plan.running == tuple(map(key, running))
    assert plan.ahead == tuple(map(key, ahead))


def test_the_sentinel_alone_asks_for_the_newest_window():
    assert plan_runs(GRID, [OUT_OF_RANGE], in_progress=[], newest=key(5)).ranges == (span(5, 5),)


def test_the_sentinel_beside_others_asks_for_nothing_more():
    assert plan_runs(GRID, [key(1), OUT_OF_RANGE], in_progress=[], newest=key(5)).ranges == (span(1, 1),)


@pytest.mark.parametrize(("failures", "seconds"), [(1, 5), (2, 10), (3, 20), (8, 600), (10_000, 600)])
def test_attempts_wait_longer_after_every_failure_up_to_ten_minutes(failures, seconds):
    assert retry_at(failures, NOON) == NOON + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("windows", "others", "runs"),
    [
        pytest.param([], [], [], id="nothing"),
        pytest.param([3, 0, 1], [], [span(0, 3)], id="over a window that nothing landed in"),
        pytest.param([0, 3], [0, 3], [span(0, 3)], id="what is asked for is no obstacle"),
        pytest.param([0, 3, 9], [2], [span(0, 0), span(3, 9)], id="not over a window with events"),
        pytest.param([0, MOST_EMPTY + 1], [], [span(0, MOST_EMPTY + 1)], id="as far as it pays"),
        pytest.param(
            [0, MOST_EMPTY + 2], [], [span(0, 0), span(MOST_EMPTY + 2, MOST_EMPTY + 2)], id="not further"
        ),
    ],
)
def test_scattered_windows_become_the_fewest_runs(windows, others, runs):
    assert replay_ranges(GRID, map(key, windows), map(key, others)) == runs
