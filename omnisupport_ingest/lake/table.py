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
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
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
from omnisupport_ingest.lake.file_index import FileIndex, index_of
from omnisupport_ingest.lake.file_index_tables import NotedTable, TablePlace, digest_of
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.listing import Listing, NotedIn
from omnisupport_ingest.lake.log_entry import may_put_entry, put_entry
from omnisupport_ingest.lake.schema import (
    Retyped,
    SchemaChanged,
    arrow_schema,
    delta_schema,
    lacks_columns,
    open_with_schema,
    retyped,
)
from omnisupport_ingest.lake.state import StateUnreadable, WindowState, read_state, write_state
from omnisupport_ingest.storage import at_hand, storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")

_KEPT_OPEN = 16
"""Tables that a process keeps open. What one holds of a table grows with the files of the table."""

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
        """The newest version, in a snapshot of its own; makes the table if it is not there.

        Columns that the spec has and the table lacks are added; those that have another type keep it until a
        commit replaces every window (``TableSnapshot.retyped``). ``SchemaChanged`` if the table is
        partitioned otherwise.
        """
        opened = self.opened()
        if opened is not None:
            return opened
        spec = self.spec
        noted = self._noted()
        as_asked = noted is not None and noted.partition_by == spec.partition_by
        if noted is not None and as_asked and not lacks_columns(noted.schema, spec.schema):
            return _kept(TableSnapshot.noted(self, noted))
        handle = open_with_schema(self.folder, spec.schema, spec.partition_by, spec.path, spec.description)
        return _kept(self._learned(handle))

    def look(self) -> TableSnapshot | None:
        """The newest version as it is on disk, None if there is none: nothing is made, widened or
        committed."""
        opened = self.opened()
        if opened is not None:
            return opened
        noted = self._noted()
        if noted is not None:
            return TableSnapshot.noted(self, noted)
        return self._learned(open_delta(self.folder)) if self.exists else None

    def opened(self) -> TableSnapshot | None:
        """The newest version, if this process has opened it and it still is that: its log is not read."""
        held = _opened.get(self.folder)
        if held is None or held.table != self or not held.is_newest():
            return None
        return held.again()

    @property
    def place(self) -> TablePlace:
        """Where the index finds the table."""
        return TablePlace(self.spec.path, self.folder, self.spec.app_id)

    @property
    def index(self) -> FileIndex:
        """What lists the files of the table."""
        return index_of(self.root.absolute(), self.spec.path)

    def _noted(self) -> NotedTable | None:
        return self.index.newest(self.place)

    def _learned(self, handle: DeltaTable) -> TableSnapshot:
        """The version that ``handle`` has open, of which the index takes note."""
        if tuple(handle.metadata().partition_columns) == self.spec.partition_by:
            noted = self.index.learn(self.place, handle)
            if noted is not None:
                return TableSnapshot.noted(self, noted)
        return TableSnapshot(self, handle)


class TableSnapshot:
    """One version of a table, and the right to commit the next, once."""

    retyped: tuple[Retyped, ...]
    """Columns that have another type on disk. A commit must replace all windows then."""

    def __init__(self, table: LakeTable, handle: DeltaTable) -> None:
        self.handle = handle
        self._set(table, str(handle.metadata().id), handle.version(), handle.schema().to_json())

    @classmethod
    def noted(cls, table: LakeTable, note: NotedTable) -> TableSnapshot:
        """The version that the index of files has noted; Delta's library opens it when it is asked for."""
        self = cls.__new__(cls)
        self._set(table, note.table_id, note.version, note.schema, note)
        self.mark = TableMark(note.table_id, note.version, note.entry)
        return self

    def _set(
        self, table: LakeTable, table_id: str, version: int, schema: str, note: NotedTable | None = None
    ) -> None:
        self.table, self.table_id, self.version = table, table_id, version
        self.retyped = retyped(schema, table.spec.schema)
        self._note, self._spent = note, False
        self._log = table.folder / "_delta_log"
        self._own, self._next = self._log / _entry_name(version), self._log / _entry_name(version + 1)
        self._entry = storage_of(self._log).version(self._own)
        noted = None if note is None else NotedIn(table.root.absolute(), table.spec.path, note)
        self._listing = Listing(table.folder, table.spec.partition_by, lambda: self.handle, noted)
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
        storage = storage_of(self._log)
        if self._entry is None or self._entry != storage.version(self._own):
            return False
        return not storage.exists(self._next)

    @cached_property
    def mark(self) -> TableMark | None:
        """What this version is known by; None where its log entry is not there."""
        entry = digest_of(self.table.folder / "_delta_log" / _entry_name(self.version))
        return None if entry is None else TableMark(self.table_id, self.version, entry)

    def windows_since(self, older: TableMark) -> frozenset[str] | None:
        """The windows that were committed to after ``older``, a version of the same table; None if that is
        not known: then any may have been."""
        if older.table_id != self.table_id or older.version > self.version:
            return None
        if digest_of(self.table.folder / "_delta_log" / _entry_name(older.version)) != older.entry:
            return None
        found: set[str] = set()
        for version in range(older.version + 1, self.version + 1):
            of_commit = _windows_in(self.table.folder / "_delta_log" / _entry_name(version))
            if of_commit is None:
                return None
            found |= of_commit
        return frozenset(found)

    @cached_property
    def handle(self) -> DeltaTable:
        """This version as Delta's library opens it, for looks at its log: it reads all files."""
        return open_delta(self.table.folder, self.version)

    def windows(self) -> list[str]:
        """Every window that holds data or a state, sorted."""
        return self._listing.windows()

    def last_window(self) -> str | None:
        """The last of ``windows``; None where there is none."""
        return self._listing.last_window()

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """The data files of ``window``, sorted by path; none if the window is unknown."""
        return tuple(file for file in self._files_of(window) if not layout.is_state(file.path))

    def all_files(self) -> tuple[LakeFile, ...]:
        """The data files of every window, sorted by window, then path."""
        return tuple(file for file in self._listing.all_files() if not layout.is_state(file.path))

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
            if schema is None and self._note is not None and may_put_entry(self._note, self.table.folder):
                version = put_entry(self.table.place, self._note, actions, note)
            else:
                version = commit_actions(
                    self.handle, actions, app_id=self.table.spec.app_id, note=note, replacing_all_with=schema
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

    @cached_property
    def _data_schema(self) -> pa.Schema:
        return arrow_schema(self.table.spec.schema, without=self.table.spec.partition_by)

    def _states_of(self, window: str) -> tuple[LakeFile, ...]:
        return tuple(file for file in self._files_of(window) if layout.is_state(file.path))

    def _files_of(self, window: str) -> tuple[LakeFile, ...]:
        """All files of ``window``, by path."""
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = self._listing.files(window)
        return found


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
