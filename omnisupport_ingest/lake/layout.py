"""The paths of a table's files, and what a path says about its file.

::

    <table>/_delta_log/                                          the log, which is the truth
    <table>/.staging/<uuid>/                                     what Spark is still writing
    <table>/window=W/g0001-<key>/source_table=T/part-0.parquet   one unit of work, moved here by one rename
    <table>/window=W/source_table=.../state-g0001-<digest>.parquet   the state of window W

Every partition column appears in the path as ``name=value`` (Hive's form): Polars and DuckDB take
the columns from there. A table without partitions has one window, the empty text, and the same
layout without the ``name=value`` folders.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from omnisupport_ingest.lake.deletion_vectors import DeletionVector, path_without_dead_rows
from omnisupport_ingest.storage import path_at_hand

WINDOW = "window"
"""The partition column that names the window."""

STAGING = ".staging"
"""The folder of unfinished writes; its name is hidden from every reader of the table."""

SWEPT = "swept-"
"""Begins the name of a folder or file in ``STAGING`` that a sweep has moved aside to delete it."""

WHOLE_TABLE = ""
"""The window of a table that is not partitioned."""

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
"""How Hive and Spark spell NULL in a path."""

_UNIT = re.compile(r"g(\d{4,})-[0-9a-f]{16}")
_STATE = re.compile(r"state-g\d{4,}-[0-9a-f]{16}\.parquet")

Partition = tuple[tuple[str, str | None], ...]
"""Partition columns and their values, in the order of the table."""


class StoredFile:
    """A file of a table. ``rows``: the live ones. ``vector``: names the dead ones, if any."""

    __slots__ = ()

    path: str
    full_path: str
    rows: int
    vector: DeletionVector | None

    @property
    def uri(self) -> str:
        """A path that can be opened as bare Parquet (``path_without_dead_rows``)."""
        return path_without_dead_rows(self)

    @property
    def stored(self) -> str:
        """A path that can be opened, of the file with its dead rows."""
        return path_at_hand(self.full_path)

    @property
    def stored_rows(self) -> int:
        """The rows in the file, dead ones included."""
        return self.rows + (self.vector.cardinality if self.vector is not None else 0)


@dataclass(frozen=True, slots=True)
class LakeFile(StoredFile):
    """A file that a version of the table holds.

    ``path`` is relative to the table, ``full_path`` is absolute; both are plain text (not URL-encoded).
    """

    path: str
    full_path: str
    window: str
    partition: Partition
    rows: int
    bytes: int
    vector: DeletionVector | None = None


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file at its final path that no version of the table holds yet.

    ``stats`` is the JSON text of its Delta statistics (Delta protocol, per-file statistics).
    """

    path: str
    window: str
    partition: Partition
    rows: int
    bytes: int
    stats: str

    def in_table(self, folder: Path) -> LakeFile:
        """Return this file as a ``LakeFile`` of the table in ``folder``."""
        full_path = os.fspath(folder / self.path)
        return LakeFile(self.path, full_path, self.window, self.partition, self.rows, self.bytes)


def unit_folder(window: str, generation: int, unit: str) -> str:
    """Return the folder of the files that the work ``unit`` (an idempotency key) made for ``window``."""
    name = f"g{generation:04d}-{_short(unit)}"
    return f"{WINDOW}={window}/{name}" if window else name


def state_path(window: str, generation: int, content: str, partition_by: tuple[str, ...]) -> str:
    """Return the path of the state of ``window``; it depends on the state's ``content``.

    Equal states have one path. Different states of one generation have different paths, because a Delta
    commit cannot remove a path and add it again.
    """
    name = f"state-g{generation:04d}-{_short(content)}.parquet"
    folders = [f"{WINDOW}={window}"] if partition_by else []
    folders += [f"{column}={HIVE_NULL}" for column in partition_by[1:]]
    return "/".join([*folders, name])


STATES_LIKE = "*state-g*"
"""Pattern of SQLite's GLOB that the path of every state file matches."""


def is_state(path: str) -> bool:
    """Return whether the file at ``path`` holds a window's state and no rows."""
    return _STATE.fullmatch(path.rpartition("/")[2]) is not None


def unit_of(path: str) -> str | None:
    """Return the unit folder that ``path`` lies in; None for a file outside of unit folders."""
    parts = PurePosixPath(path).parts
    for depth, part in enumerate(parts[:-1]):
        if _UNIT.fullmatch(part):
            return "/".join(parts[: depth + 1])
    return None


def generation_of(path: str) -> int:
    """Return the generation in the name of the unit folder of ``path``; 0 for a file outside of unit
    folders."""
    unit = unit_of(path)
    found = _UNIT.fullmatch(PurePosixPath(unit).name) if unit is not None else None
    return int(found[1]) if found is not None else 0


def partition_in(path: str, partition_by: Iterable[str]) -> Partition:
    """Return the partition values that the folders of ``path`` name; ``KeyError`` if one is missing."""
    folders: Mapping[str, str] = dict(
        part.split("=", 1) for part in PurePosixPath(path).parts[:-1] if "=" in part
    )
    return tuple(
        (name, None if folders[name] == HIVE_NULL else unquote(folders[name])) for name in partition_by
    )


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
