"""Opens files of others, plain or packed with gzip or zstd; the suffix of the name decides."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pyarrow as pa

from omnisupport_ingest.foreign import open_file

PACKED = {".gz": "gzip", ".zst": "zstd"}
"""Suffix of a name → how the file is packed."""


class PackedWrong(ValueError):
    """Raised for a packed file that is incomplete or not packed as its name says.

    The text ends a sentence.
    """


def plain_name(path: Path) -> str:
    """Return the name of ``path`` without the suffix of its packing."""
    return path.stem if path.suffix in PACKED else path.name


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open ``path`` and yield its content, unpacked if its name has a packing suffix.

    Raises ``OSError`` and ``Unreadable`` as ``open_file`` does. Any read raises ``PackedWrong`` for content
    that cannot be unpacked, including a missing end and garbage after it.
    """
    with os.fdopen(open_file(path), "rb") as plain:
        if path.suffix not in PACKED:
            yield plain
            return
        how = PACKED[path.suffix]
        if not os.fstat(plain.fileno()).st_size:
            # An empty file is no packed file: its writer has just begun, or has died.
            raise PackedWrong(f"it is not a whole {how} file")
        try:
            with pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), how) as stream:
                yield io.BufferedReader(stream, 1 << 20)
        except OSError as problem:
            if problem.errno is not None:
                raise
            raise PackedWrong(f"it is not a whole {how} file") from None
