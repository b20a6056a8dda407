"""A range of a table's keys: the part of a table that a snapshot is of, and that its boundary ends.

Whether a key lies in it is asked again long after the server said so, and without the server. So there
are ranges only of types whose order the text of a value tells (``ORDERED_TYPES``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

INTEGER, UUID, DATE, TEXT = "integer", "uuid", "date", "text"
"""How the values of a column are ordered."""

ORDERED_TYPES: Mapping[str, str] = {
    "smallint": INTEGER,
    "integer": INTEGER,
    "bigint": INTEGER,
    "uuid": UUID,
    "date": DATE,
    "text": TEXT,
    "character varying": TEXT,
}
"""PostgreSQL's types (``format_type`` without a modifier) with an order that is told from text. Texts have
it only in the collation ``C``, where they are ordered by their bytes."""

_Ordered = tuple[Any, ...]


@dataclass(frozen=True)
class KeyRange:
    """The keys from ``start`` to ``end``, both included; null: open on that side.

    A bound is the texts of the key's columns, in the contract's order, or of the first few of them: all
    keys that begin with it belong to the range then. ``kinds``: the order of each column that a bound
    names.
    """

    kinds: tuple[str, ...]
    start: tuple[str, ...] | None = None
    end: tuple[str, ...] | None = None

    def holds(self, key: str) -> bool:
        """Whether ``key``, a JSON array of texts, lies in the range."""
        return self._holds(json.loads(key))

    @property
    def is_empty(self) -> bool:
        """Whether no key can lie in it, as it ends before it starts."""
        if self._first is None or self._last is None:
            return False
        shared = min(len(self._first), len(self._last))
        return self._first[:shared] > self._last[:shared]

    @property
    def text(self) -> str:
        """The range as JSON; ``parse`` reads it."""
        document = {"kinds": self.kinds, "from": self.start, "to": self.end}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> KeyRange:
        """The range that ``text`` tells; ``ValueError`` if it tells none."""
        try:
            document = json.loads(text)
            kinds = tuple(document["kinds"])
            if unknown := set(kinds) - _ORDERS.keys():
                raise ValueError(f"{min(unknown)!r} is no order of keys")
            return cls(kinds, _bound(document["from"], kinds), _bound(document["to"], kinds))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no range of keys: {error}") from error

    def __str__(self) -> str:
        """For people: ``5 to 10``, ``from 5``, ``up to 10``; the columns of a bound with commas."""
        start, end = (None if bound is None else ", ".join(bound) for bound in (self.start, self.end))
        if start is None or end is None:
            return f"up to {end}" if start is None else f"from {start}"
        return start if start == end else f"{start} to {end}"

    def _holds(self, values: Sequence[str]) -> bool:
        first, last = self._first, self._last
        placed = self._ordered(values[: len(self.kinds)])
        return (first is None or placed[: len(first)] >= first) and (
            last is None or placed[: len(last)] <= last
        )

    @cached_property
    def _first(self) -> _Ordered | None:
        return None if self.start is None else self._ordered(self.start)

    @cached_property
    def _last(self) -> _Ordered | None:
        return None if self.end is None else self._ordered(self.end)

    def _ordered(self, values: Sequence[str]) -> _Ordered:
        return tuple(_ORDERS[kind](value) for kind, value in zip(self.kinds, values, strict=False))


def _date(text: str) -> _Ordered:
    """Of PostgreSQL's ISO text: the year may have more than four digits, or be one before Christ."""
    if text.endswith("infinity"):
        return (-1,) if text.startswith("-") else (1,)
    year, month, day = text.removesuffix(" BC").split("-")
    return 0, -int(year) if text.endswith(" BC") else int(year), int(month), int(day)


# Python compares texts by code points, which is the order of their bytes in UTF-8; uuids have one length.
_ORDERS: Mapping[str, Callable[[str], Any]] = {INTEGER: int, UUID: str, DATE: _date, TEXT: str}


def _bound(values: object, kinds: Sequence[str]) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not 0 < len(values) <= len(kinds):
        raise ValueError(f"{values!r} is no bound of a range of {len(kinds)} columns")
    for value, kind in zip(values, kinds, strict=False):
        if not isinstance(value, str):
            raise ValueError(f"{value!r} in the bound of a range is no text")
        _ORDERS[kind](value)
    return tuple(values)
