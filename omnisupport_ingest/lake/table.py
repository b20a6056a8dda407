"""A Delta table of the lake, and how its newest version is opened.

Work is planned on a ``TableSnapshot`` and committed on it, once. If another writer committed meanwhile, the
commit is refused and the work is planned again on a new snapshot (``retrying``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from deltalake import DeltaTable

from omnisupport_ingest import tracing
from omnisupport_ingest.lake.commit import until_first
from omnisupport_ingest.lake.delta import is_delta, open_delta
from omnisupport_ingest.lake.file_index import FileIndex, index_of
from omnisupport_ingest.lake.file_index_tables import IndexedVersion
from omnisupport_ingest.lake.log_entry import allow_vectors
from omnisupport_ingest.lake.log_files import has_vectors
from omnisupport_ingest.lake.looks import Looks, changed
from omnisupport_ingest.lake.schema import lacks_columns, open_with_schema
from omnisupport_ingest.lake.snapshot import TableNote, TableSnapshot
from omnisupport_ingest.lake.table_spec import TablePlace

T = TypeVar("T")

_KEPT_OPEN = 16
"""Number of tables that a process keeps open. The memory for one grows with the files of the table."""


@dataclass(frozen=True)
class LakeTable(TablePlace):
    """A table of the lake. Only ``open`` creates it.

    ``looks``: those of the work that uses the table; None: each use looks for the newest version.
    """

    looks: Looks | None = field(default=None, repr=False, compare=False)

    @property
    def exists(self) -> bool:
        return is_delta(self.folder)

    def open(self) -> TableSnapshot:
        """Return a new snapshot of the newest version; create the table if it does not exist.

        Columns that only the spec has are added. Columns that have another type on disk keep it until a
        commit replaces every window (``TableSnapshot.retyped``). Raises ``SchemaChanged`` if the partition
        columns differ.
        """
        opened = self.opened()
        if opened is not None:
            return opened
        seen = self.looks.seen(self.folder) if self.looks is not None else None
        if seen is not None and self._fits(seen.indexed):
            return _remember(seen.renewed())
        try:
            opened = self._opened_anew()
        finally:
            # The table may have been created or widened just now: other users in this process must see that.
            changed(self.folder)
        if self.looks is not None:
            self.looks.of(self.folder, lambda: opened)
        return _remember(opened)

    def _opened_anew(self) -> TableSnapshot:
        spec, indexed = self.spec, self._indexed_version()
        if indexed is not None and self._fits(indexed):
            return TableSnapshot.from_index(self, indexed)
        handle = open_with_schema(self.folder, spec.schema, spec.partition_by, spec.path, spec.description)
        if spec.deletion_vectors and not has_vectors(handle):
            handle = allow_vectors(self.folder, handle)
        return self._snapshot_of(handle)

    def look(self, noted: TableNote | None = None) -> TableSnapshot | None:
        """Return a snapshot of the newest version as it is on disk, None without a table; changes nothing.

        ``noted``: what an earlier look, perhaps of another process, noted of the table. While that is the
        newest version, the table is not opened.
        """
        found = (
            self._look(noted) if self.looks is None else self.looks.of(self.folder, lambda: self._look(noted))
        )
        return None if found is None else found.renewed()

    def _fits(self, indexed: IndexedVersion | None) -> bool:
        """Return whether the version ``indexed`` has all that the spec asks for."""
        spec = self.spec
        return (
            indexed is not None
            and indexed.partition_by == spec.partition_by
            and not lacks_columns(indexed.schema, spec.schema)
            and (indexed.has_vectors or not spec.deletion_vectors)
        )

    def _look(self, noted: TableNote | None) -> TableSnapshot | None:
        held = _opened.get(self.folder)
        if held is not None and held.table == self and held.is_newest():
            return held
        unopened = None if noted is None else TableSnapshot.unopened(self, noted)
        return self._newest() if unopened is None else unopened

    def _newest(self) -> TableSnapshot | None:
        indexed = self._indexed_version()
        if indexed is not None:
            return TableSnapshot.from_index(self, indexed)
        return self._snapshot_of(open_delta(self.folder)) if self.exists else None

    def opened(self) -> TableSnapshot | None:
        """Return a snapshot of the newest version if this process has it open, without reading the log."""
        held = _opened.get(self.folder)
        if held is None or held.table != self or not self.is_newest(held):
            return None
        return held.renewed()

    def is_newest(self, snapshot: TableSnapshot) -> bool:
        """Return whether ``snapshot`` is of the newest version of the table, as ``looks`` have seen it."""
        if self.looks is None:
            return snapshot.is_newest()
        seen = self.looks.of(self.folder, lambda: snapshot if snapshot.is_newest() else self._newest())
        return seen is not None and seen.is_version_of(snapshot)

    @property
    def index(self) -> FileIndex:
        """The index of the files of the table."""
        return index_of(self.root.absolute(), self.spec.path)

    def _indexed_version(self) -> IndexedVersion | None:
        return self.index.newest(self.log)

    def _snapshot_of(self, handle: DeltaTable) -> TableSnapshot:
        """Return a snapshot of the version that ``handle`` has open, and add the version to the index."""
        if tuple(handle.metadata().partition_columns) == self.spec.partition_by:
            indexed = self.index.learn(self.log, handle)
            if indexed is not None:
                return TableSnapshot.from_index(self, indexed)
        return TableSnapshot(self, handle)


def retrying(plan_and_commit: Callable[[TableSnapshot], T], table: LakeTable, *, attempts: int = 8) -> T:
    """Call ``plan_and_commit`` on a new snapshot until it commits without a conflict (``until_first``).

    Each call begins the looks of the table anew (``looks``), so it sees what others have committed.
    """

    def attempt() -> T:
        if table.looks is not None:
            table.looks.begin()
        with tracing.attempt(table.spec.path):
            return plan_and_commit(table.open())

    return until_first(attempt, attempts)


_opened: dict[Path, TableSnapshot] = {}
"""The tables that this process opened last, by folder: the layers of a run open the same tables."""


def _remember(snapshot: TableSnapshot) -> TableSnapshot:
    _opened.pop(snapshot.table.folder, None)
    _opened[snapshot.table.folder] = snapshot
    while len(_opened) > _KEPT_OPEN:
        _opened.pop(next(iter(list(_opened))), None)
    return snapshot
