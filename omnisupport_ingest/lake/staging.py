"""Stages a unit of work: what was written as a draft is moved to its final path, by one rename per window.

The path of a unit depends on its idempotency key and the window's generation. If the folder exists, the same
work was done before, by a run that crashed or by one that runs now: its files are used and ours are dropped.
So the same work done twice gives the same files.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.durable import sync_file, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.layout import StagedFile
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table_spec import TablePlace
from omnisupport_ingest.storage import storage_of
from omnisupport_ingest.visiting import Visit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_NO_ROOM = ("No space left on device", "Disk quota exceeded")
"""The operating system's messages for a full disk (ENOSPC, EDQUOT), which Spark passes on as text."""


_BY_A_TASK = tuple(f"OSError: [Errno {number}]" for number in (errno.ENOSPC, errno.EDQUOT))
"""The same errors as Python words them, when a Python task writes a file of a table itself."""

_FIRST_FRAME = re.compile(r"\bat (?:\S+/)?org\.apache\.(\w+)\.")
"""Matches the first class of an Apache project in a Java trace. It is Hadoop's or Parquet's when a file of
the table is written, and Spark's own when Spark shuffles or spills."""


class NoRoomOnDisk(IngestError):
    """The disk of the lake, or that of Spark's temporary files, is full. Nothing was committed.

    Fix: Make room, or set ``OMNISUPPORT_SPARK_LOCAL_DIR`` to a larger disk; then run the same again.
    """

    exit_code = 4


class FrameMismatch(IngestError):
    """A step made other columns than its table has, or rows of a window that it was not to make. Nothing was
    committed.

    Fix: Report it with the log of the run: this must not happen.
    """


@dataclass(frozen=True)
class StagedFiles:
    """The files of one unit of work, per window; a window without rows has none."""

    files: tuple[StagedFile, ...]

    def of(self, window: str) -> tuple[StagedFile, ...]:
        """Return the files of ``window``, sorted by path."""
        return tuple(self._by_window.get(window, ()))

    def windows(self) -> list[str]:
        """Return the windows that have rows, sorted."""
        return sorted(self._by_window)

    @cached_property
    def _by_window(self) -> Mapping[str, Sequence[StagedFile]]:
        # Cached: a run may have thousands of windows, and looks up the files of each.
        found: dict[str, list[StagedFile]] = {}
        for file in self.files:
            found.setdefault(file.window, []).append(file)
        return found


def stage_folders(
    table: TablePlace, folders: Iterable[str], *, unit: str, generation: Mapping[str, int]
) -> StagedFiles:
    """Move the files that tasks wrote to ``folders``, by partition, to their final paths.

    The other parameters and errors are those of ``staged_frames.stage_frame``.
    """
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    # No failpoint: a draft that no table names yet.
    draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with failpoint("lake.write", table.spec.path):
            gathered(folders, draft)
        return place_draft(table, draft, unit=unit, generation=generation)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def gathered(folders: Iterable[str | Path], whole: Path) -> Path:
    """Move the Parquet files of ``folders``, by partition, to the new folder ``whole``; return ``whole``."""
    # No failpoint: a draft that no table names yet.
    whole.mkdir(mode=0o700)
    made = {whole}
    for folder in folders:
        for file in Path(folder).rglob("*.parquet"):
            target = whole / file.relative_to(folder)
            if target.parent not in made:
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                made.add(target.parent)
            file.rename(target)
    return whole


def place_draft(table: TablePlace, draft: Path, *, unit: str, generation: Mapping[str, int]) -> StagedFiles:
    """Move the files in ``draft``, by partition, to their final paths.

    Parameters and errors are those of ``staged_frames.stage_frame``.
    """
    spec = table.spec
    staged: list[StagedFile] = []
    for window, written in _drafts(draft, spec.partition_by):
        if window not in generation:
            raise FrameMismatch(
                f"The frame for {spec.path} has rows of the window {window!r}, which was not planned.",
                fix="Filter the frame to the windows in hand before it is staged.",
            )
        folder = _final_folder(table, window, generation[window], unit)
        with failpoint("lake.place", spec.path):
            _place(written, table.folder / folder)
        staged += _staged(table, folder, window)
    return StagedFiles(tuple(staged))


def place_files(
    table: TablePlace, draft: Path, names: Collection[str], *, unit: str, generation: int
) -> list[str]:
    """Move the files called ``names``, which tasks wrote to ``draft``, to the final folder in a table without
    partitions; other files stay in ``draft``.

    Returns the paths in that folder afterwards; if the same work was done before, the paths of its files.
    ``unit`` and ``generation`` as in ``staged_frames.stage_frame``.
    """
    # Use a folder that no task knows: a task that Spark gave up or runs twice may still write to ``draft``.
    whole = draft / f"whole-{uuid.uuid4().hex}"
    # No failpoint: a draft that no table names yet.
    whole.mkdir(mode=0o700)
    for name in names:
        os.rename(draft / name, whole / name)
    folder = _final_folder(table, layout.WHOLE_TABLE, generation, unit)
    with failpoint("lake.place", table.spec.path):
        _place(whole, table.folder / folder)
    return sorted(f"{folder}/{file.name}" for file in (table.folder / folder).glob("*.parquet"))


@contextmanager
def room_on_disk(spark: SparkSession, draft: Path) -> Iterator[None]:
    """Turn Spark's error for a full disk, a failed task with a long trace, into ``NoRoomOnDisk``."""
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
        of, it = "OMNISUPPORT_HOME", "the home"
        if Visit.of(spark, draft.parent.parent) is not None:
            of, it = "SPARK_LOCAL_DIRS of the executors", "these"
        raise NoRoomOnDisk(
            f"No space left on the disk while writing {draft.parent.parent}; nothing was committed.",
            fix=f"Free some space on the disk of {of}, or move {it} to a larger one; then "
            "run the same again.",
        ) from error


def spilled(trace: str) -> bool:
    """Return whether the ``trace`` shows that the full disk is that of Spark's temporary files."""
    if any(text in trace for text in _BY_A_TASK):
        return False
    at = min(index for text in _NO_ROOM if (index := trace.find(text)) >= 0)
    frame = _FIRST_FRAME.search(trace, at)
    return frame is not None and frame[1] == "spark"


def _drafts(draft: Path, partition_by: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the windows that Spark wrote, with the folder of each."""
    if not partition_by:
        return [(layout.WHOLE_TABLE, draft)]
    prefix = f"{layout.WINDOW}="
    return [
        (folder.name.removeprefix(prefix), folder)
        for folder in sorted(draft.iterdir())
        if folder.name.startswith(prefix)
    ]


def _final_folder(table: TablePlace, window: str, generation: int, unit: str) -> str:
    """Return the folder for files of ``unit``, relative to the table.

    In an object store each attempt has its own folder within the unit's. There, a folder on this disk never
    counts as complete: another machine may have made the rest of it.
    """
    folder = layout.unit_folder(window, generation, unit)
    return folder if storage_of(table.folder).is_local else f"{folder}/{uuid.uuid4().hex[:12]}"


def _place(written: Path, target: Path) -> None:
    """Move ``written`` to ``target`` in one step, readable by its owner only, unless ``target`` exists."""
    written.chmod(0o700)
    for each in written.rglob("*"):
        each.chmod(0o700 if each.is_dir() else 0o600)
        if each.suffix == ".parquet":
            sync_file(each)
    # No failpoint: lake.place is around the calls of this function.
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        # Renew the time, so that ``sweep`` leaves the folder alone until the commit.
        os.utime(written)
        try:
            os.rename(written, target)
            sync_folder(target.parent)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            os.utime(target)
            return
        except FileNotFoundError:
            continue


def _staged(table: TablePlace, folder: str, window: str) -> list[StagedFile]:
    staged = []
    for file in sorted((table.folder / folder).rglob("*.parquet")):
        if file.name.startswith((".", "_")):
            continue
        path = file.relative_to(table.folder).as_posix()
        rows, stats = delta_stats(file, table.spec.personal)
        if rows:
            partition = layout.partition_in(path, table.spec.partition_by)
            staged.append(StagedFile(path, window, partition, rows, file.stat().st_size, stats))
    return staged
