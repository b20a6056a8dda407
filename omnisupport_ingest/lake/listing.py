"""The files of one version of a table, by window: from the index, or else as delta-rs reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from deltalake import DeltaTable

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.file_index import FileIndex, VersionNotIndexed, index_of
from omnisupport_ingest.lake.file_index_tables import Bounds, IndexedVersion, ListedFile, TableLog, listed_by
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.storage import at_hand

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionInIndex:
    """A version of the table ``name`` that the index of the ``lake`` knows."""

    lake: Path
    name: str
    version: IndexedVersion

    @property
    def index(self) -> FileIndex:
        """The index as this process has it open: the snapshot may come from the parent process."""
        return index_of(self.lake, self.name)


class Listing:
    """The files of one version of ``table``.

    ``indexed``: the version in the index; None if delta-rs has to read the files. ``handle``: opens the
    version by delta-rs.
    """

    def __init__(
        self,
        table: TableLog,
        partition_by: tuple[str, ...],
        handle: Callable[[], DeltaTable],
        indexed: VersionInIndex | None = None,
    ) -> None:
        self._table, self._root, self._partition_by = table, str(table.folder), partition_by
        self._handle, self._indexed = handle, indexed
        self._last: tuple[str, list[ListedFile]] | None = None

    def windows(self) -> list[str]:
        """Every window with files, sorted."""
        return self._from_either(
            lambda indexed: indexed.index.windows(indexed.name, indexed.version),
            lambda: sorted(self._by_window),
        )

    def last_window(self) -> str | None:
        """The last window with files; None without one."""
        return self._from_either(
            lambda indexed: indexed.index.last_window(indexed.name, indexed.version),
            lambda: max(self._by_window, default=None),
        )

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """All files of ``window``, sorted by path."""
        return tuple(map(self._lake_file, self._listed(window)))

    def states(self, window: str) -> tuple[LakeFile, ...]:
        """The state files of ``window``, sorted by path. Does not read its other files, if the index knows
        the version."""
        found = self._from_either(
            lambda indexed: indexed.index.files(
                indexed.name, indexed.version, window, like=layout.STATES_LIKE
            ),
            lambda: self._by_window.get(window, []),
        )
        return tuple(self._lake_file(file) for file in found if layout.is_state(file.path))

    def stats(self, window: str) -> dict[str, str | None]:
        """Return the statistics (JSON text) of the files of ``window``, by path; None for a file without any.

        Only for a table that may have deletion vectors.
        """
        return {file.path: file.stats for file in self._listed(window)}

    def bounds(self, window: str) -> dict[str, Bounds]:
        """Return the bounds of the files of ``window`` by path, of a table whose files are ordered."""
        return {file.path: file.bounds for file in self._listed(window)}

    def all_files(self) -> tuple[LakeFile, ...]:
        """The files of every window, sorted by window, then path."""
        found = self._from_either(
            lambda indexed: indexed.index.files(indexed.name, indexed.version, None),
            lambda: [file for window in sorted(self._by_window) for file in self._by_window[window]],
        )
        return tuple(map(self._lake_file, found))

    def _listed(self, window: str) -> list[ListedFile]:
        # A run asks several times for the files of one window, and there may be thousands.
        last = self._last
        if last is None or last[0] != window:
            found = self._from_either(
                lambda indexed: indexed.index.files(indexed.name, indexed.version, window),
                lambda: self._by_window.get(window, []),
            )
            last = self._last = window, found
        return last[1]

    def _from_either(self, of_index: Callable[[VersionInIndex], T], of_library: Callable[[], T]) -> T:
        if self._indexed is not None:
            try:
                return of_index(self._indexed)
            except VersionNotIndexed:
                self._indexed = None
        return of_library()

    @cached_property
    def _by_window(self) -> dict[str, list[ListedFile]]:
        found: dict[str, list[ListedFile]] = {}
        for file in sorted(listed_by(self._handle(), self._table, self._partition_by), key=_path):
            found.setdefault(file.window, []).append(file)
        return found

    def _lake_file(self, listed: ListedFile) -> LakeFile:
        # Joining paths costs ten times as much as joining texts, and a table may have thousands of files. A
        # foreign writer may name a file by its absolute path.
        path, vector = listed.path, listed.vector
        uri = path if path.startswith("/") else f"{self._root}/{path}"
        # A foreign writer may leave statistics out.
        stored = rows_in(at_hand(Path(uri))) if listed.rows is None else listed.rows
        return LakeFile(
            path=path,
            full_path=uri,
            window=listed.window,
            partition=tuple(zip(self._partition_by, listed.partition, strict=True)),
            rows=stored if vector is None else stored - vector.cardinality,
            bytes=listed.bytes,
            vector=vector,
        )


def _path(file: ListedFile) -> str:
    return file.path
