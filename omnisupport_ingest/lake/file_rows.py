"""Reads rows from the Parquet files of tables as Arrow, within bounded memory.

A column that a file lacks is NULL, so files of older versions of a table are read with the newest schema. A
row group is read in one piece only if its columns surely fit in memory: a few megabytes of a file may become
gigabytes of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.lake.deletion_vectors import dead_rows_of, live_mask
from omnisupport_ingest.lake.layout import LakeFile

MAX_BYTES_IN_MEMORY = 256 * 1024 * 1024
"""Most bytes of rows that a task may hold."""

BYTES_OF_A_BATCH = 32 * 1024 * 1024
"""Rows are handed over as a batch once they take this much memory."""

_ROWS_OF_A_BATCH = 50_000
_ROWS_AT_ONCE = 1_000
_GROUPS_AT_ONCE = 4
_PLAIN = frozenset({"PLAIN", "RLE", "BIT_PACKED"})
"""Encodings of a column chunk that write every value in full (Parquet format, encodings)."""


def rows_of(files: Iterable[LakeFile], schema: pa.Schema) -> pa.Table:
    """Read the live rows of ``files`` with the columns of ``schema``, in one chunk.

    Partition columns have the values of the files' partitions.
    """
    batches = [batch for file in files for batch in live_pieces(file, schema)]
    return pa.Table.from_batches(batches, schema).combine_chunks()


def rows_that_fit(files: Iterable[LakeFile], schema: pa.Schema) -> pa.Table | None:
    """Read rows as ``rows_of`` does; None, without reading further, if they exceed
    ``MAX_BYTES_IN_MEMORY``."""
    held: list[pa.RecordBatch] = []
    size = 0
    for file in files:
        for batch in live_pieces(file, schema):
            held.append(batch)
            size += batch.nbytes
            if size > MAX_BYTES_IN_MEMORY:
                return None
    return pa.Table.from_batches(held, schema).combine_chunks()


def batches_of(path: str, schema: pa.Schema, known: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the Parquet file at ``path`` with the columns of ``schema``, in large batches.

    A column of ``known`` has that value in every row; another column that the file lacks is NULL.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in pieces_of(path, schema, known):
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _ROWS_OF_A_BATCH or size >= BYTES_OF_A_BATCH:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def live_pieces(file: LakeFile, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of ``file`` as ``pieces_of`` does, with the values of its partition."""
    dead, first = dead_rows_of(file), 0
    for batch in pieces_of(file.stored, schema, dict(file.partition)):
        low, high = np.searchsorted(dead, [first, first + batch.num_rows])
        if low == high:
            yield batch
        else:
            yield batch.filter(pa.array(live_mask(dead[low:high] - first, batch.num_rows)))
        first += batch.num_rows


def pieces_of(path: str, schema: pa.Schema, known: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``batches_of`` as they are read, without a copy: mostly one row group at a time."""
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        wanted = _in_file(parquet, schema, known)
        for number in range(parquet.num_row_groups):
            for batch in _read(parquet, number, wanted):
                yield _with_columns(batch, schema, known)


def rows_at(
    path: str, schema: pa.Schema, numbers: npt.NDArray[np.int64], known: Mapping[str, Any] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with the given ``numbers`` (ascending, from 0) of the Parquet file at ``path``.

    The columns are as of ``batches_of``. Row groups without a wanted row are not read.
    """
    known = known or {}
    first = 0
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        wanted = _in_file(parquet, schema, known)
        for number in range(parquet.num_row_groups):
            end = first + parquet.metadata.row_group(number).num_rows
            low, high = np.searchsorted(numbers, [first, end])
            for batch in _read(parquet, number, wanted) if high > low else ():
                low, high = np.searchsorted(numbers, [first, first + len(batch)])
                rows = _with_columns(batch, schema, known)
                if high - low == len(rows):
                    yield rows
                elif high > low:
                    yield rows.take(pa.array(numbers[low:high] - first))
                first += len(batch)
            first = end


def _in_file(parquet: pq.ParquetFile, schema: pa.Schema, known: Mapping[str, Any]) -> list[str]:
    in_file = set(parquet.schema_arrow.names)
    return [name for name in schema.names if name in in_file and name not in known]


def _read(parquet: pq.ParquetFile, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the ``columns`` of a row group: all rows at once if they surely fit, else few at a time."""
    group = parquet.metadata.row_group(number)
    is_small = _most_bytes(group, frozenset(columns)) <= _GROUPS_AT_ONCE * BYTES_OF_A_BATCH
    rows = max(1, group.num_rows) if is_small else _ROWS_AT_ONCE
    yield from parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


def _most_bytes(group: pq.RowGroupMetaData, columns: frozenset[str]) -> int:
    """Return an upper bound of the memory in bytes that the ``columns`` of a row group need.

    Repeated texts and common prefixes are stored once, but no text is longer than its column chunk.
    """
    most = 0
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema.partition(".")[0] in columns:
            plain = chunk.physical_type != "BYTE_ARRAY" or _PLAIN.issuperset(chunk.encodings)
            most += chunk.total_uncompressed_size * (1 if plain else chunk.num_values) + 16 * chunk.num_values
    return most


def _with_columns(batch: pa.RecordBatch, schema: pa.Schema, known: Mapping[str, Any]) -> pa.RecordBatch:
    in_file = set(batch.schema.names)
    arrays: list[Any] = []
    for field in schema:
        if field.name in known:
            arrays.append(pa.repeat(pa.scalar(known[field.name], field.type), batch.num_rows))
        elif field.name in in_file:
            column = batch.column(field.name)
            # A cast to the same type costs as much as reading a few rows.
            arrays.append(column if column.type == field.type else column.cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
