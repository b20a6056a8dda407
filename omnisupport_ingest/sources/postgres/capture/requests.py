"""Requests to a running capture: files in the home that request a pause or a restart.

A running capture checks for them, and ends with the next batch. A pause lasts until a person resumes the
source. The slot stays, so nothing is lost: the server keeps the WAL until capture continues. A restart
request is fulfilled once: the next start removes it.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import encode, read_note
from omnisupport_ingest.sources.postgres.session.errors import CapturePaused, CaptureRestarts

_POLL_SECONDS = 0.5
"""Seconds between two checks of a running capture for a request."""


class Request(Protocol):
    """A request that may be present."""

    @property
    def present(self) -> bool: ...


class StopOrRequest(threading.Event):
    """A stop that is also set once a request has been present. Use ``is_set`` to obey both."""

    def __init__(self, stop: threading.Event, request: Request) -> None:
        super().__init__()
        self._stop, self._request = stop, request
        self._next_poll = 0.0
        self.is_set()

    def is_set(self) -> bool:
        if self._stop.is_set() or super().is_set():
            return True
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + _POLL_SECONDS
            if self._request.present:
                # It stays set if the request goes away, because somebody may be stopping already.
                self.set()
                return True
        return False

    @property
    def by_request(self) -> bool:
        """Whether the request has been seen, but the stop is not set."""
        return super().is_set() and not self._stop.is_set()


_PAUSE_FILE = "paused.json"


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause in force. ``reason``: given by the person, or empty."""

    since: datetime
    reason: str

    def __str__(self) -> str:
        return f"since {self.since.isoformat(timespec='seconds')}" + (
            f" ({self.reason})" if self.reason else ""
        )


class PauseRequest:
    """The request to pause one source: a file in its landing folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _PAUSE_FILE

    def write(self, reason: str = "") -> Pause:
        """Pause the source. A pause in force stays as it is. Durable on return."""
        pause = Pause(datetime.now(UTC), reason)
        with failpoint("source.pause"):
            create_exclusively(self._path, encode(pause))
        return self.read() or pause

    def clear(self) -> bool:
        """End the pause. Return whether there was one. Raises ``IngestError`` if its path is a folder."""
        try:
            with failpoint("source.resume"):
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
        """Return the pause in force, or None. A file that cannot be read still counts as a pause."""
        try:
            return read_note(Pause, self._path)
        except FileNotFoundError:
            return None
        except (OSError, Unreadable):
            # ``lstat``, because it may be a link that leads nowhere.
            since = datetime.fromtimestamp(self._path.lstat().st_mtime, UTC)
            return Pause(since, f"{self._path} cannot be read")


class StopOrPause(StopOrRequest):
    """A stop that is also set while the source is paused."""

    def __init__(self, stop: threading.Event, request: PauseRequest) -> None:
        self._pause = request
        super().__init__(stop, request)

    def raise_if_paused(self, source: str) -> None:
        """Raise ``CapturePaused`` if a pause has been seen, but the stop is not set."""
        if self.by_request:
            pause = self._pause.read()
            raise CapturePaused(
                f"The capture of {source} is paused{f' {pause}' if pause else ''}.",
                fix="omnisupport-ingest source resume",
            )


_RESTART_FILE = "restart.json"


@dataclass(frozen=True, slots=True)
class _Restart:
    reason: str
    at: datetime | None = None


class RestartRequest:
    """The request to restart the capture of one source: a file in its landing folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _RESTART_FILE

    def write(self, reason: str = "") -> None:
        """Request a restart. An earlier request stays as it is. Durable on return."""
        with failpoint("source.restart"):
            create_exclusively(self._path, encode(_Restart(reason, datetime.now(UTC))))

    def clear(self) -> None:
        """Remove the request. Call it when capture has started."""
        if self.present:
            with failpoint("source.restart_clear"):
                self._path.unlink(missing_ok=True)
                sync_folder(self._path.parent)

    @property
    def present(self) -> bool:
        return self._path.is_file()

    @property
    def reason(self) -> str:
        """The reason that the person gave; empty if none, or if the file is gone or cannot be read."""
        try:
            return read_note(_Restart, self._path).reason
        except (OSError, Unreadable):
            return ""


class StopOrRestart(StopOrRequest):
    """A stop that is also set once a restart is requested."""

    def __init__(self, stop: threading.Event, request: RestartRequest) -> None:
        self._restart = request
        super().__init__(stop, request)

    def raise_if_requested(self, source: str) -> None:
        """Raise ``CaptureRestarts`` if a restart was requested, but the stop is not set."""
        if self.by_request:
            reason = self._restart.reason
            raise CaptureRestarts(
                f"A restart of the capture of {source} was requested{f' ({reason})' if reason else ''}."
            )
