"""A Delta table as its stages see it: windows, their files, their state, and the next commit.

A ``TableSnapshot`` is one version of the table. What is planned on it is committed on it, once; if
the table has moved on, the commit is refused and the plan is made again on a new snapshot
(``retrying``). Neither needs a JVM: only ``read`` uses Spark.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import AddAction, RemoveAction

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

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

T = TypeVar("T")

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
        return DeltaTable.is_deltatable(str(self.folder))

    def open(self) -> TableSnapshot:
        """The newest version, in a handle of its own; makes the table if it is not there.

        Columns that the spec has and the table lacks are added; those that have another type keep it until a
        commit replaces every window (``TableSnapshot.retyped``). ``SchemaChanged`` if the table is
        partitioned otherwise.
        """
        handle = open_with_schema(
            self.folder, self.spec.schema, self.spec.partition_by, self.spec.path, self.spec.description
        )
        return TableSnapshot(self, handle)


class TableSnapshot:
    """One version of a table, and the right to commit the next, once."""

    def __init__(self, table: LakeTable, handle: DeltaTable) -> None:
        self.table = table
        self._handle = handle
        self._spent = False
        self.retyped: tuple[Retyped, ...] = retyped(handle, table.spec.schema)
        """Columns that have another type on disk. A commit must replace all windows then."""
        self.version: int = handle.version()
        self.table_id: str = str(handle.metadata().id)

    def windows(self) -> list[str]:
        """Every window that holds data or a state, sorted."""
        return sorted({file.window for file in self._files})

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """The data files of ``window``, sorted by path; none if the window is unknown."""
        return self._data.get(window, ())

    def all_files(self) -> tuple[LakeFile, ...]:
        """The data files of every window, sorted by window, then path."""
        return tuple(file for window in sorted(self._data) for file in self._data[window])

    def state(self, window: str) -> WindowState | None:
        """The state of ``window``; ``None`` if it has none, or none that can be read.

        A window with files but no state was rewritten by another program (compaction merges state
        files away), or its state is damaged: what it was made from is not known here. The next
        commit to the window removes a damaged state. ``StateFromNewerVersion`` is no damage.
        """
        try:
            states = [read_state(Path(file.uri)) for file in self._states.get(window, ())]
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

    def _holds(self, change: WindowChange) -> bool:
        state = self.state(change.window)
        return state is not None and state.same_work(change.state)

    def _state_actions(self, change: WindowChange) -> list[AddAction | RemoveAction]:
        spec, state = self.table.spec, change.state
        path = layout.state_path(change.window, state.generation, state.to_text(), spec.partition_by)
        before = self._states.get(change.window, ())
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

    @cached_property
    def _files(self) -> tuple[LakeFile, ...]:
        listed = pa.table(self._handle.get_add_actions(flatten=False)).to_pylist()
        return tuple(sorted(map(self._lake_file, listed), key=lambda file: file.path))

    @cached_property
    def _data(self) -> dict[str, tuple[LakeFile, ...]]:
        return _by_window(file for file in self._files if not layout.is_state(file.path))

    @cached_property
    def _states(self) -> dict[str, tuple[LakeFile, ...]]:
        return _by_window(file for file in self._files if layout.is_state(file.path))

    def _lake_file(self, listed: dict[str, Any]) -> LakeFile:
        path = unquote(listed["path"])
        uri = os.fspath(self.table.folder / path)
        values = listed.get("partition") or {}
        partition = tuple((name, values.get(name)) for name in self.table.spec.partition_by)
        rows = 0 if layout.is_state(path) else listed.get("num_records")
        return LakeFile(
            path=path,
            uri=uri,
            window=partition[0][1] or "" if partition else layout.WHOLE_TABLE,
            partition=partition,
            # A foreign writer may leave statistics out.
            rows=rows_in(Path(uri)) if rows is None else rows,
            bytes=listed["size_bytes"],
        )


def retrying(plan_and_commit: Callable[[TableSnapshot], T], table: LakeTable, *, attempts: int = 8) -> T:
    """Call ``plan_and_commit`` on a fresh snapshot until its commit meets no other (``until_first``)."""
    return until_first(lambda: plan_and_commit(table.open()), attempts)


def _by_window(files: Iterable[LakeFile]) -> dict[str, tuple[LakeFile, ...]]:
    found: dict[str, list[LakeFile]] = {}
    for file in files:
        found.setdefault(file.window, []).append(file)
    return {window: tuple(of_window) for window, of_window in found.items()}
