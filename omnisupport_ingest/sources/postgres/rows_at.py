"""The rows of a source table at an exported snapshot, as text, for comparing them with the lake.

They are read by ``SELECT``, not by the ``COPY`` that the snapshot of a table uses: a fault in one
way of reading must not hide itself by being in both.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import ARRAYS
from omnisupport_ingest.sources.postgres.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.quoting import identifier, literal, qualified

_ROWS_AT_ONCE = 10_000

JSON_PREFIX = "json:"
"""An array column is written a second time, under its name with this prefix, as JSON."""


def write_rows_at(dsn: str, snapshot: str, contract: TableContract, path: Path) -> int:
    """Write the contract's columns of every row that ``snapshot`` sees to a Parquet file at ``path``.

    Each column holds PostgreSQL's text of the value, null for NULL. Returns the number of rows.
    The session that exported ``snapshot`` must still be open. Raises ``SourceUnavailable``.
    """
    schema = pa.schema([(name, pa.string()) for name, _ in _expressions(contract)])
    listed = ", ".join(expression for _, expression in _expressions(contract))
    rows = 0
    connection = connect(dsn)
    try:
        connection.autocommit = False
        with source_errors(f"reading {contract.full_name}"), pq.ParquetWriter(path, schema) as writer:
            with connection.cursor() as start:
                start.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                start.execute(f"SET TRANSACTION SNAPSHOT {literal(snapshot)}")
            with connection.cursor(name="rows_at") as cursor:
                cursor.itersize = _ROWS_AT_ONCE
                cursor.execute(f"SELECT {listed} FROM {qualified(contract.schema, contract.table)}")
                while found := cursor.fetchmany(_ROWS_AT_ONCE):
                    columns = [list(values) for values in zip(*found, strict=True)]
                    arrays = [pa.array(values, pa.string()) for values in columns]
                    writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
                    rows += len(found)
    finally:
        connection.close()
    path.chmod(0o600)
    return rows


def _expressions(contract: TableContract) -> list[tuple[str, str]]:
    found = [(column.name, f"{identifier(column.name)}::text") for column in contract.columns]
    found += [
        (f"{JSON_PREFIX}{column.name}", f"to_json({identifier(column.name)})::text")
        for column in contract.columns
        if column.type.kind in ARRAYS
    ]
    return found
