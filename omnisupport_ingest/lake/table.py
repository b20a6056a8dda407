"""A Delta table as the layers see it: windows, their files, their state, and the next commit.

A ``TableSnapshot`` is one version of the table. What is planned on it is committed on it, once; if
the table has moved on, the commit is refused and the plan is made again on a new snapshot
(``retrying``). Neither needs a JVM: only ``read`` uses Spark.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

from omnisupport_ingest import tracing
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import (
    WindowChange,
    add_data,
    add_state,
    commit_actions,
    commit_note,
    remove,
    until_first,
)
from omnisupport_ingest.lake.delta import is_delta, keep_added, open_delta, reaching
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.schema import (
    Retyped,
    SchemaChanged,
    arrow_schema,
    delta_schema,
    open_with_schema,
    retyped,
)
from omnisupport_ingest.lake.state import StateUnreadable, WindowState, read_state, write_state
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.storage import at_hand, storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")

_KEPT_OPEN = 16
"""Tables that a process keeps open. What one holds of a table grows with the files of the table."""

_WINDOWS_ONE_BY_ONE = 64
"""Who asks for the files of more windows than these asks for those of all, as a rule."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableSpec:
    """What a table is. ``path`` is relative to the lake, like ``support_desk/raw_cdc_staging``.

    ``schema`` holds every column, partition columns included. ``partition_by`` is empty, or starts
    with ``window``; partition columns are text.
    """

    path: str
    schema: StructType
    partition_by: tuple[str, ...]
    description: str

    def __post_init__(self) -> None:
        if self.partition_by and self.partition_by[0] != layout.WINDOW:
            raise ValueError(f"{self.path}: the first partition column is not {layout.WINDOW}")
        for name in self.partition_by:
            if self.schema[name].dataType.typeName() != "string":
                raise ValueError(f"{self.path}: the partition column {name} is not text")

    @property
    def app_id(self) -> str:
        """The application id that all writers of the table share (Delta protocol, ``txn``)."""
        return f"omnisupport_ingest/{self.path}"


@dataclass(frozen=True, slots=True)
class TableMark:
    """One version of one table, to be known again in another process: ``entry`` is a digest of its log entry,
    so a table that was restored to an earlier version and went another way since is not taken for it."""

    table_id: str
    version: int
    entry: str


@dataclass(frozen=True)
class LakeTable:
    """A table of the lake in the folder ``root``; nothing is read or made before ``open``."""

    root: Path
    spec: TableSpec

    @property
    def folder(self) -> Path:
        return self.root.absolute() / self.spec.path

    @property
    def exists(self) -> bool:
        return is_delta(self.folder)

    def open(self) -> TableSnapshot:
        """The newest version, in a handle of its own; makes the table if it is not there.

        Columns that the spec has and the table lacks are added; those that have another type keep it until a
        commit replaces every window (``TableSnapshot.retyped``). ``SchemaChanged`` if the table is
        partitioned otherwise.
        """
        opened = self.opened()
        if opened is not None:
            return opened
        handle = open_with_schema(
            self.folder, self.spec.schema, self.spec.partition_by, self.spec.path, self.spec.description
        )
        return _kept(TableSnapshot(self, handle))

    def look(self) -> TableSnapshot | None:
        """The newest version as it is on disk, None if there is none: nothing is made, widened or
        committed."""
        opened = self.opened()
        if opened is not None or not self.exists:
            return opened
        return TableSnapshot(self, open_delta(self.folder))

    def opened(self) -> TableSnapshot | None:
        """The newest version, if this process has opened it and it still is that: its log is not read."""
        held = _opened.get(self.folder)
        if held is None or held.table != self or not held.is_newest():
            return None
        return held.again()


class TableSnapshot:
    """One version of a table, and the right to commit the next, once."""

    retyped: tuple[Retyped, ...]
    """Columns that have another type on disk. A commit must replace all windows then."""

    def __init__(self, table: LakeTable, handle: DeltaTable) -> None:
        self._handle = handle
        self._set(table, str(handle.metadata().id), handle.version())
        self.retyped = retyped(handle, table.spec.schema)

    def _set(self, table: LakeTable, table_id: str, version: int) -> None:
        self.table, self.table_id, self.version = table, table_id, version
        self.retyped = ()
        self._spent = False
        self._entry = _entry(table.folder / "_delta_log", version)
        self._by_window: dict[str, tuple[LakeFile, ...]] = {}

    def again(self) -> TableSnapshot:
        """The same version, and the right to commit the next; its log is not read again. No handle moves on
        by a commit, so each stays pinned to its version."""
        other = copy(self)
        other._spent, other._by_window = False, {}
        return other

    def is_newest(self) -> bool:
        """Whether nothing was committed since. Two looks at the file system, whatever the table holds; where
        they cannot tell, it is not."""
        log = self.table.folder / "_delta_log"
        if self._entry is None or self._entry != _entry(log, self.version):
            return False
        return not storage_of(log).exists(log / _entry_name(self.version + 1))

    @cached_property
    def mark(self) -> TableMark | None:
        """What this version is known by; None where its log entry is not there."""
        entry = _digest_of(self.table.folder / "_delta_log" / _entry_name(self.version))
        return None if entry is None else TableMark(self.table_id, self.version, entry)

    def windows_since(self, older: TableMark) -> frozenset[str] | None:
        """The windows that were committed to after ``older``, a version of the same table; None if that is
        not known: then any may have been."""
        if older.table_id != self.table_id or older.version > self.version:
            return None
        if _digest_of(self.table.folder / "_delta_log" / _entry_name(older.version)) != older.entry:
            return None
        found: set[str] = set()
        for version in range(older.version + 1, self.version + 1):
            of_commit = _windows_in(self.table.folder / "_delta_log" / _entry_name(version))
            if of_commit is None:
                return None
            found |= of_commit
        return frozenset(found)

    @property
    def handle(self) -> DeltaTable:
        """This version, for looks at its log."""
        return self._handle

    def windows(self) -> list[str]:
        """Every window that holds data or a state, sorted."""
        return sorted(self._rows_of)

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """The data files of ``window``, sorted by path; none if the window is unknown."""
        return tuple(file for file in self._files_of(window) if not layout.is_state(file.path))

    def all_files(self) -> tuple[LakeFile, ...]:
        """The data files of every window, sorted by window, then path."""
        return tuple(file for window in self.windows() for file in self.files(window))

    def state(self, window: str) -> WindowState | None:
        """The state of ``window``; ``None`` if it has none, or none that can be read.

        A window with files but no state was rewritten by another program (compaction merges state
        files away), or its state is damaged: what it was made from is not known here. The next
        commit to the window removes a damaged state. ``StateFromNewerVersion`` is no damage.
        """
        try:
            states = [read_state(Path(file.uri)) for file in self._states_of(window)]
        except StateUnreadable as error:
            _log.warning("%s The window counts as one without a state.", error.problem)
            return None
        return max(states, key=lambda state: state.generation, default=None)

    def read(self, spark: SparkSession, files: Iterable[LakeFile]) -> DataFrame:
        """A DataFrame of ``files`` with the columns of the spec, partition columns restored."""
        from omnisupport_ingest.lake.read import read_files

        return read_files(spark, self.table.spec.schema, self.table.spec.partition_by, files)

    def read_placed(self, spark: SparkSession, files: Iterable[StagedFile]) -> DataFrame:
        """The same of files in their final place that no version of the table holds yet."""
        folder = self.table.folder
        return self.read(
            spark,
            [
                LakeFile(
                    each.path,
                    os.fspath(folder / each.path),
                    each.window,
                    each.partition,
                    each.rows,
                    each.bytes,
                )
                for each in files
            ],
        )

    def commit(self, changes: Sequence[WindowChange], *, run_id: str | None = None) -> int:
        """Make all ``changes`` in one commit and return the version that holds them.

        A change whose work the window already holds does nothing; if nothing is left, no version is
        made. ``CommitConflict`` if the table has moved on since ``open``; ``StagedFileMissing`` if
        a file to add is not there; ``SchemaChanged`` if columns have another type and a window would
        stay. A snapshot commits once: open the table again for more. ``run_id``:
        the run that the log entry names, else the one that made the content.
        """
        if self._spent:
            raise RuntimeError(f"a snapshot of {self.table.spec.path} was committed on twice")
        if len({change.window for change in changes}) != len(changes):
            raise ValueError("one window is changed twice in one commit")
        actions: list[AddAction | RemoveAction] = []
        states: list[WindowState] = []
        for change in changes:
            planned = self._actions(change)
            if planned:
                actions += planned
                states.append(change.state)
        if not actions:
            return self.version
        note, schema = commit_note(states, run_id), None
        if self.retyped:
            self._require_all_replaced(changes)
            actions = [each for each in actions if isinstance(each, AddAction)]
            schema = delta_schema(self.table.spec.schema)
        keep_added(self.table.folder, actions, self.table.spec.app_id)
        with reaching(self.table.folder):
            version = commit_actions(
                self._handle, actions, app_id=self.table.spec.app_id, note=note, replacing_all_with=schema
            )
        self._spent = True
        return version

    def _require_all_replaced(self, changes: Sequence[WindowChange]) -> None:
        stays = set(self.windows()) - {change.window for change in changes if change.replaces}
        if stays:
            raise SchemaChanged(
                f"{self.table.spec.path} holds columns of another type: {', '.join(map(str, self.retyped))}; "
                f"its window {min(stays)} would keep them.",
                fix="Let `omnisupport-ingest materialize` run the table: it replaces all of its windows.",
            )

    def _actions(self, change: WindowChange) -> list[AddAction | RemoveAction]:
        held = {file.path: file for file in self.files(change.window)}
        staged = {file.path: file for file in change.add}
        strangers = [file.path for file in change.add if file.window != change.window]
        if strangers:
            raise ValueError(f"{strangers[0]} is not a file of the window {change.window!r}")
        unknown = [file.path for file in change.remove if file.path not in held]
        if unknown:
            raise ValueError(f"version {self.version} does not hold {unknown[0]}")
        if change.add and not change.replaces and not change.remove and self._is_held_there(change):
            return []
        leaving = set(held) if change.replaces else {file.path for file in change.remove}
        arriving = [path for path in staged if path not in held]
        removed = sorted(leaving - set(staged))
        actions: list[AddAction | RemoveAction] = []
        same = change.same_rows
        actions += [add_data(self.table.folder, staged[path], same_rows=same) for path in sorted(arriving)]
        actions += [remove(held[path], same_rows=same) for path in removed]
        if change.add and not actions and self._holds(change):
            return []
        return actions + self._state_actions(change)

    def _is_held_there(self, change: WindowChange) -> bool:
        """Whether an object store holds this work already, in files of another attempt."""
        return not storage_of(self.table.folder).is_local and self._holds(change)

    def _holds(self, change: WindowChange) -> bool:
        state = self.state(change.window)
        return state is not None and state.same_work(change.state)

    def _state_actions(self, change: WindowChange) -> list[AddAction | RemoveAction]:
        spec, state = self.table.spec, change.state
        path = layout.state_path(change.window, state.generation, state.to_text(), spec.partition_by)
        before = self._states_of(change.window)
        same = change.same_rows
        actions: list[AddAction | RemoveAction] = [
            remove(file, same_rows=same) for file in before if file.path != path
        ]
        if path not in {file.path for file in before}:
            size = write_state(self.table.folder / path, state, self._data_schema)
            partition = layout.partition_in(path, spec.partition_by)
            actions.append(add_state(path, size, partition, same_rows=same))
        return actions

    def state_paths(self, window: str) -> tuple[str, ...]:
        """The files with the states of ``window``: one, unless another program was at work."""
        return tuple(file.path for file in self._states_of(window))

    @cached_property
    def _data_schema(self) -> pa.Schema:
        return arrow_schema(self.table.spec.schema, without=self.table.spec.partition_by)

    def _states_of(self, window: str) -> tuple[LakeFile, ...]:
        return tuple(file for file in self._files_of(window) if layout.is_state(file.path))

    def _files_of(self, window: str) -> tuple[LakeFile, ...]:
        """All files of ``window``, by path. What is not asked for does not become Python's objects."""
        if window not in self._rows_of:
            return ()
        found = self._by_window.get(window)
        if found is None:
            if len(self._by_window) > _WINDOWS_ONE_BY_ONE:
                self._by_window = dict.fromkeys(self._rows_of, ()) | self._all_by_window()
                return self._by_window[window]
            rows = self._listed.take(pa.array(self._rows_of[window], pa.int64()))
            found = self._by_window[window] = self._lake_files(rows)
        return found

    def _all_by_window(self) -> dict[str, tuple[LakeFile, ...]]:
        found: dict[str, list[LakeFile]] = {}
        for file in self._lake_files(self._listed):
            found.setdefault(file.window, []).append(file)
        return {window: tuple(of_window) for window, of_window in found.items()}

    def _lake_files(self, rows: pa.Table) -> tuple[LakeFile, ...]:
        return tuple(sorted(map(self._lake_file, rows.to_pylist()), key=lambda file: file.path))

    @cached_property
    def _listed(self) -> pa.Table:
        listed = pa.table(self._handle.get_add_actions(flatten=False))
        wanted = ("path", "size_bytes", "num_records", "partition")
        return listed.select([name for name in wanted if name in listed.column_names])

    @cached_property
    def _rows_of(self) -> dict[str, list[int]]:
        """The numbers of the rows in ``_listed`` of every window."""
        if not self.table.spec.partition_by:
            return {layout.WHOLE_TABLE: list(range(self._listed.num_rows))} if self._listed.num_rows else {}
        if not self._listed.num_rows:
            return {}
        found: dict[str, list[int]] = {}
        names = pc.struct_field(self._listed["partition"], layout.WINDOW).to_pylist()
        for number, window in enumerate(names):
            found.setdefault(window or "", []).append(number)
        return found

    def _lake_file(self, listed: dict[str, Any]) -> LakeFile:
        path = unquote(listed["path"])
        uri = os.fspath(self.table.folder / path)
        values = listed.get("partition") or {}
        partition = tuple((name, values.get(name)) for name in self.table.spec.partition_by)
        rows = 0 if layout.is_state(path) else listed.get("num_records")
        return LakeFile(
            path=path,
            place=uri,
            window=partition[0][1] or "" if partition else layout.WHOLE_TABLE,
            partition=partition,
            # A foreign writer may leave statistics out.
            rows=rows_in(at_hand(Path(uri))) if rows is None else rows,
            bytes=listed["size_bytes"],
        )


def retrying(plan_and_commit: Callable[[TableSnapshot], T], table: LakeTable, *, attempts: int = 8) -> T:
    """Call ``plan_and_commit`` on a fresh snapshot until its commit meets no other (``until_first``)."""

    def attempt() -> T:
        with tracing.attempt(table.spec.path):
            return plan_and_commit(table.open())

    return until_first(attempt, attempts)


_opened: dict[Path, TableSnapshot] = {}
"""The tables that this process opened last, by folder: a run opens the same ones layer by layer."""


def _kept(snapshot: TableSnapshot) -> TableSnapshot:
    _opened.pop(snapshot.table.folder, None)
    _opened[snapshot.table.folder] = snapshot
    while len(_opened) > _KEPT_OPEN:
        _opened.pop(next(iter(list(_opened))), None)
    return snapshot


def _entry_name(version: int) -> str:
    """The name of a commit's file in the log (Delta protocol, "Delta Log Entries")."""
    return f"{version:020d}.json"


def _entry(log: Path, version: int) -> tuple[object, ...] | None:
    """What tells a commit's file from that of another table in its place."""
    return storage_of(log).version(log / _entry_name(version))


def _digest_of(entry: Path) -> str | None:
    # Of what is kept, not of a copy: a table in the bucket may have been restored since the copy was made.
    try:
        return storage_of(entry).digest(entry)[1]
    except OSError:
        return None


def _windows_in(entry: Path) -> frozenset[str] | None:
    """The windows of the files that a commit adds and removes; None if they cannot be told."""
    found = set()
    try:
        for line in at_hand(entry).read_bytes().splitlines():
            action = json.loads(line)
            for file in (action.get("add"), action.get("remove")):
                if file is not None:
                    found.add((file["partitionValues"] or {}).get(layout.WINDOW) or layout.WHOLE_TABLE)
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return frozenset(found)
