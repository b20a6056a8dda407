"""JSON of many rows at once, put together from texts that lie in one buffer.

Every row is a list of pieces: names, quotes and brackets (literals), and texts between them. One call of
Arrow takes all pieces of all rows and writes them one after another; where a row begins and ends among them
is arithmetic. No object is made for a row or a value, whatever the mix of tables. The JSON is byte for byte
what ``orjson`` writes for each row.
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

from omnisupport_ingest.sources.postgres.protocol.text_columns import Irregular

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_BEFORE_A_MEMBER = 3
_VARIANTS = 2 * _BEFORE_A_MEMBER
"""How a literal before a value may differ: the value is the first, or follows null or a text; and it is null
or a text.
"""

_CLOSINGS = ["}", '"}', "]", '"]']
_MOST_BYTES = int(np.iinfo(np.int32).max)


class Literals(NamedTuple):
    """What stands before the values of some columns: in ``content``, ``_VARIANTS`` pieces for each, of
    ``lengths``.
    """

    content: bytes
    lengths: Numbers

    @classmethod
    def of_objects(cls, names: Sequence[str]) -> Literals:
        """Return those of objects with members of ``names``."""
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
    """Values of rows, row by row.

    ``rows``: the row of each, which rises. ``columns``: which literals stand before it. ``is_text``: whether
    it is one; else it is null. ``numbers``: of the text among all texts, where it is one.
    """

    rows: Numbers
    columns: Numbers
    is_text: Flags
    numbers: Numbers

    def where(self, chosen: Flags) -> Members:
        """Return the ``chosen`` ones."""
        return Members(self.rows[chosen], self.columns[chosen], self.is_text[chosen], self.numbers[chosen])


@dataclass(frozen=True)
class JsonTexts:
    """Texts, escaped as within quotes of JSON, and the literals that may stand before them."""

    _pieces: pa.StringArray
    _first_literal: int

    @classmethod
    def of(cls, texts: bytearray, starts: Numbers, ends: Numbers, literals: Sequence[Literals]) -> JsonTexts:
        """``texts`` has one between each of ``starts`` and ``ends``, which rise together; it is used up."""
        used = [*literals, _OF_ARRAYS]
        closings = np.fromiter(map(len, _CLOSINGS), np.int64, len(_CLOSINGS))
        size = len(texts)
        # Added to, not copied: it may be large.
        texts += b"".join([*(each.content for each in used), *(each.encode() for each in _CLOSINGS)])
        if len(texts) > _MOST_BYTES:
            raise Irregular("a block that is too large")
        # The last piece is empty.
        lengths = np.concatenate([*(each.lengths for each in used), closings, np.zeros(1, np.int64)])
        first = 2 * len(starts)
        offsets = np.empty(first + len(lengths) + 1, np.int32)
        # One element for each text, one for what lies between it and the next.
        offsets[0:first:2], offsets[1:first:2] = starts, ends
        offsets[first] = size
        offsets[first + 1 :] = size + np.cumsum(lengths)
        pieces = pa.StringArray.from_buffers(len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(texts))
        return cls(pieces, first)

    def objects(self, members: Members, count: int) -> pa.StringArray:
        """Return an object for each of ``count`` rows, null for those without members."""
        return self._joined(members, count, 0)

    def arrays(self, members: Members, count: int) -> pa.StringArray:
        """Return an array for each row, in the same way; ``columns`` do not matter."""
        columns = np.full(len(members.rows), self._literals // _VARIANTS - 1)
        return self._joined(members._replace(columns=columns), count, 2)

    def values(self, members: Members) -> pa.StringArray:
        """Return the texts of ``members``, one in each row, null where none is."""
        numbers = pa.array(2 * members.numbers, mask=None if members.is_text.all() else ~members.is_text)
        return self._pieces.take(numbers)

    def values_by_row(self, members: Members, count: int) -> pa.StringArray:
        """Return the text of each of ``count`` rows, of which ``members`` has one at most; null for none."""
        numbers, missing = np.zeros(count, np.int64), np.ones(count, np.bool_)
        texts = members.where(members.is_text)
        numbers[texts.rows], missing[texts.rows] = 2 * texts.numbers, False
        return self._pieces.take(pa.array(numbers, mask=missing))

    @property
    def _literals(self) -> int:
        return len(self._pieces) - self._first_literal - len(_CLOSINGS) - 1

    def _joined(self, members: Members, count: int, closing: int) -> pa.StringArray:
        """Return the texts; ``pa.ArrowInvalid`` unless they are UTF-8."""
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
        # A value takes two pieces, the second empty if it is null; a row takes one more for its end.
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


def _strings(offsets: npt.NDArray[np.int32], content: pa.Buffer, rows: Numbers, count: int) -> pa.StringArray:
    """Return the texts of ``content``, null where none of ``rows`` is."""
    validity = None
    if len(rows) != count:
        valid = np.zeros(count, np.bool_)
        valid[rows] = True
        validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
    texts = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), content, validity)
    texts.validate(full=True)
    return texts


def escaped_texts(block: bytes, starts: Numbers, ends: Numbers) -> tuple[bytearray, Numbers, Numbers]:
    """Return the texts of ``block`` between ``starts`` and ``ends`` as they stand within quotes of JSON, with
    their starts and ends. A byte must follow each in the block.
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
    # No text of PostgreSQL has a NUL, so one may stand between two of them, and be found again.
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
    """Return the letters of ``texts``, which ``ends`` NULs part, that JSON escapes."""
    # The backslash first, because the other escapes add new ones.
    special = [letter for letter in '\\"' if letter.encode() in texts]
    control = letters < _FIRST_UNESCAPED
    if np.count_nonzero(control) > ends:
        special += [
            chr(letter) for letter in np.flatnonzero(np.bincount(letters[control])).tolist() if letter
        ]
    return special
