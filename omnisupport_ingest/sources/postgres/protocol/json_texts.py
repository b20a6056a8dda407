"""Builds the JSON of many rows at once from texts in one buffer.

A row is a list of pieces: literals (names, quotes, brackets) and the texts between them. One call of Arrow
writes the pieces of all rows one after another, and arithmetic finds where each row begins and ends. No
Python object is made for a row or a value, whatever the mix of tables is. The JSON is byte for byte what
``orjson`` writes for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.sources.postgres.protocol.text_columns import Flags, Irregular, Positions

_BEFORE_A_MEMBER = 3
_VARIANTS = 2 * _BEFORE_A_MEMBER
"""Number of variants of the literal before a value. The value comes first, after a null, or after a text; and
the value itself is null or a text."""

_CLOSINGS = ["}", '"}', "]", '"]']
_MOST_BYTES = int(np.iinfo(np.int32).max)


class Literals(NamedTuple):
    """The literals before the values of some columns: ``content`` holds ``_VARIANTS`` for each column.

    ``lengths``: length of each literal in bytes.
    """

    content: bytes
    lengths: Positions

    @classmethod
    def of_objects(cls, names: Sequence[str]) -> Literals:
        """Return the literals of objects whose members are ``names``."""
        return cls._of("{", [orjson.dumps(name).decode() + ":" for name in names])

    @classmethod
    def _of(cls, start: str, members: Sequence[str]) -> Literals:
        pieces = [
            (before + member + after).encode()
            for member in members
            for before in (start, ",", '",')
            for after in ("null", '"')
        ]
        return cls(b"".join(pieces), np.fromiter(map(len, pieces), np.int64, len(pieces)))


_OF_ARRAYS = Literals._of("[", [""])


class Members(NamedTuple):
    """The values of rows, ordered by row.

    For each value, ``rows``: number of its row; ``columns``: number of its column among those of all
    ``Literals``; ``is_text``: True for a text, False for null; ``numbers``: number of its text among all
    texts.
    """

    rows: Positions
    columns: Positions
    is_text: Flags
    numbers: Positions

    def where(self, chosen: Flags) -> Members:
        """Return the members for which the flags ``chosen`` are set."""
        return Members(self.rows[chosen], self.columns[chosen], self.is_text[chosen], self.numbers[chosen])


@dataclass(frozen=True)
class JsonTexts:
    """Texts that are escaped for JSON strings, and the literals that may stand before them."""

    _pieces: pa.StringArray
    _first_literal: int

    @classmethod
    def of(
        cls, texts: bytearray, starts: Positions, ends: Positions, literals: Sequence[Literals]
    ) -> JsonTexts:
        """Build the pieces from ``texts``, which is changed and must not be used afterwards.

        ``texts`` holds one text from each of ``starts`` to its end in ``ends``, in ascending order. Raises
        ``Irregular`` if the block is too large.
        """
        used = [*literals, _OF_ARRAYS]
        closings = np.fromiter(map(len, _CLOSINGS), np.int64, len(_CLOSINGS))
        size = len(texts)
        # Append in place, because ``texts`` may be large.
        texts += b"".join([*(each.content for each in used), *(each.encode() for each in _CLOSINGS)])
        if len(texts) > _MOST_BYTES:
            raise Irregular("a block that is too large")
        # The last piece is empty; values that are null have it.
        lengths = np.concatenate([*(each.lengths for each in used), closings, np.zeros(1, np.int64)])
        first = 2 * len(starts)
        offsets = np.empty(first + len(lengths) + 1, np.int32)
        # One element per text, and one for the bytes up to the next text.
        offsets[0:first:2], offsets[1:first:2] = starts, ends
        offsets[first] = size
        offsets[first + 1 :] = size + np.cumsum(lengths)
        pieces = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(texts))
        return cls(pieces, first)

    def objects(self, members: Members, count: int) -> pa.StringArray:
        """Return a JSON object for each of ``count`` rows; null for a row without members."""
        return self._joined(members, count, 0)

    def arrays(self, members: Members, count: int) -> pa.StringArray:
        """Return a JSON array per row (``count``); null without members. Ignores ``members.columns``."""
        columns = np.full(len(members.rows), self._literals // _VARIANTS - 1)
        return self._joined(members._replace(columns=columns), count, 2)

    def values_by_row(self, members: Members, count: int) -> pa.StringArray:
        """Return the text of each of ``count`` rows; null for none. A row has one member at most."""
        numbers, missing = np.zeros(count, np.int64), np.ones(count, np.bool_)
        texts = members.where(members.is_text)
        numbers[texts.rows], missing[texts.rows] = 2 * texts.numbers, False
        return self._pieces.take(pa.array(numbers, mask=missing))

    @property
    def _literals(self) -> int:
        return len(self._pieces) - self._first_literal - len(_CLOSINGS) - 1

    def _joined(self, members: Members, count: int, closing: int) -> pa.StringArray:
        """Return one JSON text per row. Raises ``pa.ArrowInvalid`` if a text is not UTF-8."""
        rows, is_text = members.rows, members.is_text
        values = len(rows)
        if not values:
            return pa.nulls(count, pa.string())
        begins = np.ones(values, np.bool_)
        np.not_equal(rows[1:], rows[:-1], out=begins[1:])
        firsts = np.flatnonzero(begins)
        lasts = np.append(firsts[1:], values) - 1
        literals = np.empty(values, np.int32)
        literals[1:] = is_text[:-1]
        literals[1:] += 1
        literals[firsts] = 0
        literals *= 2
        literals += is_text
        literals += (members.columns * _VARIANTS + self._first_literal).astype(np.int32)
        # A value has two pieces, the literal before it and its text (empty for null). A row has one more, its
        # end.
        at = np.cumsum(begins, dtype=np.int32)
        at += np.arange(-1, 2 * values - 1, 2, dtype=np.int32)
        pieces = np.empty(2 * values + len(firsts), np.int32)
        pieces[at] = literals
        at += 1
        pieces[at] = np.where(is_text, 2 * members.numbers, len(self._pieces) - 1)
        ends = at[lasts] + 1
        pieces[ends] = len(self._pieces) - 1 - len(_CLOSINGS) + closing + is_text[lasts]
        joined = pc.take(self._pieces, pa.array(pieces), boundscheck=False)
        bounds = np.frombuffer(joined.buffers()[1], np.int32, len(pieces) + 1)
        offsets = np.zeros(count + 1, np.int32)
        offsets[1:][rows[firsts]] = np.diff(bounds[ends + 1], prepend=0)
        np.cumsum(offsets, out=offsets)
        return _strings(offsets, joined.buffers()[2], rows[firsts], count)


def _strings(
    offsets: npt.NDArray[np.int32], content: pa.Buffer, rows: Positions, count: int
) -> pa.StringArray:
    """Return ``content`` as an array of ``count`` texts; null for rows that are not in ``rows``."""
    validity = None
    if len(rows) != count:
        valid = np.zeros(count, np.bool_)
        valid[rows] = True
        validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
    texts = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), content, validity)
    texts.validate(full=True)
    return texts


def escaped_texts(block: bytes, starts: Positions, ends: Positions) -> tuple[bytearray, Positions, Positions]:
    """Escape the texts of ``block`` from ``starts`` to ``ends`` for JSON; return them and their bounds.

    Each text must be followed by another byte in the block. Raises ``Irregular`` if a text contains NUL.
    """
    count = len(starts)
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0 : 2 * count : 2], offsets[1 : 2 * count : 2] = starts, ends + 1
    offsets[-1] = len(block)
    pieces = pa.StringArray.from_buffers(2 * count, pa.py_buffer(offsets), pa.py_buffer(block))
    taken = pieces.take(pa.array(np.arange(0, 2 * count, 2)))
    bounds = np.frombuffer(taken.buffers()[1], np.int32, count + 1).astype(np.int64)
    texts = bytearray(memoryview(taken.buffers()[2])[: int(bounds[-1])])
    letters = np.frombuffer(texts, np.uint8)
    # A text of PostgreSQL never contains NUL, so NULs can separate the texts while letters are replaced.
    if np.count_nonzero(letters) + np.count_nonzero(letters[bounds[1:] - 1] == 0) < len(letters):
        raise Irregular("a text with a NUL")
    letters[bounds[1:] - 1] = 0
    special = _special(texts, letters, count)
    del letters, taken
    if not special:
        return texts, bounds[:-1], bounds[1:] - 1
    for letter in special:
        texts = texts.replace(letter.encode(), orjson.dumps(letter)[1:-1])
    ends = np.flatnonzero(np.frombuffer(texts, np.uint8) == 0)
    return texts, np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1)), ends


_FIRST_UNESCAPED = 0x20


def _special(texts: bytearray, letters: npt.NDArray[np.uint8], ends: int) -> list[str]:
    """Return the letters in ``texts`` that JSON escapes. ``ends``: number of NULs between the texts."""
    # The backslash first, because the other escapes add backslashes.
    special = [letter for letter in '\\"' if letter.encode() in texts]
    control = letters < _FIRST_UNESCAPED
    if np.count_nonzero(control) > ends:
        special += [
            chr(letter) for letter in np.flatnonzero(np.bincount(letters[control])).tolist() if letter
        ]
    return special
