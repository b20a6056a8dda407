"""A range of a table's keys: the part of the table that a snapshot reads and that its snapshot end covers.

Long after the snapshot, and without the server, it must be decidable whether a key lies in the range. So
ranges exist only for types whose order follows from the texts of their values (``ORDERED_TYPES``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from omnisupport_ingest.foreign import parse_json

INTEGER, UUID, DATE, TEXT = "integer", "uuid", "date", "text"
"""The orders that the values of a column can have."""

ORDERED_TYPES: Mapping[str, str] = {
    "smallint": INTEGER,
    "integer": INTEGER,
    "bigint": INTEGER,
    "uuid": UUID,
    "date": DATE,
    "text": TEXT,
    "character varying": TEXT,
}
"""PostgreSQL's types (``format_type`` without a modifier) whose order follows from the text of a value. Texts
have such an order, that of their bytes, only in the collation ``C``."""

_Ordered = tuple[Any, ...]


@dataclass(frozen=True)
class KeyRange:
    """The keys from ``start`` to ``end``, both inclusive; None: open on that side.

    A bound has the texts of the key's columns, in the contract's order. It may have only the first few: then
    all keys that begin with it belong to the range. ``kinds``: the order of each column in a bound.
    """

    kinds: tuple[str, ...]
    start: tuple[str, ...] | None = None
    end: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in _ORDERS:
                raise ValueError(f"{kind[:60]!r} is no order of keys")
        for bound in (self.start, self.end):
            if bound is not None:
                if not 0 < len(bound) <= len(self.kinds):
                    raise ValueError(f"a bound of {len(bound)} values is none of {len(self.kinds)} columns")
                self._ordered(bound)

    def holds(self, key: str) -> bool:
        """Whether ``key``, a JSON array of texts, lies in the range.

        A key whose texts are no values of the range's types cannot be in the server's table, so it is in no
        range.
        """
        try:
            return self._holds(json.loads(key))
        except ValueError:
            return False

    @property
    def is_empty(self) -> bool:
        """Whether the range contains no key, because it ends before it starts."""
        if self._first is None or self._last is None:
            return False
        shared = min(len(self._first), len(self._last))
        return self._first[:shared] > self._last[:shared]

    @property
    def text(self) -> str:
        """The range as JSON, which ``parse`` reads."""
        document = {"kinds": self.kinds, "from": self.start, "to": self.end}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> KeyRange:
        """Return the range in ``text``. Raises ``ValueError`` if it is not one."""
        document = parse_json(text)
        if not isinstance(document, dict) or not document.keys() >= {"kinds", "from", "to"}:
            raise ValueError("no range of keys: kinds, from and to are not all there")
        kinds, start, end = (_texts(document[name], name) for name in ("kinds", "from", "to"))
        if kinds is None:
            raise ValueError("no range of keys: it has no kinds")
        return cls(kinds, start, end)

    def __str__(self) -> str:
        """Return the range for people: ``5 to 10``, ``from 5``, ``up to 10``; columns are separated by
        commas."""
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
    """Return PostgreSQL's ISO text as an ordered value; the year may have more than four digits, or be before
    Christ."""
    if text in ("infinity", "-infinity"):
        return (-1,) if text.startswith("-") else (1,)
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no date")
    year, month, day = (int(part) for part in match.groups()[:3])
    return 0, -year if match[4] else year, month, day


def _integer(text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text[:60]!r} is no integer of 64 bits")
    return int(text)


_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_DATE = re.compile(r"([0-9]{4,7})-([0-9]{2})-([0-9]{2})( BC)?")

# Python compares texts by code points, which is the order of their UTF-8 bytes; all uuids have one length.
_ORDERS: Mapping[str, Callable[[str], Any]] = {INTEGER: _integer, UUID: str, DATE: _date, TEXT: str}


def _texts(values: object, name: str) -> tuple[str, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"no range of keys: {name} is no list of texts")
    return tuple(values)
