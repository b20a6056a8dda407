"""Reads a list of files with Spark and takes the partition columns from the paths of the files.

Spark's own partition discovery expects nothing but ``name=value`` folders below one base folder. Here the
folder of a unit of work lies between them. So the columns come from the path of each row's file. The plan is
as small for a thousand windows as for two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omnisupport_ingest.lake import standing_task
from omnisupport_ingest.lake.deletion_vectors import dead_rows_of
from omnisupport_ingest.lake.frame_tasks import read_by_tasks, read_paths_by_tasks
from omnisupport_ingest.lake.layout import HIVE_NULL, LakeFile
from omnisupport_ingest.visiting import Visit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_OF, _NUMBER, _BITS = "_cdc_of_file", "_cdc_row_number", "_cdc_dead_bits"


def read_files(
    spark: SparkSession, schema: StructType, partition_by: tuple[str, ...], files: Iterable[LakeFile]
) -> DataFrame:
    """Return a DataFrame with exactly the columns of ``schema``; without rows if there are no ``files``.

    A column that a file lacks is NULL there. Dead rows are left out. Works on a classic session and on Spark
    Connect.
    """
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    # The job that follows needs the slot that the standing task holds.
    standing_task.release()
    files = tuple(files)
    if not files:
        return spark.createDataFrame([], schema.toNullable())
    visit = Visit.of(spark, Path(files[0].full_path))
    if visit is not None:
        return read_by_tasks(spark, visit, schema, files)
    in_files = StructType([field for field in schema.toNullable() if field.name not in partition_by])
    marked = [file for file in files if file.vector is not None]
    plain = [file for file in files if file.vector is None]
    frames = []
    if plain:
        frame = spark.read.schema(in_files).parquet(*(f"file://{file.stored}" for file in plain))
        frames.append(frame.select(*_columns(schema, partition_by, plain)))
    if marked:
        frame = spark.read.schema(in_files).parquet(*(f"file://{file.stored}" for file in marked))
        frames.append(_live(spark, frame, _columns(schema, partition_by, marked), marked))
    return reduce(DataFrame.unionAll, frames)


def read_paths(spark: SparkSession, schema: StructType, paths: Sequence[str]) -> DataFrame:
    """Return a DataFrame with the columns of ``schema`` from the bare Parquet files ``paths`` (at least one):
    files of a table without partitions, or files that tasks wrote for later ones."""
    visit = Visit.of(spark, Path(paths[0]))
    if visit is not None:
        return read_paths_by_tasks(spark, visit, schema, paths)
    return spark.read.schema(schema).parquet(*(f"file://{path}" for path in paths))


def _columns(schema: StructType, partition_by: tuple[str, ...], files: Sequence[LakeFile]) -> list[Column]:
    from pyspark.sql import functions as F

    columns = []
    for name in schema.names:
        if name not in partition_by:
            columns.append(F.col(f"`{name}`"))
            continue
        values = {dict(file.partition)[name] for file in files}
        # A single value, as when one window is read, costs nothing per row.
        column = F.lit(values.pop()).cast("string") if len(values) == 1 else _from_path(name)
        columns.append(column.alias(name))
    return columns


def _live(
    spark: SparkSession, frame: DataFrame, columns: Sequence[Column], files: Sequence[LakeFile]
) -> DataFrame:
    """Return ``columns`` of the live rows of ``frame``, which was read from ``files``.

    Spark gets one bit per row of each file, set if the row is dead, and finds the bit by the row number that
    Spark itself assigns.
    """
    from pyspark.sql import functions as F

    bits = spark.createDataFrame(
        pa.table(
            {
                _OF: [f"file:{file.stored}" for file in files],
                _BITS: pa.array([_words(file) for file in files], pa.list_(pa.int64())),
            }
        )
    )
    # Spark writes a path that has no host with one slash or with three.
    path = F.regexp_replace(F.col("_metadata.file_path"), "^file:/*", "file:/")
    number = F.col("_metadata.row_index")
    rows = frame.select(*columns, _unescaped(path).alias(_OF), number.alias(_NUMBER))
    word = F.get(_BITS, (F.col(_NUMBER) / 64).cast("int"))
    is_dead = F.getbit(word, (F.col(_NUMBER) % 64).cast("int")) == 1
    unknown = F.raise_error(F.concat(F.lit("no deletion vector was sent for "), F.col(_OF)))
    is_dead = F.when(F.isnull(word), unknown.cast("boolean")).otherwise(is_dead)
    joined = rows.join(F.broadcast(bits), _OF, "left")
    return joined.where(~is_dead).drop(_OF, _NUMBER, _BITS)


def _words(file: LakeFile) -> npt.NDArray[np.int64]:
    """Return one bit for each row of ``file``, in 64-bit words, the first row in the lowest bit."""
    is_dead = np.zeros(-(-max(1, file.stored_rows) // 64) * 64, np.uint8)
    is_dead[dead_rows_of(file)] = 1
    return np.packbits(is_dead, bitorder="little").view("<i8")


def _from_path(name: str) -> Column:
    """Return the value of the partition column ``name`` in the path of the row's file.

    The path is escaped twice: by Spark when it named the folder, and as a URL. Escapes are rare and
    unescaping is slow, so a value without a percent sign is used as it is. The folder is found by plain
    search, which is faster than a regular expression.
    """
    from pyspark.sql import functions as F

    after = F.substring_index(F.col("_metadata.file_path"), f"/{name}=", -1)
    written = F.substring_index(after, "/", 1)
    text = _unescaped(_unescaped(written))
    value = F.when(F.contains(written, F.lit("%")), text).otherwise(written)
    return F.when(value != HIVE_NULL, value)


def _unescaped(text: Column) -> Column:
    """Return ``text`` without one layer of escapes as in a URL."""
    from pyspark.sql import functions as F

    # ``url_decode`` would read a plus sign as a space; in these paths a plus sign is a plus sign.
    return F.url_decode(F.replace(text, F.lit("+"), F.lit("%2B")))
