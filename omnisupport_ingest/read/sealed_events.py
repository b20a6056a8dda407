"""Finds what stands in sealed windows: events whose images have left raw by retention.

No run judges these windows again, and landing and raw do not say which of them have rows of a subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.holdings import Holding, files_of_table
from omnisupport_ingest.read.subject_traces import Traced, Wanted, wanted_images


@dataclass(frozen=True, slots=True)
class SealedEvents:
    """The sealed windows of a source, and their files of deduped events and quarantine.

    ``files``: by the path relative to ``home``: the path in the table, and the window.
    """

    home: Path
    windows: frozenset[str]
    files: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, workspace: Workspace, source: str) -> SealedEvents:
        """Read the record of retention, and both tables. Raises ``LedgerUnreadable``."""
        windows, home = Removed.open(workspace, source).sealed, workspace.home.path
        tables = (workspace.deduped(source), workspace.quarantine(source)) if windows else ()
        snapshots = [each for table in tables if (each := table.look()) is not None]
        return cls(
            home,
            windows,
            {
                Path(file.stored).relative_to(home).as_posix(): (file.path, window)
                for snapshot in snapshots
                for window in windows
                for file in snapshot.files(window)
            },
        )

    def has_events_of(self, contract: TableContract) -> bool:
        """Return whether a sealed window has events of the table, accepted or in quarantine."""
        return any(True for _ in self._files_of(contract))

    def has_row(self, contract: TableContract, key: str) -> bool:
        """Return whether a sealed window has an event of the row ``key`` of the table."""
        return any(
            pc.any(pc.equal(pq.read_table(file, columns=["key"], partitioning=None)["key"], key)).as_py()
            for file in self._files_of(contract)
        )

    def windows_with(self, contract: TableContract, of_subject: Traced) -> set[str]:
        """Return the sealed windows that have rows of the subject, with values or without. ``contract``: of a
        table of the subject."""
        found = set[str]()
        for each in of_subject.contracts:
            wanted = Wanted.of(each, contract.subject, of_subject, whole_rows=False)
            for file in self._files_of(each) if wanted.named is not None else ():
                window = self.files[file.relative_to(self.home).as_posix()][1]
                if window not in found and any(True for _ in wanted_images(file, each, wanted)):
                    found.add(window)
        return found

    def windows_of_table(self, contract: TableContract) -> set[str]:
        """Return the sealed windows with events of the table, accepted or in quarantine."""
        names = (file.relative_to(self.home).as_posix() for file in self._files_of(contract))
        return {self.files[name][1] for name in names}

    def windows_of(self, cells: Iterable[Holding]) -> list[str]:
        """Return the sealed windows that have some of ``cells``, sorted."""
        return sorted({self.files[each.path][1] for each in cells if each.path in self.files})

    def _files_of(self, contract: TableContract) -> Iterator[Path]:
        paths = ((path, self.home / name) for name, (path, _) in self.files.items())
        return (file for _, file in files_of_table(paths, contract))
