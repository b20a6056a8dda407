"""The rows of a source table at an exported snapshot, as text, for comparing them with the lake.

They are read by ``SELECT``, not by the ``COPY`` that the snapshot of a table uses: a fault in one
way of reading must not hide itself by being in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.quoting import identifier, literal, qualified

_ROWS_AT_ONCE = 10_000

JSON_PREFIX = "json:"
"""An array column is written a second time, under its name with this prefix, as JSON."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """What was written: ``written`` rows out of ``rows``, of which ``live`` are not softly deleted.

    ``below``: the sample is the rows whose ``key_hash`` is below it; null if every row was written.
    """

    rows: int
    live: int
    written: int
    below: str | None


def write_rows_at(
    dsn: str, snapshot: str, contract: TableContract, path: Path, *, sample: int | None = None
) -> RowsAt:
    """Write the contract's columns of the rows that ``snapshot`` sees to a Parquet file at ``path``.

    ``sample``: about so many rows, chosen by the hash of their key, so the same ones each time; null
    for every row. Each column holds PostgreSQL's text of the value, as its output function writes
    it, null for NULL. The session that exported ``snapshot`` must still be open. Raises
    ``SourceUnavailable``.
    """
    expressions = _expressions(contract)
    schema = pa.schema([(name, pa.string()) for name, _ in expressions])
    listed = ", ".join(expression for _, expression in expressions)
    written = 0
    connection = connect(dsn)
    try:
        connection.autocommit = False
        with source_errors(f"reading {contract.full_name}"), pq.ParquetWriter(path, schema) as writer:
            with connection.cursor() as start:
                start.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                start.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            table = _table(connection, contract)
            rows, live = _counts(connection, contract, table)
            below = hash_bound(sample, rows)
            chosen = "" if below is None else f" WHERE {key_hash(contract)} < {literal(below)}"
            with connection.cursor(name="rows_at") as cursor:
                cursor.itersize = _ROWS_AT_ONCE
                cursor.execute(f"SELECT {listed} FROM {table}{chosen}")
                while found := cursor.fetchmany(_ROWS_AT_ONCE):
                    columns = [list(values) for values in zip(*found, strict=True)]
                    arrays = [pa.array(values, pa.string()) for values in columns]
                    writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                    written += len(found)
    finally:
        connection.close()
    path.chmod(0o600)
    return RowsAt(rows, live, written, below)


def hash_bound(sample: int | None, rows: int) -> str | None:
    """The bound below which about ``sample`` of ``rows`` hashes fall; null if that is all of them."""
    if sample is None or rows <= sample:
        return None
    return f"{(sample << 32) // rows:08x}"


def key_hash(contract: TableContract) -> str:
    """SQL: eight hexadecimal digits of the hash of a row's key, in an order that no locale changes."""
    key = ", ".join(identifier(name) for name in contract.key)
    text = f"convert_to(concat_ws(chr(31), {key}), 'UTF8')"
    return f"substr(encode(sha256({text}), 'hex'), 1, 8) COLLATE \"C\""


def _table(connection: Connection, contract: TableContract) -> str:
    """The table as it is read: without the tables that inherit from it, which have a log of their own."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT c.relkind = 'p' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname = %s",
            (contract.schema, contract.table),
        )
        row = cursor.fetchone()
    if row is None:
        raise IngestError(
            f"Table {contract.full_name} does not exist in the source database ({contract.path}).",
            fix=f"Create table {contract.full_name}, correct the contract, or connect to the right database.",
        )
    name = qualified(contract.schema, contract.table)
    return name if row[0] else f"ONLY {name}"


def _counts(connection: Connection, contract: TableContract, table: str) -> tuple[int, int]:
    mark = contract.soft_delete_column
    alive = "" if mark is None else f" FILTER (WHERE {identifier(mark)} IS NULL)"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT count(*), count(*){alive} FROM {table}")
        rows, live = cursor.fetchone()
    return rows, live


def _expressions(contract: TableContract) -> list[tuple[str, str]]:
    found = [(column.name, _text_of(identifier(column.name))) for column in contract.columns]
    found += [
        (f"{JSON_PREFIX}{column.name}", f"to_json({identifier(column.name)})::text")
        for column in contract.columns
        if column.type.kind in ARRAYS
    ]
    return found


def _text_of(column: str) -> str:
    # concat writes by the type's output function, as the log does; a cast to text would spell out
    # booleans and cut the padding of char(n).
    return f"CASE WHEN {column}::text IS NOT NULL THEN concat({column}) END"
