"""Reads many lines of JSON in step: in each line the same member is read at the same time.

One program wrote all lines, so the caller knows what comes next: text that is the same in each line, or a
value. A line with anything else is dropped. So every line that is left at the end has been read byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.sources.debezium.line_blocks import PADDING, Block, Flags, Places
from omnisupport_ingest.sources.postgres.protocol.text_columns import words

_QUOTE, _MINUS, _ZERO, _NINE, _COMMA, _OPEN, _CLOSE, _BLANK, _BEGIN = b'"-09,[] {'
_MOST_DIGITS = 19
"""Most digits of a 64-bit number; a number with so many digits that begins with a nine may be out of
range."""
_MOST_ELEMENTS = 100
_LONGEST_NUMBER = 40
"""Most characters of a number with a fraction or an exponent; a line with a longer one is read alone."""
_NUMBER = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?$"
_OF_NUMBERS = np.zeros(256, np.bool_)
_OF_NUMBERS[list(b"0123456789+-.eE")] = True
VARIABLE_DECIMAL = (
    r'^\{"scale": ?(?P<scale>0|-?[1-9][0-9]{0,8}), ?"value": ?"(?P<unscaled>[A-Za-z0-9+/]*={0,2})"\}$'
)

Words = npt.NDArray[np.uint64]


def _word(text: bytes) -> int:
    return int.from_bytes(text, "little")


_ONE_BYTE, _FOUR_BYTES = np.uint64(0xFF), np.uint64(0xFFFFFFFF)
_ZEROS = np.uint64(_word(b"0" * 8))
_SEVEN_BITS, _HIGH_BITS = np.uint64(_word(b"\x7f" * 8)), np.uint64(_word(b"\x80" * 8))
_ABOVE_NINE = np.uint64(_word(bytes([0x80 - 10]) * 8))
_NULL, _TRUE, _FALSE = _word(b"null"), _word(b"true"), _word(b"alse")


@dataclass(frozen=True)
class Slot:
    """A value in each line: bytes ``begins`` to ``ends`` of the block. ``is_null``: whether it is
    ``null``."""

    begins: Places
    ends: Places
    is_null: Flags

    def __getitem__(self, chosen: Any) -> Slot:
        return Slot(self.begins[chosen], self.ends[chosen], self.is_null[chosen])


class Walk:
    """Walks through ``lines`` (line numbers from 0) of ``block`` in step, and keeps those that match."""

    def __init__(self, block: Block, lines: Places) -> None:
        self.block, self.lines, self.slots = block, lines, list[Slot]()
        self._letters = block.letters
        self._four, self._eight = words(block.content, "<u4"), words(block.content, "<u8")
        self._at = block.starts[lines]
        self._quote = np.searchsorted(block.quotes, self._at)

    def expect(self, text: bytes) -> None:
        """Read ``text``, which every line must have next."""
        length, at = len(text), self._at
        if length > len(PADDING) - 8:
            found = self._stands(text)
        elif length < 8:
            mask = (1 << 8 * length) - 1
            found = (self._eight[at] & mask) == _word(text)
        else:
            found = self._eight[at] == _word(text[:8])
            # The last eight bytes may overlap bytes that are compared already.
            for start in [*range(8, length - 7, 8), *([length - 8] if length % 8 else [])]:
                found &= self._eight[at + start] == _word(text[start : start + 8])
        self._at = self._at + length
        self._quote = self._quote + _unescaped_quotes(text)
        self._keep(found)

    def _stands(self, text: bytes) -> Flags:
        """Return in which lines ``text`` comes next. Arrow compares it whole; it may be longer than the
        block."""
        bounds = np.empty((len(self.lines), 2), np.int32)
        bounds[:, 0] = self._at
        # For a line that ends earlier, fewer bytes are compared, so it is not equal.
        bounds[:, 1] = np.minimum(self._at + len(text), np.maximum(self._at, self.block.stops[self.lines]))
        if not len(bounds):
            return np.zeros(0, np.bool_)
        offsets = pa.py_buffer(bounds.reshape(-1))
        parts = pa.BinaryArray.from_buffers(
            pa.binary(), 2 * len(bounds) - 1, [None, offsets, pa.py_buffer(self.block.content)]
        )
        return np.asarray(pc.equal(parts, pa.scalar(text, pa.binary())))[::2]

    def text(self) -> None:
        """Read a text or null into a slot; the slot includes the quotes."""
        at = self._at
        first, is_null = self._letters[at] == _QUOTE, self._four[at] == _NULL
        ends = np.where(
            first, self.block.quotes[np.minimum(self._quote + 1, len(self.block.quotes) - 1)] + 1, at + 4
        )
        self._quote = self._quote + 2 * first
        self._take(ends, first | is_null, is_null)

    def whole(self) -> None:
        """Read a whole number of 64 bits, as JSON writes it, or null into a slot."""
        at, eight = self._at, self._eight[self._at]
        is_null, first = (eight & _FOUR_BYTES) == _NULL, eight & _ONE_BYTE
        is_negative = first == _MINUS
        if is_negative.any():
            eight = self._eight[at + is_negative]
            first = eight & _ONE_BYTE
        digits = self._digits(at + is_negative, eight)
        count = digits + is_negative
        found = (digits > 0) & (digits <= _MOST_DIGITS) & ((first != _ZERO) | ((digits == 1) & ~is_negative))
        for i in np.flatnonzero(found & (digits == _MOST_DIGITS) & (first == _NINE)):
            found[i] = -(1 << 63) <= int(self.block.content[at[i] : at[i] + count[i]]) < 1 << 63
        self._take(at + np.where(is_null, 4, count), found | is_null, is_null)

    def _digits(self, at: Places, eight: Words) -> Places:
        """Return how many digits stand at ``at``, where the words ``eight`` begin; of more than 24 digits the
        first 24 count."""
        count = _leading_digits(eight)
        for full in (8, 16):
            longer = np.flatnonzero(count == full)
            if not len(longer):
                break
            count[longer] += _leading_digits(self._eight[at[longer] + full])
        return count

    def number(self) -> None:
        """Read a number of few digits, as JSON writes it, or null into a slot."""
        at = self._at
        is_null = self._four[at] == _NULL
        # A number ends within so many bytes, because the byte after it cannot belong to a number.
        count = _OF_NUMBERS[_windows(self.block.content, _LONGEST_NUMBER + 1)[at]].argmin(axis=1)
        texts = cut(self.block, Slot(at, at + count, count == 0))
        found = np.asarray(pc.fill_null(pc.match_substring_regex(texts, _NUMBER), False))
        self._take(at + np.where(is_null, 4, count), found | is_null, is_null)

    def variable(self) -> None:
        """Read a decimal that has its own scale (``{"scale":2,"value":"AQ=="}``) or null into a slot."""
        at, stops, quotes = self._at, self.block.stops[self.lines], self.block.quotes
        is_null, is_object = self._four[at] == _NULL, self._letters[at] == _BEGIN
        # The object ends after its sixth quote.
        ends = quotes[np.minimum(self._quote + 5, len(quotes) - 1)] + 2
        ends = np.maximum(at, np.where(is_object, np.minimum(ends, stops), at + 4))
        found = pc.match_substring_regex(cut(self.block, Slot(at, ends, ~is_object)), VARIABLE_DECIMAL)
        self._quote = self._quote + 6 * is_object
        self._take(ends, np.asarray(pc.fill_null(found, False)) | is_null, is_null)

    def flag(self) -> None:
        """Read true, false or null into a slot."""
        at = self._at
        word = self._four[at]
        is_null, is_false = word == _NULL, self._four[at + 1] == _FALSE
        is_false &= self._letters[at] == ord("f")
        self._take(at + 4 + is_false, (word == _TRUE) | is_false | is_null, is_null)

    def texts(self) -> None:
        """Read a list of texts and nulls, or null, into a slot."""
        self._texts(1)

    def texts_apart(self) -> None:
        """Read such a list, with a blank after each comma."""
        self._texts(2)

    def _texts(self, separator: int) -> None:
        at, quote = self._at, self._quote
        is_null = self._four[at] == _NULL
        is_list = self._letters[at] == _OPEN
        found = is_null.copy()
        ends = at + 4
        going = np.flatnonzero(is_list)
        at, quote = at[going] + 1, quote[going]
        quotes = self.block.quotes
        empty = self._letters[at] == _CLOSE
        self._quote = self._quote.copy()
        for _ in range(_MOST_ELEMENTS):
            done = empty | (self._letters[at - 1] == _CLOSE)
            ended = going[done]
            found[ended], ends[ended], self._quote[ended] = True, at[done] + empty[done], quote[done]
            going, at, quote = going[~done], at[~done], quote[~done]
            if not len(going):
                break
            is_text, nothing = self._letters[at] == _QUOTE, self._four[at] == _NULL
            at = np.where(is_text, quotes[np.minimum(quote + 1, len(quotes) - 1)] + 1, at + 4)
            at = np.minimum(at, len(self._letters) - 8)
            quote = quote + 2 * is_text
            behind = self._letters[at]
            more = (is_text | nothing) & ((behind == _COMMA) | (behind == _CLOSE))
            if separator > 1:
                more &= (behind == _CLOSE) | (self._letters[at + 1] == _BLANK)
            going, quote = going[more], quote[more]
            at = at[more] + np.where(behind[more] == _COMMA, separator, 1)
            empty = np.zeros(len(going), np.bool_)
        self._take(ends, found, is_null)

    def end(self) -> None:
        """Require that the line ends here."""
        self._keep(self._at == self.block.stops[self.lines])

    def _take(self, ends: Places, found: Flags, is_null: Flags) -> None:
        self.slots.append(Slot(self._at, ends, is_null))
        self._at = ends
        self._keep(found)

    def _keep(self, chosen: Flags) -> None:
        # A line may not continue beyond its block, nor into the padding after it.
        chosen = chosen & (self._at <= len(self._letters) - len(PADDING))
        if chosen.all():
            return
        self.lines, self._at, self._quote = self.lines[chosen], self._at[chosen], self._quote[chosen]
        self.slots = [each[chosen] for each in self.slots]


def cut(block: Block, slot: Slot, *, inside: int = 0) -> pa.StringArray:
    """Return the text of ``slot``, null where the slot is null. ``inside``: characters to leave out at each
    end."""
    bounds = np.empty((len(slot.begins), 2), np.int32)
    bounds[:, 0], bounds[:, 1] = slot.begins + inside, slot.ends - inside
    if not len(bounds):
        return pa.array([], pa.string())
    offsets = pa.py_buffer(bounds.reshape(-1))
    parts = pa.StringArray.from_buffers(2 * len(bounds) - 1, offsets, pa.py_buffer(block.content))
    indices = np.arange(0, 2 * len(bounds), 2, dtype=np.int32)
    return parts.take(pa.array(indices, mask=slot.is_null if slot.is_null.any() else None))


def _windows(content: bytes, width: int) -> npt.NDArray[np.uint8]:
    return np.ndarray((len(content) - width + 1, width), np.uint8, buffer=content, strides=(1, 1))


def _leading_digits(eight: Words) -> Places:
    """Return how many of the eight letters in each word, from the lowest on, are digits before another
    letter."""
    # A digit is 0x30 to 0x39. Each step works on eight letters at once, and none carries into the next one.
    half = eight ^ _ZEROS
    others = (((half & _SEVEN_BITS) + _ABOVE_NINE) | half) & _HIGH_BITS
    lowest = others & (~others + np.uint64(1))
    # Below the high bit of the first other letter are seven bits of its own, and eight for each digit.
    return np.where(others == 0, 8, np.bitwise_count(lowest - np.uint64(1)) >> 3).astype(np.int64)


def _unescaped_quotes(text: bytes) -> int:
    return text.replace(b"\\\\", b"").replace(b'\\"', b"").count(b'"')
