"""The files of one version of a table, by window: as the index has them, or as Delta's library reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from deltalake import DeltaTable

from omnisupport_ingest.lake.file_index import FileIndex, ListGone, index_of
from omnisupport_ingest.lake.file_index_tables import ListedFile, NotedTable, listed_by
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.storage import at_hand

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotedIn:
    """A version of the table ``name`` as the index of the ``lake`` has it."""

    lake: Path
    name: str
    note: NotedTable

    @property
    def index(self) -> FileIndex:
        """The index as this process has it: the process it was forked from may have opened the snapshot."""
        return index_of(self.lake, self.name)


class Listing:
    """What one version of the table in ``folder`` holds.

    ``noted``: that version in the index; null where Delta's library has to be asked. ``handle`` opens it
    there.
    """

    def __init__(
        self,
        folder: Path,
        partition_by: tuple[str, ...],
        handle: Callable[[], DeltaTable],
        noted: NotedIn | None = None,
    ) -> None:
        self._folder, self._partition_by = folder, partition_by
        self._handle, self._noted = handle, noted

    def windows(self) -> list[str]:
        """Every window with files, sorted."""
        return self._asked(
            lambda noted: noted.index.windows(noted.name, noted.note), lambda: sorted(self._by_window)
        )

    def last_window(self) -> str | None:
        """The last of them; None where there is none."""
        return self._asked(
            lambda noted: noted.index.last_window(noted.name, noted.note),
            lambda: max(self._by_window, default=None),
        )

    def files(self, window: str) -> tuple[LakeFile, ...]:
        """All files of ``window``, sorted by path."""
        found = self._asked(
            lambda noted: noted.index.files(noted.name, noted.note, window),
            lambda: self._by_window.get(window, []),
        )
        return tuple(map(self._lake_file, found))

    def all_files(self) -> tuple[LakeFile, ...]:
        """Those of every window, sorted by window, then path."""
        found = self._asked(
            lambda noted: noted.index.files(noted.name, noted.note, None),
            lambda: [file for window in sorted(self._by_window) for file in self._by_window[window]],
        )
        return tuple(map(self._lake_file, found))

    def _asked(self, of_index: Callable[[NotedIn], T], of_library: Callable[[], T]) -> T:
        if self._noted is not None:
            try:
                return of_index(self._noted)
            except ListGone:
                self._noted = None
        return of_library()

    @cached_property
    def _by_window(self) -> dict[str, list[ListedFile]]:
        found: dict[str, list[ListedFile]] = {}
        for file in sorted(listed_by(self._handle(), self._partition_by), key=_path):
            found.setdefault(file.window, []).append(file)
        return found

    def _lake_file(self, listed: ListedFile) -> LakeFile:
        uri = os.fspath(self._folder / listed.path)
        return LakeFile(
            path=listed.path,
            place=uri,
            window=listed.window,
            partition=tuple(zip(self._partition_by, listed.partition, strict=True)),
            # A foreign writer may leave statistics out.
            rows=rows_in(at_hand(Path(uri))) if listed.rows is None else listed.rows,
            bytes=listed.bytes,
        )


def _path(file: ListedFile) -> str:
    return file.path
