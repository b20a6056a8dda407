"""What earlier checks found out about each key range of a table, so that a check reads only what changed.

For a tenth of the cost of a checksum, the source says whether a range still has the same row versions
(``RowVersions``). If it has, its earlier checksum is still right. If the lake's files of the range are the
same too, the range is as it was when both sides were equal. Even so, each range is read again on both sides
after a day, once what changed leaves room in the budget: a value may change without its row (a label of an
enum, for example), and a file without its name.

A check may read only so many rows (``Budget``). A range that changed and is not read keeps the moment at
which it was last found equal; the table is equal as of the oldest of these moments. The module is pure,
except for its file.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import add
from pathlib import Path
from typing import Any

from omnisupport_ingest import durable
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import (
    Key,
    KeySpan,
    RowChecksum,
    RowVersions,
    checked_columns,
)
from omnisupport_ingest.foreign import Unreadable, read_file
from omnisupport_ingest.home import Home
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import RANGES, Moment, folder_of
from omnisupport_ingest.records import decode_note, encode_line

READ_AGAIN_AFTER = timedelta(days=1)
"""A range is read again after this time, whatever its row versions say."""

LOOKS_FOR_A_READ = 10
"""Looking at the versions of so many rows costs the server at most as much as reading one row."""

_LOOKS = 8
"""Tenths of a budget that may be spent on looking."""

_FORMAT = 2
"""Version of the way in which the checksum of a row is computed. A new version makes earlier checksums
invalid."""


@dataclass(slots=True)
class Budget:
    """The rows that the server may still read in this check, of all tables; None: as many as there are."""

    rows: int | None

    def of_table(self, least: int) -> int | None:
        """Return the rows for the next table: what is left, and at least ``least``."""
        return None if self.rows is None else max(self.rows, least)

    def spend(self, read: int, looked: int) -> None:
        """Subtract the cost of reading and looking at so many rows."""
        if self.rows is not None:
            self.rows -= read + looked // LOOKS_FOR_A_READ


@dataclass(frozen=True, slots=True)
class KnownRange:
    """A range of keys from ``start`` (None: the first range) to the start of the next one.

    Attributes:
        rows: of the source, when it was last looked at, or an estimate.
        checksum: of its rows at ``read_at``; None if it was never read.
        versions: of its rows at ``read_at``.
        read_at: the clock of the source.
        equal: the last moment at which both sides had the same rows.
        files: a hash that names the lake's files of the range, if every row in them is equal to one of
            ``versions``.
        tried: the LSN at which it was last compared, if it was not found equal there.
        differed: it differed at ``tried``; otherwise some of its rows could not be judged.
    """

    start: str | None
    rows: int
    checksum: tuple[int, ...] | None = None
    versions: tuple[int, ...] | None = None
    read_at: datetime | None = None
    equal: Moment | None = None
    files: str | None = None
    tried: Lsn | None = None
    differed: bool = False

    def with_next(self, other: KnownRange) -> KnownRange:
        """Return this range and the next one as one. The sums of both add up to the sums of the whole."""
        read = [each.read_at for each in (self, other) if each.read_at is not None]
        return KnownRange(
            self.start,
            self.rows + other.rows,
            _sum(self.checksum, other.checksum),
            _sum(self.versions, other.versions),
            min(read) if len(read) == 2 else None,
            KnownRanges("", (self, other)).equal,
            differed=self.differed or other.differed,
        )

    def has(self, versions: RowVersions | None) -> bool:
        """Whether its rows are still the ``versions`` of the source (None: they are not known)."""
        return versions is not None and self.versions == tuple(versions)

    @property
    def turn(self) -> tuple[bool, int]:
        """Sort key for the order in which ranges are due. First come ranges that differed, so that a known
        difference is never passed over; then ranges that were never compared; then those compared the
        longest time ago."""
        compared = [-1 if self.equal is None else self.equal.lsn.value]
        if self.tried is not None:
            compared.append(self.tried.value)
        return not self.differed, max(compared)


def _sum(one: tuple[int, ...] | None, other: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if one is None or other is None else tuple(map(add, one, other))


@dataclass(frozen=True, slots=True)
class KnownRanges:
    """All ranges of a table. ``made_of``: a hash of what the checksums depend on besides the rows."""

    made_of: str
    ranges: tuple[KnownRange, ...]

    def divided(self, cuts: Sequence[str], rows_between: int, *, whole_numbers: bool) -> KnownRanges:
        """Divide ranges of more than twice ``rows_between`` rows at the ascending ``cuts`` within them."""
        order: Callable[[str], Any] = int if whole_numbers else str
        ordered = [order(cut) for cut in cuts]
        ends = [*(each.start for each in self.ranges[1:]), None]
        parts: list[KnownRange] = []
        for each, end in zip(self.ranges, ends, strict=True):
            first = 0 if each.start is None else bisect_left(ordered, order(each.start))
            last = len(cuts) if end is None else bisect_left(ordered, order(end))
            inner = [cut for cut in cuts[first:last] if cut != each.start]
            if each.rows <= 2 * rows_between or not inner:
                parts.append(each)
            else:
                part = KnownRange(
                    None, rows_between, equal=each.equal, tried=each.tried, differed=each.differed
                )
                parts += [replace(part, start=start) for start in (each.start, *inner)]
        return replace(self, ranges=tuple(parts))

    def joined(self, rows_between: int) -> KnownRanges:
        """Join neighbours that have half of ``rows_between`` rows or fewer together.

        Otherwise a table whose keys grow and whose old rows are deleted would get more ranges every day.
        """
        together: list[KnownRange] = []
        for each in self.ranges:
            if together and 2 * (together[-1].rows + each.rows) <= rows_between:
                together[-1] = together[-1].with_next(each)
            else:
                together.append(each)
        return replace(self, ranges=tuple(together))

    def holding(self, keys: Collection[Key], *, whole_numbers: bool) -> frozenset[int]:
        """Return the numbers of the ranges in which ``keys`` lie."""
        order: Callable[[str], Any] = int if whole_numbers else str
        starts = [order(each.start) for each in self.ranges[1:] if each.start is not None]
        # A withheld event may have a key that is no number; no row has such a key.
        firsts = {key[0] for key in keys if not whole_numbers or _is_number(key[0])}
        return frozenset(bisect_right(starts, order(first)) for first in firsts)

    def around(self, spans: Collection[KeySpan], *, whole_numbers: bool) -> frozenset[int]:
        """Return the numbers of the ranges that contain ``spans``."""
        starts = [(span.start,) for span in spans if span.start is not None]
        first = {0} if len(starts) < len(spans) else set()
        return self.holding(starts, whole_numbers=whole_numbers) | first

    @property
    def differs(self) -> bool:
        """Whether a range is known to differ."""
        return any(each.differed for each in self.ranges)

    @property
    def equal(self) -> Moment | None:
        """The oldest moment at which a range was equal; None if any range never was."""
        moments = [each.equal for each in self.ranges if each.equal is not None]
        if len(moments) < len(self.ranges):
            return None
        return min(moments, key=lambda each: each.lsn)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def known_ranges(home: Home, contract: TableContract, made_of: str) -> KnownRanges:
    """Return what is known of the ranges of a table, if ``made_of`` is still the same; else one range of
    which nothing is known."""
    try:
        # Larger than other notes: some hundred bytes for each 8,192 rows of the table.
        known = decode_note(KnownRanges, read_file(_file(home, contract)))
    except (OSError, Unreadable):
        known = None
    if known is None or known.made_of != made_of or not known.ranges:
        return KnownRanges(made_of, (KnownRange(None, 1 << 62),))
    return known


def write_known_ranges(home: Home, contract: TableContract, known: KnownRanges) -> None:
    """Replace what is known of the ranges of a table, durable on return."""
    file = _file(home, contract)
    # No failpoint: without the file, or with the one before, the next check reads more.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    durable.replace(file, encode_line(known).encode())


def made_of(contract: TableContract, epoch: int, definition: str) -> str:
    """Return a hash of what the checksums of a table depend on besides its rows.

    ``definition``: of the table at the source, and the timeline. The epoch is in the hash, because in another
    epoch the source may be another server, with other transactions of the same numbers.
    """
    types = [(each.name, each.type) for each in checked_columns(contract)]
    columns = [[name, of_type.kind.name, of_type.precision, of_type.scale] for name, of_type in types]
    parts = [_FORMAT, epoch, definition, list(contract.key), columns, contract.soft_delete_column]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _file(home: Home, contract: TableContract) -> Path:
    return folder_of(home, contract.source) / f"{contract.name}{RANGES}"


def part_to_look_at(ranges: Sequence[KnownRange], budget: int | None) -> range:
    """Return the consecutive ranges whose row versions a check looks at: all, if ``budget`` allows it,
    else as many as it allows, from the one that is due first."""
    if budget is None or sum(each.rows for each in ranges) <= (most := _most_looks(budget)):
        return range(len(ranges))
    first = min(range(len(ranges)), key=lambda number: (ranges[number].turn, number))
    last, left = first + 1, most - ranges[first].rows
    while last < len(ranges) and ranges[last].rows <= left:
        left -= ranges[last].rows
        last += 1
    return range(first, last)


def _most_looks(budget: int) -> int:
    return budget * _LOOKS * LOOKS_FOR_A_READ // 10


@dataclass(frozen=True)
class Look:
    """What a check does with the ranges of a table.

    Attributes:
        part: the numbers of the ranges that it looks at.
        versions: of these ranges; None: not known.
        chosen: those of them that the server reads.
        left: those that may differ and are passed over.
        settled: those that are as they were when both sides were equal.
        files: for each range of the table, a hash that names the lake's files of the range.
    """

    known: KnownRanges
    part: range
    versions: tuple[RowVersions, ...] | None = None
    chosen: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()
    settled: frozenset[int] = frozenset()
    files: tuple[str, ...] = ()

    @classmethod
    def again(cls, spans: Sequence[KeySpan]) -> Look:
        """Return the look that reads just the ascending ``spans``."""
        starts: list[str | None] = [None]
        for bound in (each for span in spans for each in span):
            if bound is not None and bound != starts[-1]:
                starts.append(bound)
        look = cls(KnownRanges("", tuple(KnownRange(start, 0) for start in starts)), range(len(starts)))
        chosen = frozenset(number for number, span in look.spans.items() if span in set(spans))
        return replace(look, chosen=chosen, left=frozenset(look.part) - chosen)

    def choosing(
        self,
        versions: Sequence[RowVersions] | None,
        files: Sequence[str],
        now: datetime,
        budget: int | None,
    ) -> Look:
        """Choose what to read: first what changed, in the order of ``turn``, then what was read more than a
        day ago.

        ``versions``: of the part; None if the source does not report them. ``files``: of every range.
        ``now``: the clock of the source. Without a ``budget`` everything is read.
        """
        found = None if versions is None else tuple(versions)
        look = replace(self, versions=found, files=tuple(files))
        if budget is None:
            return replace(look, chosen=frozenset(self.part))
        version_of = dict(zip(self.part, found or [None] * len(self.part), strict=True))
        size_of = {
            number: self.known.ranges[number].rows if each is None else each.rows
            for number, each in version_of.items()
        }
        changed = [number for number in self.part if not self.known.ranges[number].has(version_of[number])]
        changed.sort(key=lambda number: self.known.ranges[number].turn)
        due = _due(self.known.ranges, set(self.part) - set(changed), now)
        chosen: set[int] = set()
        rows = budget - look.rows_looked_at() // LOOKS_FOR_A_READ
        for number in [*changed, *due]:
            if chosen and size_of[number] > rows:
                break
            chosen.add(number)
            rows -= size_of[number]
        settled = frozenset(
            number
            for number in set(self.part) - set(changed) - chosen
            if self.known.ranges[number].files == files[number]
        )
        left = frozenset(changed) - chosen
        return replace(look, chosen=frozenset(chosen), left=left, settled=settled)

    @property
    def spans(self) -> dict[int, KeySpan]:
        """The span of each range that is looked at, by its number."""
        starts = [*(each.start for each in self.known.ranges), None]
        return {number: KeySpan(starts[number], starts[number + 1]) for number in self.part}

    @property
    def span(self) -> KeySpan:
        """The span of all ranges that are looked at."""
        spans = self.spans
        return KeySpan(spans[self.part[0]].start, spans[self.part[-1]].end)

    @property
    def cuts(self) -> list[str]:
        """The cuts between the ranges that are looked at."""
        return [each.start for each in list(self.spans.values())[1:] if each.start is not None]

    @property
    def whole(self) -> bool:
        """Whether every range of the table is compared."""
        return len(self.part) == len(self.known.ranges) and not self.left

    @property
    def passed_over(self) -> frozenset[KeySpan]:
        """The spans that need not be compared, or are not compared."""
        spans = self.spans
        return frozenset(spans[number] for number in self.left | self.settled)

    @property
    def unchanged(self) -> dict[KeySpan, RowChecksum]:
        """The checksums of spans that need not be read."""
        checksums = {
            span: self.known.ranges[number].checksum
            for number, span in self.spans.items()
            if number not in self.chosen | self.left | self.settled
        }
        return {span: RowChecksum(*each) for span, each in checksums.items() if each is not None}

    def rows_looked_at(self) -> int:
        """Return the number of rows whose versions were looked at."""
        return 0 if self.versions is None else sum(each.rows for each in self.versions)

    def settled_rows(self) -> int:
        """Return the number of rows in the ranges that need not be compared."""
        return sum(self.known.ranges[number].rows for number in self.settled)

    def after(
        self,
        read: Mapping[KeySpan, RowChecksum],
        moment: Moment,
        *,
        differing: Collection[int] = (),
        unjudged: Collection[int] = (),
        left_out: Collection[int] = (),
    ) -> KnownRanges:
        """Return what is known after the check.

        ``read``: checksums of the source by span. The other arguments are numbers of ranges: ``differing``
        ones differ; ``unjudged`` ones have rows of which the lake does not know everything; ``left_out`` ones
        are equal except for rows that were not compared. All other ranges that were compared are equal.
        """
        ranges = list(self.known.ranges)
        for place, (number, span) in enumerate(self.spans.items()):
            versions = self.versions[place] if self.versions is not None else None
            one = ranges[number]
            if number in self.chosen and span in read:
                one = replace(one, checksum=tuple(read[span]), read_at=moment.at, rows=read[span].rows)
                one = replace(one, versions=None if versions is None else tuple(versions), files=None)
            elif versions is not None:
                one = replace(one, rows=versions.rows)
            if number in self.left:
                pass
            elif number in differing or number in unjudged:
                one = replace(one, tried=moment.lsn, differed=number in differing)
            else:
                files = self.files[number] if number not in left_out and versions is not None else None
                one = replace(one, equal=moment, files=files, tried=None, differed=False)
            ranges[number] = one
        return replace(self.known, ranges=tuple(ranges))


def _due(ranges: Sequence[KnownRange], numbers: Collection[int], now: datetime) -> Iterator[int]:
    """Yield those of ``numbers`` whose ranges were read more than a day ago, the longest ago first."""
    read = [(read_at, number) for number in numbers if (read_at := ranges[number].read_at) is not None]
    yield from (number for read_at, number in sorted(read) if now - read_at > READ_AGAIN_AFTER)
