"""Reads rows of a table by COPY, as the exact texts that the stream would send.

COPY's text format (PostgreSQL manual, COPY, "Text Format") writes values with the same output functions as
logical decoding, and distinguishes NULL (``\\N``) from the empty text. The delimiter is the double quote. So
the server escapes quotes within values as JSON does, and a value followed by its delimiter is already the end
of a JSON string.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pyarrow as pa
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.compiled import buffer_of, compiled_rows, texts_of
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines, copy_from_socket
from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.postgres.protocol.text_columns import Numbers
from omnisupport_ingest.sources.postgres.protocol.transport import is_encrypted
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge
from omnisupport_ingest.sources.postgres.session.silence import Awaited

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 6 * 1024 * 1024
"""Bytes that are passed on at a time: about the rows that a row group should have."""

_VALUE = re.compile(r'([^"\\]*(?:\\.[^"\\]*)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_QUOTE, _LINE_END = ord('"'), ord("\n")


def parse_row(line: str) -> list[str | None]:
    """Return the values of one line of COPY, given without its line end; None for NULL."""
    values = _VALUE.findall(line + '"')
    return [None if value == "\\N" else _unescaped(value) for value in values]


def copy_lines(
    connection: Connection,
    query: str,
    *,
    doing: str,
    block_bytes: int = BLOCK_BYTES,
    max_row_bytes: int | None = None,
    lines: Callable[[Lines], None],
) -> None:
    """Call ``lines`` with the rows that ``query`` (a SELECT) returns, many at a time.

    ``doing``: completes "while …" in errors. ``max_row_bytes``: largest length of a line; None: no limit.
    Raises ``RowTooLarge`` for a longer line, and ``SourceUnavailable``. An error in ``lines`` ends the copy
    and is raised from here.
    """
    command = f"COPY ({query}) TO STDOUT (DELIMITER '\"')"
    with source_errors(doing), Awaited(connection, connection.silence) as answer:

        def take(block: Lines) -> None:
            with answer.busy():
                lines(block)

        copy = copy_by_psycopg if is_encrypted(connection) else copy_from_socket
        copy(connection, command, block_bytes, max_row_bytes, take)


def copy_by_psycopg(
    connection: Connection,
    command: str,
    block_bytes: int,
    max_row_bytes: int | None,
    lines: Callable[[Lines], None],
) -> None:
    """Do what ``copy_from_socket`` does, also over an encrypted connection; that makes the same blocks."""
    # psycopg2 writes line by line, which would be slow into a buffer written in Python. A buffer that is
    # discarded may still flush; ``whole``, once closed, ignores that.
    with closing(_WholeLines(lines, max_row_bytes)) as whole, connection.cursor() as cursor:
        buffer = io.BufferedWriter(whole, block_bytes)
        cursor.copy_expert(command, buffer)
        buffer.flush()


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows that COPY returned. ``keys``: each key as a JSON array. ``images``: each row as a JSON object."""

    keys: pa.StringArray
    images: pa.StringArray
    _column: Callable[[int], pa.StringArray]

    def texts(self, column: int) -> pa.StringArray:
        """Return the values of the column with that index, one of those that were asked for. They may be
        escaped as in a JSON string."""
        return self._column(column)


def copied_rows(
    lines: Lines, names: Sequence[str], key: Sequence[int], texts: Sequence[int] = ()
) -> CopiedRows:
    """Convert ``lines`` of columns ``names``.

    ``key``: indexes of the key columns. ``texts``: of those that ``CopiedRows.texts`` may be asked for.

    Converts all lines in one compiled pass; one by one only if they do not look like output of COPY.
    """
    if compiled_rows is None:
        return one_by_one(lines.joined(), names, key)
    members = [orjson.dumps(name) + b":" for name in names]
    places = np.cumsum([0, *map(len, members)]).astype(np.int32)
    try:
        found = compiled_rows.convert_lines(
            *lines, b"".join(members), places, np.array(key, np.int32), np.array(texts, np.int32)
        )
        if found is None:
            return one_by_one(lines.joined(), names, key)
        keys, rows, starts, ends = found
        first, last = (
            np.frombuffer(buffer_of(each), np.int32).reshape(lines.rows, len(texts))
            for each in (starts, ends)
        )
        images = texts_of(rows, lines.rows)

        def column(number: int) -> pa.StringArray:
            at = texts.index(number)
            return _cut(images.buffers()[2], first[:, at], last[:, at])

        return CopiedRows(texts_of(keys, lines.rows), images, column)
    except (pa.ArrowInvalid, OverflowError):
        # A text is not UTF-8, or all images are too much for one array.
        return one_by_one(lines.joined(), names, key)


def one_by_one(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Convert lines, given one after the other, one by one. This function defines what ``copied_rows``
    returns."""
    rows = [parse_row(line) for line in lines.decode()[:-1].split("\n")]
    return CopiedRows(
        pa.array([row_key([row[i] for i in key]) for row in rows], pa.string()),
        pa.array([row_image(tuple(names), row) for row in rows], pa.string()),
        lambda column: pa.array([row[column] for row in rows], pa.string()),
    )


def _cut(images: pa.Buffer, begins: Numbers, stops: Numbers) -> pa.StringArray:
    """Return the values of a column, each in ``images`` from where it begins to where it stops."""
    # An empty text is followed by its quote, NULL by ``null``.
    is_null = (begins == stops) & (np.frombuffer(images, np.uint8)[begins] != _QUOTE)
    # One piece per value, and one for the bytes between it and the next value.
    offsets = np.empty(2 * len(begins) + 1, np.int32)
    offsets[0:-1:2], offsets[1::2], offsets[-1] = begins, stops, images.size
    cut = pa.StringArray.from_buffers(2 * len(begins), pa.py_buffer(offsets), images)
    return cut.take(pa.array(np.arange(0, 2 * len(begins), 2), mask=is_null if is_null.any() else None))


class _WholeLines(io.RawIOBase):
    """Passes on what is written to it, up to the last line end; keeps the rest until more is written."""

    def __init__(self, lines: Callable[[Lines], None], max_row_bytes: int | None) -> None:
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
            self._lines(Lines.of(block[:end]))
        return memoryview(content).nbytes

    def _check(self, content: ReadableBuffer) -> None:
        """Raise ``RowTooLarge`` if a line is too long, before any of it is passed on."""
        if self._longest is None or len(self._begun) + memoryview(content).nbytes <= self._longest:
            return
        letters = np.frombuffer(memoryview(content), np.uint8)
        ends = np.flatnonzero(letters == _LINE_END)
        # The first line may have begun in earlier content; the last may continue in later content.
        bounds = np.concatenate(([-1 - len(self._begun)], ends, [len(letters) - 1]))
        longest = int(np.diff(bounds).max())
        if longest > self._longest:
            raise RowTooLarge(longest, self._longest)


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), value)
