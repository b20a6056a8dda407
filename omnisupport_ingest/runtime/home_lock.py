"""One supervisor per home, and one keeper of its embedded server: each has a lock file in the home."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.locks import Holder, LockTaken, NamedLock


class HomeInUse(IngestError):
    """Another command has its processes running on the same home."""

    exit_code = 6


SUPERVISOR = "supervisor"
"""Lock of the command whose processes run on the home."""

EMBEDDED_SERVER = "embedded-postgres"
"""Lock of the process that keeps the embedded PostgreSQL running."""


def holder(home: Home, lock: str = SUPERVISOR) -> Holder | None:
    """Who holds ``lock`` of ``home`` at this moment; None if nobody does."""
    return NamedLock.holder(_lock_file(home, lock))


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
        self._held: NamedLock | None = None

    def __enter__(self) -> Self:
        try:
            self._held = NamedLock.take(_lock_file(self._home, self._lock), self._command)
        except LockTaken as taken:
            raise HomeInUse(
                f"{self._home.path} is in use by {taken.holder}.",
                fix=f"{taken.holder.stop}, or set OMNISUPPORT_HOME to another folder.",
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def keep(self) -> None:
        """Enter, and hold the lock until this process ends, whatever program it executes meanwhile."""
        self.__enter__()
        assert self._held is not None
        self._held.keep_when_executing()

    def release(self) -> None:
        """Let go of the lock; once more does nothing."""
        if self._held is not None:
            self._held.release()


def _lock_file(home: Home, lock: str) -> Path:
    return home.run / f"{lock}.lock"
