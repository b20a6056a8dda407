"""``Reader``: the interface to a database that is read by cursor, and the rows that it returns.

There are two readers. ``postgres`` reads by COPY and keeps the server's own text. ``dialect`` reads any
database that SQLAlchemy supports, and writes the text that PostgreSQL would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.landing.schema_changes import SeenTable
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.query.cursor import CursorColumn, KeysetPosition


@dataclass(frozen=True, slots=True)
class Moment:
    """The begin of a transaction of the source: the source's clock, which limits cursors, and the identity of
    the database (None if unknown).

    ``low``, ``high``: the server's LSN just before and just after the snapshot was taken (None: unknown).
    """

    clock: datetime
    database: str | None
    low: int | None = None
    high: int | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Rows to read, in order: those without a cursor (``nulls``), or those with ``low`` ≤ cursor ≤ ``high``
    (texts; None: open).

    They begin after the row ``after``; there are at most ``limit``.
    """

    nulls: bool
    low: str | None
    high: str | None
    after: KeysetPosition | None
    limit: int


@dataclass(frozen=True, slots=True)
class Rows:
    """One or more rows of a table in the order of the reading, as columns.

    ``keys`` and ``images``: JSON, as events have them. ``cursors``: as numbers, None for NULL. ``times``: of
    the contract's event-time column, in microseconds; null if it names none. ``last``: the position of the
    last row. ``bytes``: their approximate size.
    """

    keys: pa.StringArray
    images: pa.StringArray
    cursors: pa.Int64Array
    times: pa.Int64Array
    last: KeysetPosition
    bytes: int

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Keys above ``start``, up to and including ``end``: texts of the key's columns (None: open).

    Whole numbers are ordered as numbers, other values by the bytes of their texts, as in the lake.
    """

    start: tuple[str, ...] | None
    end: tuple[str, ...] | None


class Reader(Protocol):
    """A connection to a source, which reads everything between ``begin`` and ``end`` in one transaction."""

    def begin(self) -> Moment:
        """Open the transaction; all reads see the database as it is now."""

    def cursor_type(self, table: TableContract, cursor: CursorColumn, /) -> str:
        """Return the present type of the cursor column at the source.

        Raises ``QueryRefused`` if the type, or the lowest or highest value, is of another kind than the
        contract's.
        """

    def schemas(
        self, tables: Sequence[TableContract], known: Mapping[str, SeenTable], /
    ) -> dict[str, LiveSchema] | None:
        """Return the schemas of those ``tables`` that exist, by the names of their contracts; None if the
        database does not show schemas.

        ``known``: the schemas as they were last seen.
        """

    def go_on_without(self, table: TableContract, columns: frozenset[str], /) -> None:
        """From now on, read ``table`` although it lacks the ``columns`` that its contract names."""

    def loose_columns(self, table: TableContract, /) -> frozenset[str]:
        """Return the columns whose declared type says nothing of their values."""

    def columns(self, table: TableContract, /) -> str:
        """Return names and types of the table's columns as one text.

        While the text is the same, an unchanged row has the same image in every reading.
        """

    def indexes(self, table: TableContract, /) -> tuple[tuple[str, ...], ...]:
        """Return the columns of each index that can give rows in order."""

    def index_sql(self, table: TableContract, name: str, columns: Sequence[str], /) -> str:
        """Return the statement that adds an index ``name`` on ``columns``; a sentence if the table can have
        none."""

    def not_null_fix(self, table: TableContract, column: str, /) -> str:
        """Return how to make ``column`` refuse NULL: a statement, or a sentence that ends with a
        semicolon."""

    def newest(self, table: TableContract, cursor: CursorColumn, /) -> str | None:
        """Return the highest cursor in the table; None if no row has one."""

    def rows(
        self, table: TableContract, cursor: CursorColumn, span: Span, take: Callable[[Rows], None], /
    ) -> int:
        """Call ``take`` with the rows of ``span``, some megabytes at a time; return how many there were."""

    def key_checksum(self, table: TableContract, bounds: KeyBounds, /) -> RowChecksum | None:
        """Return the checksum of the keys in ``bounds``; None if the database cannot compute one."""

    def keys(self, table: TableContract, bounds: KeyBounds, /) -> Iterator[list[str]]:
        """Yield the keys in ``bounds`` as JSON, some thousands at a time."""

    def rows_of(
        self, table: TableContract, cursor: CursorColumn, keys: Sequence[str], take: Callable[[Rows], None], /
    ) -> None:
        """Call ``take`` with the rows that have one of ``keys`` (JSON)."""

    def step_over(self) -> None:
        """Let the transaction continue after a table was refused."""

    def end(self) -> None:
        """End the transaction."""

    def close(self) -> None:
        """Close the connection."""
