"""A table that nothing was committed to since a look noted it: its log is read only for what was not noted.

A look of a new process asks every table of a source for its states of the windows that are not settled. To
open a table costs 5 to 40 ms, and most tables have had no news. So a look notes where those states are
(``HeldWindow``), and the next process reads them there, as long as the table has no newer version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from deltalake import DeltaTable

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.table import LakeTable, TableMark, TableSnapshot


@dataclass(frozen=True, slots=True)
class HeldWindow:
    """The paths of the files with a window's states, nearly always one or none; whether it has data files."""

    states: tuple[str, ...]
    files: bool


@dataclass(frozen=True, slots=True)
class HeldWindows:
    """What one version of a table holds of some windows. ``columns``: what its columns follow from; none of
    them was of another type on disk."""

    columns: str
    windows: Mapping[str, HeldWindow] = field(default_factory=dict)


class NotedSnapshot(TableSnapshot):
    """The version ``mark`` of a table, of which ``held`` is known; it is opened when more is asked for."""

    def __init__(self, table: LakeTable, mark: TableMark, held: HeldWindows) -> None:
        self._set(table, mark.table_id, mark.version)
        self._held = held.windows

    @classmethod
    def newest(cls, table: LakeTable, mark: TableMark, held: HeldWindows) -> NotedSnapshot | None:
        """The snapshot, if ``mark`` is still the newest version of ``table``."""
        found = cls(table, mark, held)
        return found if found.is_newest() and mark == found.mark else None

    @cached_property
    def _handle(self) -> DeltaTable:  # type: ignore[override]
        return open_delta(self.table.folder, self.version)

    def files(self, window: str) -> tuple[LakeFile, ...]:
        held = self._held.get(window)
        return () if held is not None and not held.files else super().files(window)

    def _states_of(self, window: str) -> tuple[LakeFile, ...]:
        held = self._held.get(window)
        if held is None:
            return super()._states_of(window)
        folder, by = self.table.folder, self.table.spec.partition_by
        return tuple(
            LakeFile(path, str(folder / path), window, layout.partition_in(path, by), 0, 0)
            for path in held.states
        )


def held_windows(snapshot: TableSnapshot, windows: Iterable[str], columns: str) -> HeldWindows | None:
    """What ``snapshot`` holds of ``windows``; None where a column has another type on disk."""
    if snapshot.retyped:
        return None
    found = {
        window: HeldWindow(snapshot.state_paths(window), bool(snapshot.files(window))) for window in windows
    }
    return HeldWindows(columns, found)
