"""The columns that the rows of a table may and must have where its contract says ``"evolution": "block"``.

Of delivered events and files, only a row itself shows that its table has changed. Under ``block`` such a row
waits until the contract follows: a row has every column of the contract and no other one.
``x-cdc.optional_columns`` names the exceptions. A column that came later is missing from the rows of before,
and one that is gone, or that the contract leaves out on purpose, is in rows that have landed. So the verdict
on a row depends on the row and its contract alone, whenever it is judged.

A log and a cursor leave the whole table out before a row lands, so their rows are not judged by this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import dataclass

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.foreign import on_one_line

UNKNOWN_COLUMN, MISSING_COLUMN = "unknown_column", "missing_column"
"""How a column of a row can be at odds with the contract: ``<column>:<one of these>``, as a rule is named."""

MOST_NAMED = 50
"""Columns that are named of one row: each event in quarantine has their names."""

_LONGEST = 200


@dataclass(frozen=True)
class RowColumns:
    """``named``: the columns that a row may have. ``required``: those among them that it must have, unless it
    says that they were not sent."""

    named: frozenset[str]
    required: frozenset[str]

    @classmethod
    def of(cls, contract: TableContract, *, bare: bool) -> RowColumns:
        """Return those of ``contract``. ``bare``: a row may leave out any column."""
        names, optional = {each.name for each in contract.source_columns}, {*contract.optional_columns}
        # A default is what rows have in a column that were written before it was added: they lack it.
        optional |= {each.name for each in contract.source_columns if each.default is not None}
        return cls(frozenset(names | optional), frozenset() if bare else frozenset(names - optional))

    def mismatches(self, columns: Collection[str]) -> list[str]:
        """Return how a row with ``columns``, sent or not, is at odds with these, sorted by column; the first
        ``MOST_NAMED`` of them, with names that fit into a message."""
        there = frozenset(columns)
        unknown = ((name, UNKNOWN_COLUMN) for name in there - self.named)
        missing = ((name, MISSING_COLUMN) for name in self.required - there)
        found = sorted([*unknown, *missing])[:MOST_NAMED]
        return [f"{on_one_line(name[:_LONGEST])}:{what}" for name, what in found]

    def version(self, judged_by: str) -> str:
        """Return a SHA-256 of these and of ``judged_by``, the fingerprint of what else decides a verdict."""
        parts = [judged_by, sorted(self.named), sorted(self.required)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
