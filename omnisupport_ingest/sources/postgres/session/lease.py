"""One capture per home and source: a lock that the operating system drops when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from omnisupport_ingest.durable import open_lock
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.json_values import read_note
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning

_NAME_BYTES = 512
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lease; all None if it has not written its name yet."""

    pid: int | None
    host: str | None
    since: datetime | None


class Lease:
    """A held lease; ``release`` it, or use it as a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, run_folder: Path, source: str) -> Lease:
        """Take the lease on ``source``; ``CaptureRunning`` says who holds it."""
        path = run_folder / f"capture-{source}.lock"
        # Not inherited by child processes, which would keep the lock after this one has died.
        descriptor = open_lock(path)
        if not _locked(descriptor):
            holder = _holder(path)
            os.close(descriptor)
            raise CaptureRunning(
                f"Source {source} is being captured into this home already{_named(holder)}.",
                fix="Leave that process running, or stop it before you start another.",
            )
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        # One write of fixed length, never a truncation: a reader sees the last holder or this one.
        os.pwrite(descriptor, json.dumps(about).encode().ljust(_NAME_BYTES), 0)
        return cls(descriptor)

    @staticmethod
    def is_held(run_folder: Path, source: str) -> bool:
        """Whether some process captures ``source`` now. Holds nothing on return."""
        try:
            descriptor = open_lock(run_folder / f"capture-{source}.lock", create=False)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @classmethod
    def holder(cls, run_folder: Path, source: str) -> Holder | None:
        """Return the process that captures ``source`` now, or None."""
        if not cls.is_held(run_folder, source):
            return None
        return _holder(run_folder / f"capture-{source}.lock")

    def release(self) -> None:
        # The file stays: removing it would let two processes lock two files of one name.
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _locked(descriptor: int) -> bool:
    """Whether the lock could be taken. A process that only looks (``is_held``) has it briefly, and is waited
    for.
    """
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def _holder(path: Path) -> Holder:
    try:
        return read_note(Holder, path)
    except (OSError, Unreadable):
        return Holder(None, None, None)


def _named(holder: Holder) -> str:
    if holder.since is None:
        return ""
    since = holder.since.isoformat(timespec="seconds")
    return f" by process {holder.pid} on {holder.host}, since {since}"
