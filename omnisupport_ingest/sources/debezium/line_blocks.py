"""A block of many lines as bytes, and what is found in it before any line is parsed.

Arithmetic examines all lines of a block at once. A line becomes a Python object only when it is requested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omnisupport_ingest.sources.postgres.protocol.text_columns import pieces

Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Letters = npt.NDArray[np.uint8]

PADDING = bytes(64)
"""Follows the lines, so that several bytes can be read at any place."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_END, _RETURN = b"\n\r"
LARGEST_BLOCK = 16 << 20
"""Largest block that is examined, in bytes. A larger one has one very long line."""


@dataclass
class Block:
    """Lines ``starts`` to ``stops`` in ``content``, which ends with ``PADDING``.

    ``first_row``: the number of the first line in its file; None if the lines are of no file: they are then
    values, not records. ``delivered``: for each line, the text that is kept with its event; None: the line
    itself. ``name``: the file or topic.
    """

    content: bytes
    starts: Places
    stops: Places
    first_row: int | None = None
    delivered: pa.BinaryArray | None = None
    name: str = ""

    @classmethod
    def of_file(cls, content: bytes, first_row: int, name: str = "") -> Block:
        """Return the lines of ``content``: a part of a file that ends at the end of a line, then
        ``PADDING``."""
        nothing = np.empty(0, np.int64)
        block = cls(content, nothing, nothing, first_row, name=name)
        size, letters = len(content) - len(PADDING), block.letters
        ends = block._line_ends()
        if letters[size - 1] != _LINE_END:
            ends = np.append(ends, size)
        starts = np.empty_like(ends)
        starts[0], starts[1:] = 0, ends[:-1] + 1
        if first_row == 1 and content.startswith(_BYTE_ORDER_MARK):
            starts[0] = len(_BYTE_ORDER_MARK)
        ends = ends - ((letters[ends - 1] == _RETURN) & (ends > starts))
        block.starts, block.stops = starts, ends
        return block

    @classmethod
    def of_values(cls, values: Sequence[bytes], delivered: pa.BinaryArray, name: str = "") -> Block:
        """Return ``values``, each as one line whatever it holds."""
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        stops = np.cumsum(lengths)
        return cls(b"".join([*values, PADDING]), stops - lengths, stops, None, delivered, name)

    def __len__(self) -> int:
        return len(self.starts)

    def line(self, number: int) -> bytes:
        """Return line ``number``, counted from 0, without surrounding blanks."""
        return self.content[self.starts[number] : self.stops[number]].strip()

    @cached_property
    def letters(self) -> Letters:
        return np.frombuffer(self.content, np.uint8)

    @cached_property
    def is_utf8(self) -> bool:
        """Whether all lines are UTF-8. A block that is too large to look at is taken for one that is not."""
        return len(self.content) <= LARGEST_BLOCK and _is_utf8(self.content)

    def _line_ends(self) -> Places:
        found, start = [], 0
        for piece in pieces(self.letters):
            found.append(np.flatnonzero(piece == _LINE_END) + start)
            start += len(piece)
        return np.concatenate(found)


def _is_utf8(content: bytes) -> bool:
    offsets = pa.py_buffer(np.array([0, len(content)], np.int32))
    try:
        pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(content)]).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True
