"""The checksum of a set of rows, by which server and lake compare their rows.

The text of a row has, for each of the contract's columns in order, ``N`` for NULL, else the number of bytes
of the value's UTF-8 text, ``:``, and that text; so different rows have different texts. Two numbers of 60
bits are taken from its SHA-256 and summed over the rows, so their order does not matter. Different sets of
rows have the same checksum with a probability of 2^-120.

The text of a value is PostgreSQL's; for an array of one dimension it is ``to_json``. The lake writes it from
typed values. Where it writes another text (for example JSON's escapes of control characters), equal rows look
different, never the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
    """The number of rows, and the sums of their two numbers."""

    rows: int
    first: int
    second: int

    def without(self, rows: Sequence[RowNumbers]) -> RowChecksum:
        """Return the checksum of the same rows without those with these numbers."""
        return RowChecksum(
            self.rows - len(rows),
            self.first - sum(first for first, _ in rows),
            self.second - sum(second for _, second in rows),
        )


NO_ROWS = RowChecksum(0, 0, 0)


class RowVersions(NamedTuple):
    """The number of rows of a key range at the source, and a sum over the transactions that wrote their
    present versions (and the partitions that hold them).

    Each change writes a row by a new transaction, which no earlier snapshot sees. So if a range has the same
    two numbers as in an earlier snapshot, it has the same rows.
    """

    rows: int
    writers: int


class KeySpan(NamedTuple):
    """Rows whose first key column is ``start`` or above, and below ``end``; None: open on that side.

    Whole numbers are ordered by value, everything else by the bytes of its text.
    """

    start: str | None
    end: str | None


EVERY_KEY = KeySpan(None, None)


def has_checksum(contract: TableContract) -> bool:
    """Whether whole rows of the table can be compared. They cannot if a column is a float, whose text differs
    in the lake, or if a policy for personal data has changed values."""
    return not contract.unprotected and not any(column.type.kind in FLOATS for column in contract.columns)


def checked_columns(contract: TableContract) -> tuple[Column, ...]:
    """Return the columns that can be compared, even if whole rows cannot (``has_checksum``)."""
    return tuple(each for each in contract.columns if each.pii == KEEP and each.type.kind not in FLOATS)


def as_compared(contract: TableContract) -> TableContract:
    """Return the contract with only the columns that a comparison of rows with the lake reads at the source.

    Columns whose values a policy for personal data changes in the lake are left out: they can be compared
    with nothing.
    """
    if not contract.unprotected:
        return contract
    names = {*contract.key, contract.soft_delete_column, *(each.name for each in checked_columns(contract))}
    columns = tuple(each for each in contract.columns if each.name in names)
    return replace(contract, columns=columns, unprotected=())


def by_number(contract: TableContract) -> bool:
    """Whether key spans (``KeySpan``) of the table are ordered as whole numbers."""
    return contract.column(contract.key[0]).type.kind in INTEGERS
