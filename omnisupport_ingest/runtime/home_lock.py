"""One supervisor per home: a lock file that says who holds it.

The lock is the kernel's (``flock``), so it is gone with its holder however that ends; the text in
the file is only for the message to the second one.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from omnisupport_ingest.durable import open_lock
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.home import Home
from omnisupport_ingest.json_values import from_note


class HomeInUse(IngestError):
    """Another command has its processes running on the same home."""

    exit_code = 6


def in_use(home: Home) -> bool:
    """Whether a command has its processes running on ``home`` at this moment."""
    descriptor = open_lock(_lock_file(home))
    try:
        # Shared, so that two who only look do not take one another for a holder.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True)
class _Holder:
    pid: int
    command: str
    since: str


class HomeLock:
    """Held by a command while its processes run on ``home``; a context manager.

    Entering raises ``HomeInUse``, which names the holder, if another process holds it.
    """

    def __init__(self, home: Home, command: str) -> None:
        """``command`` is what the holder is called in the message, like ``up``."""
        self._home, self._command = home, command
        self._descriptor = -1

    def __enter__(self) -> HomeLock:
        # Not inherited by children: a daemon must not keep the lock of its starter.
        descriptor = open_lock(_lock_file(self._home))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            raise self._in_use(holder) from None
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
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)

    def _in_use(self, holder: bytes) -> HomeInUse:
        stop = "Stop it (Ctrl-C where it runs)"
        try:
            record = from_note(_Holder, parse_json(holder))
            who = f"`{record.command}` (process {record.pid}, since {record.since})"
            stop = f"Stop it (Ctrl-C where it runs, or `kill {record.pid}`)"
        except Unreadable:
            who = "another process"  # It has locked the file and not yet written its name.
        return HomeInUse(
            f"{self._home.path} is in use by {who}.",
            fix=f"{stop}, or set OMNISUPPORT_HOME to another folder.",
        )


def _lock_file(home: Home) -> Path:
    return home.run / "supervisor.lock"
