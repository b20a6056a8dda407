"""The lines of a file of events, one at a time: memory holds one line, however large the file.

The content is what counts: a file and its gzipped copy have the same lines and the same hash.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from omnisupport_ingest.foreign import Unreadable, open_file, printable
from omnisupport_ingest.sources.debezium.faults import FileRefused

MAX_LINE_BYTES = 256 * 1024 * 1024
"""An event as large as this is taken for a file that is not one event per line."""

_BLOCK = 1 << 20


@dataclass
class Lines:
    """The lines of ``path`` from 1 on, without blank ones; ``sha256`` is of what was read so far."""

    path: Path
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256, init=False, repr=False)

    @property
    def sha256(self) -> str:
        """SHA-256 of the content read so far, 64 hexadecimal digits."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        with _reading(self.path) as source:
            number = 0
            while line := source.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise FileRefused(
                        f"{printable(self.path)}, line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
                        fix="Write one event per line.",
                    )
                self._hash.update(line)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if stripped := line.strip():
                    yield number, stripped


def content_hash(path: Path) -> str:
    """SHA-256 of the content of ``path``, unpacked; ``FileRefused`` if it cannot be read."""
    found = hashlib.sha256()
    with _reading(path) as source:
        while block := source.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


class _reading:
    """``path`` opened and, if its name ends so, unpacked; what the system or gzip says is told plainly."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> IO[bytes]:
        try:
            self._plain = os.fdopen(open_file(self._path), "rb")
        except (OSError, Unreadable) as problem:
            raise self._unreadable(problem) from None
        self._file: IO[bytes] = (
            gzip.GzipFile(fileobj=self._plain)  # type: ignore[assignment]
            if self._path.suffix == ".gz"
            else self._plain
        )
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._plain.close()
        if isinstance(error, OSError | EOFError | zlib.error):
            raise self._unreadable(error) from None

    def _unreadable(self, problem: BaseException) -> FileRefused:
        if isinstance(problem, gzip.BadGzipFile | EOFError | zlib.error):
            return FileRefused(
                f"{printable(self._path)} is not a whole gzip file.",
                fix="Copy it again, or name it without .gz.",
            )
        told = problem.strerror if isinstance(problem, OSError) else problem
        return FileRefused(
            f"{printable(self._path)} cannot be read: {told or type(problem).__name__}.",
            fix="Check the path and its permissions.",
        )
