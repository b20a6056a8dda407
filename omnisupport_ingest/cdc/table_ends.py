"""Truncates and boundaries: the events that end rows without naming their keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from omnisupport_ingest.cdc.life import Ending, Micros, Position
from omnisupport_ingest.key_range import KeyRange

Told = tuple[Position, Micros, Position | None, str | None]
"""Position, time, position of the doubt if it is in quarantine, and range of keys (null: all) of one."""


@dataclass(frozen=True, slots=True)
class TableEnds:
    """What ends rows of a table: accepted truncates and boundaries, and quarantined ones (``doubts``).

    ``ranged``: the same of those that end a range of keys alone.
    """

    endings: tuple[Ending, ...] = ()
    doubts: tuple[Position, ...] = ()
    ranged: tuple[tuple[KeyRange, TableEnds], ...] = field(default=())

    @classmethod
    def told(cls, places: Iterable[Told]) -> TableEnds:
        """Of the truncates and boundaries of a table, in any order, repeats allowed."""
        found = set(places)
        # An accepted one voids a quarantined one at its position.
        accepted = {position for position, _, doubt, _ in found if doubt is None}
        counted = [each for each in found if each[2] is None or each[2] not in accepted]
        scopes = sorted({scope for *_, scope in counted if scope is not None})
        of_ranges = tuple((KeyRange.parse(scope), _of_scope(counted, scope)) for scope in scopes)
        whole = _of_scope(counted, None)
        return cls(whole.endings, whole.doubts, of_ranges)

    @property
    def last(self) -> Position | None:
        """The highest position of those that reach every key."""
        return max((*(each.position for each in self.endings), *self.doubts), default=None)

    @property
    def last_ranged(self) -> Position | None:
        """The highest position of those that reach a range of keys."""
        found = (ends.last for _, ends in self.ranged)
        return max((position for position in found if position is not None), default=None)

    def reach(self, key: str) -> bool:
        """Whether any that is of a range of keys reaches ``key``."""
        return any(scope.holds(key) for scope, _ in self.ranged)

    def of(self, key: str) -> TableEnds:
        """Those that reach ``key``, as if each were of the whole table."""
        holding = [ends for scope, ends in self.ranged if scope.holds(key)]
        if not holding:
            return TableEnds(self.endings, self.doubts)
        endings = {*self.endings, *(each for ends in holding for each in ends.endings)}
        doubts = {*self.doubts, *(each for ends in holding for each in ends.doubts)}
        return TableEnds(tuple(sorted(endings)), tuple(sorted(doubts)))


def _of_scope(places: Iterable[Told], scope: str | None) -> TableEnds:
    here = [each for each in places if each[3] == scope]
    endings = {Ending(position, at) for position, at, doubt, _ in here if doubt is None}
    doubts = {doubt for _, _, doubt, _ in here if doubt is not None}
    return TableEnds(tuple(sorted(endings)), tuple(sorted(doubts)))


FORMAT = 1


@dataclass(frozen=True, slots=True)
class Carried:
    """What a table that is updated in place knows beside its rows: ``told`` are the truncates and boundaries
    that its rows have been held against."""

    told: frozenset[Told] = frozenset()

    @property
    def ends(self) -> TableEnds:
        return TableEnds.told(self.told)

    def with_more(self, told: Iterable[Told]) -> Carried:
        return Carried(self.told | frozenset(told))

    def to_text(self) -> str:
        ordered = sorted(self.told, key=lambda each: (each[0], each[1], each[2] or (), each[3] or ""))
        return json.dumps({"format": FORMAT, "ends": ordered}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Carried | None:
        """What ``to_text`` wrote; None for the text of another format, none included."""
        try:
            record: Any = json.loads(text)
            if record["format"] != FORMAT:
                return None
            return cls(frozenset(_told(each) for each in record["ends"]))
        except (ValueError, TypeError, KeyError):
            return None


def _told(each: Any) -> Told:
    position, at, doubt, scope = each
    return tuple(position), at, None if doubt is None else tuple(doubt), scope
