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
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.protocol.copy_socket import copy_from_socket
from omnisupport_ingest.sources.postgres.protocol.row_events import row_image, row_key
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    Flags,
    Irregular,
    Letters,
    Positions,
    escape,
)
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
_QUOTE, _BACKSLASH, _LINE_END, _FIRST_PRINTABLE = ord('"'), ord("\\"), ord("\n"), ord(" ")
_NULL, _VERTICAL_TAB = b"\\N", int.from_bytes(b"\\v", "little")

_MOST_BACKSLASHES = 64
"""Largest number of backslashes before a quote that are counted for all quotes at once."""

_SEARCHED_BYTES = 128 * 1024
"""Bytes that are searched at a time: few enough for all intermediate arrays to fit into the cache."""

_MOST_BYTES = int(np.iinfo(np.int32).max)


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
    lines: Callable[[bytes], None],
) -> None:
    """Call ``lines`` with the rows that ``query`` (a SELECT) returns: whole lines of COPY, many at a time.

    ``doing``: completes "while …" in errors. ``max_row_bytes``: largest length of a line; None: no limit.
    Raises ``RowTooLarge`` for a longer line, and ``SourceUnavailable``. An error in ``lines`` ends the copy
    and is raised from here.
    """
    command = f"COPY ({query}) TO STDOUT (DELIMITER '\"')"
    with source_errors(doing), Awaited(connection, connection.silence) as answer:

        def take(block: bytes) -> None:
            with answer.busy():
                lines(block)

        copy = copy_by_psycopg if is_encrypted(connection) else copy_from_socket
        copy(connection, command, block_bytes, max_row_bytes, take)


def copy_by_psycopg(
    connection: Connection,
    command: str,
    block_bytes: int,
    max_row_bytes: int | None,
    lines: Callable[[bytes], None],
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
        """Return the values of the column with that index. They may be escaped as in a JSON string."""
        return self._column(column)


def rows_of(lines: bytes) -> int:
    """Return the number of rows in COPY's ``lines``."""
    return int(np.count_nonzero(np.frombuffer(lines, np.uint8) == _LINE_END))


def copied_rows(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Convert COPY's ``lines`` of columns ``names``. ``key``: indexes of the key columns.

    Converts all lines at once; one by one only if they do not look like output of COPY.
    """
    try:
        return _all_at_once(lines, names, key)
    except (Irregular, pa.ArrowInvalid):
        return one_by_one(lines, names, key)


def one_by_one(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    """Convert lines one by one. This function defines what ``copied_rows`` returns."""
    rows = [parse_row(line) for line in lines.decode()[:-1].split("\n")]
    return CopiedRows(
        pa.array([row_key([row[i] for i in key]) for row in rows], pa.string()),
        pa.array([row_image(tuple(names), row) for row in rows], pa.string()),
        lambda column: pa.array([row[column] for row in rows], pa.string()),
    )


def _all_at_once(lines: bytes, names: Sequence[str], key: Sequence[int]) -> CopiedRows:
    literals = _literals(tuple(names))
    values = _Values.of(lines, len(names), literals)
    return CopiedRows(
        values.joined(np.array(key, np.int64), np.minimum(np.arange(len(key)), 1) * 2, _CLOSE_ARRAY),
        values.joined(slice(None), literals.of_columns, _CLOSE_OBJECT),
        values.texts,
    )


_IN_ARRAYS = ['["', "[null", ',"', ",null"]
_CLOSE_ARRAY, _CLOSE_OBJECT, _OF_COLUMNS = 4, 5, 6
"""Numbers of literals: the two closing ones, and the first one for the column names."""


class _Literals(NamedTuple):
    """Literals: the JSON before and after values. ``content`` holds them all; ``starts``: where each begins.

    There are two literals before a value: one for a text, and the next one for NULL. ``of_columns``: for each
    column, number of its first literal in an object.
    """

    content: bytes
    starts: npt.NDArray[np.int32]
    of_columns: Positions


@lru_cache(64)
def _literals(names: tuple[str, ...]) -> _Literals:
    members = [("," if number else "{") + orjson.dumps(name).decode() for number, name in enumerate(names)]
    texts = [*_IN_ARRAYS, "]", "}", *(f"{each}:{value}" for each in members for value in ('"', "null"))]
    content = [each.encode() for each in texts]
    ends = np.cumsum([len(each) for each in content])
    starts = np.concatenate(([0], ends[:-1])).astype(np.int32)
    return _Literals(b"".join(content), starts, _OF_COLUMNS + 2 * np.arange(len(names)))


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of rows in ``block``, escaped for JSON; each text is followed by a quote.

    ``starts``, ``ends``, ``is_null`` and ``numbers`` have the shape rows × columns. ``numbers``: number of
    each value's piece in ``pieces``. The first pieces are the literals. The piece of a text includes its
    quote; the piece of NULL is empty.
    """

    block: bytearray
    starts: Positions
    ends: Positions
    is_null: Flags
    pieces: pa.StringArray
    numbers: npt.NDArray[np.int32]

    @classmethod
    def of(cls, lines: bytes, columns: int, literals: _Literals) -> _Values:
        """Cut COPY's ``lines`` into values. Raises ``Irregular`` if they do not have ``columns`` columns."""
        block, ends, is_line_end = _escaped_for_json(lines, literals.content)
        letters, first = np.frombuffer(block, np.uint8), len(literals.starts)
        rows, rest = divmod(len(ends), columns)
        line_ends = ends[columns - 1 :: columns]
        if (
            rest
            or np.count_nonzero(is_line_end) != rows
            or not is_line_end[columns - 1 :: columns].all()
            or ends[-1] != len(block) - 1
        ):
            raise Irregular(f"lines that have not {columns} columns")
        letters[line_ends] = _QUOTE
        starts = np.empty_like(ends)
        starts[0], starts[1:] = len(literals.content), ends[:-1] + 1
        short = np.flatnonzero(ends - starts == len(_NULL))
        nulls = short[(letters[starts[short]] == _NULL[0]) & (letters[starts[short] + 1] == _NULL[1])]
        is_null = np.zeros(len(ends), np.bool_)
        is_null[nulls] = True
        # One piece per value, and one for the bytes between it and the next value.
        offsets = np.empty(first + 2 * len(ends) + 1, np.int32)
        offsets[:first] = literals.starts
        offsets[first:-1:2], offsets[first + 1 : -1 : 2] = starts, ends + 1
        offsets[first + 1 + 2 * nulls] = starts[nulls]
        offsets[-1] = len(block)
        numbers = np.arange(first, len(offsets) - 1, 2, dtype=np.int32)
        shape = rows, columns
        return cls(
            block,
            starts.reshape(shape),
            ends.reshape(shape),
            is_null.reshape(shape),
            pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(block)),
            numbers.reshape(shape),
        )

    def joined(self, columns: Positions | slice, literals: Positions, closing: int) -> pa.StringArray:
        """Return the JSON of each row: its values in ``columns``, each after a literal, then ``closing``.

        ``literals`` and ``closing`` are numbers of literals. Raises ``pa.ArrowInvalid`` if the result is not
        UTF-8.
        """
        width = 2 * len(literals) + 1
        found = np.empty((len(self.numbers), width), np.int32)
        found[:, 0:-1:2] = literals
        found[:, 0:-1:2] += self.is_null[:, columns]
        found[:, 1::2] = self.numbers[:, columns]
        found[:, -1] = closing
        joined = pc.take(self.pieces, pa.array(found.reshape(-1)), boundscheck=False)
        offsets = np.frombuffer(joined.buffers()[1], np.int32, found.size + 1)[::width].copy()
        texts = pa.StringArray.from_buffers(len(found), pa.py_buffer(offsets), joined.buffers()[2])
        texts.validate(full=True)
        return texts

    def texts(self, column: int) -> pa.StringArray:
        """Return the values of ``column``; null for NULL."""
        rows, is_null = len(self.starts), self.is_null[:, column]
        offsets = np.empty(2 * rows + 1, np.int32)
        offsets[0:-1:2], offsets[1::2] = self.starts[:, column], self.ends[:, column]
        offsets[-1] = len(self.block)
        cut = pa.StringArray.from_buffers(2 * rows, pa.py_buffer(offsets), pa.py_buffer(self.block))
        return cut.take(pa.array(np.arange(0, 2 * rows, 2), mask=is_null if is_null.any() else None))


class _WholeLines(io.RawIOBase):
    """Passes on what is written to it, up to the last line end; keeps the rest until more is written."""

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


def _escaped_for_json(lines: bytes, before: bytes) -> tuple[bytearray, Positions, Flags]:
    """Convert COPY's escapes to JSON's; return the block, the ends of values, and flags for line ends.

    The block is ``before`` followed by the converted ``lines``. Both formats write most escapes alike. The
    letters that end values, and ``\\N``, are kept.
    """
    if _has_vertical_tab(lines):
        # A text of PostgreSQL never contains NUL, so two NULs can stand for an escaped backslash meanwhile.
        lines = lines.replace(b"\\\\", b"\0\0").replace(b"\\v", b"\\u000b").replace(b"\0\0", b"\\\\")
    while True:
        # Joined at once: to append would make room for the lines first, and copy what it has.
        block = bytearray().join((before, lines))
        if len(block) > _MOST_BYTES:
            raise Irregular("a block that is too large")
        letters = np.frombuffer(block, np.uint8)
        ends = _ends(letters, len(before))
        found = letters[ends]
        is_line_end = found == _LINE_END
        if np.count_nonzero(is_line_end) + np.count_nonzero(found == _QUOTE) == len(ends):
            return block, ends, is_line_end
        for letter in np.unique(found[~is_line_end & (found != _QUOTE)]).tolist():
            lines = lines.replace(bytes([letter]), escape(chr(letter)).encode())


def _has_vertical_tab(block: bytes) -> bool:
    """Whether ``block`` contains ``\\v``. Compares two letters at a time, at even and at odd offsets."""
    return any(
        bool((np.frombuffer(block, "<u2", (len(block) - first) // 2, first) == _VERTICAL_TAB).any())
        for first in (0, 1)
        if len(block) - first >= 2
    )


def _ends(letters: Letters, first: int) -> Positions:
    """Return the positions, from ``first`` on, of unescaped quotes and of control letters.

    COPY escapes the quotes and the line ends within values. Raises ``Irregular`` if too many backslashes
    precede a quote (``_MOST_BACKSLASHES``).
    """
    found = []
    for start in range(first, len(letters), _SEARCHED_BYTES):
        piece = letters[start : start + _SEARCHED_BYTES]
        is_quote = piece == _QUOTE
        escaped = letters[start - 1 : start - 1 + len(piece)] == _BACKSLASH
        escaped &= is_quote
        doubtful = letters[start - 2 : start - 2 + len(piece)] == _BACKSLASH
        doubtful &= escaped
        if doubtful.any():
            _count_backslashes(letters, start, escaped, np.flatnonzero(doubtful))
        ends = is_quote > escaped
        ends |= piece < _FIRST_PRINTABLE
        found.append(np.flatnonzero(ends) + start)
    return np.concatenate(found)


def _count_backslashes(letters: Letters, start: int, escaped: Flags, quotes: Positions) -> None:
    """Correct ``escaped`` for ``quotes``, each preceded by at least two backslashes.

    Both are relative to ``start``. An escaped backslash escapes nothing, so a quote is escaped if an odd
    number of backslashes precedes it.
    """
    for count in range(2, _MOST_BACKSLASHES + 1):
        escaped[quotes] ^= True
        quotes = quotes[letters[start + quotes - count - 1] == _BACKSLASH]
        if not len(quotes):
            return
    raise Irregular("very many backslashes before a quote")


def _unescaped(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), value)
