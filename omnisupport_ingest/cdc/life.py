"""The algebra of the fold on plain values: what is kept of a key's life, and how two parts of it merge.

A *part* is what one event, or one folded row, says of a key. Parts merge by taking maxima: the latest life
start, the latest event that leaves the key alive, and per column the latest event that carried it. A maximum
does not depend on order, grouping or repetition, so the fold is associative, commutative and idempotent: a
window folded in parts, replayed, or merged with others gives the same state. (The state is a
join-semilattice, as in state-based CRDTs: Shapiro et al., 2011.)

This module knows neither Spark nor Arrow. Positions are tuples, which compare as positions do. Times are
microseconds since 1970, UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PositionTuple = tuple[int, int, int]
"""(epoch, commit LSN, ordinal)."""

Micros = int
"""Microseconds since 1970, UTC."""


class Ending(NamedTuple):
    """A delete, truncate or snapshot end: it ends the life of the keys it reaches."""

    position: PositionTuple
    at: Micros


class Cell(NamedTuple):
    """The latest entry of a column: its deciding position, and whether its value is known there.

    Cells compare by position first; an accepted event (``known``) beats a quarantined one at the same
    position. ``row``: number of the row that has the value.
    """

    position: PositionTuple
    known: bool
    row: int


@dataclass(slots=True)
class Part:
    """What one event or one folded row says of a key. None stands for "no such event".

    Attributes:
        row: its number in its table.
        position: of its last event.
        first: position of its first event.
        alive: position of its latest event that leaves the key alive.
        life_start: position of its latest ``c`` or ``r``; a new life inherits nothing.
        moved_from: old key, if a key change began that life and left a column unsent.
        deletes: deletes that may still matter.
        doubt: position of its latest quarantined delete.
        vouched: position of its latest accepted event that leaves the key alive.
    """

    row: int
    position: PositionTuple | None
    first: PositionTuple | None
    alive: PositionTuple | None = None
    life_start: PositionTuple | None = None
    moved_from: str | None = None
    deletes: Sequence[Ending] = ()
    doubt: PositionTuple | None = None
    vouched: PositionTuple | None = None


@dataclass(slots=True)
class Life:
    """Merged parts: for each fact the part that has it; None where no part has it.

    Attributes:
        last: the part with the last event.
        first: the part with the first event.
        living: the part with the latest event that leaves the key alive.
        start: the part with the latest life start.
        doubting: the part with the latest doubt.
        vouching: the part with the latest accepted event that leaves the key alive.
        deletes: in order, the last one below ``alive`` and all above it.
        begins: lowest position that can belong to the life of the latest living event; cells below it are
            void.
    """

    last: Part
    first: Part
    living: Part | None
    start: Part | None
    doubting: Part | None
    vouching: Part | None
    deletes: Sequence[Ending]
    begins: PositionTuple | None

    @property
    def alive(self) -> PositionTuple | None:
        return self.living.alive if self.living is not None else None

    @property
    def known_to_exist(self) -> PositionTuple | None:
        """Position of the latest event after which the key is known to exist: an accepted one, or a new
        life."""
        vouched = self.vouching.vouched if self.vouching is not None else None
        return latest(vouched, self.start.life_start if self.start is not None else None)


def merge(parts: Sequence[Part], rank: Callable[[int], Any]) -> Life:
    """Merge ``parts`` (at least one).

    ``rank`` orders rows of one position, which is rare, by a total order of their content, so that the result
    does not depend on which came first.
    """
    last = first = parts[0]
    living = start = doubting = vouching = None
    deletes: set[Ending] = set()
    for part in parts:
        last = _later(last, part, last.position, part.position, rank)
        if part.first is not None and (first.first is None or part.first < first.first):
            first = part
        if part.alive is not None:
            living = part if living is None else _later(living, part, living.alive, part.alive, rank)
        if part.life_start is not None and (start is None or _start(part) > _start(start)):
            start = part
        if part.doubt is not None and (
            doubting is None or doubting.doubt is None or part.doubt > doubting.doubt
        ):
            doubting = part
        if part.vouched is not None and (
            vouching is None or vouching.vouched is None or part.vouched > vouching.vouched
        ):
            vouching = part
        if part.deletes:
            deletes.update(part.deletes)
    alive = living.alive if living is not None else None
    matter = deletes_that_matter(alive, deletes) if deletes else ()
    return Life(
        last=last,
        first=first,
        living=living,
        start=start,
        doubting=doubting,
        vouching=vouching,
        deletes=matter,
        begins=life_begins(alive, start.life_start if start is not None else None, matter),
    )


def _later(
    held: Part, part: Part, at: PositionTuple | None, other: PositionTuple | None, rank: Callable[[int], Any]
) -> Part:
    """Return the later of two parts, by the positions ``at`` and ``other``."""
    if other is None or held is part:
        return held
    if at is None or other > at:
        return part
    return part if other == at and rank(part.row) > rank(held.row) else held


def _start(part: Part) -> tuple[PositionTuple | None, str]:
    return part.life_start, part.moved_from or ""


def deletes_that_matter(alive: PositionTuple | None, deletes: Iterable[Ending]) -> list[Ending]:
    """Return the last delete at or below the latest living event, and all above it, in order.

    Deletes below that one cannot matter any more: life starts and living events only move up. A delete at the
    position of the living event comes before it (``event_fold.ORDER``).
    """
    ordered = sorted(deletes)
    if alive is None or not ordered:
        return ordered
    above = [each for each in ordered if each.position > alive]
    below = [each for each in ordered if each.position <= alive]
    return below[-1:] + above


def life_begins(
    alive: PositionTuple | None, start: PositionTuple | None, endings: Sequence[Ending]
) -> PositionTuple | None:
    """Return the later of the life's start and the last ending below ``alive``; None if there is neither."""
    if alive is None or not endings:
        return start
    last = max((each.position for each in endings if each.position <= alive), default=None)
    return latest(start, last)


def winner(cells: Iterable[Cell], begins: PositionTuple | None) -> Cell | None:
    """Return the latest of one column's cells; None if it belongs to an earlier life or there is none."""
    best = max(cells, default=None)
    if best is None or (begins is not None and best.position < begins):
        return None
    return best


def latest(one: PositionTuple | None, other: PositionTuple | None) -> PositionTuple | None:
    """Return the later of two positions; None only if both are."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def just_below(start: PositionTuple) -> PositionTuple:
    """Return the position of the ``d`` of a key change whose ``c`` is at ``start``."""
    return (start[0], start[1], start[2] - 1)
