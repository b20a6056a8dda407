"""Lock files of a home: one supervisor per home, and one keeper of its embedded server."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.locks import Holder, LockTaken, NamedLock


class HomeInUse(IngestError):
    """Another command has its processes running on the same home.

    Fix: Stop what the message names, or set ``OMNISUPPORT_HOME`` to another folder.
    """

    exit_code = 6


SUPERVISOR = "supervisor"
"""Lock of the command whose processes run on the home."""

EMBEDDED_SERVER = "embedded-postgres"
"""Lock of the process that keeps the embedded PostgreSQL running."""

DAEMON_HOLDS = "serve daemon"
"""Name of the holder of a home whose services are started one by one."""

_TAKING_IN = frozenset({"up", "demo", DAEMON_HOLDS})
"""Commands that hold the home while they take in what lands. Others hold it, too, so that nothing runs beside
them, such as `materialize` and `home copy`."""

_SERVICE = "service-{}"


def service_lock(name: str) -> str:
    """Return the lock of the service ``name`` when it is started alone (``serve``)."""
    return _SERVICE.format(name)


def holder(home: Home, lock: str = SUPERVISOR) -> Holder | None:
    """Return who holds ``lock`` of ``home`` now; None if nobody does."""
    return NamedLock.holder(_lock_file(home, lock))


def in_use(home: Home) -> bool:
    """Whether a command has processes running on ``home`` now."""
    return holder(home) is not None


def takes_in(held: Holder | None) -> bool:
    """Whether the holder of a home takes in what lands. None: nobody holds it."""
    return held is not None and (held.command is None or held.command in _TAKING_IN)


class HomeLock:
    """Held by a command while its processes run on ``home``. A context manager.

    Entering raises ``HomeInUse``, which names the holder, if another process holds the lock. A command that
    would start processes beside services of ``serve`` raises it as well, because both use the same sockets
    and files.
    """

    def __init__(self, home: Home, command: str, lock: str = SUPERVISOR) -> None:
        """``command``: the name of the holder in the message, such as ``up``."""
        self._home, self._command, self._lock = home, command, lock
        self._held: NamedLock | None = None

    def __enter__(self) -> Self:
        try:
            self._held = NamedLock.take(_lock_file(self._home, self._lock), self._command)
        except LockTaken as taken:
            raise _in_use_by(self._home, taken.holder) from None
        if self._lock == SUPERVISOR and self._command != DAEMON_HOLDS:
            # The command looks for services with its lock held, and a service looks for a command with its
            # own lock held. So of two that begin at the same time, at least one sees the other.
            for file in sorted(self._home.run.glob(f"{service_lock('*')}.lock")):
                if (holder := NamedLock.holder(file)) is not None:
                    self.release()
                    raise _in_use_by(self._home, holder)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def keep(self) -> None:
        """Enter, and hold the lock until this process ends, even if it executes another program meanwhile."""
        self.__enter__()
        assert self._held is not None
        self._held.keep_when_executing()

    def release(self) -> None:
        """Release the lock. Does nothing if it is not held."""
        if self._held is not None:
            self._held.release()


def _in_use_by(home: Home, holder: Holder) -> HomeInUse:
    return HomeInUse(
        f"{home.path} is in use by {holder}.",
        fix=f"{holder.stop}, or set OMNISUPPORT_HOME to another folder.",
    )


def _lock_file(home: Home, lock: str) -> Path:
    return home.run / f"{lock}.lock"
