"""Restarting the capture of a source: a note in the home, which the capture that follows obeys once.

It ends where the next batch ends, as for a pause; its next start takes the note away.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note
from omnisupport_ingest.sources.postgres.capture.note_watch import StopOrNote
from omnisupport_ingest.sources.postgres.session.errors import CaptureRestarts

_NOTE = "restart.json"


@dataclass(frozen=True, slots=True)
class _Content:
    reason: str


class RestartNote:
    """The note of one source, in its landing folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NOTE

    def write(self, reason: str = "") -> None:
        """Ask for a restart; one that was asked for already stays as it is. Durable when this returns."""
        content = {"at": datetime.now(UTC).isoformat(), "reason": reason}
        with gate("source.restart"):
            create_exclusively(self._path, json.dumps(content).encode() + b"\n")

    def clear(self) -> None:
        """A start has been made: nothing is asked for any more."""
        if self.present:
            with gate("source.restart_clear"):
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)

    @property
    def present(self) -> bool:
        return self._path.is_file()

    @property
    def reason(self) -> str:
        """What the person said, or empty; also if the note is gone or cannot be read."""
        try:
            return read_note(_Content, self._path).reason
        except (OSError, Unreadable):
            return ""


class StopOrRestart(StopOrNote):
    """A stop that is also set once a restart is asked for."""

    def __init__(self, stop: threading.Event, note: RestartNote) -> None:
        self._restart = note
        super().__init__(stop, note)

    def raise_if_asked(self, source: str) -> None:
        """``CaptureRestarts`` if a restart has been seen, and not the stop."""
        if self.by_note:
            reason = self._restart.reason
            raise CaptureRestarts(
                f"A restart of the capture of {source} was asked for{f' ({reason})' if reason else ''}.",
                fix="Start it again: omnisupport-ingest capture",
            )
