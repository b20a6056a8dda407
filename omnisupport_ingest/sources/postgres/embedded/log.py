"""The embedded server's log: one file that never grows without bound, however long it is open."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

_MAX_BYTES = 10 * 1024 * 1024
_OLDER_PARTS = 3
_TAIL_BYTES = 2000


class ServerLog:
    """The file at ``path`` and its older parts ``path.1`` (newest) to ``path.3``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> BinaryIO:
        """Open the log for appending, owner-only; the server keeps this file open for its whole life."""
        # No failpoint: logs.
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.fdopen(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab")

    def rotate(self) -> None:
        """Move a log above 10 MiB to ``.1`` by copying, then empty it.

        The server still has the file open and appends at the new end. A line written between copy and
        emptying is lost; that is the price of not restarting the server. If the copy fails, on a full disk
        say, the log stays as it is: a log must not keep the server from starting.
        """
        with suppress(OSError):
            self._rotate()

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size <= _MAX_BYTES:
            return
        for number in range(_OLDER_PARTS, 1, -1):
            newer = self._part(number - 1)
            if newer.exists():
                # No failpoint: logs.
                newer.replace(self._part(number))
        try:
            shutil.copy(self.path, self._part(1))
        except OSError:
            # A partial copy would take the space that is missing.
            self._part(1).unlink(missing_ok=True)
            raise
        os.truncate(self.path, 0)

    def tail(self) -> str:
        """Return the last lines of the log, about 2,000 bytes."""
        if not self.path.exists():
            return ""
        content = self.path.read_bytes()[-_TAIL_BYTES:]
        return content.decode(errors="replace").strip()

    def _part(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
