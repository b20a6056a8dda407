"""Spark tasks that write the files of tables themselves, in Arrow.

Spark distributes the work, retries failed tasks and reports when all are done. No row passes through the JVM,
and the plan has one node for any number of columns and files. So a small run costs little, and a large one
costs what its rows cost in Arrow.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import file_rows, layout, standing_task
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staging import StagedFiles, gathered, place_draft, room_on_disk
from omnisupport_ingest.lake.table_spec import TablePlace

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FEW_ROWS = 20_000
"""Up to this many rows, one task is faster than several."""

FEW_BYTES = 16 * 1024 * 1024
"""Up to this many bytes of compressed files, one task is faster than several."""

FEW_FILES = 256
"""Up to this many files, one task is faster than several."""

ROWS_OF_A_TASK = 100_000
"""Rows that one task takes; more if a single file has more."""

_SHARES = 4
_ROWS_OF_A_GROUP = 8_192
_ROWS_OF_A_SAMPLE = 1_024
_ROWS_OF_A_FILE = 2 * ROWS_OF_A_TASK

_OUTCOME = "attempt string, result string, sent string"


class Sized(Protocol):
    """A data file, of a table or of landing, with a known number of rows and bytes."""

    @property
    def rows(self) -> int: ...

    @property
    def bytes(self) -> int: ...


_File = TypeVar("_File", bound=Sized)


def are_few(files: Sequence[Sized]) -> bool:
    """Return whether one task is faster with ``files`` than several."""
    return (
        len(files) <= FEW_FILES
        and sum(file.rows for file in files) <= FEW_ROWS
        and sum(file.bytes for file in files) <= FEW_BYTES
    )


def in_shares(files: Sequence[_File]) -> list[list[_File]]:
    """Divide ``files`` among tasks, in their order; a file is never divided."""
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


class Output:
    """Takes the rows that a task makes and writes them to a draft.

    ``scratch``: a folder for temporary files of the task, deleted with the draft.
    """

    def __init__(self, folder: Path, number: int, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        """``number``: the task's number. ``schema``: the table's, partition columns included."""
        self._rows, self._aside, self.scratch = folder / "rows", folder / "aside", folder / "scratch"
        self._beside = folder / "beside"
        for each in (folder, self._rows, self._aside, self._beside, self.scratch):
            # No failpoint: a draft that no table names yet.
            each.mkdir(mode=0o700)
        self._schema, self._partition_by = schema, partition_by
        self._files: dict[Path, _Growing] = {}
        # Sorted by name, the files of all tasks are in the order of the tasks' work.
        self._names = (f"part-{number:05d}-{index:05d}-{uuid.uuid4().hex}.parquet" for index in count())

    def add(self, rows: pa.Table) -> None:
        """Add rows of the table, with its columns, partition columns included."""
        self._add(self._rows, rows, self._schema, self._partition_by)

    def put_beside(self, rows: pa.Table, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        """Add rows of another table, as ``add`` does; ``staging.stage_folders`` stages them."""
        self._add(self._beside, rows, schema, partition_by)

    def _add(self, draft: Path, rows: pa.Table, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        kept = rows.select(schema.names).cast(schema)
        for folder, part in _parts(kept, partition_by):
            self._file(draft / folder).add(part.drop_columns(list(partition_by)))
        # Rows of many windows may wait, a few of each.
        if sum(file.held_bytes for file in self._files.values()) > file_rows.MAX_BYTES_IN_MEMORY:
            for file in self._files.values():
                file.write()

    def link(self, file: LakeFile, partition: Sequence[tuple[str, str | None]]) -> None:
        """Add a file of another table unchanged, by a hard link; ``partition``: its partition in this table.

        Where the file system has no links, the file is copied.
        """
        folder = self._rows / "/".join(_folder_of(*each) for each in partition)
        # No failpoint: a draft that no table names yet.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / next(self._names)
        try:
            path.hardlink_to(file.uri)
        except OSError:
            shutil.copyfile(file.uri, path)

    def put_aside(self, rows: pa.Table) -> None:
        """Add rows that are for the caller and not for the table (``Made.aside``)."""
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
    """Writes the rows of one folder to files; a new file begins when one has grown large."""

    def __init__(self, folder: Path, names: Iterator[str]) -> None:
        self._folder, self._names = folder, names
        self._held: list[pa.Table] = []
        self._writer: pq.ParquetWriter | None = None
        self._written = 0
        self.held_bytes = 0

    def add(self, rows: pa.Table) -> None:
        self._held.append(rows)
        self.held_bytes += rows.nbytes
        held_rows = sum(each.num_rows for each in self._held)
        if held_rows >= _ROWS_OF_A_GROUP or self.held_bytes >= file_rows.BYTES_OF_A_BATCH:
            self.write()

    def close(self) -> None:
        self.write()
        if self._writer is not None:
            self._writer.close()

    def write(self) -> None:
        """Write the rows that are held."""
        if not self._held:
            return
        rows = pa.concat_tables(self._held)
        self._held, self.held_bytes = [], 0
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
    """Return the text columns with few distinct values in the first rows: only these gain from a
    dictionary."""
    first = rows.slice(0, _ROWS_OF_A_SAMPLE)
    return [
        field.name
        for field in rows.schema
        if pa.types.is_string(field.type) and len(first[field.name].unique()) <= max(1, len(first) // 8)
    ]


Work = Callable[[Output], "str | None"]
"""The work of a task; returns text for the caller, or None if a task cannot do it."""


@dataclass(frozen=True)
class Made:
    """A draft that tasks wrote; it is deleted at the end of the ``with`` block unless it was placed.

    ``results``: the texts that the works returned, in their order. ``aside``: files of the rows put aside.
    ``beside``: folders with files of the rows put beside. ``place``: moves the table's rows to their final
    paths.
    """

    results: tuple[str, ...]
    aside: tuple[str, ...]
    beside: tuple[str, ...]
    place: Callable[[], StagedFiles]


@contextmanager
def made_by_tasks(
    spark: SparkSession,
    table: TablePlace,
    works: Sequence[Work],
    *,
    unit: str,
    generation: Mapping[str, int],
) -> Iterator[Made | None]:
    """Run each of ``works`` in a Spark task and yield the draft; yield None if a task cannot do its work.

    ``Made.place`` moves the rows to their final paths; no version of the table holds them yet. The works are
    pickled and sent to Spark's workers. ``unit`` and ``generation``: as in ``staged_frames.stage_frame``.
    """
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft.mkdir(mode=0o700)
    spec, drafts = table.spec, Drafts.of(spark, draft)
    schema = arrow_schema(spec.schema, without=())
    write = partial(_write, works=works, drafts=drafts, schema=schema, partition_by=spec.partition_by)
    try:
        with failpoint("lake.write", spec.path), room_on_disk(spark, draft):
            outcomes = _outcomes(spark, write, len(works))
        if any(each["result"] is None for each in outcomes):
            yield None
            return
        # Only the folders of attempts that succeeded: others may still be writing to theirs.
        folders = [draft / each["attempt"] for each in outcomes]
        sent = [name for each in outcomes for name in each["sent"].splitlines()]
        # Files put aside stay where they are: the next tasks read them.
        aside = [name for name in sent if name.split("/")[1] == "aside"]
        drafts.bring(set(sent) - set(aside))

        def place() -> StagedFiles:
            whole = gathered((folder / "rows" for folder in folders), draft / "whole")
            placed = place_draft(table, whole, unit=unit, generation=generation)
            drafts.keep(file.path for file in placed.files)
            return placed

        yield Made(
            results=tuple(each["result"] for each in outcomes),
            aside=tuple(drafts.paths(aside))
            or tuple(str(file) for folder in folders for file in sorted((folder / "aside").glob("*"))),
            beside=tuple(str(folder / "beside") for folder in folders),
            place=place,
        )
    finally:
        drafts.clear()


def _outcomes(
    spark: SparkSession, write: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]], count: int
) -> Sequence[Any]:
    """Return the outcomes of ``count`` works: of a single one by the standing task, else by a Spark job."""
    if not count:
        return []
    if count == 1 and (rows := standing_task.ask(spark, partial(outcome_of_one, write))) is not None:
        return rows
    standing_task.release()
    return spark.range(0, count, 1, count).mapInArrow(write, _OUTCOME).collect()


def outcome_of_one(
    write: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]],
) -> list[dict[str, Any]]:
    """Return the rows that ``write`` yields as the only task of a job, whose number is 0."""
    numbers = pa.RecordBatch.from_pydict({"id": pa.array([0], pa.int64())})
    return [row for batch in write([numbers]) for row in batch.to_pylist()]


def _write(
    batches: Iterable[pa.RecordBatch],
    works: Sequence[Work],
    drafts: Drafts,
    schema: pa.Schema,
    partition_by: tuple[str, ...],
) -> Iterator[pa.RecordBatch]:
    """Run in a worker: do the work of each number in ``batches``."""
    found: dict[str, list[str | None]] = {"attempt": [], "result": [], "sent": []}
    with drafts.begun() as folder:
        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            attempt = uuid.uuid4().hex
            output = Output(folder / attempt, number, schema, partition_by)
            result = works[number](output)
            output.close()
            found["attempt"].append(attempt)
            found["result"].append(result)
            found["sent"].append("\n".join(each.name for each in drafts.sent(folder)))
    columns = [pa.array(values, pa.string()) for values in found.values()]
    yield pa.RecordBatch.from_arrays(columns, names=[*found])


def _parts(rows: pa.Table, partition_by: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Yield each partition's folder and rows; nothing without rows."""
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
    # An empty text is NULL as a partition value (Delta protocol, partition value serialization).
    return f"{column}={quote(value, safe='') if value else layout.HIVE_NULL}"
