"""Table ends: the truncates and snapshot ends of a table, which end rows without naming their keys.

The fold of a key knows only the events of that key. Whoever computes its current state (``current_rows``,
``updating``) also needs the table ends above them: each ends the life of every key that it reaches.
A truncate reaches every key; a snapshot end reaches the keys that the snapshot covered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.event_fold import SNAPSHOT_END, TRUNCATE
from omnisupport_ingest.cdc.life import Ending, Micros, PositionTuple
from omnisupport_ingest.key_range import KeyRange

TABLE_END_COLUMNS = ("_cdc_kind", "_cdc_position", "_cdc_source_ts", "_cdc_doubt", "_cdc_scope")
"""The columns of folded rows that say what a table end is."""


class TableEnd(NamedTuple):
    """One truncate or snapshot end.

    ``at``: its commit time. ``doubt``: its own position if it is in quarantine, else None. ``key_range``: the
    text of the key range that it ends (``KeyRange.parse``); None: the whole table.
    """

    position: PositionTuple
    at: Micros
    doubt: PositionTuple | None
    key_range: str | None


def table_ends_in(rows: pa.Table) -> Iterator[TableEnd]:
    """Return the table ends among folded ``rows``, which have at least ``TABLE_END_COLUMNS``."""
    rows = rows.filter(pc.is_in(rows["_cdc_kind"], pa.array([TRUNCATE, SNAPSHOT_END])))
    fields = zip(
        columnar.positions(rows["_cdc_position"]),
        columnar.micros(rows["_cdc_source_ts"]),
        columnar.positions(rows["_cdc_doubt"]),
        rows["_cdc_scope"].to_pylist(),
        strict=True,
    )
    return (TableEnd(*each) for each in fields)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class TableEnds:
    """The table ends that reach every key of a table, and those that reach a key range.

    ``endings``: accepted ones. ``doubts``: positions of quarantined ones. ``ranged``: by key range, the ends
    that reach this range alone.
    """

    endings: tuple[Ending, ...] = ()
    doubts: tuple[PositionTuple, ...] = ()
    ranged: tuple[tuple[KeyRange, TableEnds], ...] = field(default=())

    @classmethod
    def collect(cls, table_ends: Iterable[TableEnd]) -> TableEnds:
        """Collect the table ends of one table, in any order, repeats allowed.

        An accepted end voids a quarantined one at its position.
        """
        distinct = set(table_ends)
        accepted = {end.position for end in distinct if end.doubt is None}
        counted = [end for end in distinct if end.doubt is None or end.doubt not in accepted]
        key_ranges = sorted({end.key_range for end in counted if end.key_range is not None})
        ranged = tuple((KeyRange.parse(each), _of_range(counted, each)) for each in key_ranges)
        whole = _of_range(counted, None)
        return cls(whole.endings, whole.doubts, ranged)

    @property
    def last(self) -> PositionTuple | None:
        """The highest position of an end that reaches every key."""
        return max((*(each.position for each in self.endings), *self.doubts), default=None)

    @property
    def last_ranged(self) -> PositionTuple | None:
        """The highest position of an end that reaches a key range."""
        found = (ends.last for _, ends in self.ranged)
        return max((position for position in found if position is not None), default=None)

    def any_range_holds(self, key: str) -> bool:
        """Whether ``key`` lies in the key range of any end."""
        return any(key_range.holds(key) for key_range, _ in self.ranged)

    def reaching(self, key: str) -> TableEnds:
        """Return the ends that reach ``key``, without their key ranges."""
        holding = [ends for key_range, ends in self.ranged if key_range.holds(key)]
        if not holding:
            return TableEnds(self.endings, self.doubts)
        endings = {*self.endings, *(each for ends in holding for each in ends.endings)}
        doubts = {*self.doubts, *(each for ends in holding for each in ends.doubts)}
        return TableEnds(tuple(sorted(endings)), tuple(sorted(doubts)))


def _of_range(table_ends: Iterable[TableEnd], key_range: str | None) -> TableEnds:
    here = [end for end in table_ends if end.key_range == key_range]
    endings = {Ending(end.position, end.at) for end in here if end.doubt is None}
    doubts = {end.doubt for end in here if end.doubt is not None}
    return TableEnds(tuple(sorted(endings)), tuple(sorted(doubts)))


FORMAT = 1
"""Version of the text that ``AppliedTableEnds`` writes."""


@dataclass(frozen=True, slots=True)
class AppliedTableEnds:
    """The table ends that were applied to the rows of a dimension, as its checkpoint keeps them.

    The next update in place applies only those that are not among them.
    """

    applied: frozenset[TableEnd] = frozenset()

    @property
    def ends(self) -> TableEnds:
        return TableEnds.collect(self.applied)

    def with_more(self, table_ends: Iterable[TableEnd]) -> AppliedTableEnds:
        return AppliedTableEnds(self.applied | frozenset(table_ends))

    def to_text(self) -> str:
        ordered = sorted(self.applied, key=lambda end: (*end[:2], end.doubt or (), end.key_range or ""))
        return json.dumps({"format": FORMAT, "ends": ordered}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> AppliedTableEnds | None:
        """Parse what ``to_text`` wrote; None if the text has another format or is empty."""
        try:
            record: Any = json.loads(text)
            if record["format"] != FORMAT:
                return None
            return cls(frozenset(_table_end(each) for each in record["ends"]))
        except (ValueError, TypeError, KeyError):
            return None


def _table_end(fields: Any) -> TableEnd:
    position, at, doubt, key_range = fields
    return TableEnd(tuple(position), at, None if doubt is None else tuple(doubt), key_range)
