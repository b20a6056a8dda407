"""Find the keys that differ between two sides, by checksums of key ranges that get smaller. Pure.

Both sides return the checksums of all ranges of a step at once. A range that differs is cut again, until it
is small enough to compare row by row, by two numbers for each row. So the cost is one look at everything, and
after that only at what differs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from omnisupport_ingest.contracts.row_checksum import (
    NO_ROWS,
    Key,
    KeySpan,
    RowChecksum,
    RowNumbers,
)

LEAF_ROWS = 4096
"""A range of at most so many rows is compared row by row."""

PARTS = 16
"""Into so many parts a range that differs is cut."""

STEPS = 4
"""So many times ranges are cut. That is enough for any table, and it ends where many rows share a first
key column."""

MOST_ROWS = 200_000
"""Rows of either side that are compared row by row. Differences beyond that are reported as ranges, not as
keys."""


Sizes = tuple[int, int]
"""Numbers of rows of a range, of the source and of the lake."""


class Side(Protocol):
    """The rows of one table on one side."""

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
        """Return the checksum of each range between ``cuts``, of rows in one of ``spans``."""

    def numbers(self, spans: Sequence[KeySpan], /) -> Mapping[Key, RowNumbers]:
        """Return the numbers of every row in ``spans``, by its key."""


class CutSide(Side, Protocol):
    """A side that can also choose the cuts."""

    def cuts(self, span: KeySpan, parts: int, /) -> list[str]:
        """Return values of the first key column that cut ``span`` into about as many even ranges, in
        ascending order."""


@dataclass(frozen=True, slots=True)
class Differing:
    """What differs.

    ``rows``: number of rows of the source in everything compared. ``spans``: the smallest ranges that differ.
    ``keys``: the differing keys, in order; if ``more``, there are others, or a side has more rows than keys.
    """

    rows: int
    spans: tuple[KeySpan, ...] = ()
    keys: tuple[Key, ...] = ()
    more: bool = False

    def without(self, same: Collection[Key]) -> Differing:
        """Return what differs without the keys ``same``, whose rows are equal value by value.

        Nothing differs if no key is left.
        """
        keys = tuple(key for key in self.keys if key not in same)
        return replace(self, keys=keys) if keys or self.more else Differing(self.rows)


def differing(
    source: Side,
    lake: CutSide,
    span: KeySpan,
    cuts: Sequence[str],
    passed_over: Collection[KeySpan] = (),
) -> Differing:
    """Compare the rows in ``span``, cut at the ascending ``cuts`` within it, except for the ranges
    ``passed_over``."""
    theirs, ours = _both(source, lake, cuts, [span])
    compared = [
        (each, one, other)
        for each, one, other in zip(ranges_of(span, cuts), theirs, ours, strict=True)
        if each not in passed_over
    ]
    rows = sum(one.rows for _, one, _ in compared)
    wrong = {each: (one.rows, other.rows) for each, one, other in compared if one != other}
    for _ in range(STEPS):
        large = [each for each, sizes in wrong.items() if max(sizes) > LEAF_ROWS]
        finer = {each: inner for each in large if (inner := lake.cuts(each, PARTS))}
        if not finer:
            break
        within = _of_cut(source, lake, finer)
        # Keep the order of keys: the cuts must ascend.
        wrong = {
            part: sizes
            for each, whole in wrong.items()
            for part, sizes in (within[each].items() if each in finer else ((each, whole),))
        }
    return _by_rows(source, lake, rows, wrong)


def ranges_of(span: KeySpan, cuts: Sequence[str]) -> list[KeySpan]:
    """Return the ranges into which the ascending ``cuts`` divide ``span``."""
    return [KeySpan(start, end) for start, end in pairwise([span.start, *cuts, span.end])]


def _both(
    source: Side, lake: Side, cuts: Sequence[str], spans: Sequence[KeySpan]
) -> tuple[list[RowChecksum], list[RowChecksum]]:
    """Return the checksums of both sides, which are computed at the same time."""
    with ThreadPoolExecutor(1, thread_name_prefix="checksums of the source") as pool:
        theirs = pool.submit(source.sums, cuts, spans)
        ours = lake.sums(cuts, spans)
        return theirs.result(), ours


def _of_cut(
    source: Side, lake: CutSide, finer: Mapping[KeySpan, list[str]]
) -> dict[KeySpan, dict[KeySpan, Sizes]]:
    """Cut each range at its cuts in ``finer``; return, for each range, its parts that differ with their
    numbers of rows."""
    inside = list(finer)
    parts_of = {span: ranges_of(span, inner) for span, inner in finer.items()}
    parts = [part for each in parts_of.values() for part in each]
    # Parts come in the order of keys. No row between two spans is counted.
    cuts = [part.start for part in parts if part.start is not None]
    theirs, ours = _both(source, lake, cuts, inside)
    number_of = {cut: number for number, cut in enumerate(cuts, start=1)}
    wrong: dict[KeySpan, dict[KeySpan, Sizes]] = {span: {} for span in inside}
    for span, of_span in parts_of.items():
        for part in of_span:
            number = 0 if part.start is None else number_of[part.start]
            if theirs[number] != ours[number]:
                wrong[span][part] = theirs[number].rows, ours[number].rows
    return wrong


def _by_rows(source: Side, lake: Side, rows: int, wrong: Mapping[KeySpan, Sizes]) -> Differing:
    chosen: list[KeySpan] = []
    budget = MOST_ROWS
    for span, sizes in wrong.items():
        if max(sizes) <= budget:
            chosen.append(span)
            budget -= max(sizes)
    keys: tuple[Key, ...] = ()
    twice = False
    if chosen:
        theirs, ours = source.numbers(chosen), lake.numbers(chosen)
        keys = tuple(sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)))
        # If the lake has a row twice, its key is there once, and only the checksum shows it.
        counted = [sum(wrong[span][side] for span in chosen) for side in (0, 1)]
        twice = counted != [len(theirs), len(ours)]
    more = twice or len(chosen) < len(wrong) or bool(wrong and not keys)
    return Differing(rows, tuple(wrong), keys, more=more)


@dataclass(frozen=True)
class Unchanged:
    """A side of which some checksums are ``known``, so that only the others are computed.

    ``passed_over``: ranges that need no checksum. ``read``: the checksums that were computed.
    """

    side: Side
    known: Mapping[KeySpan, RowChecksum]
    passed_over: Collection[KeySpan] = ()
    read: dict[KeySpan, RowChecksum] = field(default_factory=dict)

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
        """Return the checksums of the side; ranges that are passed over get the checksum of no rows."""
        if len(spans) != 1:
            return self.side.sums(cuts, spans)
        ranges = ranges_of(spans[0], cuts)
        asked = [each for each in ranges if each not in self.known and each not in self.passed_over]
        found = self.side.sums(cuts, _joined(asked)) if asked else [NO_ROWS] * len(ranges)
        checksums = dict(zip(ranges, found, strict=True)) | dict(self.known)
        self.read.update({each: checksums[each] for each in asked})
        return [checksums[each] for each in ranges]

    def numbers(self, spans: Sequence[KeySpan], /) -> Mapping[Key, RowNumbers]:
        """Return the numbers of the side."""
        return self.side.numbers(spans)


def _joined(spans: Sequence[KeySpan]) -> list[KeySpan]:
    """Return the ascending ``spans`` with neighbours joined."""
    together: list[KeySpan] = []
    for each in spans:
        if together and together[-1].end == each.start:
            together[-1] = KeySpan(together[-1].start, each.end)
        else:
            together.append(each)
    return together


@dataclass(frozen=True)
class Remaining:
    """A side without the rows of some keys, which cannot be compared now.

    ``left_out``: the numbers of those rows, as the side has them. ``whole_numbers``: whether spans are
    ordered as whole numbers.
    """

    side: Side
    left_out: Mapping[Key, RowNumbers]
    whole_numbers: bool

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
        """Return the checksums of the side without the rows that are left out."""
        edges = [self._order(cut) for cut in cuts]
        away: dict[int, list[RowNumbers]] = {}
        for key, numbers in self.left_out.items():
            if any(self._holds(span, key[0]) for span in spans):
                away.setdefault(bisect_right(edges, self._order(key[0])), []).append(numbers)
        checksums = self.side.sums(cuts, spans)
        return [each.without(away.get(index, ())) for index, each in enumerate(checksums)]

    def numbers(self, spans: Sequence[KeySpan], /) -> Mapping[Key, RowNumbers]:
        """Return the numbers of the side without the rows that are left out."""
        numbers_of = self.side.numbers(spans)
        return {key: numbers for key, numbers in numbers_of.items() if key not in self.left_out}

    def _holds(self, span: KeySpan, first: str) -> bool:
        at = self._order(first)
        return (span.start is None or at >= self._order(span.start)) and (
            span.end is None or at < self._order(span.end)
        )

    def _order(self, first: str) -> tuple[int, str]:
        return (int(first), "") if self.whole_numbers else (0, first)
