"""Spark writes a unit of work, and one rename per window puts it in its place.

A unit's folder follows from its idempotency key and the window's generation. If it is there
already, the same work was done before, by a run that crashed or by one that runs now: its files
are taken, ours are dropped. So doing the same work twice gives the same files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.durable import sync_file, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout, standing_task
from omnisupport_ingest.lake.layout import StagedFile
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType


_NO_ROOM = ("No space left on device", "Disk quota exceeded")
"""The operating system's messages (ENOSPC, EDQUOT), which Spark passes on as text."""


_BY_A_TASK = tuple(f"OSError: [Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
"""How Python puts it where a task of ours writes a file itself; those are files of tables."""

COMPILED_FROM = 50_000
"""Rows from which on Spark compiles the plan that writes them; for fewer, interpreting it costs less."""

_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


_FIRST_FRAME = re.compile(r"\bat (?:\S+/)?org\.apache\.(\w+)\.")
"""The first class of an Apache project in a Java trace: Hadoop's or Parquet's where a file of the table is
written, Spark's own where it shuffles or spills."""


class NoRoomOnDisk(IngestError):
    """The disk of the lake is full, or that of Spark's temporary files."""

    exit_code = 4


class FrameMismatch(IngestError):
    """A frame has not the columns of the table, or rows of windows that were not asked for."""


@dataclass(frozen=True)
class StagedFiles:
    """The files of one unit of work, per window; a window without rows has none."""

    files: tuple[StagedFile, ...]

    def of(self, window: str) -> tuple[StagedFile, ...]:
        """The files of ``window``, sorted by path."""
        return tuple(file for file in self.files if file.window == window)

    def windows(self) -> list[str]:
        """The windows that have rows, sorted."""
        return sorted({file.window for file in self.files})


def stage_frame(
    table: LakeTable, frame: DataFrame, *, unit: str, generation: Mapping[str, int], rows: int = 0
) -> StagedFiles:
    """Write ``frame`` as Parquet files in their final place; no version of the table holds them yet.

    ``frame`` has the columns of the table's spec, partition columns included, in any order.
    ``unit`` is the idempotency key of the work: the same key for the same window and generation
    must mean the same rows. ``generation`` gives the generation to write for every window that
    may have rows (``""`` for a table without partitions). ``rows``: how many the frame is made from,
    where they may be many. ``FrameMismatch`` if columns or windows differ; ``table`` must have been
    opened once.
    """
    spec = table.spec
    _check_columns(table, frame)
    standing_task.release()
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: the staging folder, and a draft in it that no table names.
    draft.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with (
            failpoint("lake.write", spec.path),
            room_on_disk(frame.sparkSession, draft),
            _compiled(frame.sparkSession, rows),
        ):
            writer = frame.select(*spec.schema.names).write
            if spec.partition_by:
                writer = writer.partitionBy(*spec.partition_by)
            writer.parquet(f"file://{draft}")
        return place_draft(table, draft, unit=unit, generation=generation)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def stage_folders(
    table: LakeTable, folders: Iterable[str], *, unit: str, generation: Mapping[str, int]
) -> StagedFiles:
    """Put what tasks wrote to ``folders``, in folders by the table's partition, in its final place.

    The files leave ``folders``. The other parameters and errors are those of ``stage_frame``.
    """
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        with failpoint("lake.write", table.spec.path):
            gathered(folders, draft)
        return place_draft(table, draft, unit=unit, generation=generation)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def gathered(folders: Iterable[str | Path], whole: Path) -> Path:
    """Move the Parquet files of ``folders``, by partition, to the new folder ``whole``, which is returned."""
    # No failpoint: a draft that no table names yet.
    whole.mkdir(mode=0o700)
    made = {whole}
    for folder in folders:
        for file in Path(folder).rglob("*.parquet"):
            place = whole / file.relative_to(folder)
            if place.parent not in made:
                place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                made.add(place.parent)
            file.rename(place)
    return whole


def place_draft(table: LakeTable, draft: Path, *, unit: str, generation: Mapping[str, int]) -> StagedFiles:
    """Put what was written to ``draft``, in folders by partition, in its final place.

    Parameters and errors are those of ``stage_frame``.
    """
    spec = table.spec
    staged: list[StagedFile] = []
    for window, written in _drafts(draft, spec.partition_by):
        if window not in generation:
            raise FrameMismatch(
                f"The frame for {spec.path} has rows of the window {window!r}, which was not planned.",
                fix="Filter the frame to the windows in hand before it is staged.",
            )
        place = _place_of(table, window, generation[window], unit)
        with failpoint("lake.place", spec.path):
            _place(written, table.folder / place)
        staged += _staged(table.folder, place, window, spec.partition_by)
    return StagedFiles(tuple(staged))


def place_files(
    table: LakeTable, draft: Path, names: Collection[str], *, unit: str, generation: int
) -> list[str]:
    """Put the files called ``names``, which tasks wrote to ``draft``, in their final place in a table without
    partitions; whatever else is in ``draft`` stays there.

    Returns the paths of what is in that place then: if the same work was done before, its files.
    ``unit`` and ``generation`` as in ``stage_frame``.
    """
    # A folder that no task knows: one that Spark has given up, or runs twice, may still write to ``draft``.
    whole = draft / f"whole-{uuid.uuid4().hex}"
    # No failpoint: a draft that no table names yet.
    whole.mkdir(mode=0o700)
    for name in names:
        os.rename(draft / name, whole / name)
    place = _place_of(table, layout.WHOLE_TABLE, generation, unit)
    with failpoint("lake.place", table.spec.path):
        _place(whole, table.folder / place)
    return sorted(f"{place}/{file.name}" for file in (table.folder / place).glob("*.parquet"))


@contextmanager
def _compiled(spark: SparkSession, rows: int) -> Iterator[None]:
    """Have Spark compile the plans of a session meanwhile, if it is worth it for ``rows``."""
    if rows < COMPILED_FROM:
        yield
        return
    before = {name: spark.conf.get(name) for name in _COMPILED}
    try:
        for name, value in _COMPILED.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, held in before.items():
            spark.conf.set(name, str(held))


@contextmanager
def room_on_disk(spark: SparkSession, draft: Path) -> Iterator[None]:
    """Say plainly what Spark reports as a failed task with a long trace."""
    try:
        yield
    except Exception as error:
        if not any(text in str(error) for text in _NO_ROOM):
            raise
        if spilled(str(error)):
            folder = spark.conf.get("spark.omnisupport.localDir", "the temporary folder")
            raise NoRoomOnDisk(
                f"No space left on the disk of Spark's temporary files, {folder}, while writing "
                f"{draft.parent.parent}; nothing was committed.",
                fix="Free some space there, or set OMNISUPPORT_SPARK_LOCAL_DIR to a folder on a larger disk "
                "and start again; then run the same again.",
            ) from error
        raise NoRoomOnDisk(
            f"No space left on the disk while writing {draft.parent.parent}; nothing was committed.",
            fix="Free some space on the disk of OMNISUPPORT_HOME, or move the home to a larger one; then "
            "run the same again.",
        ) from error


def spilled(trace: str) -> bool:
    """Whether Spark found no room for a temporary file, not for a file of a table, as its ``trace`` tells."""
    if any(text in trace for text in _BY_A_TASK):
        return False
    at = min(place for text in _NO_ROOM if (place := trace.find(text)) >= 0)
    frame = _FIRST_FRAME.search(trace, at)
    return frame is not None and frame[1] == "spark"


def _check_columns(table: LakeTable, frame: DataFrame) -> None:
    wanted = {field.name: field.dataType for field in table.spec.schema.toNullable()}
    given = {field.name: field.dataType for field in frame.schema.toNullable()}
    wrong = sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name))
    if wrong:
        raise FrameMismatch(
            f"The frame for {table.spec.path} differs from the table in: "
            + ", ".join(f"{name} ({_type(given, name)} for {_type(wanted, name)})" for name in wrong),
            fix="Select and cast the columns of the table's spec before the frame is staged.",
        )


def _type(types: Mapping[str, DataType], name: str) -> str:
    return types[name].simpleString() if name in types else "nothing"


def _drafts(draft: Path, partition_by: tuple[str, ...]) -> list[tuple[str, Path]]:
    """The windows that Spark wrote, with the folder of each."""
    if not partition_by:
        return [(layout.WHOLE_TABLE, draft)]
    prefix = f"{layout.WINDOW}="
    return [
        (folder.name.removeprefix(prefix), folder)
        for folder in sorted(draft.iterdir())
        if folder.name.startswith(prefix)
    ]


def _place_of(table: LakeTable, window: str, generation: int, unit: str) -> str:
    """Where files of ``unit`` go. In an object store each attempt has a folder of its own in the unit's: what
    is in that folder here may be a part of what another machine made, so it is never taken for the whole."""
    place = layout.unit_folder(window, generation, unit)
    return place if storage_of(table.folder).is_local else f"{place}/{uuid.uuid4().hex[:12]}"


def _place(written: Path, place: Path) -> None:
    """Move ``written`` to ``place`` in one step, unless ``place`` is there already; for its owner only."""
    written.chmod(0o700)
    for each in written.rglob("*"):
        each.chmod(0o700 if each.is_dir() else 0o600)
        if each.suffix == ".parquet":
            sync_file(each)
    # No failpoint: lake.place stands around its calls.
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        # A fresh time keeps ``sweep`` away until the commit.
        os.utime(written)
        try:
            os.rename(written, place)
            sync_folder(place.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            os.utime(place)
            return
        except FileNotFoundError:
            continue


def _staged(folder: Path, place: str, window: str, partition_by: tuple[str, ...]) -> list[StagedFile]:
    staged = []
    for file in sorted((folder / place).rglob("*.parquet")):
        if file.name.startswith((".", "_")):
            continue
        path = file.relative_to(folder).as_posix()
        rows, stats = delta_stats(file)
        if rows:
            partition = layout.partition_in(path, partition_by)
            staged.append(StagedFile(path, window, partition, rows, file.stat().st_size, stats))
    return staged
