"""The checksum of a set of rows, by which server and lake tell whether they hold the same ones.

The text of a row is, for each of the contract's columns in order, ``N`` for NULL, else the number of
characters of the value's text, ``:``, and that text: no two different rows have one text. Two numbers of
60 bits are cut from its SHA-256 and added up over the rows, so the order of the rows does not matter. Rows
that differ have one checksum with a chance of 2^-120.

The text of a value is PostgreSQL's, of an array its ``to_json``. The lake writes it from typed values; where
it writes another one (a date before Christ, say) rows that are the same look different, never the reverse.
"""

from __future__ import annotations

from typing import NamedTuple

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import FLOATS

DIGITS = 15
"""Hexadecimal digits of each number: 60 bits, so it is positive in a signed 64-bit integer."""


class RowChecksum(NamedTuple):
    """How many rows there are, and the sums of their numbers."""

    rows: int
    first: int
    second: int


def has_checksum(contract: TableContract) -> bool:
    """Whether rows of the table have one: floats have another text in the lake, and so have values that a
    policy for personal data has changed."""
    return not contract.unprotected and not any(column.type.kind in FLOATS for column in contract.columns)
