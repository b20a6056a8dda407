"""Locks between processes, and the holder of a lock.

A lock is the kernel's (``flock(2)``): it ends with its holder, however that dies, so nobody has to remove
one. ``NamedLock`` is a lock file whose text names the holder, for the message of a second process; the text
decides nothing. Folders are locked directly, without a lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from omnisupport_ingest.durable import open_lock
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import decode_note, encode_line

_RECORD_BYTES = 4096
"""Bytes of a holder's record. A record is written whole in one call, so a reader never sees a part of it."""

LOOK_SECONDS = 1.0
"""Seconds to try for a lock: a process that only looks (``NamedLock.holder``) shares it for some
microseconds."""


def try_lock(descriptor: int, *, seconds: float = 0.0) -> bool:
    """Return whether the open file or folder could be locked for this process alone within ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)


def wait_for_lock(descriptor: int) -> None:
    """Lock the open file or folder for this process alone; wait while another process has it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of the existing ``folder``; wait while another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        wait_for_lock(descriptor)
        yield
    finally:
        # Unlocked before it is closed: a process that was forked meanwhile has the descriptor too.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock. All None if it has not written its record yet."""

    command: str | None = None
    pid: int | None = None
    host: str | None = None
    since: datetime | None = None

    def __str__(self) -> str:
        if self.pid is None or self.since is None:
            return "another process"
        since = self.since.isoformat(timespec="seconds")
        if self.command is None:
            return f"process {self.pid} on {self.host}, since {since}"
        return f"`{self.command}` (process {self.pid}, since {since})"

    @property
    def stop(self) -> str:
        """The command that stops the holder, as the beginning of a sentence."""
        if self.pid is None:
            return "Stop it (Ctrl-C where it runs)"
        return f"Stop it (Ctrl-C where it runs, or `kill {self.pid}`)"


class LockTaken(Exception):
    """Another process holds the lock."""

    def __init__(self, holder: Holder) -> None:
        super().__init__(str(holder))
        self.holder = holder


class NamedLock:
    """A lock file that this process holds; made by ``take``. Call ``release``, or use it as a context
    manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, command: str | None = None) -> Self:
        """Lock the file ``path``, which is made if missing, and write ``command`` and this process into it.

        Raises:
            LockTaken: another process holds it for longer than ``LOOK_SECONDS``.
            LockUnusable: it is no regular file.
        """
        # Child processes must not inherit it: they would keep the lock after this process has died.
        descriptor = open_lock(path)
        if not try_lock(descriptor, seconds=LOOK_SECONDS):
            holder = _read(descriptor)
            os.close(descriptor)
            raise LockTaken(holder)
        record = Holder(command, os.getpid(), socket.gethostname(), datetime.now(UTC).replace(microsecond=0))
        # Fixed length, never truncated: a reader sees the last holder or this one.
        # No failpoint: a lock of the kernel's, gone with its process; the text only says who holds it.
        os.pwrite(descriptor, encode_line(record).encode().ljust(_RECORD_BYTES), 0)
        return cls(descriptor)

    @staticmethod
    def holder(path: Path) -> Holder | None:
        """Return who holds the lock file ``path`` now; None if nobody does. The caller holds nothing
        afterwards."""
        try:
            descriptor = open_lock(path, create=False)
        except FileNotFoundError:
            return None
        try:
            # A shared lock, so that two processes that only look do not take each other for a holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(descriptor)
        finally:
            os.close(descriptor)
        return None

    def keep_when_executing(self) -> None:
        """Keep the lock even when this process executes another program."""
        assert self._descriptor is not None
        os.set_inheritable(self._descriptor, True)

    def release(self) -> None:
        """Release the lock. Does nothing if it is released already.

        The file stays: if it were removed, two processes could lock two files of the same name.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _read(descriptor: int) -> Holder:
    try:
        return decode_note(Holder, os.pread(descriptor, _RECORD_BYTES, 0))
    except Unreadable:
        return Holder()
