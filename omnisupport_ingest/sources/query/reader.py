"""What a reading by cursor needs of a database: ``Reader``, and the rows that one gives.

There are two: ``postgres`` reads by COPY and keeps the server's own text; ``dialect`` reads whatever
SQLAlchemy speaks, and writes the text that PostgreSQL would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.sources.query.cursor import CursorColumn, Place


@dataclass(frozen=True, slots=True)
class Moment:
    """When a transaction of the source began: the clock by which cursors are held against, and which
    database it is (None where it cannot be told)."""

    clock: datetime
    database: str | None


@dataclass(frozen=True, slots=True)
class Span:
    """What is to be read, in order: rows without a cursor (``nulls``), or those with ``low`` ≤ cursor ≤
    ``high`` (texts; null: open), each beginning behind ``after`` and at most ``limit`` of them."""

    nulls: bool
    low: str | None
    high: str | None
    after: Place | None
    limit: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a table in the order of the reading, one or more, as columns.

    ``keys`` and ``images``: JSON, as events have them. ``cursors``: as numbers, None for NULL.
    ``times``: of the contract's event-time column, microseconds, None where it names none. ``last``:
    the place of the last one. ``bytes``: about their size.
    """

    keys: pa.StringArray
    images: pa.StringArray
    cursors: pa.Int64Array
    times: pa.Int64Array
    last: Place
    bytes: int

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Keys above ``start``, up to and with ``end``: the texts of the key's columns (null: open).

    Whole numbers are in their order, everything else in that of the bytes of its text, here as in the lake.
    """

    start: tuple[str, ...] | None
    end: tuple[str, ...] | None


class Reader(Protocol):
    """A connection to a source, which reads everything between ``begin`` and ``end`` in one transaction."""

    def begin(self) -> Moment:
        """Open the transaction; all reads see the database as it is now."""

    def cursor_type(self, table: TableContract, cursor: CursorColumn, /) -> str:
        """The type that the cursor column has now, as the source calls it; ``QueryRefused`` if it is no
        type of a cursor of its kind."""

    def indexes(self, table: TableContract, /) -> tuple[tuple[str, ...], ...]:
        """The columns of each index that can be walked in their order."""

    def newest(self, table: TableContract, cursor: CursorColumn, /) -> str | None:
        """The highest cursor in the table; None if no row has one."""

    def rows(
        self, table: TableContract, cursor: CursorColumn, span: Span, take: Callable[[Rows], None], /
    ) -> int:
        """Give the rows of ``span`` to ``take``, some megabytes at a time; returns how many there were."""

    def key_checksum(self, table: TableContract, bounds: KeyBounds, /) -> RowChecksum | None:
        """The checksum of the keys in ``bounds``; None where the database cannot work one out."""

    def keys(self, table: TableContract, bounds: KeyBounds, /) -> Iterator[list[str]]:
        """The keys in ``bounds`` as JSON, some thousands at a time."""

    def rows_of(
        self, table: TableContract, cursor: CursorColumn, keys: Sequence[str], take: Callable[[Rows], None], /
    ) -> None:
        """Give the rows with one of ``keys`` (JSON) to ``take``."""

    def end(self) -> None:
        """End the transaction."""

    def close(self) -> None:
        """Let go of the connection."""
