"""Ranges of numbers of windows: given, learned, and what stands out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.checks.quality_checks import LEAST_WINDOWS, Range, quiet_stretches, range_of
from omnisupport_ingest.contracts.quality import Expected
from omnisupport_ingest_tests.examples import examples

LEARNED = Expected(learned=True, windows=10, spread=3.0)


def test_a_given_range_has_the_ends_that_are_given() -> None:
    found = range_of(Expected(at_least=5), [])
    assert found == Range(5, None) and (found.holds(5), found.holds(4)) == (True, False)
    found = range_of(Expected(at_most=7), [])
    assert found == Range(None, 7) and (found.holds(7), found.holds(8)) == (True, False)


def test_nothing_is_learned_from_too_few_windows() -> None:
    assert range_of(LEARNED, [100] * (LEAST_WINDOWS - 1)) is None


def test_learned_is_the_median_and_so_many_times_the_median_distance_from_it() -> None:
    # By hand: the median is 105, the distances 5 5 5 5 15 15 25 95, their median 10.
    found = range_of(LEARNED, [100, 110, 100, 110, 90, 120, 80, 200])
    assert found == Range(75.0, 135.0)


def test_only_the_newest_windows_are_learned_from() -> None:
    assert range_of(LEARNED, [9_000] * 50 + [100] * 10) == Range(85.0, 115.0)


@settings(max_examples=examples(100))
@given(st.integers(0, 10_000), st.integers(0, 3))
def test_a_few_odd_windows_move_nothing_much(usual: int, odd: int) -> None:
    found = range_of(LEARNED, [usual] * (10 - odd) + [10**9] * odd)
    assert found is not None and found.holds(usual) and not found.holds(10**9)


@pytest.mark.parametrize(
    ("counts", "stretches", "now"),
    [
        ([], [], 0),
        ([0, 0], [], 2),
        ([5, 5, 5], [0, 0], 0),
        ([0, 5, 0, 0, 5, 5, 0], [2, 0], 1),
        ([5, 0, 5, 0, 0, 0], [1], 3),
    ],
)
def test_stretches_without_events_lie_between_windows_that_have_some(
    counts: list[int], stretches: list[int], now: int
) -> None:
    assert quiet_stretches(counts) == (stretches, now)
