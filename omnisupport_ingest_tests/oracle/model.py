"""The oracle's own words: an event, its position, and a row of current state.

Nothing here is shared with the pipeline, so that a mistake in one cannot hide in the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

Key = tuple[str, ...]
"""The texts of a row's key columns, in the contract's order. (Of bad input, one of them may be ``None``.)"""

Image = dict[str, str | None]
"""Columns that were sent, by name. NULL is ``None``; a column that was not sent is not in it."""


class Position(NamedTuple):
    """Identity and order of an event: ``(epoch, commit_lsn, ordinal)``."""

    epoch: int
    commit_lsn: int
    ordinal: int

    def below(self) -> Position:
        """The position just below: that of the ``d`` when this is the ``c`` of a key change."""
        return self._replace(ordinal=self.ordinal - 1)


@dataclass(frozen=True)
class Event:
    """One event of one table.

    ``op``: ``c`` insert, ``u`` update, ``d`` delete, ``r`` snapshot row, ``t`` truncate, ``b``
    boundary of a finished snapshot. ``after`` holds the columns that were sent, without the key's;
    ``before`` those of the old row, where the source sent it. ``moved_from``: on the ``c`` of a
    key change, the old key; its ``d`` stands just below. ``quarantined``: the event is a withheld.

    ``read_at`` is of ``r`` only: the read saw exactly the transactions that committed below this
    LSN of its epoch. ``None`` says the same of the row's own position: an exact snapshot.
    ``identity``: what tells the event from others at its position, where positions are not unique.
    ``scope`` is of ``b`` only: the first and the last key that it ends, or what such keys begin with.
    ``None``: it ends them all. Keys are ordered as the integers that they are, as far as a scope names them.
    """

    at: Position
    op: str
    table: str
    key: Key | None
    source_ts: datetime
    before: Image | None = None
    after: Image | None = None
    unchanged: frozenset[str] = frozenset()
    moved_from: Key | None = None
    quarantined: bool = False
    read_at: int | None = None
    identity: str | None = None
    scope: tuple[Key, Key] | None = None

    @property
    def content(self) -> tuple[object, ...]:
        """What two events of one position must share to be copies of one event."""
        images = (None if i is None else frozenset(i.items()) for i in (self.before, self.after))
        told = (self.op, self.table, self.key, self.scope, *images)
        return (*told, self.unchanged, self.moved_from, self.source_ts)

    def reaches(self, key: Key) -> bool:
        """Whether this truncate or boundary is about ``key``."""
        if self.scope is None:
            return True
        first, last = self.scope
        return _numbers(first) <= _numbers(key[: len(first)]) and (
            _numbers(key[: len(last)]) <= _numbers(last)
        )

    def sends(self, column: str) -> bool:
        """Whether a value of ``column`` stands in the event."""
        return column in (self.after or {}) or column in self.carried_before

    @property
    def carried_before(self) -> Image:
        """The columns that were not sent anew and stand in the old image."""
        return {name: (self.before or {})[name] for name in self.unchanged if name in (self.before or {})}

    def saw(self, other: Event) -> bool:
        """Whether this snapshot row was read after the transaction of ``other`` became visible."""
        seen_below = self.at.commit_lsn if self.read_at is None else self.read_at
        return self.op == "r" and (self.at.epoch, seen_below) > other.at[:2]


def _numbers(key: Key) -> tuple[int, ...]:
    return tuple(int(text) for text in key)


@dataclass(frozen=True)
class TableShape:
    """The columns of a table beside its key, and the one that marks soft deletes, if any.

    ``defaults``: what rows have in columns that the table got later, from before it had them.
    """

    name: str
    columns: tuple[str, ...]
    soft_delete_column: str | None = None
    defaults: tuple[tuple[str, str | None], ...] = ()

    def carried(self, event: Event) -> Image:
        """The columns that ``event`` says: those that were sent, those of the old image that were not, and of
        a row that begins without a column, because its table had none, the default."""
        image = {**event.carried_before, **(event.after or {})}
        if event.op in "cr" and event.after is not None:
            image = {name: text for name, text in self.defaults if name not in event.unchanged} | image
        return {name: image[name] for name in self.columns if name in image}


class Cell(NamedTuple):
    """A known value, with the event that carried it."""

    value: str | None
    decided_by: Event


@dataclass
class Row:
    """Current state of one key.

    ``cells`` are the columns whose value is known; every other column is unresolved. A row that
    is deleted keeps its last known cells for display. ``deleted_at``: the position of the ``d``,
    ``t`` or ``b`` that ended the life (never of a soft delete). ``existence_unresolved``: a
    delete of this row is in quarantine, so whether the row exists is not known. ``doubted_after_end``:
    the same of the last delete of a row that had ended already. ``along``: by column that came along key
    changes and was not sent since, the lives it was taken from, from the nearest back: (old key, where its
    ``d`` stands).
    """

    shape: TableShape
    last: Position
    cells: dict[str, Cell] = field(default_factory=dict)
    deleted_at: Position | None = None
    existence_unresolved: bool = False
    doubted_after_end: bool = False
    along: dict[str, tuple[tuple[Key, Position], ...]] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.deleted_at is not None

    @property
    def is_deleted(self) -> bool:
        return self.ended or self.values.get(self.shape.soft_delete_column or "") is not None

    @property
    def values(self) -> Image:
        return {column: cell.value for column, cell in self.cells.items()}

    @property
    def unresolved(self) -> frozenset[str]:
        return frozenset(self.shape.columns) - frozenset(self.cells)
