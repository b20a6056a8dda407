"""Reads what changed between two versions of a Delta table, from the entries of its log.

The cost depends on how much was committed in between, not on the size of the table (Delta protocol, actions).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.deletion_vectors import DeletionVector, are_there
from omnisupport_ingest.lake.delta import entry_file
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.log_files import vector_of
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.stats import rows_in
from omnisupport_ingest.lake.table_spec import TablePlace
from omnisupport_ingest.storage import at_hand

_FileKey = tuple[str, DeletionVector | None]


@dataclass(frozen=True, slots=True)
class LogChanges:
    """How the rows of a table changed.

    ``added``: files whose rows entered their window; a file that was compacted since is still listed, and
    still on disk. ``replaced``: windows that lost some or all of the rows they had; ``added`` names no file
    of these. ``gone``: the files that held the lost rows. ``new_states``: windows with another state;
    ``states``: files of the states that they had before. ``oldest``: when the first of the added files was
    committed; None without one. ``same``: windows that were replaced by the same rows, and so are left out.
    """

    added: tuple[LakeFile, ...]
    replaced: frozenset[str]
    gone: tuple[LakeFile, ...]
    new_states: frozenset[str]
    states: tuple[LakeFile, ...] = ()
    oldest: datetime | None = None
    same: frozenset[str] = frozenset()

    @property
    def windows(self) -> frozenset[str]:
        """The windows whose rows changed."""
        return self.replaced | {file.window for file in self.added}

    def without(self, windows: frozenset[str]) -> LogChanges:
        """Return the changes without those of ``windows``, which were replaced by the same rows."""
        gone = tuple(file for file in self.gone if file.window not in windows)
        return replace(self, replaced=self.replaced - windows, gone=gone, same=windows)


def changes_since(snapshot: TableSnapshot, version: int) -> LogChanges | None:
    """Return the changes after ``version`` up to that of ``snapshot``.

    Returns None if the changes are no longer known: an entry of the log, or a file that has to be read, is
    gone.
    """
    files = files_since(snapshot, version)
    if files is None:
        return None
    replaced = frozenset(file.window for file in files.gone)
    added = tuple(file for file in files.added if file.window not in replaced)
    if not are_there((*added, *files.gone)):
        return None
    return LogChanges(added, replaced, files.gone, files.new_states, files.states, files.oldest)


def committed_at(table: TablePlace, version: int) -> datetime:
    """Return when ``version`` was committed. Raises ``FileNotFoundError`` if its entry is gone."""
    entry = at_hand(table.folder / "_delta_log" / f"{version:020d}.json")
    actions = (json.loads(line) for line in entry.read_text().splitlines() if line)
    timestamp = next((each["commitInfo"].get("timestamp") for each in actions if "commitInfo" in each), None)
    # A copy of the file has another time than the commit; an entry that another program wrote may have none.
    moment = timestamp / 1000 if isinstance(timestamp, (int, float)) else entry.stat().st_mtime
    return datetime.fromtimestamp(moment, UTC)


def by_window(files: Iterable[LakeFile]) -> dict[str, list[LakeFile]]:
    """Return ``files`` by their window."""
    found: dict[str, list[LakeFile]] = {}
    for file in files:
        found.setdefault(file.window, []).append(file)
    return found


def is_same_again(
    snapshot: TableSnapshot, window: str, before: WindowState, gone: Iterable[LakeFile]
) -> bool:
    """Whether ``window`` was made again and came to the same rows.

    ``before``: the state that it had. ``gone``: the files, with all of its rows, that it lost. False if
    another program had written to the window before: no state describes what it made.
    """
    now, files = snapshot.state(window), list(gone)
    if now is None or not before.same_rows(now) or not all(map(layout.unit_of, (f.path for f in files))):
        return False
    try:
        return sum(rows_in(at_hand(Path(file.uri))) for file in files) == before.checkpoint.rows
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class FileChanges:
    """Which files entered and left a table; a file may have been swept since.

    A window's rows before, without those in its ``gone`` files and with those in its ``added`` files, are its
    rows now. A compaction alone changes no rows; its files are listed only if their window lost rows as well.
    ``new_states``, ``oldest``: as in ``LogChanges``. ``states``: files of states that windows had before.
    """

    added: tuple[LakeFile, ...]
    gone: tuple[LakeFile, ...]
    new_states: frozenset[str]
    states: tuple[LakeFile, ...] = ()
    oldest: datetime | None = None


def files_since(snapshot: TableSnapshot, version: int) -> FileChanges | None:
    """Return the files that entered or left the table after ``version``; None if a log entry is gone."""
    if version > snapshot.version:
        return None
    moves = _Moves()
    new_states: set[str] = set()
    new_paths: set[str] = set()
    states: list[LakeFile] = []
    for number in range(version + 1, snapshot.version + 1):
        entry = at_hand(entry_file(snapshot.table.folder, number))
        try:
            actions = [json.loads(line) for line in entry.read_text().splitlines() if line]
        except FileNotFoundError:
            return None
        compactions: dict[layout.Partition, _Compaction] = defaultdict(_Compaction)
        for kind, file, data_change, moment in _files(snapshot, actions):
            if layout.is_state(file.path):
                new_states.add(file.window)
                if kind == "add":
                    new_paths.add(file.path)
                elif file.path not in new_paths:
                    states.append(file)
            elif not data_change:
                compaction = compactions[file.partition]
                (compaction.made if kind == "add" else compaction.replaced).append((file, moment))
            elif kind == "add":
                moves.add(file, moment)
            else:
                moves.remove(file)
        for compaction in compactions.values():
            moves.compact(compaction)
    added = moves.added()
    first = min((moment for _, moment in added), default=None)
    return FileChanges(
        added=tuple(file for file, _ in added),
        gone=tuple(file for file in moves.left.values() if file.window in moves.lost),
        new_states=frozenset(new_states),
        states=tuple(states),
        oldest=None if first is None else datetime.fromtimestamp(first / 1000, UTC),
    )


_Moved = tuple[LakeFile, int]
"""A file, and when the action on it was committed (milliseconds since 1970)."""


@dataclass(slots=True)
class _Compaction:
    """The files of one partition that a commit ``replaced`` by others with the same rows, and those it
    ``made``."""

    replaced: list[_Moved] = field(default_factory=list)
    made: list[_Moved] = field(default_factory=list)


@dataclass(slots=True)
class _Moves:
    """Which files entered and left a table, commit by commit. Files are distinguished by path and deletion
    vector: a file that gets another vector leaves with the one and enters with the other.

    Attributes:
        brought: files whose rows entered; a compaction may have replaced them since.
        entered: files that are held and have rows which entered.
        left: files that were held before and were removed, or replaced together with files that entered.
        lost: windows that lost rows.
    """

    brought: dict[_FileKey, _Moved] = field(default_factory=dict)
    entered: dict[_FileKey, _Moved] = field(default_factory=dict)
    left: dict[_FileKey, LakeFile] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def add(self, file: LakeFile, moment: int) -> None:
        self.brought[_key(file)] = self.entered[_key(file)] = file, moment

    def remove(self, file: LakeFile) -> None:
        if self.brought.pop(_key(file), None) is None:
            self.lost.add(file.window)
        self._leave(file)

    def compact(self, compaction: _Compaction) -> None:
        if not any(_key(file) in self.entered for file, _ in compaction.replaced):
            # The new files stand for files that were held before; these may have been swept.
            return
        for file, _ in compaction.replaced:
            self._leave(file)
        self.entered |= {_key(file): (file, moment) for file, moment in compaction.made}

    def added(self) -> list[_Moved]:
        """Return the files whose rows entered.

        Where a window lost rows, files that entered may have been compacted with others and lost with them:
        there it is the files that are held.
        """
        brought = [each for each in self.brought.values() if each[0].window not in self.lost]
        return brought + [each for each in self.entered.values() if each[0].window in self.lost]

    def _leave(self, file: LakeFile) -> None:
        if self.entered.pop(_key(file), None) is None:
            self.left[_key(file)] = file


def _key(file: LakeFile) -> _FileKey:
    return file.path, file.vector


def _files(
    snapshot: TableSnapshot, actions: list[Mapping[str, Any]]
) -> Iterator[tuple[str, LakeFile, bool, int]]:
    """Yield kind of action, file, whether rows change, and its time (milliseconds since 1970)."""
    for action in actions:
        for kind in ("add", "remove"):
            fields = action.get(kind)
            if fields is not None:
                moment = fields.get("modificationTime") or fields.get("deletionTimestamp") or 0
                yield kind, _lake_file(snapshot, fields), fields.get("dataChange", True), moment


def _lake_file(snapshot: TableSnapshot, fields: Mapping[str, Any]) -> LakeFile:
    path = unquote(fields["path"])
    values = fields.get("partitionValues") or {}
    partition = tuple((name, values.get(name)) for name in snapshot.table.spec.partition_by)
    rows = json.loads(fields["stats"]).get("numRecords", 0) if fields.get("stats") else 0
    vector = vector_of(fields)
    if vector is not None:
        rows = (rows or _rows_on_disk(snapshot.table.folder / path, vector)) - vector.cardinality
    return LakeFile(
        path=path,
        full_path=str(snapshot.table.folder / path),
        window=partition[0][1] or "" if partition else WHOLE_TABLE,
        partition=partition,
        rows=rows,
        bytes=fields.get("size") or 0,
        vector=vector,
    )


def _rows_on_disk(file: Path, vector: DeletionVector) -> int:
    """Return the rows of a file whose removal does not say how many it had; it may have been swept."""
    try:
        return rows_in(at_hand(file))
    except FileNotFoundError:
        return vector.cardinality
