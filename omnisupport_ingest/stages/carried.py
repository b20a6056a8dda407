"""What a table that is updated in place knows beside its rows: the truncates and boundaries so far."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from omnisupport_ingest.cdc.table_ends import TableEnds, Told

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Carried:
    """``told``: the truncates and boundaries that the rows have been held against."""

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
        """What ``to_text`` wrote; null for the text of another format, none included."""
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
