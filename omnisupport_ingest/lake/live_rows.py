"""Reads the live rows of files that may have deletion vectors: as Arrow, and as SQL for DuckDB.

Whatever reads a dimension or a history goes through here (without Spark) or through ``lake.read`` (Spark).
A file without a vector is read as bare Parquet, at no further cost.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.lake.deletion_vectors import dead_rows_of, live_mask
from omnisupport_ingest.lake.layout import LakeFile

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_FILE, _ROW = "_cdc_of_file", "file_row_number"
"""Columns that DuckDB adds: the path of a row's file, and the row's number in it (whose name is fixed)."""


def live_table(
    file: LakeFile,
    *,
    columns: Sequence[str] | None = None,
    filters: pc.Expression | None = None,
) -> pa.Table:
    """Return the live rows of ``file``; the other parameters are those of ``pyarrow.parquet.read_table``."""
    if file.vector is None:
        return pq.read_table(file.stored, columns=columns, filters=filters, partitioning=None)
    # The filter may need other columns, so then all are read.
    read = columns if filters is None else None
    rows = pq.read_table(file.stored, columns=read, partitioning=None)
    rows = rows.filter(pa.array(live_mask(dead_rows_of(file), file.stored_rows)))
    if filters is not None:
        rows = rows.filter(filters)
    return rows if columns is None else rows.select(columns)


def live_sql(connection: DuckDBPyConnection, files: Iterable[LakeFile | str]) -> str:
    """Return the live rows of ``files`` as a table expression for ``connection``.

    A file given as a path is bare Parquet that belongs to no table. A column that a file lacks is NULL. The
    numbers of dead rows go to a temporary table.
    """
    files = list(files)
    marked = [file for file in files if not isinstance(file, str) and file.vector is not None]
    plain = [
        file if isinstance(file, str) else file.stored
        for file in files
        if isinstance(file, str) or file.vector is None
    ]
    if not marked:
        return bare_sql(plain)
    dead = f"dead_{uuid.uuid4().hex}"
    numbers = [dead_rows_of(file) for file in marked]
    # A dead row names its file by number, because a path takes a hundred bytes.
    of = np.repeat(np.arange(len(marked), dtype=np.int32), [len(each) for each in numbers])
    listed = {
        dead: pa.table({"file": of, "number": np.concatenate(numbers)}),
        f"{dead}_in": pa.table(
            {"file": np.arange(len(marked), dtype=np.int32), "path": [file.stored for file in marked]}
        ),
    }
    for name, rows in listed.items():
        connection.register(f"{name}_listed", rows)
        # No failpoint: a temporary table of this connection.
        connection.execute(f"CREATE TEMP TABLE {name} AS SELECT * FROM {name}_listed")
        connection.unregister(f"{name}_listed")
    numbered = bare_sql([file.stored for file in marked], f"filename = '{_FILE}'", "file_row_number = true")
    unknown = f"error('no deletion vector was read for ' || m.{_FILE})::INTEGER"
    live = (
        f"SELECT m.* EXCLUDE ({_FILE}, {_ROW}) FROM {numbered} m LEFT JOIN {dead}_in f ON m.{_FILE} = f.path "
        f"ANTI JOIN {dead} d ON coalesce(f.file, {unknown}) = d.file AND m.{_ROW} = d.number"
    )
    return f"(FROM {bare_sql(plain)} UNION ALL BY NAME {live})" if plain else f"({live})"


def bare_sql(paths: Collection[str], *options: str) -> str:
    """Return all rows of the Parquet files ``paths`` as a table expression for DuckDB."""
    listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    arguments = ", ".join(("union_by_name = true", "hive_partitioning = false", *options))
    return f"read_parquet([{listed}], {arguments})"
