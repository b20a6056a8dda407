"""The checksum of a set of rows, by which server and lake tell whether they hold the same ones.

The text of a row is, for each of the contract's columns in order, ``N`` for NULL, else the number of
bytes of the value's text in UTF-8, ``:``, and that text: no two different rows have one text. Two numbers of
60 bits are cut from its SHA-256 and added up over the rows, so the order of the rows does not matter. Rows
that differ have one checksum with a chance of 2^-120.

The text of a value is PostgreSQL's, of an array of one dimension its ``to_json``. The lake writes it from
typed values; where it writes another one (JSON's escapes of control characters, say) rows that are the same
look different, never the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import FLOATS, INTEGERS
from omnisupport_ingest.contracts.pii_policies import KEEP

DIGITS = 15
"""Hexadecimal digits of each number: 60 bits, so it is positive in a signed 64-bit integer."""

Key = tuple[str, ...]
"""The texts of a row's key columns."""

RowNumbers = tuple[int, int]
"""The two numbers of one row."""


class RowChecksum(NamedTuple):
    """How many rows there are, and the sums of their numbers."""

    rows: int
    first: int
    second: int

    def without(self, rows: Sequence[RowNumbers]) -> RowChecksum:
        """The checksum of the same rows less those with these numbers."""
        return RowChecksum(
            self.rows - len(rows),
            self.first - sum(first for first, _ in rows),
            self.second - sum(second for _, second in rows),
        )


NO_ROWS = RowChecksum(0, 0, 0)


class KeySpan(NamedTuple):
    """Rows whose first key column is ``start`` or above, and below ``end``; None: open on that side.

    Whole numbers are ordered by value, everything else by the bytes of its text.
    """

    start: str | None
    end: str | None


EVERY_KEY = KeySpan(None, None)


def has_checksum(contract: TableContract) -> bool:
    """Whether rows of the table have one: floats have another text in the lake, and so have values that a
    policy for personal data has changed."""
    return not contract.unprotected and not any(column.type.kind in FLOATS for column in contract.columns)


def checked_columns(contract: TableContract) -> tuple[Column, ...]:
    """The columns that a checksum can be of, where it is not of whole rows: see ``has_checksum``."""
    return tuple(each for each in contract.columns if each.pii == KEEP and each.type.kind not in FLOATS)


def by_number(contract: TableContract) -> bool:
    """Whether a ``KeySpan`` of the table is one of whole numbers."""
    return contract.column(contract.key[0]).type.kind in INTEGERS


def living_alone(contract: TableContract) -> bool:
    """Whether rows that are marked as deleted are left out on both sides: the dimension purges them, and the
    source keeps them."""
    return contract.purge_deleted_after is not None and contract.soft_delete_column is not None
