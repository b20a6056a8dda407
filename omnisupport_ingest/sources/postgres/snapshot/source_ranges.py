"""Checksums of key ranges, computed by the server at one LSN, so that no row is sent.

A read-only transaction imports the snapshot that a temporary slot exports, and lasts longer than the slot. So
the server keeps no WAL for it, and smaller and smaller ranges can be read at the same LSN. Each query reads
its rows once, on one core.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import FLOATS, Fit, Kind, PgType, fit
from omnisupport_ingest.contracts.row_checksum import (
    Key,
    KeySpan,
    RowChecksum,
    RowNumbers,
    RowVersions,
    as_compared,
    by_number,
    checked_columns,
)
from omnisupport_ingest.key_range import INTEGER, TEXT, UUID
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.relations import CatalogRelation, read_relation
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified
from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import hashed, row_number, write_text_rows
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import XMIN, by_bytes, kinds_of, source_of_rows

_KEYS_AT_ONCE = 1000
_MOST_CONDITIONS = 16
"""Largest number of spans that become conditions. With more, a row is searched among the spans' ends, which
takes a few comparisons for any number."""

_FORMS = {
    "bigint": re.compile(r"[+-]?[0-9]{1,19}"),
    "uuid": re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
}
_BIGINTS = range(-(1 << 63), 1 << 63)


@dataclass(frozen=True)
class SourceAt:
    """The source at ``lsn``; ``at``: its clock then. ``publication``: decides which rows are read."""

    connection: Connection
    publication: str
    lsn: Lsn
    at: datetime

    def table(self, contract: TableContract) -> SourceRanges:
        """Return the rows of one table. Raises as ``read_relation`` does."""
        relation = read_relation(self.connection, self.publication, contract)
        first = contract.key[0]
        kind = kinds_of(relation, (first,))[0]
        ordered = kind in (INTEGER, UUID) or (kind == TEXT and by_bytes(self.connection, contract, first))
        # If the lake does not know the order of the column, compare it by its text, without an index.
        column = identifier(first) if ordered else f'concat({identifier(first)}) COLLATE "C"'
        if by_number(contract) and kind != INTEGER:
            # A domain over whole numbers.
            column = f"{identifier(first)}::bigint"
        cast = "bigint" if by_number(contract) else "uuid" if kind == UUID else "text"
        rows = source_of_rows(contract.table_name, relation)
        return SourceRanges(self.connection, contract, rows, column, cast, _texts(contract, relation))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Return a context that reads within a savepoint, which is rolled back at the end.

        So no lock remains that would block a change of the table's schema, and after an error the next table
        can be read.
        """
        with self.connection.cursor() as cursor:
            cursor.execute("SAVEPOINT one_table")
            try:
                yield
            finally:
                # If the connection is gone, the next query raises the error.
                with suppress(psycopg2.Error):
                    cursor.execute("ROLLBACK TO SAVEPOINT one_table")


@contextmanager
def source_at(dsn: str, publication: str, patience: float) -> Iterator[SourceAt]:
    """Open the source at its current LSN.

    Raises ``SlotNotMade`` if transactions that may write are still open after ``patience`` seconds, and as
    ``consistent_snapshot`` does.
    """
    stop = threading.Event()
    timer = threading.Timer(patience, stop.set)
    timer.start()
    connection = connect(dsn)
    try:
        with (
            consistent_snapshot(dsn, stop) as (lsn, snapshot),
            source_errors("reading the source at one LSN"),
            connection.cursor() as cursor,
        ):
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            # Use only one core of the server, however long it takes.
            cursor.execute("SET LOCAL max_parallel_workers_per_gather = 0")
            cursor.execute("SET LOCAL jit = off")
            cursor.execute("SELECT clock_timestamp()")
            (at,) = cursor.fetchone()
        yield SourceAt(connection, publication, lsn, at)
    finally:
        timer.cancel()
        with suppress(psycopg2.Error):
            connection.close()


def _texts(contract: TableContract, relation: CatalogRelation) -> dict[str, str]:
    """Return SQL for the text of columns that the lake writes in another type than the source's."""
    texts, types = dict[str, str](), dict(zip(relation.columns, relation.types, strict=True))
    for column in checked_columns(contract):
        # A column that is not there is an error of the query.
        of_lake, of_source = column.type, PgType.parse(types.get(column.name, column.pg_type))
        if of_lake == of_source:
            continue
        name, fits = identifier(column.name), fit(of_lake, of_source)
        if of_lake.kind is Kind.DECIMAL and fits is Fit.ALL:
            texts[column.name] = _as_decimal(name, of_lake)
        elif of_lake.kind is Kind.DECIMAL and fits is Fit.EXACT_TEXT and of_source.kind not in FLOATS:
            # A value that does not fit is kept as its exact text. NaN and infinity are such values.
            number, whole = f"{name}::numeric", of_lake.precision - of_lake.scale
            holds = f"abs({number}) < 1e{whole} AND {number} = round({number}, {of_lake.scale})"
            texts[column.name] = (
                f"CASE WHEN {holds} THEN {_as_decimal(name, of_lake)} ELSE concat({name}) END"
            )
        elif of_lake.kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ) and fits is Fit.ALL:
            texts[column.name] = f"concat({name}::{of_lake.kind.name.lower()})"
    return texts


def _as_decimal(name: str, of: PgType) -> str:
    return f"concat({name}::numeric({of.precision},{of.scale}))"


@dataclass(frozen=True)
class SourceRanges:
    """The rows of one table. ``rows``: the SQL that follows FROM. ``column``: the SQL expression of type
    ``cast`` that is compared with spans. ``texts``: as of ``hashed``."""

    connection: Connection
    contract: TableContract
    rows: str
    column: str
    cast: str
    texts: Mapping[str, str] = field(default_factory=dict)

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan]) -> list[RowChecksum]:
        """Return the checksum of each range between ``cuts`` (ascending), of rows in one of ``spans`` only.

        The first range is below all cuts; the second begins with the first cut. ``spans`` must be ascending.
        """
        listed = ", ".join(literal(cut) for cut in cuts)
        bucket = f"width_bucket(k, ARRAY[{listed}]::{self.cast}[])" if cuts else "0"
        rows = self._hashed(self._where(spans), k=self._value)
        sums = ", ".join(f"sum({row_number(number)})::text" for number in (1, 2))
        query = f"SELECT {bucket}, count(*), {sums} FROM ({rows}) AS hashed GROUP BY 1"
        checksums = [RowChecksum(0, 0, 0)] * (len(cuts) + 1)
        for number, *of_range in self._ask(query):
            checksums[number] = RowChecksum(*map(int, of_range))
        return checksums

    def versions(self, cuts: Sequence[str], span: KeySpan) -> list[RowVersions] | None:
        """Return the row versions of each range between ``cuts`` (ascending), counting only rows in ``span``.

        This converts no value to text. None if the role may read only the contract's columns.
        """
        table = literal(qualified(*self.contract.table_name))
        may_read = (f"has_column_privilege({table}, '{name}', 'SELECT')" for name in (XMIN, "tableoid"))
        ((allowed,),) = self._ask(f"SELECT {' AND '.join(may_read)}")
        if not allowed:
            return None
        listed = ", ".join(literal(cut) for cut in cuts)
        bucket = f"width_bucket({self._value}, ARRAY[{listed}]::{self.cast}[])" if cuts else "0"
        # Hashed, because in a sum of the numbers themselves, one difference might cancel another. With the
        # partition, because a partition may be replaced by another that the same transaction filled.
        writers = f"sum(hashtextextended({XMIN}::text, tableoid::bigint))::text"
        query = f"SELECT {bucket}, count(*), {writers} FROM {self.rows}{self._where([span])} GROUP BY 1"
        found = [RowVersions(0, 0)] * (len(cuts) + 1)
        for number, *of_range in self._ask(query):
            found[number] = RowVersions(*map(int, of_range))
        return found

    def definition(self) -> str:
        """Return, as a text, everything that can change a value of the table without a change of its row.

        That is: the table itself, its columns and their types, the labels of its enums, and the server's
        timeline. On another timeline, a transaction may have the number of one that was lost in the failover.
        Capture begins a new epoch for that, but perhaps only after this call.
        """
        ((timeline,),) = self._ask(
            "SELECT CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END"
        )
        table = literal(qualified(*self.contract.table_name))
        ((columns,),) = self._ask(
            "SELECT jsonb_agg(jsonb_build_array(a.attrelid, a.attnum, a.attname, a.atttypid, a.atttypmod,"
            " (SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder) FROM pg_enum e"
            " WHERE e.enumtypid = a.atttypid)) ORDER BY a.attnum)::text FROM pg_attribute a"
            f" WHERE a.attrelid = {table}::regclass AND a.attnum > 0 AND NOT a.attisdropped"
        )
        return f"{timeline} {columns} {self.rows}"

    def numbers(self, spans: Sequence[KeySpan]) -> dict[Key, RowNumbers]:
        """Return the numbers of every row in ``spans``, by its key."""
        return self._numbers(self._where(spans))

    def numbers_of(self, keys: Collection[Key]) -> dict[Key, RowNumbers]:
        """Return the numbers of those rows with ``keys`` that exist."""
        numbers: dict[Key, RowNumbers] = {}
        for where in self._with_keys(keys):
            numbers |= self._numbers(where)
        return numbers

    def write_rows(self, keys: Collection[Key], folder: Path) -> list[Path]:
        """Write the rows with ``keys``, ``as_compared``, by ``write_text_rows`` to files in ``folder``."""
        files, contract = list[Path](), as_compared(self.contract)
        for number, where in enumerate(self._with_keys(keys)):
            files.append(folder / f"rows-{number}.parquet")
            with source_errors(f"reading rows of {self.contract.full_name}"):
                write_text_rows(self.connection, contract, f"{self.rows}{where}", files[-1])
        return files

    def _with_keys(self, keys: Collection[Key]) -> Iterator[str]:
        """Yield WHERE clauses for the rows with ``keys``, each for a limited number of keys."""
        wanted = [key for key in sorted(keys) if self._may_be(key)]
        names = self.contract.key
        for start in range(0, len(wanted), _KEYS_AT_ONCE):
            some = wanted[start : start + _KEYS_AT_ONCE]
            # The first value uses the index. The texts compare the other columns, whatever their types are.
            firsts = ", ".join(f"{literal(key[0])}::{self.cast}" for key in some)
            condition = f"{self._value} IN ({firsts})"
            if len(names) > 1:
                texts = ", ".join(literal(json.dumps(key)) for key in some)
                whole = ", ".join(f"concat({identifier(name)})" for name in names)
                array = f"array_to_json(ARRAY[{whole}])::jsonb"
                condition += f" AND {array} = ANY(ARRAY[{texts}]::jsonb[])"
            yield f" WHERE {condition}"

    def _numbers(self, where: str) -> dict[Key, RowNumbers]:
        keys = ", ".join(f"concat({identifier(name)})" for name in self.contract.key)
        rows = self._hashed(where, key=f"ARRAY[{keys}]::text[]")
        query = f"SELECT key, {row_number(1)}, {row_number(2)} FROM ({rows}) AS hashed"
        return {tuple(key): (first, second) for key, first, second in self._ask(query)}

    @property
    def _value(self) -> str:
        return f"{self.column}::bigint" if self.cast == "bigint" else self.column

    def _hashed(self, where: str, **kept: str) -> str:
        columns = checked_columns(self.contract)
        return hashed(self.connection, columns, f"{self.rows}{where}", self.texts, **kept)

    def _where(self, spans: Sequence[KeySpan]) -> str:
        if len(spans) <= _MOST_CONDITIONS:
            return f" WHERE ({' OR '.join(map(self._inside, spans))})"
        bounds = [bound for span in spans for bound in span if bound is not None]
        listed = ", ".join(map(literal, bounds))
        # A value lies within a span if an odd number of bounds is at or below it, counting an open start as
        # one.
        odd = 0 if spans[0].start is None else 1
        place = f"width_bucket({self._value}, ARRAY[{listed}]::{self.cast}[]) % 2 = {odd}"
        outer = self._inside(KeySpan(spans[0].start, spans[-1].end))
        return f" WHERE {outer} AND {place}"

    def _inside(self, span: KeySpan) -> str:
        bounds = [
            f"{self.column} {compared} {literal(bound)}::{self.cast}"
            for bound, compared in ((span.start, ">="), (span.end, "<"))
            if bound is not None
        ]
        return f"({' AND '.join(bounds)})" if bounds else "true"

    def _may_be(self, key: Key) -> bool:
        """Whether the server can compare ``key``; that of a withheld event may have values of other types."""
        form = _FORMS.get(self.cast)
        if len(key) != len(self.contract.key) or (form is not None and form.fullmatch(key[0]) is None):
            return False
        return self.cast != "bigint" or int(key[0]) in _BIGINTS

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        about = self.contract.full_name
        with source_errors(f"working out checksums of {about}"), self.connection.cursor() as cursor:
            # No failpoint: a SELECT, put together elsewhere.
            cursor.execute(query)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows
