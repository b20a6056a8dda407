"""Reads and writes a DataFrame by Python tasks, where executors do not see the home.

Spark's own readers and writers need files that driver and executors both see. Elsewhere, each task reads its
share of the files from its own copies of the objects, and writes its partition of the frame to drafts, which
it uploads (``lake.drafts``). The rows are the same. The cost: Spark would read only the columns that a plan
needs; the tasks read all.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from omnisupport_ingest.lake.drafts import Draft, Drafts
from omnisupport_ingest.lake.file_rows import batches_of, live_pieces
from omnisupport_ingest.lake.file_tasks import Output, in_shares
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.storage import path_at_hand
from omnisupport_ingest.visiting import Visit, visiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_SENT = "name string, rows long, bytes long"


def read_by_tasks(
    spark: SparkSession, visit: Visit, schema: StructType, files: Sequence[LakeFile]
) -> DataFrame:
    """Return what ``read.read_files`` returns for ``files`` (at least one)."""
    shares = in_shares(files)
    read = partial(_live_rows, shares=shares, schema=arrow_schema(schema, without=()))
    return _frame(spark, len(shares), visiting(visit, read), schema)


def _live_rows(
    batches: Iterable[pa.RecordBatch], shares: Sequence[Sequence[LakeFile]], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        for file in shares[number]:
            yield from live_pieces(file, schema)


def read_paths_by_tasks(
    spark: SparkSession, visit: Visit, schema: StructType, paths: Sequence[str]
) -> DataFrame:
    """Return the rows of the bare Parquet files ``paths`` (at least one); each task reads one file."""
    read = partial(_rows, paths=paths, schema=arrow_schema(schema, without=()))
    return _frame(spark, len(paths), visiting(visit, read), schema)


def _rows(
    batches: Iterable[pa.RecordBatch], paths: Sequence[str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        yield from batches_of(path_at_hand(paths[number]), schema, {})


def _frame(spark: SparkSession, count: int, task: object, schema: StructType) -> DataFrame:
    return spark.range(0, count, 1, count).mapInArrow(task, schema.toNullable())  # type: ignore[arg-type]


def write_by_tasks(frame: DataFrame, drafts: Drafts, partition_by: tuple[str, ...]) -> list[Draft]:
    """Write ``frame`` to ``drafts``, in folders by ``partition_by``; return the files, sorted by name.

    The rows of each task keep their order.
    """
    schema = arrow_schema(frame.schema, without=())
    write = partial(_written, drafts=drafts, schema=schema, partition_by=partition_by)
    sent = frame.mapInArrow(write, _SENT).collect()
    found = (Draft(each["name"], each["rows"], each["bytes"]) for each in sent)
    return sorted(found, key=lambda file: file.name)


def _written(
    batches: Iterable[pa.RecordBatch], drafts: Drafts, schema: pa.Schema, partition_by: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "a worker of Spark has a task"
    with drafts.begun() as folder:
        attempt = uuid.uuid4().hex
        output = Output(folder / attempt, context.partitionId(), schema, partition_by)
        for batch in batches:
            output.add(pa.Table.from_batches([batch]))
        output.close()
        sent = drafts.sent(folder)
    names = [each.name for each in sent]
    columns = [
        pa.array(names, pa.string()),
        pa.array([each.rows for each in sent], pa.int64()),
        pa.array([each.bytes for each in sent], pa.int64()),
    ]
    yield pa.RecordBatch.from_arrays(columns, names=["name", "rows", "bytes"])
