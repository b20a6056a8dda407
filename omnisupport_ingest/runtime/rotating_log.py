"""A log that never ends the process that writes it: writing raises nothing, whatever the disk does.

Bytes that cannot be written are counted. As soon as the log can be written again, a line in it says how many
bytes are missing there, since when, and why.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LOG_BYTES = 10 * 1024 * 1024
LOGS_KEPT = 3


@dataclass
class _Missing:
    """A run of bytes that could not be written: how many, since when, and the system's last error."""

    size: int
    since: datetime
    reason: str

    @property
    def note(self) -> bytes:
        now = datetime.now(UTC)
        return (
            f"{now:%Y-%m-%d %H:%M:%S} WARNING: {self.size:,} bytes of output were not written here, "
            f"from {self.since:%Y-%m-%d %H:%M:%S} UTC on: {self.reason}\n"
        ).encode()


class RotatingLog:
    """A file that is renamed to ``.1``, ``.2``, … when it grows over ``limit`` bytes."""

    def __init__(self, path: Path, *, limit: int = LOG_BYTES, kept: int = LOGS_KEPT) -> None:
        """Open the file at once, if possible; only its owner can read it."""
        self._path, self._limit, self._kept = path, limit, kept
        self._descriptor: int | None = None
        self._missing: _Missing | None = None
        self._line_ended = True
        with contextlib.suppress(OSError):
            self._open()

    def write(self, data: bytes) -> None:
        """Write ``data``, or count the bytes that cannot be written."""
        self.catch_up()
        if self._missing is not None:
            self._missing.size += len(data)
            return
        rest = memoryview(data)
        try:
            descriptor = self._with_room_for(len(data))
            while rest:
                # No failpoint: logs.
                written = os.write(descriptor, rest)
                self._line_ended = rest[written - 1] == ord("\n")
                rest = rest[written:]
        except OSError as error:
            self._missing = _Missing(len(rest), datetime.now(UTC), error.strerror or type(error).__name__)

    def catch_up(self) -> None:
        """Write the line about missing bytes, if there are any and it can be written now."""
        if self._missing is None:
            return
        note = (b"" if self._line_ended else b"\n") + self._missing.note
        try:
            descriptor = self._with_room_for(len(note))
            size = os.fstat(descriptor).st_size
            # No failpoint: logs.
            if os.write(descriptor, note) < len(note):
                # Undo a partial write, which would be repeated at every try.
                os.ftruncate(descriptor, size)
                return
        except OSError as error:
            self._missing.reason = error.strerror or type(error).__name__
            return
        self._missing, self._line_ended = None, True

    def _with_room_for(self, size: int) -> int:
        descriptor = self._open()
        written = os.fstat(descriptor).st_size
        if written == 0 or written + size <= self._limit:
            return descriptor
        for number in range(self._kept - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                # No failpoint: logs.
                os.replace(self._numbered(number), self._numbered(number + 1))
        os.replace(self._path, self._numbered(1))
        os.close(descriptor)
        self._descriptor = None
        return self._open()

    def _open(self) -> int:
        if self._descriptor is None:
            # No failpoint: logs.
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return self._descriptor

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
