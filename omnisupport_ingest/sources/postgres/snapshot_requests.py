"""Asking for another snapshot of a table: a note in the home, which the capture obeys once."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.failpoints import gate

_FOLDER = "snapshot_requests"


class SnapshotRequests:
    """The notes of one source, in its landing folder: one for each table."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder / _FOLDER

    def write(self, table: str, reason: str) -> bool:
        """Ask for ``table`` (a contract's name); whether it was not asked for already. Durable then."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        content = {"table": table, "reason": reason, "at": datetime.now(UTC).isoformat()}
        with gate("source.snapshot_request", table):
            return create_exclusively(self._path(table), json.dumps(content).encode() + b"\n")

    def read(self) -> dict[str, str]:
        """The tables asked for, with the reasons; a note that cannot be read has an empty one."""
        if not self._folder.is_dir():
            return {}
        return {file.stem: _reason(file) for file in sorted(self._folder.glob("[!.]*.json"))}

    def clear(self, table: str) -> None:
        """The snapshot has been planned: nothing is asked for any more."""
        file = self._path(table)
        if file.exists():
            with gate("source.snapshot_request_clear", table):
                file.unlink(missing_ok=True)
                sync_folder(file.parent)

    def _path(self, table: str) -> Path:
        return self._folder / f"{table}.json"


def _reason(file: Path) -> str:
    try:
        return str(json.loads(file.read_text())["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
