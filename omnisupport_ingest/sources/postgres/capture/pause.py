"""Pausing the capture of a source: a durable note in the home, which every capture obeys.

A capture that runs stops where the next batch ends; the slot stays, so nothing is lost, and the
server keeps the WAL until the capture goes on.
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note
from omnisupport_ingest.sources.postgres.capture.note_watch import StopOrNote
from omnisupport_ingest.sources.postgres.session.errors import CapturePaused

_NOTE = "paused.json"


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in force. ``reason`` is what the person said, or empty."""

    since: datetime
    reason: str

    def __str__(self) -> str:
        return f"since {self.since.isoformat(timespec='seconds')}" + (
            f" ({self.reason})" if self.reason else ""
        )


class PauseNote:
    """The note of one source, in its landing folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NOTE

    def write(self, reason: str = "") -> Pause:
        """Pause; a pause that is in force already stays as it is. Durable when this returns."""
        pause = Pause(datetime.now(UTC), reason)
        content = {"since": pause.since.isoformat(), "reason": reason}
        with gate("source.pause"):
            create_exclusively(self._path, json.dumps(content).encode() + b"\n")
        return self.read() or pause

    def clear(self) -> bool:
        """End the pause; returns whether there was one."""
        try:
            with gate("source.resume"):
                self._path.unlink()
                sync_folder(self._path.parent)
        except FileNotFoundError:
            return False
        except IsADirectoryError:
            raise IngestError(
                f"{self._path} is a folder: the source is paused, and no command ends this.",
                fix=f"Move {self._path} away.",
            ) from None
        return True

    @property
    def present(self) -> bool:
        return os.path.lexists(self._path)

    def read(self) -> Pause | None:
        """The pause in force, if any. A note that cannot be read is a pause all the same."""
        try:
            return read_note(Pause, self._path)
        except FileNotFoundError:
            return None
        except (OSError, Unreadable):
            # Of a link that leads nowhere the time is its own.
            since = datetime.fromtimestamp(self._path.lstat().st_mtime, UTC)
            return Pause(since, f"{self._path} cannot be read")


class StopOrPause(StopOrNote):
    """A stop that is also set while the source is paused."""

    def __init__(self, stop: threading.Event, note: PauseNote) -> None:
        self._pause = note
        super().__init__(stop, note)

    def raise_if_paused(self, source: str) -> None:
        """``CapturePaused`` if a pause has been seen, and not the stop."""
        if self.by_note:
            pause = self._pause.read()
            raise CapturePaused(
                f"The capture of {source} is paused{f' {pause}' if pause else ''}.",
                fix="omnisupport-ingest source resume",
            )
