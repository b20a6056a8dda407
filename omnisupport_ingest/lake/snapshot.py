"""One version of a Delta table: its windows, their files and their state, and the commit of the next version.

Only ``read`` uses Spark.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.transaction import AddAction

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import (
    Action,
    VectorChange,
    WindowChange,
    add_data,
    add_state,
    commit_actions,
    commit_note,
    mark,
    remove,
    windows_in,
)
from omnisupport_ingest.lake.delta import entry_file, open_delta, translated_store_errors, upload_added
from omnisupport_ingest.lake.file_index import index_of
from omnisupport_ingest.lake.file_index_tables import (
    Bounds,
    IndexedVersion,
    digest_of,
    has_checkpoint_after,
)
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.listing import Listing, VersionInIndex
from omnisupport_ingest.lake.log_entry import may_put_entry, put_entry, version_to_commit_on
from omnisupport_ingest.lake.log_files import has_vectors
from omnisupport_ingest.lake.looks import changed
from omnisupport_ingest.lake.schema import Retyped, SchemaChanged, arrow_schema, delta_schema, retyped
from omnisupport_ingest.lake.state import StateUnreadable, WindowState, read_state, write_state
from omnisupport_ingest.lake.table_spec import TablePlace
from omnisupport_ingest.storage import storage_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_log = logging.getLogger(__name__)

_warned: set[str] = set()
"""Damaged states that this process has warned about already."""


@dataclass(frozen=True, slots=True)
class TableMark:
    """Identifies one version of one table across processes.

    ``entry``: digest of the version's log entry. It tells apart two histories with the same version number,
    as when a table was restored and then changed differently.
    """

    table_id: str
    version: int
    entry: str


@dataclass(frozen=True, slots=True)
class TableNote:
    """What a look noted of a version of a table, for other processes.

    ``stamp``: what the storage said of the files that end the log when the version was the newest; empty if
    that is not certain. ``fits``: fingerprint of the contract whose types the columns have; empty if
    some have another type, or if that is not noted.
    """

    mark: TableMark
    stamp: str = ""
    fits: str = ""


class TableSnapshot:
    """One version of a table, on which the next version can be committed, once."""

    retyped: tuple[Retyped, ...]
    """Columns that have another type on disk. If there are any, a commit must replace all windows."""

    def __init__(self, table: TablePlace, handle: DeltaTable) -> None:
        self.handle = handle
        self._set(table, str(handle.metadata().id), handle.version(), handle.schema().to_json())

    @classmethod
    def from_index(cls, table: TablePlace, indexed: IndexedVersion) -> TableSnapshot:
        """Return a snapshot of a version in the index; ``handle`` opens it by delta-rs when first used."""
        self = cls.__new__(cls)
        self._set(table, indexed.table_id, indexed.version, indexed.schema, indexed)
        self.mark = TableMark(indexed.table_id, indexed.version, indexed.entry)
        return self

    @classmethod
    def unopened(cls, table: TablePlace, note: TableNote) -> TableSnapshot | None:
        """Return a snapshot of the version in ``note`` without reading its log; None if another version may
        be the newest.

        Costs three look-ups in the file system. The log and the index are read when files are first asked
        for. The columns have the types of the spec.
        """
        self = cls.__new__(cls)
        mark = note.mark
        self._place(table, mark.table_id, mark.version)
        self.retyped, self.mark, self._entry = (), mark, self._log_storage.version(self._own)
        if self._entry is None or self._stamp() != note.stamp or self._log_storage.exists(self._next):
            return None
        self._noted = note
        return self

    def _set(
        self,
        table: TablePlace,
        table_id: str,
        version: int,
        schema: str,
        indexed: IndexedVersion | None = None,
    ) -> None:
        self._place(table, table_id, version)
        self.retyped = retyped(schema, table.spec.schema)
        self._entry, self._indexed = self._log_storage.version(self._own), indexed

    def _place(self, table: TablePlace, table_id: str, version: int) -> None:
        self.table, self.table_id, self.version, self._committed = table, table_id, version, False
        folder = table.folder
        self._log_storage = storage_of(folder)
        self._own, self._next = entry_file(folder, version), entry_file(folder, version + 1)
        self._by_window: dict[str, tuple[tuple[LakeFile, ...], tuple[LakeFile, ...]]] = {}
        self._table_states: tuple[LakeFile, ...] | None = None
        self._noted: TableNote | None = None

    @cached_property
    def _indexed(self) -> IndexedVersion | None:
        """This version in the index, for a snapshot that was taken without opening it."""
        table = self.table
        index = index_of(table.root.absolute(), table.spec.path)
        found = index.held(table.spec.path)
        if found is not None and found.ordered_by == table.spec.ordered_by:
            is_noted = TableMark(found.table_id, found.version, found.entry) == self.mark
            # The storage's stamp does not show an entry that was changed in place; its digest does.
            if is_noted and digest_of(self._own) == found.entry:
                return found
        return index.learn(table.log, self.handle)

    @cached_property
    def _listing(self) -> Listing:
        table, indexed = self.table, self._indexed
        in_index = (
            None if indexed is None else VersionInIndex(table.root.absolute(), table.spec.path, indexed)
        )
        return Listing(table.log, table.spec.partition_by, lambda: self.handle, in_index)

    def renewed(self) -> TableSnapshot:
        """Return a new snapshot of the same version, on which one can commit; the log is not read again.

        Both share the handle, which a commit leaves at its version.
        """
        other = copy(self)
        other._committed, other._by_window, other._table_states = False, {}, None
        return other

    def is_newest(self) -> bool:
        """Return whether this is still the newest version; False if that is uncertain.

        Costs two look-ups in the file system, whatever the size of the table.
        """
        if self._entry is None or self._entry != self._log_storage.version(self._own):
            return False
        return not self._log_storage.exists(self._next)

    @property
    def indexed(self) -> IndexedVersion | None:
        """This version as the index knows it; None if it does not."""
        return self._indexed

    def is_version_of(self, other: TableSnapshot) -> bool:
        """Return whether this is the same version as ``other``, of the same history of the table."""
        mine = self.table_id, self.version, self._entry
        return mine == (other.table_id, other.version, other._entry)

    def note(self, fits: str) -> TableNote | None:
        """Return what other processes may know of this version; None if its log entry does not exist.

        ``fits``: fingerprint of the contract of the table.
        """
        if self.mark is None:
            return None
        if not fits:
            # Nobody takes such a table as noted, so its stamp is not worth what a store takes for it.
            return TableNote(self.mark)
        if self._noted is not None and self._noted.fits == ("" if self.retyped else fits):
            return self._noted
        stamp = self._stamp()
        # Look once more after the stamp was made, so that it is of the files that the mark describes.
        newest = self.is_newest() and not has_checkpoint_after(self.table.log, self.version)
        is_marked = newest and digest_of(self._own) == self.mark.entry
        # A store without versions of objects shows no other entry.
        is_marked = is_marked and bool(self._entry) and any(self._entry or ())
        noted = TableNote(self.mark, stamp if is_marked else "", "" if self.retyped else fits)
        self._noted = noted if is_marked else None
        return noted

    def _stamp(self) -> str:
        """Return what the storage says of the files that end the log: the entry of this version, and the note
        of the newest checkpoint. Another file at either place has another stamp."""
        last = self._own.with_name("_last_checkpoint")
        return f"{self._entry} {self._log_storage.version(last) if self._log_storage.is_local else None}"

    @cached_property
    def mark(self) -> TableMark | None:
        """The mark of this version; None if its log entry does not exist."""
        entry = digest_of(entry_file(self.table.folder, self.version))
        return None if entry is None else TableMark(self.table_id, self.version, entry)

    def windows_since(self, older: TableMark) -> frozenset[str] | None:
        """Return the windows that commits after ``older`` changed; None if unknown: any may have changed."""
        if older.table_id != self.table_id or older.version > self.version:
            return None
        if digest_of(entry_file(self.table.folder, older.version)) != older.entry:
            return None
        found: set[str] = set()
        for version in range(older.version + 1, self.version + 1):
            of_commit = windows_in(entry_file(self.table.folder, version))
            if of_commit is None:
                return None
            found |= of_commit
        return frozenset(found)

    @cached_property
    def handle(self) -> DeltaTable:
        """This version opened by delta-rs, which reads the list of all files."""
        return open_delta(self.table.folder, self.version)

    def windows(self) -> list[str]:
        """Return every window that holds data or a state, sorted."""
        return self._listing.windows()

    def last_window(self) -> str | None:
        """Return the last window that holds data or a state; None without one."""
        return self._listing.last_window()

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """Return the data files of ``window``, sorted by path; none if the window is unknown."""
        return self._divided(window)[0]

    def all_files(self) -> tuple[LakeFile, ...]:
        """Return the data files of every window, sorted by window, then path."""
        return tuple(file for file in self._listing.all_files() if not layout.is_state(file.path))

    @cached_property
    def has_vectors(self) -> bool:
        """Whether files of the table may have deletion vectors."""
        return has_vectors(self.handle) if self._indexed is None else self._indexed.has_vectors

    def stats(self, window: str) -> dict[str, str | None]:
        """Return the Delta statistics (JSON text) of the files of ``window``, by path; None for a file
        without any.

        Only for a table that ``has_vectors``.
        """
        return self._listing.stats(window)

    def bounds(self, window: str) -> dict[str, Bounds]:
        """Return, by path, the lowest and the highest value of each file of ``window``.

        They are of the column by which files are ordered (``TableSpec.ordered_by``); None where the
        statistics of a file lack them.
        """
        return self._listing.bounds(window)

    def state(self, window: str) -> WindowState | None:
        """Return the state of ``window``; None if it has none that can be read.

        A window with files but no readable state was rewritten by another program (foreign compaction drops
        state files), or its state is damaged: its inputs are unknown. The next commit to the window removes a
        damaged state. Raises ``StateFromNewerVersion``, which is no damage.
        """
        try:
            states = [read_state(Path(file.uri)) for file in self._states_of(window)]
        except StateUnreadable as error:
            if error.problem not in _warned:
                # Each step of a run asks for it again, so warn once.
                _warned.add(error.problem)
                _log.warning("%s The window counts as one without a state.", error.problem)
            return None
        return max(states, key=lambda state: state.generation, default=None)

    def read(self, spark: SparkSession, files: Iterable[LakeFile]) -> DataFrame:
        """Return a DataFrame of ``files`` with the columns of the spec, partition columns included."""
        from omnisupport_ingest.lake.read import read_files

        return read_files(spark, self.table.spec.schema, self.table.spec.partition_by, files)

    def commit(self, changes: Sequence[WindowChange], *, run_id: str | None = None) -> int:
        """Make all ``changes`` in one commit and return the version that holds them.

        A change whose work the window already holds is left out; without any other change there is no commit.
        A snapshot commits once: open the table again for more. ``run_id``: the run that the log entry names,
        by default the one that made the content.

        Raises ``CommitConflict`` if this is no longer the newest version, ``StagedFileMissing`` if a file to
        add is gone, ``SchemaChanged`` if a window would keep columns of another type.
        """
        if self._committed:
            raise RuntimeError(f"a snapshot of {self.table.spec.path} was committed on twice")
        if len({change.window for change in changes}) != len(changes):
            raise ValueError("one window is changed twice in one commit")
        actions: list[Action] = []
        states: list[WindowState] = []
        for change in changes:
            planned = self._actions(change)
            if planned:
                actions += planned
                states.append(change.state)
        if not actions:
            return self.version
        text, schema = commit_note(states, run_id), None
        if self.retyped:
            self._require_all_replaced(changes)
            actions = [each for each in actions if isinstance(each, AddAction)]
            schema = delta_schema(self.table.spec.schema)
        upload_added(self.table.folder, actions, self.table.spec.app_id)
        return self._put(actions, text, schema)

    def fence(self) -> int:
        """Commit an entry that changes nothing, and return its version. Raises ``CommitConflict``.

        A writer that planned on an earlier version, however long ago, is then refused and plans again.
        """
        return self._put([], {"fence": True}, None)

    def _put(self, actions: Sequence[Action], text: dict[str, Any], schema: Schema | None) -> int:
        try:
            with translated_store_errors(self.table.folder):
                indexed = self._indexed
                if indexed is None and schema is None and has_vectors(self.handle):
                    indexed = version_to_commit_on(self.handle, self.table.log)
                if schema is None and indexed is not None and may_put_entry(indexed, self.table.folder):
                    version = put_entry(self.table.log, indexed, actions, text)
                else:
                    version = commit_actions(
                        self.handle,
                        actions,
                        folder=self.table.folder,
                        app_id=self.table.spec.app_id,
                        note=text,
                        replacing_all_with=schema,
                    )
        finally:
            # Also after a failure: the store may have committed, and only its answer was lost.
            changed(self.table.folder)
        self._committed = True
        return version

    def _require_all_replaced(self, changes: Sequence[WindowChange]) -> None:
        stays = set(self.windows()) - {change.window for change in changes if change.replaces}
        if stays:
            raise SchemaChanged(
                f"{self.table.spec.path} holds columns of another type: {', '.join(map(str, self.retyped))}; "
                f"its window {min(stays)} would keep them.",
                fix="Let `omnisupport-ingest materialize` run the table: it replaces all of its windows.",
            )

    def _actions(self, change: WindowChange) -> list[Action]:
        held = {file.path: file for file in self.files(change.window)}
        staged = {file.path: file for file in change.add}
        strangers = [file.path for file in change.add if file.window != change.window]
        if strangers:
            raise ValueError(f"{strangers[0]} is not a file of the window {change.window!r}")
        unknown = [file.path for file in change.remove if file.path not in held]
        if unknown:
            raise ValueError(f"version {self.version} does not hold {unknown[0]}")
        adds_only = not (change.replaces or change.remove or change.marked)
        if change.add and adds_only and self._is_held_in_bucket(change):
            return []
        leaving = set(held) if change.replaces else {file.path for file in change.remove}
        arriving = [path for path in staged if path not in held]
        removed = sorted(leaving - set(staged))
        actions: list[Action] = []
        same = change.same_rows
        actions += [add_data(self.table.folder, staged[path], same_rows=same) for path in sorted(arriving)]
        actions += [remove(held[path], same_rows=same) for path in removed]
        actions += self._marks(change, {path: held[path] for path in held.keys() - leaving})
        if change.add and not actions and self._holds(change):
            return []
        return actions + self._state_actions(change)

    def _marks(self, change: WindowChange, staying: Mapping[str, LakeFile]) -> list[VectorChange]:
        if not change.marked:
            return []
        if not self.has_vectors:
            raise ValueError(f"{self.table.spec.path} may have no deletion vectors")
        strangers = change.marked.keys() - staying.keys()
        if strangers:
            raise ValueError(f"{min(strangers)} has a new deletion vector and does not stay in the table")
        stats, folder = self.stats(change.window), self.table.folder
        # A file that leaves and enters with the same vector would be gone for readers.
        new = [each for each in sorted(change.marked.items()) if staying[each[0]].vector != each[1]]
        return [mark(folder, staying[path], vector, stats[path]) for path, vector in new]

    def _is_held_in_bucket(self, change: WindowChange) -> bool:
        """Return whether the window holds this work already, from another attempt, in files of a bucket."""
        return not storage_of(self.table.folder).is_local and self._holds(change)

    def _holds(self, change: WindowChange) -> bool:
        state = self.state(change.window)
        return state is not None and state.same_work(change.state)

    def _state_actions(self, change: WindowChange) -> list[Action]:
        spec, state = self.table.spec, change.state
        path = layout.state_path(change.window, state.generation, state.to_text(), spec.partition_by)
        before = self._states_of(change.window)
        same = change.same_rows
        actions: list[Action] = [remove(file, same_rows=same) for file in before if file.path != path]
        if path not in {file.path for file in before}:
            size = write_state(self.table.folder / path, state, self._data_schema)
            partition = layout.partition_in(path, spec.partition_by)
            actions.append(add_state(path, size, partition, same_rows=same))
        return actions

    @cached_property
    def _data_schema(self) -> pa.Schema:
        return arrow_schema(self.table.spec.schema, without=self.table.spec.partition_by)

    def _states_of(self, window: str) -> tuple[LakeFile, ...]:
        if window == layout.WHOLE_TABLE and window not in self._by_window:
            # Who asks only for the state of a table need not list its thousands of files.
            if self._table_states is None:
                self._table_states = self._listing.states(window)
            return self._table_states
        return self._divided(window)[1]

    def _divided(self, window: str) -> tuple[tuple[LakeFile, ...], tuple[LakeFile, ...]]:
        """Return the data files of ``window`` and its state files, each sorted by path."""
        found = self._by_window.get(window)
        if found is None:
            files: list[LakeFile] = []
            states: list[LakeFile] = []
            for file in self._listing.files(window):
                (states if layout.is_state(file.path) else files).append(file)
            found = self._by_window[window] = tuple(files), tuple(states)
        return found


def look_for_empty(snapshots: Iterable[TableSnapshot], window: str) -> None:
    """Find out at once which of ``snapshots``, of tables of one source, hold nothing of ``window``; they do
    not look for it themselves any more."""
    asked = {
        each.table.spec.path: each
        for each in snapshots
        if each.mark is not None and window not in each._by_window
    }
    if not asked:
        return
    first = next(iter(asked.values())).table
    index = index_of(first.root.absolute(), first.spec.path)
    entries = {path: each.mark.entry for path, each in asked.items() if each.mark is not None}
    for path in index.without(window, entries):
        asked[path]._by_window[window] = (), ()
