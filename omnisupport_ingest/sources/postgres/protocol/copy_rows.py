"""Reads rows of a table by COPY, as the exact texts that the stream would send.

COPY's text format (PostgreSQL manual, COPY, "Text Format") writes values with the same output
functions as logical decoding, and distinguishes NULL (``\\N``) from the empty text.
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

from omnisupport_ingest.sources.postgres.protocol.json_texts import JsonTexts, Literals, Members
from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    PIECE_BYTES,
    Irregular,
    Positions,
    escape,
    pieces,
)
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import RowTooLarge
from omnisupport_ingest.sources.postgres.session.silence import Awaited

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BLOCK_BYTES = 6 * 1024 * 1024
"""Bytes that are passed on at a time: about the rows that a row group should have."""

_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_TAB, _LINE_END, _FIRST_PRINTABLE = ord("\t"), ord("\n"), ord(" ")
_NULL, _VERTICAL_TAB = b"\\N", int.from_bytes(b"\\v", "little")


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
    # psycopg2 writes line by line, which would be slow into a buffer written in Python. Once ``whole`` is
    # closed, it ignores what a discarded buffer still flushes.
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
    """Rows that COPY returned. ``keys`` and ``images``: the JSON of each row's key and of the row."""

    keys: pa.StringArray
    images: pa.StringArray
    _column: Callable[[int], pa.StringArray]

    def texts(self, column: int) -> pa.StringArray:
        """Return the values of a column. They may be escaped as in a JSON string."""
        return self._column(column)


def rows_of(lines: bytes) -> int:
    """Return the number of rows in COPY's ``lines``."""
    return int(np.count_nonzero(np.frombuffer(lines, np.uint8) == _LINE_END))


def copied_rows(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Convert COPY's ``lines`` of columns ``names``. ``key``: indexes of the key columns.

    Converts all lines at once; one by one only if they do not look as COPY writes them.
    """
    try:
        return _all_at_once(lines, names, key)
    except (Irregular, pa.ArrowInvalid):
        return one_by_one(lines, names, key)


def one_by_one(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Convert lines one by one. This defines what ``copied_rows`` returns."""
    rows = [parse_row(line) for line in lines.decode()[:-1].split("\n")]
    return CopiedRows(
        pa.array([row_key([row[i] for i in key]) for row in rows], pa.string()),
        pa.array([row_image(tuple(names), row) for row in rows], pa.string()),
        lambda column: pa.array([row[column] for row in rows], pa.string()),
    )


def _all_at_once(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    block, ends = _escaped_for_json(lines)
    letters, count = np.frombuffer(block, np.uint8), len(names)
    rows, rest = divmod(len(ends), count)
    is_line_end = letters[ends] == _LINE_END
    if (
        rest
        or ends[-1] != len(block) - 1
        or np.count_nonzero(is_line_end) != rows
        or not is_line_end[count - 1 :: count].all()
    ):
        raise Irregular(f"lines that have not {count} columns")
    starts = np.empty_like(ends)
    starts[0], starts[1:] = 0, ends[:-1] + 1
    short = np.flatnonzero(ends - starts == len(_NULL))
    is_text = np.ones(len(ends), np.bool_)
    is_text[short[(letters[starts[short]] == _NULL[0]) & (letters[starts[short] + 1] == _NULL[1])]] = False
    del letters
    texts = JsonTexts.of(block, starts, ends, [Literals.of_objects(names)])
    row_starts = np.arange(0, len(ends), count)

    def members(columns: Sequence[int]) -> Members:
        """Return the values of ``columns`` of every row."""
        numbers = (row_starts[:, np.newaxis] + np.array(columns)).reshape(-1)
        row_of = np.repeat(np.arange(rows), len(columns))
        return Members(row_of, np.tile(columns, rows), is_text[numbers], numbers)

    images = texts.objects(members(range(count)), rows)
    return CopiedRows(
        texts.arrays(members(key), rows), images, lambda column: texts.values(members([column]))
    )


class _WholeLines(io.RawIOBase):
    """Passes on what is written to it, up to the last line end; the rest waits for more."""

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
        """Raise ``RowTooLarge`` before anything is passed on if a line is longer than allowed."""
        if self._longest is None or len(self._begun) + memoryview(content).nbytes <= self._longest:
            return
        letters = np.frombuffer(memoryview(content), np.uint8)
        ends = np.flatnonzero(letters == _LINE_END)
        # The first line may have begun in earlier content; the last may continue in later content.
        bounds = np.concatenate(([-1 - len(self._begun)], ends, [len(letters) - 1]))
        longest = int(np.diff(bounds).max())
        if longest > self._longest:
            raise RowTooLarge(longest, self._longest)


def _escaped_for_json(block: bytes) -> tuple[bytearray, Positions]:
    """Return lines of COPY with JSON's escapes instead of COPY's, and the positions where values end.

    Both formats write most escapes alike. Tabs and line ends, which separate values, and ``\\N`` stay.
    """
    escaped = bytearray(block.replace(b'"', b'\\"'))
    if _has_vertical_tab(escaped):
        # No text of PostgreSQL has a NUL, so two NULs can stand for an escaped backslash.
        escaped = escaped.replace(b"\\\\", b"\0\0").replace(b"\\v", b"\\u000b").replace(b"\0\0", b"\\\\")
    while True:
        # Neither separator occurs within a value, because COPY escapes both.
        ends = _control_letters(escaped)
        letters = np.frombuffer(escaped, np.uint8)[ends]
        others = letters[(letters != _TAB) & (letters != _LINE_END)]
        if not len(others):
            return escaped, ends
        for letter in np.unique(others).tolist():
            escaped = escaped.replace(bytes([letter]), escape(chr(letter)).encode())


def _has_vertical_tab(block: bytearray) -> bool:
    """Whether ``block`` contains ``\\v``. Compares two letters at a time, from even and from odd offsets."""
    return any(
        bool((np.frombuffer(block, "<u2", (len(block) - first) // 2, first) == _VERTICAL_TAB).any())
        for first in (0, 1)
        if len(block) - first >= 2
    )


def _control_letters(block: bytearray) -> Positions:
    letters = np.frombuffer(block, np.uint8)
    found = [np.flatnonzero(piece < _FIRST_PRINTABLE) for piece in pieces(letters)]
    return np.concatenate([each + number * PIECE_BYTES for number, each in enumerate(found)])


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), value)
