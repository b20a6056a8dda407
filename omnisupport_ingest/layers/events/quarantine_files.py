"""Which files of the quarantine count: those that the states of ``deduped_events`` name.

The events of a window are judged into two tables, and one commit reaches only one of them. So the state of
the deduped window is the record of both: its ``companions`` are the window's quarantine files. Readers of
withheld events read these, whatever the log of ``quarantine`` holds. That log follows in two commits: a file
is added before a state names it, and removed after no state names it any more.

A crash, or a writer that lost a race, leaves files that no state names. The path of a file tells whether a
state may still name it. It contains (as the generation in the unit's folder) the version of
``deduped_events`` that the file was judged for, and a commit makes exactly the version that it was planned
for, or fails. Once that version exists and does not name the file, no version ever will.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.layout import WINDOW, LakeFile, generation_of, partition_in
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import at_hand, storage_of

WITHHELD = "quarantine/"
"""Prefix of the name of a quarantine file among the inputs of net changes."""

_LOOKS = 5
"""How often to look for two versions that belong together, while others commit."""


_FOOTERS_KEPT = 16_384


class EventsGone(IngestError):
    """A file of events that a version of the lake was made from, or names, is not there any more.

    Fix: Let the pipeline run, by ``omnisupport-ingest up`` or ``materialize``; then try again.
    """


@dataclass(frozen=True, slots=True)
class Unsettled:
    """How the log of ``quarantine`` differs from what the state of ``window`` names.

    ``missing``: named files that the log does not hold. ``left``: held files that no state names, now or
    later.
    """

    window: str
    missing: tuple[str, ...]
    left: tuple[LakeFile, ...]


@dataclass(frozen=True)
class QuarantineFiles:
    """The quarantine files of one version of a source's deduped events (None: that table does not exist)."""

    deduped: TableSnapshot | None
    quarantine: TableSnapshot

    @classmethod
    def newest(cls, workspace: Workspace, source: str) -> QuarantineFiles | None:
        """Return the newest version; None before the first event was judged. Creates no table."""
        return cls.of_tables(workspace.deduped(source), workspace.quarantine(source))

    @classmethod
    def of_tables(cls, deduped: LakeTable, quarantine: LakeTable) -> QuarantineFiles | None:
        """Return the newest version of both tables as of one moment, unless others keep committing."""
        for number in range(_LOOKS):
            if number and deduped.looks is not None:
                deduped.looks.begin()
            judged, held = deduped.look(), quarantine.look()
            if judged is None or judged.is_newest():
                break
        return None if held is None else cls(judged, held)

    def of(self, window: str) -> tuple[LakeFile, ...]:
        """Return the quarantine files of ``window``, of all tables. Raises ``EventsGone`` if one is
        missing."""
        named = named_by(self.state(window))
        # Most windows withhold nothing, and this is called for each table and window.
        held = self._held(window) if named else {}
        return tuple(held.get(path) or self.on_disk(path) for path in named)

    def there(self, window: str) -> tuple[LakeFile, ...]:
        """Return the quarantine files of ``window`` that are on disk."""
        found = []
        held = self._held(window)
        for path in named_by(self.state(window)):
            with suppress(EventsGone):
                found.append(held.get(path) or self.on_disk(path))
        return tuple(found)

    def all(self) -> tuple[LakeFile, ...]:
        """Return the quarantine files of every window."""
        windows = self.deduped.windows() if self.deduped is not None else ()
        return tuple(file for window in windows for file in self.of(window))

    def shown(self, window: str | None = None) -> Iterator[tuple[LakeFile, WindowState | None]]:
        """Yield the files of ``window`` (None: of every window), each with the state that names it, to be
        shown to people.

        If the state of a window is unknown, yield all files that the table holds of it, with None: better to
        show too much than nothing.
        """
        every = sorted({*self._windows, *self.quarantine.windows()}) if window is None else [window]
        for each in every:
            state = self.state(each)
            for file in self.quarantine.files(each) if state is None else self.of(each):
                yield file, state

    def unsettled(self, window: str) -> Unsettled | None:
        """Return what of ``window`` must be added to, or removed from, the quarantine's log; None:
        nothing."""
        state = self.state(window)
        if state is None or self.deduped is None:
            # The window will be judged again, and will then name its files.
            return None
        held, named = self._held(window), named_by(state)
        missing = tuple(path for path in named if path not in held)
        left = tuple(
            file
            for path, file in held.items()
            if path not in named and generation_of(path) <= self.deduped.version
        )
        return Unsettled(window, missing, left) if missing or left else None

    def state(self, window: str) -> WindowState | None:
        """Return the state of the deduped ``window``; None if it has none that can be read."""
        return self.deduped.state(window) if self.deduped is not None else None

    @cached_property
    def _windows(self) -> list[str]:
        return self.deduped.windows() if self.deduped is not None else []

    def _held(self, window: str) -> dict[str, LakeFile]:
        return {file.path: file for file in self.quarantine.files(window)}

    def may_have(self, path: str, contract: TableContract) -> bool:
        """Whether the file at ``path`` may have events of the contract's table; True if that is unknown."""
        try:
            return _may_have(str(at_hand(self.quarantine.table.folder / path)), contract.table)
        except (OSError, pa.ArrowException):
            return True

    def on_disk(self, path: str) -> LakeFile:
        """Return the file at ``path``, whatever names it. Raises ``EventsGone`` if it is missing."""
        table = self.quarantine.table
        file = at_hand(table.folder / path)
        if not file.exists():
            raise EventsGone(
                f"{file} is not there, but a window of deduped events names it as its quarantined events.",
                fix="Run the window again (omnisupport-ingest up does it by itself, or materialize): it is "
                "judged anew from raw.",
            )
        partition = partition_in(path, table.spec.partition_by)
        window = dict(partition)[WINDOW] or ""
        return LakeFile(path, str(file), window, partition, rows_in(file), file.stat().st_size)


def named_by(state: WindowState | None) -> tuple[str, ...]:
    """The paths of the quarantine files that belong to a window of deduped events."""
    return state.companions if state is not None else ()


def withheld_of(files: Iterable[LakeFile], contract: TableContract) -> tuple[LakeFile, ...]:
    """Those of the quarantine ``files`` that may have events of the contract's table, by their footers."""
    return tuple(file for file in files if _may_have(file.uri, contract.table))


def may_have_any(file: LakeFile, tables: Iterable[str]) -> bool:
    """Whether the quarantine ``file`` may have events of one of ``tables`` (names at the source), by its
    footer."""
    return any(_may_have(file.uri, table) for table in tables)


def _may_have(uri: str, table: str) -> bool:
    return any(span is None or span[0] <= table <= span[1] for span in _tables_in(uri))


@lru_cache(maxsize=_FOOTERS_KEPT)
def _tables_in(uri: str) -> tuple[TableName | None, ...]:
    """Return the first and last table name in each row group of a file; None: any. A file never changes."""
    with pq.ParquetFile(uri) as parquet:
        schema, footer = parquet.schema, parquet.metadata
        place = next(leaf for leaf in range(len(schema)) if schema.column(leaf).path == "source_table")
        groups = (footer.row_group(number).column(place) for number in range(footer.num_row_groups))
        statistics = [group.statistics for group in groups]
    return tuple(
        None if each is None or not each.has_min_max else (each.min, each.max) for each in statistics
    )


def gone_from_disk(quarantine: LakeTable, state: WindowState | None) -> bool:
    """Whether a quarantine file that ``state`` names is missing on disk: the window must be judged again."""
    storage = storage_of(quarantine.folder)
    return any(not storage.exists(quarantine.folder / path) for path in named_by(state))


def named_anywhere(workspace: Workspace, source: str) -> frozenset[str]:
    """Return every path that some state of the newest deduped events names; ``sweep`` keeps these."""
    judged = workspace.deduped(source).look()
    windows = judged.windows() if judged is not None else ()
    return frozenset(path for window in windows if judged for path in named_by(judged.state(window)))
