"""Ranges that numbers of windows are expected in, given or learned, and what stands out of them. Pure.

Learned is robust: the median of earlier windows, and so many times the median of the distances from it (MAD),
so that a few odd windows move neither. A distance is taken for at least ``_LEAST`` of the median, and for at
least 1, or the first change of a number that never changed would stand out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from omnisupport_ingest.contracts.quality import Expected

LEAST_WINDOWS = 8
"""Earlier numbers that are needed to learn."""

_LEAST = 0.05


@dataclass(frozen=True, slots=True)
class Range:
    """From ``low`` to ``high``, both included; null: without an end."""

    low: float | None
    high: float | None

    def holds(self, number: float) -> bool:
        return (self.low is None or number >= self.low) and (self.high is None or number <= self.high)

    def __str__(self) -> str:
        if self.low is None:
            return f"at most {self.high:g}"
        return f"at least {self.low:g}" if self.high is None else f"{self.low:g} to {self.high:g}"


def range_of(expected: Expected, earlier: Sequence[float]) -> Range | None:
    """The range that ``expected`` gives, or that is learned from the ``earlier`` numbers; None: too few."""
    if not expected.learned:
        return Range(expected.at_least, expected.at_most)
    numbers = earlier[-expected.windows :]
    if len(numbers) < LEAST_WINDOWS:
        return None
    middle = median(numbers)
    distance = median([abs(number - middle) for number in numbers])
    width = expected.spread * max(distance, _LEAST * middle, 1.0)
    return Range(max(0.0, round(middle - width, 3)), round(middle + width, 3))


def quiet_stretches(counts: Sequence[int]) -> tuple[list[int], int]:
    """The lengths of the stretches of windows without events between windows that have some (0: none between
    two), and the length of the one that ``counts`` end with."""
    runs = [(busy, len(list(of))) for busy, of in groupby(counts, key=bool)]
    now = runs.pop()[1] if runs and not runs[-1][0] else 0
    if runs and not runs[0][0]:
        # Before its first event the table was not known.
        runs = runs[1:]
    lengths: list[int] = []
    for busy, length in runs:
        lengths += [0] * (length - 1) if busy else [length]
    return lengths, now
