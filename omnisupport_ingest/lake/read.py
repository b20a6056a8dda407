"""Reads a list of files with Spark and takes the partition columns from the paths of the files.

Spark's own partition discovery expects nothing but ``name=value`` folders below one base folder, and a unit's
folder stands between them. So the columns come from the path of each row's file. The plan is as small for a
thousand windows as for two.
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
    """Return a DataFrame with exactly the columns of ``schema``; without rows if there are no ``files``.

    A column that a file lacks is NULL there. Works on a classic session and on Spark Connect.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    # Another job follows, and the standing task holds a slot.
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
    """Return the value of the partition column ``name`` in the path of the row's file.

    The path is escaped twice: by Spark when it named the folder, and as a URL. Escapes are rare and
    unescaping is slow, so a value without a percent sign is used as it is. The folder is found by plain
    search, which is faster than a regular expression.
    """
    from pyspark.sql import functions as F

    after = F.substring_index(F.col("_metadata.file_path"), f"/{name}=", -1)
    written = F.substring_index(after, "/", 1)
    text = written
    for _ in range(2):
        # ``url_decode`` would read a plus sign as a space; neither escaping means that.
        text = F.url_decode(F.replace(text, F.lit("+"), F.lit("%2B")))
    value = F.when(F.contains(written, F.lit("%")), text).otherwise(written)
    return F.when(value != HIVE_NULL, value)
