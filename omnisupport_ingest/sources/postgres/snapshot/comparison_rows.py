"""Reads rows of a table, or their checksum, to compare them with the lake.

Rows are read as PostgreSQL's text by ``SELECT``, not by ``COPY`` as in a snapshot: if both sides were read in
the same way, a fault of that way would not show. The server computes the checksum (``row_checksum``), so no
row is sent for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS, Kind
from omnisupport_ingest.contracts.row_checksum import DIGITS, RowChecksum
from omnisupport_ingest.sources.postgres.catalog.relations import read_relation
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal
from omnisupport_ingest.sources.postgres.snapshot.key_ranges import source_of_rows

_ROWS_AT_ONCE = 10_000
_CURSOR = "text_rows"

JSON_PREFIX = "json:"
"""An array column is written a second time, as JSON, under its name with this prefix."""


def write_text_rows(
    connection: Connection,
    contract: TableContract,
    rows: str,
    path: Path,
    *,
    fetched: Callable[[int], None] = lambda _count: None,
) -> int:
    """Write the contract's columns of ``rows`` to a Parquet file at ``path``, which only its owner can read.

    ``rows``: the SQL that follows FROM, read in the open transaction of ``connection``. Each column has the
    text that PostgreSQL writes for the value; null for NULL. ``fetched``: called with the number of rows
    received, some thousands at a time. Returns the number of rows. Raises psycopg2's errors.
    """
    expressions = _expressions(contract)
    schema = pa.schema([(name, pa.string()) for name, _ in expressions])
    listed = ", ".join(expression for _, expression in expressions)
    written = 0
    # No failpoint: a scratch file; what a killed process left is removed before the next use.
    path.touch(mode=0o600)
    with pq.ParquetWriter(path, schema) as writer, connection.cursor() as cursor:
        # Not a named cursor of psycopg2: it refuses a transaction that psycopg2 has not begun.
        cursor.execute(f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR SELECT {listed} FROM {rows}")
        while True:
            cursor.execute(f"FETCH {_ROWS_AT_ONCE} FROM {_CURSOR}")
            fetched_rows = cursor.fetchall()
            if not fetched_rows:
                break
            columns = [list(values) for values in zip(*fetched_rows, strict=True)]
            arrays = [pa.array(values, pa.string()) for values in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            written += len(fetched_rows)
            fetched(len(fetched_rows))
        cursor.execute(f"CLOSE {_CURSOR}")
    return written


def _expressions(contract: TableContract) -> list[tuple[str, str]]:
    expressions = [(column.name, _text_of(identifier(column.name))) for column in contract.source_columns]
    expressions += [
        (f"{JSON_PREFIX}{column.name}", _array_as_json(column))
        for column in contract.source_columns
        if column.type.kind in ARRAYS
    ]
    return expressions


def _text_of(column: str) -> str:
    # concat uses the type's output function, as the stream does. A cast to text writes booleans as words and
    # cuts the padding of char(n).
    return f"CASE WHEN {column}::text IS NOT NULL THEN concat({column}) END"


def _array_as_json(column: Column) -> str:
    """Return SQL for an array as JSON, with the elements that the lake has."""
    name = identifier(column.name)
    whole = f"to_json({name})::text"
    if column.type.kind is not Kind.TEXT_ARRAY:
        return whole
    # The lake has such elements as their texts. Those of other types are texts in JSON, too; a cast would cut
    # the padding of char(n).
    of_json = f"pg_typeof({name}) IN ('json[]', 'jsonb[]', 'smallint[]', 'integer[]', 'bigint[]')"
    return f"CASE WHEN {of_json} THEN to_json({name}::text[])::text ELSE {whole} END"


def server_checksum(connection: Connection, contract: TableContract, rows: str) -> RowChecksum:
    """Return the checksum of the contract's columns of ``rows`` (the SQL that follows FROM).

    It is computed in the open transaction of ``connection``. Raises psycopg2's errors.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT count(*), coalesce(sum({row_number(1)}), 0)::text,"
            f" coalesce(sum({row_number(2)}), 0)::text FROM"
            f" ({hashed(connection, contract.columns, rows, {})}) AS hashed"
        )
        count, first, second = cursor.fetchone()
    return RowChecksum(count, int(first), int(second))


_PAIRS_AT_ONCE = 48
"""Pairs in one ``concat``, which takes at most 100 arguments."""


def hashed(
    connection: Connection, columns: Sequence[Column], rows: str, texts: Mapping[str, str], **kept: str
) -> str:
    """Return SQL for the SHA-256 of each of ``rows`` (see ``row_checksum``), as hexadecimal ``digest``.

    ``texts``: by column, the SQL of its text, where that is not the text of its own type. ``kept``: further
    columns by name, each with its SQL. In the SQL, OFFSET 0 keeps the planner from converting a value to text
    again wherever it is used.
    """
    shown = [*(f"{sql} AS {name}" for name, sql in kept.items())]
    shown += [
        f"{_shown(column, texts.get(column.name))} AS c{number}" for number, column in enumerate(columns)
    ]
    inner = f"SELECT {', '.join(shown)} FROM {rows} OFFSET 0"
    utf8 = connection.get_parameter_status("server_encoding") == "UTF8"
    pairs = []
    for number in range(len(columns)):
        length = f"octet_length(c{number})" if utf8 else f"octet_length(convert_to(c{number}, 'UTF8'))"
        pairs.append(f"coalesce({length}::text || ':', 'N'), c{number}")
    text = " || ".join(
        f"concat({', '.join(pairs[start : start + _PAIRS_AT_ONCE])})"
        for start in range(0, len(pairs), _PAIRS_AT_ONCE)
    )
    # SHA-256 also works on servers that forbid MD5.
    digest = f"encode(sha256(convert_to({text}, 'UTF8')), 'hex') AS digest"
    return f"SELECT {', '.join([*kept, digest])} FROM ({inner}) AS texts OFFSET 0"


def _shown(column: Column, text: str | None) -> str:
    name = identifier(column.name)
    # concat uses the type's output function, as the stream does. num_nulls, because a row value of NULLs
    # passes for NULL by IS NULL.
    text = text or f"concat({name})"
    if column.type.kind in ARRAYS:
        # The lake stores arrays of several dimensions, or with other lower bounds, as exact text.
        plain = f"coalesce(array_ndims({name}) = 1 AND array_lower({name}, 1) = 1, true)"
        text = f"CASE WHEN {plain} THEN {_array_as_json(column)} ELSE {text} END"
    return f"CASE WHEN num_nulls({name}) = 0 THEN {text} END"


def row_number(number: int) -> str:
    """Return SQL for the first or second number of a row, as bigint, from its ``digest``."""
    start = 1 + (number - 1) * DIGITS
    return f"('x{'0' * (16 - DIGITS)}' || substr(digest, {start}, {DIGITS}))::bit(64)::bigint"


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The result of ``write_rows_at``: ``written`` of ``rows`` rows. ``live``: rows not softly deleted.

    ``below``: the sample consists of the rows whose ``key_hash`` is lower; None if every row was written.
    """

    rows: int
    live: int
    written: int
    below: str | None


def write_rows_at(
    dsn: str,
    publication: str,
    snapshot: str,
    contract: TableContract,
    path: Path,
    *,
    sample: int | None = None,
) -> WrittenRows:
    """Write the contract's columns of the rows that ``snapshot`` sees to a Parquet file at ``path``.

    Leaves out rows that ``publication`` does not send. ``sample``: about how many rows to write, chosen by
    the hash of their key, so the same rows each time; None: every row. The session that exported ``snapshot``
    must still be open. Raises ``SourceUnavailable``, and as ``read_relation`` does.
    """
    connection = connect(dsn)
    try:
        connection.autocommit = False
        with source_errors(f"reading {contract.full_name}"):
            with connection.cursor() as start:
                start.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                start.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            relation = read_relation(connection, publication, contract)
            table = source_of_rows(contract.table_name, relation)
            rows, live = _counts(connection, contract, table)
            below = hash_bound(sample, rows)
            chosen = "" if below is None else f" WHERE {key_hash(contract)} < {literal(below)}"
            written = write_text_rows(connection, contract, f"{table}{chosen}", path)
    finally:
        connection.close()
    return WrittenRows(rows, live, written, below)


def hash_bound(sample: int | None, rows: int) -> str | None:
    """Return the bound below which about ``sample`` of ``rows`` hashes fall; None if all rows are wanted."""
    if sample is None or rows <= sample:
        return None
    return f"{(sample << 32) // rows:08x}"


def key_hash(contract: TableContract) -> str:
    """Return SQL for the first eight hexadecimal digits of the hash of a row's key, ordered by bytes."""
    key = ", ".join(identifier(name) for name in contract.key)
    text = f"convert_to(concat_ws(chr(31), {key}), 'UTF8')"
    return f"substr(encode(sha256({text}), 'hex'), 1, 8) COLLATE \"C\""


def _counts(connection: Connection, contract: TableContract, table: str) -> tuple[int, int]:
    mark = contract.soft_delete_column
    alive = "" if mark is None else f" FILTER (WHERE {identifier(mark)} IS NULL)"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*), count(*){alive} FROM {table}")
        rows, live = cursor.fetchone()
    return rows, live
