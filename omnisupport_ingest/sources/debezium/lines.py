"""The lines of a file of events, one at a time: memory holds one line, however large the file is.

Only the content counts: a file and its packed copy have the same lines and the same hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import xxhash

from omnisupport_ingest.foreign import Unreadable, is_fault_of_file, printable
from omnisupport_ingest.sources.debezium.faults import FileRefused
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.packed import PackedWrong, plain_name, unpacked

MAX_LINE_BYTES = 256 * 1024 * 1024
"""A longer line is taken as a sign that the file does not have one event per line."""

_PIECE = 1 << 18
_LINES_BLOCK = 4 << 20
"""So large that the work per block is negligible per line."""


@dataclass
class Lines:
    """The lines of ``path``, numbered from 1, without blank ones."""

    path: Path
    _hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128, init=False, repr=False)

    def is_whole(self, content: Content) -> bool:
        """Whether the file, as read so far, is all of ``content``."""
        return self._hash.digest() == content.checksum

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
        """Yield the lines, including blank ones, in blocks of some megabytes."""
        with _reading(self.path) as source:
            row, kept, size, name = 1, list[bytes | memoryview](), 0, plain_name(self.path)
            while piece := source.read(_LINES_BLOCK):
                self._hash.update(piece)
                kept.append(piece)
                size += len(piece)
                end = piece.rfind(b"\n") + 1
                if end:
                    rest, kept[-1] = piece[end:], memoryview(piece)[:end]
                    block = Block.of_file(b"".join([*kept, PADDING]), row, name)
                    if int(block.stops[0]) >= MAX_LINE_BYTES:
                        raise self._too_long(row)
                    yield block
                    row, kept, size = row + len(block), [rest], len(rest)
                elif size > MAX_LINE_BYTES:
                    raise self._too_long(row)
            if size:
                yield Block.of_file(b"".join([*kept, PADDING]), row, name)

    def _too_long(self, number: int) -> FileRefused:
        return FileRefused(
            f"{printable(self.path)}, line {number} is longer than {MAX_LINE_BYTES >> 20} MiB.",
            fix="Write one event per line.",
        )


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a file. ``sha256``: 64 hexadecimal digits, which name it. ``checksum``: shows at a tenth
    of the cost whether another reading has the same content."""

    sha256: str
    checksum: bytes


def content_of(path: Path) -> Content:
    """Return the content of ``path``, unpacked. Raises ``FileRefused`` if it cannot be read."""
    digest, checksum = hashlib.sha256(), xxhash.xxh3_128()
    with _reading(path) as source:
        while piece := source.read(_PIECE):
            digest.update(piece)
            checksum.update(piece)
    return Content(digest.hexdigest(), checksum.digest())


@contextmanager
def _reading(path: Path) -> Iterator[IO[bytes]]:
    """Open ``path``, and unpack it if it has a packing suffix. Errors name the file and the reason.

    An ``OSError`` that is not the fault of the file is raised as it is: the file may land later.
    """
    try:
        with unpacked(path) as content:
            yield content
    except PackedWrong as problem:
        raise FileRefused(
            f"{printable(path)} cannot be read: {problem}.",
            fix="Copy it again, or name it without .gz or .zst.",
        ) from None
    except (OSError, Unreadable) as problem:
        if isinstance(problem, OSError) and not is_fault_of_file(problem):
            raise
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise FileRefused(
            f"{printable(path)} cannot be read: {reason or type(problem).__name__}.",
            fix="Check the path and its permissions.",
        ) from None
