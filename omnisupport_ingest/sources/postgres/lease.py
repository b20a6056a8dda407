"""One capture per home and source: a lock that the operating system drops when its holder dies."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from omnisupport_ingest.sources.postgres.errors import CaptureRunning


class Lease:
    """A held lease; ``release`` it, or use it as a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, run_folder: Path, source: str) -> Lease:
        """Take the lease on ``source``; ``CaptureRunning`` says who holds it."""
        path = run_folder / f"capture-{source}.lock"
        # Not inherited by child processes, which would hold the lock on after this one has died.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(path)
            os.close(descriptor)
            raise CaptureRunning(
                f"Source {source} is being captured into this home already{holder}.",
                fix="Leave that process running, or stop it before you start another.",
            ) from None
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)
        return cls(descriptor)

    @staticmethod
    def is_held(run_folder: Path, source: str) -> bool:
        """Whether some process captures ``source`` now; holds nothing when it returns."""
        try:
            descriptor = os.open(run_folder / f"capture-{source}.lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

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


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_text())
        return f" by process {about['pid']} on {about['host']}, since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
