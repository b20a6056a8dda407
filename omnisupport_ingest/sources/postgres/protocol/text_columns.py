"""Finds texts in a block of bytes, column by column, and joins columns of texts into JSON.

Everything is arithmetic over all rows at once; no Python object is made for a row or a value. The JSON is
byte for byte what ``orjson`` writes for each row.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.compiled import Bytes

Positions = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int32]

PADDING = bytes(8)
"""Follows the rows of a block: reading a number stays within the block even if a row ends before it."""

PIECE_BYTES = 1024 * 1024

_BACKSLASH = ord("\\")

_KEPT_BYTES = 32 * 1024 * 1024
_ARENAS = 2
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the process keep freed memory for the next block (Linux with glibc), that of Arrow included.

    Without this, each block returns its memory to the system, and the next block requests it page by page.
    Arrow's own allocator does so whatever glibc is set to, so it is not used, unless somebody has chosen it.
    Threads share two arenas: with one for each thread, what is kept grew with the number of chunks.

    What the process has loaded (modules, types, contracts) is exempt from garbage collection from then on.
    A full collection visited all of it, and the other threads waited.
    """
    _exempt_loaded_objects()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, 2 * _KEPT_BYTES)
        mallopt(_ARENA_MAX, _ARENAS)
        if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
            pa.set_memory_pool(pa.system_memory_pool())


@cache
def _exempt_loaded_objects() -> None:
    # Not collected first: that takes 40 ms, and little of it is garbage.
    gc.freeze()
    # At its end the interpreter must find them: libraries report what it leaves.
    atexit.register(gc.unfreeze)


def pieces(letters: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield ``letters`` in pieces, at least one, to limit memory.

    Each intermediate array is as large as its piece. Without pieces, one large row would need several times
    its size.
    """
    for start in range(0, max(1, len(letters)), PIECE_BYTES):
        yield letters[start : start + PIECE_BYTES]


def big_endian(block: Bytes, form: str, at: Positions) -> npt.NDArray[Any]:
    """Return the numbers at the offsets ``at``, aligned or not. ``form``: numpy type, such as ``>u4``."""
    return words(block, form)[at]


def words(block: Bytes, form: str) -> npt.NDArray[Any]:
    """Return the numbers of type ``form`` that begin at each letter."""
    size = np.dtype(form).itemsize
    return np.ndarray((len(block) - size + 1,), form, buffer=block, strides=(1,))


_QUOTE = ord('"')
_FIRST_UNESCAPED = 0x20


def escape(letter: str) -> str:
    """Return ``letter`` as it is written in a JSON string."""
    return orjson.dumps(letter).decode()[1:-1]


def escaped(texts: pa.StringArray) -> pa.StringArray:
    """Return ``texts`` as they are written between the quotes of a JSON string."""
    # The backslash first, because the other escapes add backslashes.
    for letter in sorted(_special_letters(texts), reverse=True):
        pattern = chr(letter)
        texts = pc.replace_substring(texts, pattern=pattern, replacement=escape(pattern))
    return texts


def json_arrays(columns: Sequence[pa.StringArray]) -> pa.StringArray:
    """Return one JSON array per row of the values in ``columns`` (at least one, escaped)."""
    return _joined("[", ["" for _ in columns], columns, "]")


def json_objects(names: Sequence[str], columns: Sequence[pa.StringArray]) -> pa.StringArray:
    """Return one JSON object per row, ``names`` → ``columns`` (at least one, escaped)."""
    return _joined("{", [orjson.dumps(name).decode() + ":" for name in names], columns, "}")


def _joined(
    start: str, prefixes: Sequence[str], columns: Sequence[pa.StringArray], end: str
) -> pa.StringArray:
    arguments: list[str | pa.StringArray] = []
    between = start
    for prefix, column in zip(prefixes, columns, strict=True):
        if column.null_count:
            arguments += [between + prefix, _values(column)]
            between = ","
        else:
            arguments += [f'{between}{prefix}"', column]
            between = '",'
    return pc.binary_join_element_wise(*arguments, between[:-1] + end, "")


def _values(texts: pa.StringArray) -> pa.StringArray:
    """Return ``texts`` as JSON strings, and ``null`` for nulls."""
    return pc.fill_null(pc.binary_join_element_wise('"', texts, '"', ""), "null")


def _special_letters(texts: pa.StringArray) -> set[int]:
    content = texts.buffers()[2]
    if content is None:
        return set()
    special_letters = set[int]()
    for piece in pieces(np.frombuffer(content, np.uint8)):
        special = (piece < _FIRST_UNESCAPED) | (piece == _QUOTE) | (piece == _BACKSLASH)
        special_letters.update(np.unique(piece[special]).tolist())
    return special_letters
