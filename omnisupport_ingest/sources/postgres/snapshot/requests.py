"""Asking for another snapshot of a table, or of a range of its keys: a note in the home, which the capture
obeys once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.json_values import read_note
from omnisupport_ingest.key_range import KeyRange

_FOLDER = "snapshot_requests"


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """What is asked for: ``table`` (a contract's name), or the keys of ``scope``. ``name``: of its note."""

    table: str
    scope: KeyRange | None
    reason: str
    name: str

    def __str__(self) -> str:
        return self.table if self.scope is None else f"{self.table}, keys {self.scope}"


@dataclass(frozen=True, slots=True)
class _Content:
    reason: str
    scope: str | None = None


class SnapshotRequests:
    """The notes of one source, in its landing folder: one for each table and each range."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder / _FOLDER

    def write(self, table: str, reason: str, scope: KeyRange | None = None) -> bool:
        """Ask for ``table`` (a contract's name), or for a range of its keys; whether that was not asked for
        already. Durable then."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        content = {
            "table": table,
            "reason": reason,
            "at": datetime.now(UTC).isoformat(),
            "scope": None if scope is None else scope.text,
        }
        with gate("source.snapshot_request", table):
            return create_exclusively(
                self._folder / f"{_name(table, scope)}.json", json.dumps(content).encode() + b"\n"
            )

    def read(self) -> list[SnapshotRequest]:
        """What is asked for. A note that cannot be read asks for all of its table, with an empty reason.

        What is no file is no note.
        """
        if not self._folder.is_dir():
            return []
        notes = (file for file in sorted(self._folder.glob("[!.]*.json")) if file.is_file())
        return [_request(file) for file in notes]

    def whole_tables(self) -> dict[str, str]:
        """The tables of which all is asked for, with the reasons."""
        return {each.table: each.reason for each in self.read() if each.scope is None}

    def file(self, table: str) -> Path:
        """The note that asks for all of ``table``."""
        return self._folder / f"{_name(table, None)}.json"

    def clear(self, request: SnapshotRequest) -> None:
        """The snapshot has been planned, or one that reads more: nothing is asked for any more."""
        file = self._folder / f"{request.name}.json"
        if file.exists():
            with gate("source.snapshot_request_clear", request.table):
                file.unlink(missing_ok=True)
                sync_folder(file.parent)


def _name(table: str, scope: KeyRange | None) -> str:
    # The name of a contract has no dot.
    return table if scope is None else f"{table}.{sha256(scope.text.encode()).hexdigest()[:16]}"


def _request(file: Path) -> SnapshotRequest:
    table = file.stem.partition(".")[0]
    try:
        note = read_note(_Content, file)
        scope = None if note.scope is None else KeyRange.parse(note.scope)
        return SnapshotRequest(table, scope, note.reason, file.stem)
    except (OSError, ValueError):
        return SnapshotRequest(table, None, "", file.stem)
