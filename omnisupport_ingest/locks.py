"""Locks between processes, and who holds one.

A lock is the kernel's (``flock(2)``): it ends with its holder, however that dies, so nobody has to clear one.
``NamedLock`` is a lock file whose text names the holder for the message to the second process; the text
decides nothing. Folders are locked as they are, without a file.
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
from types import TracebackType
from typing import Self

from omnisupport_ingest.durable import open_lock
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.records import decode_note, encode_line

_RECORD_BYTES = 4096
"""Length of a holder's record. It is written at once and in full, so a reader never sees half of one."""

LOOK_SECONDS = 1.0
"""How long to try for a lock: who only looks (``NamedLock.holder``) shares it for some microseconds."""


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
    """Lock the open file or folder for this process alone, waiting for whoever has it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


@contextlib.contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which exists, alone; wait for whoever has it."""
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
    """A held lock file; made by ``take``. ``release`` it, or use it as a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, path: Path, command: str | None = None) -> Self:
        """Lock the file ``path``, made if it is missing, and name ``command`` and this process in it.

        Raises:
            LockTaken: another process holds it for longer than a look takes.
            LockUnusable: no regular file stands there.
        """
        # Not inherited by child processes, which would keep the lock after this one has died.
        descriptor = open_lock(path)
        if not try_lock(descriptor, seconds=LOOK_SECONDS):
            holder = _read(descriptor)
            os.close(descriptor)
            raise LockTaken(holder)
        record = Holder(command, os.getpid(), socket.gethostname(), datetime.now(UTC).replace(microsecond=0))
        # Of fixed length, never a truncation: a reader sees the last holder or this one.
        # No failpoint: a lock of the kernel's, gone with its process; the text only says who holds it.
        os.pwrite(descriptor, encode_line(record).encode().ljust(_RECORD_BYTES), 0)
        return cls(descriptor)

    @staticmethod
    def holder(path: Path) -> Holder | None:
        """Return who holds the lock file ``path`` at this moment, or None. Holds nothing on return."""
        try:
            descriptor = open_lock(path, create=False)
        except FileNotFoundError:
            return None
        try:
            # Shared, so that two who only look do not take one another for a holder.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read(descriptor)
        finally:
            os.close(descriptor)
        return None

    def keep_when_executing(self) -> None:
        """Keep the lock also when this process executes another program."""
        assert self._descriptor is not None
        os.set_inheritable(self._descriptor, True)

    def release(self) -> None:
        """Let go of the lock; once more does nothing.

        The file stays: removing it would let two processes lock two files of one name.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _read(descriptor: int) -> Holder:
    try:
        return decode_note(Holder, os.pread(descriptor, _RECORD_BYTES, 0))
    except Unreadable:
        return Holder()
