"""Spark tasks that read and write the files of tables themselves.

Spark spreads the work, tries again what failed and says when all is done; no row passes through the JVM, and
the plan has one node, however many columns and files there are. So a small run costs little, and a large one
what its rows cost in Arrow.
"""

from __future__ import annotations

import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout, standing_task
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staging import StagedFiles, gathered, place_draft, room_on_disk
from omnisupport_ingest.lake.table import LakeTable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW_ROWS = 20_000
"""Rows up to which one task is quicker than several."""

FEW_BYTES = 16 * 1024 * 1024
"""Of compressed files, likewise."""

FEW_FILES = 256
"""Likewise."""

ROWS_OF_A_TASK = 100_000
"""Rows that a task takes, where they come in files that are not larger."""

MOST_BYTES_HELD = 256 * 1024 * 1024
"""Bytes of rows that a task may hold."""

_SHARES = 4
_ROWS_AT_ONCE = 1_000
_GROUPS_AT_ONCE = 4
_PLAIN = frozenset({"PLAIN", "RLE", "BIT_PACKED"})
_ROWS_OF_A_BATCH = 50_000
_BYTES_OF_A_BATCH = 32 * 1024 * 1024
_ROWS_OF_A_GROUP = 8_192
_ROWS_OF_A_SAMPLE = 1_024
_ROWS_OF_A_FILE = 2 * ROWS_OF_A_TASK

_OUTCOME = "attempt string, told string"


class Sized(Protocol):
    """A data file, of a table or landed, whose rows and bytes are known."""

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


_File = TypeVar("_File", bound=Sized)


def are_few(files: Sequence[Sized]) -> bool:
    """Whether one task is quicker with ``files`` than several."""
    return (
        len(files) <= FEW_FILES
        and sum(file.rows for file in files) <= FEW_ROWS
        and sum(file.bytes for file in files) <= FEW_BYTES
    )


def in_shares(files: Sequence[_File]) -> list[list[_File]]:
    """``files`` in their order, shared out among tasks; a file is one task's."""
    if are_few(files):
        return [list(files)] if files else []
    most_rows = max(FEW_ROWS, min(ROWS_OF_A_TASK, sum(file.rows for file in files) // _SHARES))
    shares: list[list[_File]] = [[]]
    rows = size = 0
    for file in files:
        held = shares[-1]
        if held and (rows + file.rows > most_rows or size + file.bytes > FEW_BYTES or len(held) == FEW_FILES):
            shares.append([])
            rows = size = 0
        shares[-1].append(file)
        rows, size = rows + file.rows, size + file.bytes
    return shares


def rows_of(files: Iterable[LakeFile], schema: pa.Schema) -> pa.Table:
    """The rows of ``files`` in the columns of ``schema``, in one chunk; one that a file lacks is NULL there.

    Partition columns are taken from the files' places.
    """
    batches = [batch for file in files for batch in pieces_of(file.uri, schema, dict(file.partition))]
    return pa.Table.from_batches(batches, schema).combine_chunks()


def rows_that_fit(files: Iterable[LakeFile], schema: pa.Schema) -> pa.Table | None:
    """``rows_of``, if one task may hold so much; else None, once that much has been read.

    A few megabytes of a file may be gigabytes of rows.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for file in files:
        for batch in pieces_of(file.uri, schema, dict(file.partition)):
            held.append(batch)
            size += batch.nbytes
            if size > MOST_BYTES_HELD:
                return None
    return pa.Table.from_batches(held, schema).combine_chunks()


def batches_of(path: str, schema: pa.Schema, known: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """The rows of the Parquet file at ``path`` in the columns of ``schema``, some thousands at a time.

    A column of ``known`` has its value there in every row; another that the file lacks is NULL.
    """
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in pieces_of(path, schema, known):
        held.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= _ROWS_OF_A_BATCH or size >= _BYTES_OF_A_BATCH:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
    if held:
        yield pa.concat_batches(held)


def pieces_of(path: str, schema: pa.Schema, known: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches_of`` as they are read, so that none is copied: a row group at a time, mostly."""
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        wanted = _in_file(parquet, schema, known)
        for number in range(parquet.num_row_groups):
            for batch in _read(parquet, number, wanted):
                yield _with_columns(batch, schema, known)


def rows_at(path: str, schema: pa.Schema, numbers: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """The rows with the ``numbers``, which rise, of the Parquet file at ``path``, which has the columns of
    ``schema``; nothing is read of a row group that holds none of them."""
    first = 0
    with pq.ParquetFile(path, pre_buffer=False) as parquet:
        wanted = _in_file(parquet, schema, {})
        for number in range(parquet.num_row_groups):
            end = first + parquet.metadata.row_group(number).num_rows
            low, high = np.searchsorted(numbers, [first, end])
            for batch in _read(parquet, number, wanted) if high > low else ():
                low, high = np.searchsorted(numbers, [first, first + len(batch)])
                rows = _with_columns(batch, schema, {})
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
    """The ``columns`` of a row group: all rows at once where it is surely small enough, else few."""
    group = parquet.metadata.row_group(number)
    is_small = _most_bytes(group, frozenset(columns)) <= _GROUPS_AT_ONCE * _BYTES_OF_A_BATCH
    rows = max(1, group.num_rows) if is_small else _ROWS_AT_ONCE
    yield from parquet.iter_batches(rows, row_groups=[number], columns=columns, use_threads=False)


def _most_bytes(group: pq.RowGroupMetaData, columns: frozenset[str]) -> int:
    """No fewer bytes than the ``columns`` of a row group have in memory.

    Texts that repeat, or begin alike, are written once; but no text is longer than all that is written.
    """
    most = 0
    for place in range(group.num_columns):
        chunk = group.column(place)
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
            arrays.append(batch.column(field.name).cast(field.type))
        else:
            arrays.append(pa.nulls(batch.num_rows, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Output:
    """Where a task puts the rows that it makes.

    ``scratch``: a folder for what it cannot hold, gone with what the tasks made.
    """

    def __init__(self, folder: Path, number: int, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        """``number``: of the task. ``schema``: of the table, partition columns included."""
        self._rows, self._aside, self.scratch = folder / "rows", folder / "aside", folder / "scratch"
        self._beside = folder / "beside"
        for each in (folder, self._rows, self._aside, self._beside, self.scratch):
            # No failpoint: a draft that no table names yet.
            each.mkdir(mode=0o700)
        self._schema, self._partition_by = schema, partition_by
        self._files: dict[Path, _Growing] = {}
        # Who sorts the files by name has the rows in the order in which the tasks were given theirs.
        self._names = (f"part-{number:05d}-{place:05d}-{uuid.uuid4().hex}.parquet" for place in count())

    def add(self, rows: pa.Table) -> None:
        """Rows of the table: its columns, partition columns included."""
        self._add(self._rows, rows, self._schema, self._partition_by)

    def put_beside(self, rows: pa.Table, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        """Rows of another table, as ``add`` takes them; ``staging.stage_folders`` gives them their place."""
        self._add(self._beside, rows, schema, partition_by)

    def _add(self, place: Path, rows: pa.Table, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        kept = rows.select(schema.names).cast(schema)
        for folder, part in _parts(kept, partition_by):
            self._file(place / folder).add(part.drop_columns(list(partition_by)))

    def link(self, file: LakeFile, partition: Sequence[tuple[str, str | None]]) -> None:
        """The rows of a file of another table, as they stand in it; ``partition``: where they belong here.

        Where the file system has no links, the file is copied.
        """
        folder = self._rows / "/".join(_folder_of(*each) for each in partition)
        # No failpoint: a draft that no table names yet.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = folder / next(self._names)
        try:
            place.hardlink_to(file.uri)
        except OSError:
            shutil.copyfile(file.uri, place)

    def put_aside(self, rows: pa.Table) -> None:
        """Rows that are not for the table but for who asked for the work."""
        if rows.num_rows:
            self._file(self._aside).add(rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, folder: Path) -> _Growing:
        if folder not in self._files:
            # No failpoint: a draft that no table names yet.
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files[folder] = _Growing(folder, self._names)
        return self._files[folder]


class _Growing:
    """The files of one folder that a task writes: a next one begins where one has grown large."""

    def __init__(self, folder: Path, names: Iterator[str]) -> None:
        self._folder, self._names = folder, names
        self._held: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._written = 0

    def add(self, rows: pa.Table) -> None:
        self._held.append(rows)
        if sum(each.num_rows for each in self._held) >= _ROWS_OF_A_GROUP or (
            sum(each.nbytes for each in self._held) >= _BYTES_OF_A_BATCH
        ):
            self._write()

    def close(self) -> None:
        self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        if not self._held:
            return
        rows = pa.concat_tables(self._held)
        self._held = []
        if self._writer is not None and self._written + rows.num_rows > _ROWS_OF_A_FILE:
            self._writer.close()
            self._writer = None
        if self._writer is None:
            path = self._folder / next(self._names)
            # No failpoint: a draft that no table names yet.
            self._writer = pq.ParquetWriter(
                path, rows.schema, compression="snappy", use_dictionary=repeating_texts(rows)
            )
            self._written = 0
        self._writer.write_table(rows, row_group_size=_ROWS_OF_A_GROUP)
        self._written += rows.num_rows


def repeating_texts(rows: pa.Table) -> list[str]:
    """The columns in whose first rows few texts stand: a dictionary of the others only costs time."""
    first = rows.slice(0, _ROWS_OF_A_SAMPLE)
    return [
        field.name
        for field in rows.schema
        if pa.types.is_string(field.type) and len(first[field.name].unique()) <= max(1, len(first) // 8)
    ]


Work = Callable[[Output], "str | None"]
"""What a task does; gives what the caller is told of it. None: it cannot be done by a task after all."""


@dataclass(frozen=True)
class Made:
    """What tasks made, which is gone when the ``with`` ends unless it is placed.

    ``told``: what the works say, in their order. ``aside``: files of rows put aside. ``beside``: folders with
    the files of rows that were put beside.
    """

    told: tuple[str, ...]
    aside: tuple[str, ...]
    beside: tuple[str, ...]
    place: Callable[[], StagedFiles]


@contextmanager
def made_by_tasks(
    spark: SparkSession,
    table: LakeTable,
    works: Sequence[Work],
    *,
    unit: str,
    generation: Mapping[str, int],
) -> Iterator[Made | None]:
    """Have each of ``works`` done by a task of Spark; None if one of them cannot be.

    ``Made.place`` puts the rows in their final place; no version of the table holds them yet. The works are
    sent to Spark's workers. ``unit`` and ``generation``: as of ``staging.stage_frame``, and what is said
    there of files holds here.
    """
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.parent.mkdir(mode=0o700, exist_ok=True)
    draft.mkdir(mode=0o700)
    spec = table.spec
    schema = arrow_schema(spec.schema, without=())
    write = partial(_write, works=works, draft=draft, schema=schema, partition_by=spec.partition_by)
    try:
        with failpoint("lake.write", spec.path), room_on_disk(spark, draft):
            outcomes = _outcomes(spark, write, len(works))
        if any(each["told"] is None for each in outcomes):
            yield None
            return
        # Only the folders of the attempts that answered: others may still be writing to theirs.
        folders = [draft / each["attempt"] for each in outcomes]
        yield Made(
            told=tuple(each["told"] for each in outcomes),
            aside=tuple(str(file) for folder in folders for file in sorted((folder / "aside").iterdir())),
            beside=tuple(str(folder / "beside") for folder in folders),
            place=lambda: place_draft(
                table,
                gathered((folder / "rows" for folder in folders), draft / "whole"),
                unit=unit,
                generation=generation,
            ),
        )
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _outcomes(
    spark: SparkSession, write: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], count: int
) -> Sequence[Any]:
    """What ``write`` says of its ``count`` works: by the standing task if it is one, else by a job."""
    if not count:
        return []
    if count == 1 and (rows := standing_task.ask(spark, partial(rows_told, write))) is not None:
        return rows
    standing_task.release()
    return spark.range(0, count, 1, count).mapInArrow(write, _OUTCOME).collect()


def rows_told(write: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]) -> list[dict[str, Any]]:
    """The rows that ``write`` gives for the number 0, the only one of a job of one task."""
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    return [row for batch in write([numbers]) for row in batch.to_pylist()]


def _write(
    batches: Iterable[pa.RecordBatch],
    works: Sequence[Work],
    draft: Path,
    schema: pa.Schema,
    partition_by: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    """What a worker does for each number of a work in ``batches``."""
    found: dict[str, list[str | None]] = defaultdict(list)
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        attempt = uuid.uuid4().hex
        output = Output(draft / attempt, number, schema, partition_by)
        told = works[number](output)
        output.close()
        found["attempt"].append(attempt)
        found["told"].append(told)
    columns = [pa.array(found[name], pa.string()) for name in ("attempt", "told")]
    yield pa.RecordBatch.from_arrays(columns, names=["attempt", "told"])


def _parts(rows: pa.Table, partition_by: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """The rows of each partition, with its folder; none where there are no rows."""
    if not rows.num_rows:
        return
    if not partition_by:
        yield "", rows
        return
    column, *others = partition_by
    values = pc.unique(rows[column]).to_pylist()
    for value in values:
        of_value = rows
        if len(values) > 1:
            of_value = rows.filter(
                pc.is_null(rows[column]) if value is None else pc.equal(rows[column], value)
            )
        folder = _folder_of(column, value)
        for below, part in _parts(of_value, others):
            yield f"{folder}/{below}" if below else folder, part


def _folder_of(column: str, value: str | None) -> str:
    # An empty text is NULL where it is a partition (Delta protocol, partition value serialization).
    return f"{column}={quote(value, safe='') if value else layout.HIVE_NULL}"
