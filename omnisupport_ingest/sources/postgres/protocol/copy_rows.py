"""Rows of a table as the exact text that the stream would send, by COPY.

COPY's text format (PostgreSQL manual, COPY, "Text Format") writes values with the same output
functions as logical decoding, and tells NULL (``\\N``) from the empty text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    Irregular,
    escape,
    json_arrays,
    json_objects,
    line_columns,
    pieces,
)
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge
from omnisupport_ingest.sources.postgres.session.silence import Awaited

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 6 * 1024 * 1024
"""Bytes of a table that are passed on at a time: about as many rows as a row group should have."""

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_TAB, _LINE_END, _FIRST_PRINTABLE = ord("\t"), ord("\n"), ord(" ")


def parse_row(line: str) -> list[str | None]:
    """Return the values of one line of COPY's text format, without its line end."""
    values = line.split("\t")
    if "\\" not in line:
        return values  # type: ignore[return-value]  # no NULL among them
    return [None if value == "\\N" else _unescaped(value) for value in values]


def copy_lines(
    connection: Connection,
    query: str,
    *,
    doing: str,
    block_bytes: int = BLOCK_BYTES,
    max_row_bytes: int | None = None,
    lines: Callable[[bytes], None],
) -> None:
    """Call ``lines`` with whole lines of the rows that ``query`` (a SELECT) returns, many at a time.

    ``doing`` names the work in errors. ``RowTooLarge`` for a line longer than ``max_row_bytes`` (None: no
    limit). An error in ``lines`` ends the copy and is raised from here.
    """
    # psycopg2 writes line by line, so the collecting buffer must not be Python. Once ``whole`` is closed, it
    # takes nothing more from a buffer that is discarded.
    with source_errors(doing), Awaited(connection, connection.silence) as answer:

        def take(block: bytes) -> None:
            with answer.busy():
                lines(block)

        with closing(_WholeLines(take, max_row_bytes)) as whole, connection.cursor() as cursor:
            buffer = io.BufferedWriter(whole, block_bytes)
            cursor.copy_expert(f"COPY ({query}) TO STDOUT", buffer)
            buffer.flush()


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of COPY. ``keys`` and ``images``: JSON of each row's key and of the row.

    ``columns``: the values, null for NULL, with the escapes of JSON; None where rows were read one by one,
    which ``rows`` are then.
    """

    keys: pa.StringArray
    images: pa.StringArray
    columns: Sequence[pa.StringArray] | None
    rows: Sequence[Sequence[str | None]] = ()

    def texts(self, column: int) -> pa.StringArray:
        """Return the values of a column; those in which JSON escapes something may have its escapes."""
        if self.columns is not None:
            return self.columns[column]
        return pa.array([row[column] for row in self.rows], pa.string())


def copied_rows(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Read COPY's ``lines``, of columns with ``names``; the key is of the columns at ``key``.

    All lines at once; one by one only where they are not what COPY writes.
    """
    try:
        columns = line_columns(_escaped_for_json(lines), len(names))
        keys, images = json_arrays([columns[i] for i in key]), json_objects(names, columns)
        images.validate(full=True)
        return CopiedRows(keys, images, columns)
    except (Irregular, pa.ArrowInvalid):
        rows = [parse_row(line) for line in lines.decode()[:-1].split("\n")]
        return CopiedRows(
            pa.array([row_key([row[i] for i in key]) for row in rows], pa.string()),
            pa.array([row_image(tuple(names), row) for row in rows], pa.string()),
            None,
            rows,
        )


class _WholeLines(io.RawIOBase):
    """Passes on what is written to it, cut after the last line end."""

    def __init__(self, lines: Callable[[bytes], None], max_row_bytes: int | None) -> None:
        self._lines, self._longest = lines, max_row_bytes
        self._begun = b""

    def writable(self) -> bool:
        return True

    def write(self, content: ReadableBuffer) -> int:
        self._check(content)
        block = self._begun + bytes(content)
        end = block.rfind(b"\n") + 1
        self._begun = block[end:]
        if end:
            self._lines(block[:end])
        return memoryview(content).nbytes

    def _check(self, content: ReadableBuffer) -> None:
        """Raise ``RowTooLarge`` before anything is copied, if a line is longer than allowed."""
        if self._longest is None or len(self._begun) + memoryview(content).nbytes <= self._longest:
            return
        letters = np.frombuffer(memoryview(content), np.uint8)
        ends = np.flatnonzero(letters == _LINE_END)
        # The first line has begun in what came before; the last may go on in what comes.
        bounds = np.concatenate(([-1 - len(self._begun)], ends, [len(letters) - 1]))
        longest = int(np.diff(bounds).max())
        if longest > self._longest:
            raise RowTooLarge(longest, self._longest)


def _escaped_for_json(block: bytes) -> bytes:
    """Return lines of COPY with the escapes of JSON.

    Both formats write most of them alike. Tabs and line ends, which separate the values, and ``\\N`` stay.
    """
    block = block.replace(b'"', b'\\"')
    if b"\\v" in block:
        # No text of PostgreSQL has a NUL, so two of them may stand for an escaped backslash.
        block = block.replace(b"\\\\", b"\0\0").replace(b"\\v", b"\\u000b").replace(b"\0\0", b"\\\\")
    not_escaped = set[int]()
    for piece in pieces(np.frombuffer(block, np.uint8)):
        control = piece[piece < _FIRST_PRINTABLE]
        not_escaped.update(np.unique(control).tolist())
    for letter in sorted(not_escaped - {_TAB, _LINE_END}):
        block = block.replace(bytes([letter]), escape(chr(letter)).encode())
    return block


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), value)
