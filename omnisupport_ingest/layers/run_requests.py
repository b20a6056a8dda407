"""Which runs to ask for: gapless ranges of pending windows that no run in progress covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.windows import OUT_OF_RANGE, WindowGrid, WindowRange, without_sentinel

FIRST_WAIT = timedelta(seconds=5)
LONGEST_WAIT = timedelta(minutes=10)

MOST_EMPTY = 24
"""Windows without an event that one run of a replay goes over; more of them cost more than a second run."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """``ranges`` to ask for; ``running`` windows are covered already; ``ahead`` are no partitions yet."""

    ranges: tuple[WindowRange, ...]
    running: tuple[str, ...]
    ahead: tuple[str, ...]


def plan_runs(
    grid: WindowGrid, pending: Iterable[str], *, in_progress: Iterable[WindowRange], newest: str
) -> RunPlan:
    """Split ``pending`` windows; ``newest`` is the newest one that is a partition.

    A covered window waits for its run to end: what landed after that run had looked is still
    pending then. The sentinel is no partition and is taken in by any run, so alone it asks for one
    of the newest window.
    """
    asked = set(pending)
    windows = set(without_sentinel(sorted(asked)))
    if asked == {OUT_OF_RANGE}:
        windows = {newest}
    busy = {key for each in in_progress for key in windows if each.first <= key <= each.last}
    # Keys sort as their times do.
    ahead = {key for key in windows if key > newest}
    return RunPlan(
        ranges=tuple(grid.ranges(windows - busy - ahead)),
        running=tuple(sorted(busy)),
        ahead=tuple(sorted(ahead - busy)),
    )


def replay_ranges(grid: WindowGrid, windows: Iterable[str], others: Iterable[str]) -> list[WindowRange]:
    """The fewest runs that make ``windows`` again and none of ``others``, which events landed in as well.

    A run of Dagster covers windows in a row. What a run costs is mostly fixed, so it goes on over windows
    that nothing landed in, up to ``MOST_EMPTY`` of them at a time.
    """
    asked = set(windows)
    not_over = set(others) - asked
    found: list[WindowRange] = []
    for each in grid.ranges(asked):
        between = grid.keys_between(found[-1].last, each.first)[1:-1] if found else []
        if found and len(between) <= MOST_EMPTY and not_over.isdisjoint(between):
            found[-1] = WindowRange(found[-1].first, each.last)
        else:
            found.append(each)
    return found


def retry_at(failures: int, last_failure: datetime) -> datetime:
    """When to try again after ``failures`` failed runs in a row: 5 s later, then 10 s, … 10 minutes."""
    doublings = min(max(failures - 1, 0), 16)
    return last_failure + min(FIRST_WAIT * (1 << doublings), LONGEST_WAIT)
