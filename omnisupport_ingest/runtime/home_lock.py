"""One supervisor per home, and one keeper of its embedded server: lock files that say who holds them.

The lock is the kernel's (``flock``), so it is gone with its holder however that ends; the text in
the file is only for the message to the second one.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from omnisupport_ingest.durable import open_lock
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.home import Home
from omnisupport_ingest.json_values import from_note

_LONGEST = 4096
"""Bytes of a lock file that are read."""

_LOOK_SECONDS = 1.0
"""How long to try. ``holder`` shares the lock for some microseconds; a command that runs keeps it."""


class HomeInUse(IngestError):
    """Another command has its processes running on the same home."""

    exit_code = 6


@dataclass(frozen=True, slots=True)
class Holder:
    """The command that holds a lock. All None if it has not written its name yet."""

    command: str | None = None
    pid: int | None = None
    since: str | None = None

    def __str__(self) -> str:
        if self.command is None:
            return "another process"
        return f"`{self.command}` (process {self.pid}, since {self.since})"

    @property
    def stop(self) -> str:
        """How to stop it, as the beginning of a sentence."""
        if self.pid is None:
            return "Stop it (Ctrl-C where it runs)"
        return f"Stop it (Ctrl-C where it runs, or `kill {self.pid}`)"


SUPERVISOR = "supervisor"
"""Lock of the command whose processes run on the home."""

EMBEDDED_SERVER = "embedded-postgres"
"""Lock of the process that keeps the embedded PostgreSQL running."""


def holder(home: Home, lock: str = SUPERVISOR) -> Holder | None:
    """Who holds ``lock`` of ``home`` at this moment; None if nobody does."""
    descriptor = open_lock(_lock_file(home, lock))
    try:
        # Shared, so that two who only look do not take one another for a holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(os.pread(descriptor, _LONGEST, 0))
    finally:
        os.close(descriptor)
    return None


def in_use(home: Home) -> bool:
    """Whether a command has its processes running on ``home`` at this moment."""
    return holder(home) is not None


class HomeLock:
    """Held by a command while its processes run on ``home``; a context manager.

    Entering raises ``HomeInUse``, which names the holder, if another process holds it.
    """

    def __init__(self, home: Home, command: str, lock: str = SUPERVISOR) -> None:
        """``command`` is what the holder is called in the message, like ``up``."""
        self._home, self._command, self._lock = home, command, lock
        self._descriptor = -1

    def __enter__(self) -> HomeLock:
        # Not inherited by children: a daemon must not keep the lock of its starter.
        descriptor = open_lock(_lock_file(self._home, self._lock))
        try:
            _take(descriptor)
        except BlockingIOError:
            found = os.pread(descriptor, _LONGEST, 0)
            os.close(descriptor)
            raise self._in_use(_named(found)) from None
        record = {
            "pid": os.getpid(),
            "command": self._command,
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the lock; once more does nothing."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1

    def _in_use(self, found: Holder) -> HomeInUse:
        return HomeInUse(
            f"{self._home.path} is in use by {found}.",
            fix=f"{found.stop}, or set OMNISUPPORT_HOME to another folder.",
        )


def _take(descriptor: int) -> None:
    """Lock the file; ``BlockingIOError`` if another process has it for longer than a look takes."""
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS / 50)


def _named(record: bytes) -> Holder:
    try:
        return from_note(Holder, parse_json(record))
    except Unreadable:
        return Holder()  # It has locked the file and not yet written its name.


def _lock_file(home: Home, lock: str) -> Path:
    return home.run / f"{lock}.lock"
