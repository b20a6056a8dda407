"""Reads the rows of a few keys from many files, by Spark tasks of ours.

In each plan that uses them, Spark would decode every row of every file. A task reads the columns that decide
which rows are wanted, and whole rows only from row groups that hold one. A file without any costs about a
millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.lake import standing_task
from omnisupport_ingest.lake.deletion_vectors import dead_rows_of
from omnisupport_ingest.lake.file_rows import BYTES_OF_A_BATCH, pieces_of, rows_at
from omnisupport_ingest.lake.file_tasks import in_shares
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.visiting import Visit, visiting

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

MOST_KEYS = 20_000
"""Most keys that are looked for in this way; every task is sent all of them."""

_MOST_LETTERS = 8 * 1024 * 1024
"""Most characters of keys that count as few."""

Values = tuple[str | int, ...]


@dataclass(frozen=True)
class Wanted:
    """Which rows are wanted. A row is wanted if any of these holds:

    - its ``key`` is one of ``keys``;
    - its column ``moved`` has a value;
    - each column of ``others`` has one of the values given for it;
    - it has no key, and ``keyless`` is set.

    With ``only`` (column → value), a wanted row must also have these values.
    """

    key: str
    keys: tuple[str, ...]
    moved: str
    others: Mapping[str, Values]
    only: Mapping[str, str] = field(default_factory=dict)
    keyless: bool = True

    @property
    def columns(self) -> list[str]:
        """The columns that decide."""
        return [self.key, self.moved, *self.others, *self.only]

    @cached_property
    def _keys(self) -> pa.Array:
        return pa.array(self.keys, pa.string())

    def among(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return a mask of the wanted ones among ``rows``, which have ``columns``."""
        key, moved = rows.column(self.key), rows.column(self.moved)
        of_others = (_is_in(rows.column(name), values) for name, values in self.others.items())
        ways = [pc.is_in(key, self._keys), pc.is_valid(moved), reduce(pc.and_, of_others)]
        if self.keyless:
            ways.append(pc.is_null(key))
        demands = (_is_in(rows.column(name), (value,)) for name, value in self.only.items())
        found = reduce(pc.and_, demands, reduce(pc.or_, ways))
        mask: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
        return mask


def _is_in(column: pa.Array, values: Values) -> pa.BooleanArray:
    return pc.is_in(column, pa.array(values, column.type))


def few_keys(keys: DataFrame) -> frozenset[str] | None:
    """Return the values in the only column of ``keys``, without NULL; None if there are too many."""
    rows = keys.dropna().distinct().limit(MOST_KEYS + 1).collect()
    found = frozenset(row[0] for row in rows)
    return None if len(found) > MOST_KEYS or sum(map(len, found)) > _MOST_LETTERS else found


def keys_frame(spark: SparkSession, keys: Iterable[str]) -> DataFrame:
    """Return a frame of ``keys`` in the column ``_cdc_key``."""
    return spark.createDataFrame(pa.table({"_cdc_key": pa.array(sorted(keys), pa.string())}))


@contextmanager
def reading_wanted(
    spark: SparkSession, schema: StructType, files: Sequence[LakeFile], wanted: Wanted
) -> Iterator[DataFrame]:
    """Yield a frame of the live rows of ``files`` that are ``wanted``, with the columns of ``schema``.

    The files are read once, and Spark keeps the rows until the ``with`` block ends. Rows lost with an
    executor are read again.
    """
    standing_task.release()
    if not files:
        yield spark.createDataFrame([], schema.toNullable())
        return
    shares = in_shares(files)
    read = partial(_wanted_rows, shares=shares, wanted=wanted, schema=arrow_schema(schema, without=()))
    task = visiting(Visit.of(spark, Path(files[0].full_path)), read)
    rows = spark.range(0, len(shares), 1, len(shares)).mapInArrow(task, schema.toNullable()).persist()
    try:
        yield rows
    finally:
        rows.unpersist()


def _wanted_rows(
    batches: Iterable[pa.RecordBatch],
    shares: Sequence[Sequence[LakeFile]],
    wanted: Wanted,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    held: list[pa.RecordBatch] = []
    size = 0
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        for file in shares[number]:
            for rows in wanted_in(file, wanted, schema):
                held.append(rows)
                size += rows.nbytes
                if size >= BYTES_OF_A_BATCH:
                    yield pa.concat_batches(held)
                    held, size = [], 0
    if held:
        yield pa.concat_batches(held)


def wanted_in(file: LakeFile, wanted: Wanted, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the live rows of ``file`` that are ``wanted``, with the columns of ``schema``; runs in a task."""
    known = dict(file.partition)
    telling = pa.schema([schema.field(name) for name in wanted.columns])
    found, first = [np.zeros(0, np.int64)], 0
    for batch in pieces_of(file.stored, telling, known):
        found.append(first + np.flatnonzero(wanted.among(batch)))
        first += len(batch)
    numbers = np.concatenate(found)
    dead = dead_rows_of(file)
    if len(dead):
        numbers = numbers[~np.isin(numbers, dead)]
    if len(numbers):
        yield from rows_at(file.stored, schema, numbers, known)
