"""Which runs to request: gapless ranges of pending windows that no run in progress covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from omnisupport_ingest.windows import OUT_OF_RANGE, WindowGrid, WindowRange, without_sentinel

FIRST_WAIT = timedelta(seconds=5)
LONGEST_WAIT = timedelta(minutes=10)

MOST_EMPTY = 24
"""Most windows in a row without an event that one replay run covers; beyond that a second run costs less."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """``ranges``: to request. ``running``: windows that runs cover already. ``ahead``: no partitions yet."""

    ranges: tuple[WindowRange, ...]
    running: tuple[str, ...]
    ahead: tuple[str, ...]


def plan_runs(
    grid: WindowGrid, pending: Iterable[str], *, in_progress: Iterable[WindowRange], newest: str
) -> RunPlan:
    """Split ``pending`` windows into runs. ``newest``: the newest window that is a partition.

    A window that a run covers waits for the run to end; what landed after the run had looked is then still
    pending. The sentinel is no partition, but every run takes it in. So if it alone is pending, a run of the
    newest window is requested.
    """
    asked = set(pending)
    windows = set(without_sentinel(sorted(asked)))
    if asked == {OUT_OF_RANGE}:
        windows = {newest}
    busy = {key for each in in_progress for key in windows if each.first <= key <= each.last}
    # The keys of windows sort in the order of their times.
    ahead = {key for key in windows if key > newest}
    return RunPlan(
        ranges=tuple(grid.ranges(windows - busy - ahead)),
        running=tuple(sorted(busy)),
        ahead=tuple(sorted(ahead - busy)),
    )


def replay_ranges(grid: WindowGrid, windows: Iterable[str], others: Iterable[str]) -> list[WindowRange]:
    """Return the fewest runs that rebuild ``windows`` and none of ``others``, the other windows with events.

    A Dagster run covers consecutive windows. Most of its cost is fixed, so a run continues over windows
    without events, up to ``MOST_EMPTY`` of them in a row.
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
    """Return when to retry after ``failures`` failed runs in a row: after 5 s, 10 s, … up to 10 minutes."""
    doublings = min(max(failures - 1, 0), 16)
    return last_failure + min(FIRST_WAIT * (1 << doublings), LONGEST_WAIT)
