"""What the log of a Delta table says changed between two versions, read entry by entry.

So it costs as much as was committed in between, not as much as the table has files (Delta protocol, actions).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.table import TableSnapshot
from omnisupport_ingest.storage import at_hand


@dataclass(frozen=True, slots=True)
class LogChanges:
    """What became of a table's rows.

    ``added``: files with rows that joined their window, by path; those that closing has folded into others
    since are among them, and still on disk. ``replaced``: windows whose rows were taken out, or some of them;
    of these windows no added file is told. ``gone``: the files that held those rows. ``noted``: every
    window that has another state. ``oldest``: when the first of the added files was committed; None without.
    """

    added: tuple[LakeFile, ...]
    replaced: frozenset[str]
    gone: tuple[LakeFile, ...]
    noted: frozenset[str]
    oldest: datetime | None = None

    @property
    def windows(self) -> frozenset[str]:
        """The windows with other rows."""
        return self.replaced | {file.window for file in self.added}


def changes_since(snapshot: TableSnapshot, version: int) -> LogChanges | None:
    """The changes after ``version``, up to the one of ``snapshot``.

    None if they cannot be told any more: an entry of the log is gone, or a file that has to be read.
    """
    files = files_since(snapshot, version)
    if files is None:
        return None
    replaced = frozenset(file.window for file in files.gone)
    told = tuple(file for file in files.added if file.window not in replaced)
    if not all(Path(file.uri).exists() for file in (*told, *files.gone)):
        return None
    return LogChanges(told, replaced, files.gone, files.noted, files.oldest)


@dataclass(frozen=True, slots=True)
class FileChanges:
    """``added`` files have rows now and had none, of ``gone`` ones it is the other way round; ``noted`` as in
    ``LogChanges``. ``states``: the files with the states that windows had then and have no more. A file may
    have been swept since. ``oldest``: when the first of the added ones was committed."""

    added: tuple[LakeFile, ...]
    gone: tuple[LakeFile, ...]
    noted: frozenset[str]
    states: tuple[LakeFile, ...] = ()
    oldest: datetime | None = None


def files_since(snapshot: TableSnapshot, version: int) -> FileChanges | None:
    """Which files hold other rows than at ``version``; None if an entry of the log is gone."""
    if version > snapshot.version:
        return None
    added: dict[str, LakeFile] = {}
    gone: dict[str, LakeFile] = {}
    noted: set[str] = set()
    told: set[str] = set()
    states: list[LakeFile] = []
    moments: dict[str, int] = {}
    for number in range(version + 1, snapshot.version + 1):
        entry = at_hand(snapshot.table.folder / "_delta_log" / f"{number:020d}.json")
        try:
            actions = [json.loads(line) for line in entry.read_text().splitlines() if line]
        except FileNotFoundError:
            return None
        for kind, file, data_change, moment in _files(snapshot, actions):
            if layout.is_state(file.path):
                noted.add(file.window)
                if kind == "add":
                    told.add(file.path)
                elif file.path not in told:
                    states.append(file)
            elif not data_change:
                # Closing folds files into others, and no row changes.
                continue
            elif kind == "add":
                added[file.path], moments[file.path] = file, moment
            elif added.pop(file.path, None) is None:
                gone[file.path] = file
    first = min((moments[path] for path in added), default=None)
    return FileChanges(
        added=tuple(added.values()),
        gone=tuple(gone.values()),
        noted=frozenset(noted),
        states=tuple(states),
        oldest=None if first is None else datetime.fromtimestamp(first / 1000, UTC),
    )


def _files(
    snapshot: TableSnapshot, actions: list[Mapping[str, Any]]
) -> Iterator[tuple[str, LakeFile, bool, int]]:
    """Kind of action, file, whether rows change, and when it was made (milliseconds since 1970)."""
    for action in actions:
        for kind in ("add", "remove"):
            told = action.get(kind)
            if told is not None:
                moment = told.get("modificationTime") or told.get("deletionTimestamp") or 0
                yield kind, _lake_file(snapshot, told), told.get("dataChange", True), moment


def _lake_file(snapshot: TableSnapshot, told: Mapping[str, Any]) -> LakeFile:
    path = unquote(told["path"])
    values = told.get("partitionValues") or {}
    partition = tuple((name, values.get(name)) for name in snapshot.table.spec.partition_by)
    rows = json.loads(told["stats"]).get("numRecords", 0) if told.get("stats") else 0
    return LakeFile(
        path=path,
        place=str(snapshot.table.folder / path),
        window=partition[0][1] or "" if partition else WHOLE_TABLE,
        partition=partition,
        rows=rows,
        bytes=told.get("size") or 0,
    )
