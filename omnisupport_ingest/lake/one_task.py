"""Few rows are made and written by one Spark task, which reads and writes its files itself.

For few rows it is the plan that costs: a reader, a writer and every column in between are planned anew, which
takes longer than the work. Here the plan has one node, however many columns and files there are.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staging import StagedFiles, place_draft, room_on_disk
from omnisupport_ingest.lake.table import LakeTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW_ROWS = 20_000
"""Rows up to which one task is quicker than a plan of many."""

FEW_BYTES = 16 * 1024 * 1024
"""Of compressed files, likewise: a task holds its rows in memory."""

_MOST_BYTES_HELD = 64 * 1024 * 1024

FEW_FILES = 256
"""Likewise; many small files are read by many tasks."""

Work = Callable[[], "pa.Table | None"]
"""Makes the rows of a table: its columns, partition columns included. None: not for one task after all."""

_OUTCOME = "attempt string"


class Sized(Protocol):
    """A data file, of a table or landed, whose rows and bytes are known."""

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


def are_few(files: Sequence[Sized]) -> bool:
    """Whether one task can read ``files`` and make rows of them."""
    return (
        len(files) <= FEW_FILES
        and sum(file.rows for file in files) <= FEW_ROWS
        and sum(file.bytes for file in files) <= FEW_BYTES
    )


def fit_in_memory(paths: Iterable[str]) -> bool:
    """Whether one task may hold the rows of the Parquet files at ``paths``, by what their footers say.

    A few megabytes that compress well may be gigabytes.
    """
    held = 0
    for path in paths:
        footer = pq.read_metadata(path)
        held += sum(footer.row_group(number).total_byte_size for number in range(footer.num_row_groups))
    return held <= _MOST_BYTES_HELD


def rows_of(files: Iterable[LakeFile], schema: pa.Schema) -> pa.Table:
    """The rows of ``files`` in the columns of ``schema``, in one chunk; one that a file lacks is NULL there.

    Partition columns are taken from the files' places.
    """
    tables = [schema.empty_table()]
    for file in files:
        tables.append(columns_of(file.uri, schema, dict(file.partition)))
    return pa.concat_tables(tables).combine_chunks()


def columns_of(path: str, schema: pa.Schema, known: Mapping[str, Any]) -> pa.Table:
    """The rows of the Parquet file at ``path`` in the columns of ``schema``.

    A column of ``known`` has its value there in every row; another that the file lacks is NULL.
    """
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        in_file = set(parquet.schema_arrow.names)
        rows = parquet.read(columns=[name for name in schema.names if name in in_file])
    arrays: list[Any] = []
    for field in schema:
        if field.name in known:
            arrays.append(pa.repeat(pa.scalar(known[field.name], field.type), rows.num_rows))
        elif field.name in in_file:
            arrays.append(rows[field.name].cast(field.type))
        else:
            arrays.append(pa.nulls(rows.num_rows, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def stage_in_one_task(
    spark: SparkSession, table: LakeTable, work: Work, *, unit: str, generation: Mapping[str, int]
) -> StagedFiles | None:
    """Have one task write the rows that ``work`` makes, in their final place; None if it makes none there.

    ``work`` is sent to a worker. The other parameters are those of ``staging.stage_frame``, and what is said
    there of files and units holds here.
    """
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    draft.parent.mkdir(mode=0o700, exist_ok=True)
    draft.mkdir(mode=0o700)
    spec = table.spec
    schema = arrow_schema(spec.schema, without=())
    write = partial(_write, work=work, draft=draft, schema=schema, partition_by=spec.partition_by)
    frame = spark.range(0, 1, 1, 1).mapInArrow(write, _OUTCOME)
    try:
        with gate("lake.write", spec.path), room_on_disk(frame, draft):
            (attempt,) = (row["attempt"] for row in frame.collect())
        if attempt is None:
            return None
        # Only the folder of the attempt that answered: another one may still be writing to its own.
        return place_draft(table, draft / attempt, unit=unit, generation=generation)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _write(
    batches: Iterable[pa.RecordBatch],
    work: Work,
    draft: Path,
    schema: pa.Schema,
    partition_by: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    """What the task does; gives the name of its folder below ``draft``, or NULL."""
    for _ in batches:
        # The one row that starts the task.
        pass
    rows, attempt = work(), None
    if rows is not None:
        attempt = uuid.uuid4().hex
        (draft / attempt).mkdir(mode=0o700)
        rows = rows.select(schema.names).cast(schema)
        for folder, part in _parts(rows, partition_by):
            _write_part(part, draft / attempt / folder, partition_by)
    yield pa.RecordBatch.from_arrays([pa.array([attempt], pa.string())], names=["attempt"])


def _parts(rows: pa.Table, partition_by: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each partition, with its folder; none where there are no rows."""
    if not rows.num_rows:
        return
    if not partition_by:
        yield "", rows
        return
    column, *others = partition_by
    for value in pc.unique(rows[column]).to_pylist():
        of_value = rows.filter(pc.is_null(rows[column]) if value is None else pc.equal(rows[column], value))
        # An empty text is NULL where it is a partition (Delta protocol, partition value serialization).
        folder = f"{column}={quote(value, safe='') if value else layout.HIVE_NULL}"
        for below, part in _parts(of_value, others):
            yield f"{folder}/{below}" if below else folder, part


def _write_part(rows: pa.Table, folder: Path, partition_by: Sequence[str]) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"part-{uuid.uuid4().hex}.parquet"
    pq.write_table(rows.drop_columns(list(partition_by)), path, compression="snappy")
