"""Files that others wrote, plain or packed with gzip or zstd, opened by their names."""

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
"""How a name ends → how the file is packed."""


class PackedWrong(ValueError):
    """Raised for a packed file that is incomplete or not packed as its name says.

    The text ends a sentence.
    """


def plain_name(path: Path) -> str:
    """The name of ``path`` without how it is packed."""
    return path.stem if path.suffix in PACKED else path.name


@contextmanager
def unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The content of ``path``, unpacked if its name ends so.

    ``OSError`` and ``Unreadable`` as of ``open_file``; ``PackedWrong``, from any read, for what cannot be
    unpacked: neither end nor garbage behind it is passed over.
    """
    with os.fdopen(open_file(path), "rb") as plain:
        if path.suffix not in PACKED:
            yield plain
            return
        how = PACKED[path.suffix]
        if not os.fstat(plain.fileno()).st_size:
            # Nothing that is packed has no bytes: its writer has just begun, or has died.
            raise PackedWrong(f"it is not a whole {how} file")
        try:
            with pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), how) as stream:
                yield io.BufferedReader(stream, 1 << 20)
        except OSError as problem:
            if problem.errno is not None:
                raise
            raise PackedWrong(f"it is not a whole {how} file") from None
