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

import xxhash

from omnisupport_ingest.foreign import Unreadable, printable
from omnisupport_ingest.sources.debezium.faults import FileRefused
from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block
from omnisupport_ingest.sources.packed import PackedWrong, plain_name, unpacked

MAX_LINE_BYTES = 256 * 1024 * 1024
"""An event as large as this is taken for a file that is not one event per line."""

_PIECE = 1 << 18
_LINES_BLOCK = 4 << 20
"""Large enough that what is done once for a block costs a line nothing."""


@dataclass
class Lines:
    """The lines of ``path`` from 1 on, without blank ones."""

    path: Path
    _hash: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128, init=False, repr=False)

    def is_whole(self, content: Content) -> bool:
        """Whether what was read so far is ``content``."""
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
        """The lines some megabytes at a time, blank ones among them."""
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
    """The content of a file: its SHA-256, 64 hexadecimal digits, which names it, and a ``checksum``, which
    tells at a tenth of the cost whether another reading is of the same."""

    sha256: str
    checksum: bytes


def content_of(path: Path) -> Content:
    """The content of ``path``, unpacked; ``FileRefused`` if it cannot be read."""
    digest, checksum = hashlib.sha256(), xxhash.xxh3_128()
    with _reading(path) as source:
        while piece := source.read(_PIECE):
            digest.update(piece)
            checksum.update(piece)
    return Content(digest.hexdigest(), checksum.digest())


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
