"""Spark reads a list of files and takes their partition columns from their paths.

Spark's own discovery of partitions looks for ``name=value`` folders below one base folder without
others between them; a unit's folder stands between, so the columns are taken from the path of each
row's file instead. The plan is as small for a thousand windows as for two.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from omnisupport_ingest.lake import standing_task
from omnisupport_ingest.lake.layout import HIVE_NULL, LakeFile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


def read_files(
    spark: SparkSession, schema: StructType, partition_by: tuple[str, ...], files: Iterable[LakeFile]
) -> DataFrame:
    """A DataFrame with exactly the columns of ``schema``; without rows if there are no ``files``.

    A column that a file lacks is NULL there. Works on a classic session and on Spark Connect.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    # Who reads by Spark has another job to do.
    standing_task.release()
    files = tuple(files)
    if not files:
        return spark.createDataFrame([], schema.toNullable())
    in_files = StructType([field for field in schema.toNullable() if field.name not in partition_by])
    frame = spark.read.schema(in_files).parquet(*(f"file://{file.uri}" for file in files))
    columns = []
    for name in schema.names:
        if name not in partition_by:
            columns.append(F.col(f"`{name}`"))
            continue
        values = {dict(file.partition)[name] for file in files}
        # One value, as when one window is read, costs nothing per row.
        column = F.lit(values.pop()).cast("string") if len(values) == 1 else _from_path(name)
        columns.append(column.alias(name))
    return frame.select(*columns)


def _from_path(name: str) -> Column:
    """The value of the partition column ``name`` in the path of the row's file.

    The path is escaped twice: by Spark where it made the folder's name, and as a URL. Both are
    rare and their undoing is dear, so a value without a percent sign is taken as it is; and the
    folder is found by plain search rather than by a regular expression.
    """
    from pyspark.sql import functions as F

    after = F.substring_index(F.col("_metadata.file_path"), f"/{name}=", -1)
    written = F.substring_index(after, "/", 1)
    text = written
    for _ in range(2):
        # ``url_decode`` would read a plus sign as a space, which neither escaping means.
        text = F.url_decode(F.replace(text, F.lit("+"), F.lit("%2B")))
    value = F.when(F.contains(written, F.lit("%")), text).otherwise(written)
    return F.when(value != HIVE_NULL, value)
