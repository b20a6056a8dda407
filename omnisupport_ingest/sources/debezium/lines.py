"""The lines of a file of events, one at a time: memory holds one line, however large the file.

The content is what counts: a file and its packed copy have the same lines and the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from omnisupport_ingest.foreign import Unreadable, printable
from omnisupport_ingest.sources.debezium.faults import FileRefused
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.packed import PackedWrong, unpacked

MAX_LINE_BYTES = 256 * 1024 * 1024
"""An event as large as this is taken for a file that is not one event per line."""

_PIECE = 1 << 18
_LINES_BLOCK = 4 << 20
"""Large enough that what is done once for a block costs a line nothing."""


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
                    raise self._too_long(number)
                self._hash.update(line)
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if stripped := line.strip():
                    yield number, stripped

    def blocks(self) -> Iterator[Block]:
        """The lines some megabytes at a time, blank ones among them."""
        with _reading(self.path) as source:
            row, kept, size = 1, list[bytes | memoryview](), 0
            while piece := source.read(_LINES_BLOCK):
                self._hash.update(piece)
                kept.append(piece)
                size += len(piece)
                end = piece.rfind(b"\n") + 1
                if end:
                    rest, kept[-1] = piece[end:], memoryview(piece)[:end]
                    block = Block.of_file(b"".join([*kept, PADDING]), row)
                    if int(block.stops[0]) >= MAX_LINE_BYTES:
                        raise self._too_long(row)
                    yield block
                    row, kept, size = row + len(block), [rest], len(rest)
                elif size > MAX_LINE_BYTES:
                    raise self._too_long(row)
            if size:
                yield Block.of_file(b"".join([*kept, PADDING]), row)

    def _too_long(self, number: int) -> FileRefused:
        return FileRefused(
            f"{printable(self.path)}, line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
            fix="Write one event per line.",
        )


def content_hash(path: Path) -> str:
    """SHA-256 of the content of ``path``, unpacked; ``FileRefused`` if it cannot be read."""
    digest = hashlib.sha256()
    with _reading(path) as source:
        while piece := source.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open ``path`` and unpack it if its name says so; errors name the file and the reason."""
    try:
        with unpacked(path) as content:
            yield content
    except PackedWrong as problem:
        raise FileRefused(
            f"{printable(path)} cannot be read: {problem}.",
            fix="Copy it again, or name it without .gz or .zst.",
        ) from None
    except (OSError, Unreadable) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise FileRefused(
            f"{printable(path)} cannot be read: {reason or type(problem).__name__}.",
            fix="Check the path and its permissions.",
        ) from None
