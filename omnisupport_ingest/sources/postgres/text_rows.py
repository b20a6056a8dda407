"""Rows of a table as PostgreSQL's text, in a file, for comparing them with the lake.

They are read by ``SELECT``, not by the ``COPY`` that the snapshot of a table uses: a fault in one
way of reading must not hide itself by being in both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS
from omnisupport_ingest.sources.postgres.quoting import identifier

_ROWS_AT_ONCE = 10_000
_CURSOR = "text_rows"

JSON_PREFIX = "json:"
"""An array column is written a second time, under its name with this prefix, as JSON."""


def write_text_rows(
    connection: Connection,
    contract: TableContract,
    rows: str,
    path: Path,
    *,
    fetched: Callable[[int], None] = lambda _count: None,
) -> int:
    """Write the contract's columns, as the source has them, of ``rows`` to a Parquet file at ``path``, for
    its owner only.

    ``rows``: what stands behind FROM, read in the open transaction of ``connection``. Each column holds
    PostgreSQL's text of the value, as its output function writes it, null for NULL. ``fetched`` is told
    how many rows came, some thousands at a time. Returns how many there are in all. Raises psycopg2's errors.
    """
    expressions = _expressions(contract)
    schema = pa.schema([(name, pa.string()) for name, _ in expressions])
    listed = ", ".join(expression for _, expression in expressions)
    written = 0
    path.touch(mode=0o600)
    with pq.ParquetWriter(path, schema) as writer, connection.cursor() as cursor:
        # Declared by hand: the driver's own refuses a transaction that was not begun by it.
        cursor.execute(f"DECLARE {_CURSOR} NO SCROLL CURSOR FOR SELECT {listed} FROM {rows}")
        while True:
            cursor.execute(f"FETCH {_ROWS_AT_ONCE} FROM {_CURSOR}")
            found = cursor.fetchall()
            if not found:
                break
            columns = [list(values) for values in zip(*found, strict=True)]
            arrays = [pa.array(values, pa.string()) for values in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            written += len(found)
            fetched(len(found))
        cursor.execute(f"CLOSE {_CURSOR}")
    return written


def _expressions(contract: TableContract) -> list[tuple[str, str]]:
    found = [(column.name, _text_of(identifier(column.name))) for column in contract.source_columns]
    found += [
        (f"{JSON_PREFIX}{column.name}", f"to_json({identifier(column.name)})::text")
        for column in contract.source_columns
        if column.type.kind in ARRAYS
    ]
    return found


def _text_of(column: str) -> str:
    # concat writes by the type's output function, as the log does; a cast to text would spell out
    # booleans and cut the padding of char(n).
    return f"CASE WHEN {column}::text IS NOT NULL THEN concat({column}) END"
