"""Converts dates, times, numbers and bytes of a column of many lines to PostgreSQL's texts in bulk.

``values`` defines the meaning of a single value; here arithmetic converts a whole column. The result is the
text between the quotes of JSON, null for every value that this module does not know (``infinity``, a year
before 1000, a number of many digits): such a value is then converted alone. Both ways must give the same
text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts.pg_values import whole_number
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.json_walk import VARIABLE_DECIMAL, Slot
from omnisupport_ingest.sources.debezium.line_blocks import Block, Flags, Letters, Places
from omnisupport_ingest.sources.debezium.pg_numbers import Schema
from omnisupport_ingest.sources.debezium.pg_times import DAY
from omnisupport_ingest.sources.debezium.targets import Target
from omnisupport_ingest.sources.debezium.values import has_meaning, is_single

Converter: TypeAlias = Callable[[pa.StringArray], pa.StringArray]
"""Makes the texts of a column from the values in its lines, without quotes."""

_FIRST_DAY, _LAST_DAY = -354_285, 2_932_896
"""Days from 1970 to 1000-01-01 and to 9999-12-31: between them every year has four digits."""
_FIRST_MICROS, _LAST_MICROS = _FIRST_DAY * DAY, (_LAST_DAY + 1) * DAY - 1
_MILLI, _MICRO, _NANO = 1_000, 1, 0
"""Microseconds per unit. Nanoseconds are converted by division."""

_DAYS = ("io.debezium.time.Date", "org.apache.kafka.connect.data.Date")
_MOMENTS = {
    "io.debezium.time.Timestamp": _MILLI,
    "io.debezium.time.MicroTimestamp": _MICRO,
    "io.debezium.time.NanoTimestamp": _NANO,
    "org.apache.kafka.connect.data.Timestamp": _MILLI,
}
_CLOCKS = {
    "io.debezium.time.Time": _MILLI,
    "io.debezium.time.MicroTime": _MICRO,
    "io.debezium.time.NanoTime": _NANO,
    "org.apache.kafka.connect.data.Time": _MILLI,
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"

_MOST_SCALE, _MOST_SCALES = 38, 16
"""The largest scale that is converted in bulk, and the most different scales in one column."""
_PLAIN_DECIMAL = r"^-?(0|[1-9][0-9]{0,150})(\.[0-9]{1,150})?$"
_FLOAT_DIGITS = {True: 6, False: 15}
"""Decimal digits that a ``real`` (true) and a ``double precision`` keep. A number with at most so many digits
has a float of its own, so its own digits are the shortest that read as that float."""
_HEX_PREFIX = r"\\x"
"""The beginning of PostgreSQL's text of bytes, as it stands in JSON."""


def converter_of(schema: Schema, target: Target, handling: Handling, *, is_text: bool) -> Converter | None:
    """Return a converter to the texts that ``text_of`` makes of values of the column; None if this module has
    none.

    ``is_text``: its values are JSON texts, not numbers.
    """
    found = _of_text(schema, target, handling) if is_text else _of_number(schema, target)
    return found if found is None else partial(_checked, found)


def _of_number(schema: Schema, target: Target) -> Converter | None:
    if has_meaning(schema):
        meaning = schema["name"]
        if meaning in _MOMENTS:
            return partial(
                _moments, unit=_MOMENTS[meaning], zone="+00" if target.name == "timestamptz" else ""
            )
        if meaning in _CLOCKS:
            return partial(_clocks, unit=_CLOCKS[meaning])
        return _dates if meaning in _DAYS else None
    single = is_single(schema, target)
    if single is not None:
        return partial(_floats, single=single)
    unit = _MILLI if target.modifier is not None and target.modifier <= 3 else _MICRO
    by_type: dict[str, Converter] = {
        "date": _dates,
        "timestamp": partial(_moments, unit=unit, zone=""),
        "time": partial(_clocks, unit=unit),
    }
    return by_type.get(target.name)


def _of_text(schema: Schema, target: Target, handling: Handling) -> Converter | None:
    if has_meaning(schema):
        scale = _scale_of(schema, target) if schema["name"] == _DECIMAL and target.name != "money" else None
        return None if scale is None else partial(_unscaled, scale=scale)
    if target.name == "bytea" or schema.get("type") == "bytes":
        if handling.binary == "hex":
            return _hexadecimal
        if handling.binary is None and schema.get("type") == "string":
            return None
        return partial(_base64, url_safe=handling.binary == "base64-url-safe")
    if target.name != "numeric" or is_single(schema, target) is not None:
        return None
    precise = schema.get("type") != "string" and handling.decimals == "precise"
    if not precise or target.modifier is None:
        return _decimals
    return partial(_decimals_or_unscaled, scale=target.scale) if 0 <= target.scale <= _MOST_SCALE else None


def _scale_of(schema: Schema, target: Target) -> int | None:
    parameters = schema.get("parameters")
    declared = parameters.get("scale") if isinstance(parameters, dict) else target.scale
    scale = whole_number(declared) if isinstance(declared, str) else declared
    plain = isinstance(scale, int) and not isinstance(scale, bool) and 0 <= scale <= _MOST_SCALE
    return scale if plain else None


def _checked(convert: Converter, values: pa.StringArray) -> pa.StringArray:
    """Return the result of ``convert``; nulls if Arrow cannot convert the column."""
    try:
        return convert(values)
    except pa.ArrowInvalid:
        return pa.nulls(len(values), pa.string())


# ---- Times


def _dates(values: pa.StringArray) -> pa.StringArray:
    days = _between(values.cast(pa.int64()), _FIRST_DAY, _LAST_DAY)
    return days.cast(pa.int32()).cast(pa.date32()).cast(pa.string())


def _moments(values: pa.StringArray, *, unit: int, zone: str) -> pa.StringArray:
    micros = _micros(values, unit, _FIRST_MICROS, _LAST_MICROS)
    texts = _without_zeros(micros.cast(pa.timestamp("us")).cast(pa.string()))
    return pc.binary_join_element_wise(texts, zone, "") if zone else texts


def _clocks(values: pa.StringArray, *, unit: int) -> pa.StringArray:
    # The end of a day is 24:00:00, which Arrow does not have.
    return _without_zeros(_micros(values, unit, 0, DAY - 1).cast(pa.time64("us")).cast(pa.string()))


def _micros(values: pa.StringArray, unit: int, first: int, last: int) -> pa.Int64Array:
    """Return numbers in ``unit`` as microseconds, null outside of ``first`` to ``last``."""
    numbers = values.cast(pa.int64())
    if unit == _NANO:
        # Rounded down, as Python does; Arrow rounds towards zero.
        quotient = pc.divide(numbers, 1000)
        numbers = pc.if_else(
            pc.less(numbers, pc.multiply(quotient, 1000)), pc.subtract(quotient, 1), quotient
        )
    elif unit == _MILLI:
        numbers = pc.multiply(_between(numbers, first // _MILLI, last // _MILLI), _MILLI)
    return _between(numbers, first, last)


def _between(numbers: pa.Int64Array, first: int, last: int) -> pa.Int64Array:
    inside = pc.and_(pc.greater_equal(numbers, first), pc.less_equal(numbers, last))
    return pc.if_else(inside, numbers, pa.scalar(None, pa.int64()))


def _without_zeros(texts: pa.StringArray) -> pa.StringArray:
    """Return times with six digits of fraction without the trailing zeros."""
    return pc.ascii_rtrim(pc.ascii_rtrim(texts, "0"), ".")


# ---- Numbers


def _floats(values: pa.StringArray, *, single: bool) -> pa.StringArray:
    has_point = pc.match_substring(values, ".")
    digits = pc.subtract(pc.binary_length(values), pc.add(has_point.cast(pa.int32()), _signs(values)))
    # PostgreSQL writes no exponent from 1e-4 up to so many digits. JSON's -0 is the whole number 0.
    plain = pc.and_(
        pc.match_substring_regex(values, _PLAIN_DECIMAL), pc.less_equal(digits, _FLOAT_DIGITS[single])
    )
    tiny = pc.match_substring_regex(values, r"^-?0\.0000[0-9]*[1-9]|^-0$")
    kept = _where(pc.and_not(plain, tiny), values)
    return pc.if_else(has_point, _without_zeros(kept), kept)


def _signs(values: pa.StringArray) -> pa.Int32Array:
    return pc.starts_with(values, "-").cast(pa.int32())


def _decimals(values: pa.StringArray) -> pa.StringArray:
    return _where(pc.match_substring_regex(values, _PLAIN_DECIMAL), values)


def _decimals_or_unscaled(values: pa.StringArray, *, scale: int) -> pa.StringArray:
    """Return decimals, recognised by their point, and unscaled numbers in base64, which have none, as
    decimals.

    ``Infinity`` would also be eight characters of base64; it gives null.
    """
    has_point = pc.match_substring(values, ".")
    texts = pc.if_else(has_point, _decimals(values), _unscaled(values, scale=scale))
    return _where(pc.not_equal(values, "Infinity"), texts)


def _unscaled(values: pa.StringArray, *, scale: int) -> pa.StringArray:
    """Return unscaled numbers of up to eight bytes in base64 as decimals with ``scale`` digits after the
    point."""
    numbers, known = _numbers_of_base64(values)
    known &= numbers != np.iinfo(np.int64).min
    digits = pa.array(np.abs(numbers), mask=~known).cast(pa.string())
    signs = pc.if_else(pa.array(numbers < 0), "-", "")
    if not scale:
        return pc.binary_join_element_wise(signs, digits, "")
    digits = pc.utf8_lpad(digits, scale + 1, "0")
    whole = pc.utf8_slice_codeunits(digits, 0, -scale)
    return pc.binary_join_element_wise(signs, whole, ".", pc.utf8_slice_codeunits(digits, -scale), "")


def variable_decimals(values: pa.StringArray) -> pa.StringArray:
    """Return objects of a scale and an unscaled number as decimals."""
    scale_texts, unscaled = pc.extract_regex(values, VARIABLE_DECIMAL).flatten()
    scales = scale_texts.cast(pa.int64())
    texts = pa.nulls(len(values), pa.string())
    for scale in scales.unique().to_pylist()[:_MOST_SCALES]:
        if scale is not None and 0 <= scale <= _MOST_SCALE:
            mine = pc.fill_null(pc.equal(scales, scale), False)
            texts = pc.replace_with_mask(texts, mine, _unscaled(unscaled.filter(mine), scale=scale))
    return texts


def _where(chosen: pa.BooleanArray, values: pa.StringArray) -> pa.StringArray:
    return pc.if_else(chosen, values, pa.scalar(None, pa.string()))


# ---- Base64

_PAD, _NO_LETTER = ord("="), 255
_SIX_BITS = np.full(256, _NO_LETTER, np.uint8)
_SIX_BITS[np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)] = (
    np.arange(64)
)
_SIX_BITS[_PAD] = 0
_URL_SAFE = _SIX_BITS.copy()
_URL_SAFE[list(b"-_")], _URL_SAFE[list(b"+/")] = _SIX_BITS[list(b"+/")], _NO_LETTER
_HEX = np.frombuffer(b"".join(b"%02x" % each for each in range(256)), np.uint16)
"""The two hexadecimal digits of each byte."""
_LETTERS_OF_NUMBERS = (4, 8, 12)


def _numbers_of_base64(values: pa.StringArray) -> tuple[npt.NDArray[np.int64], Flags]:
    """Return the numbers (big-endian, signed), and which of ``values`` are one to eight bytes in base64."""
    letters, bounds = _letters_of(values)
    lengths = np.diff(bounds)
    numbers, known = np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    is_value = np.asarray(values.is_valid())
    for length in _LETTERS_OF_NUMBERS:
        rows = np.flatnonzero(is_value & (lengths == length))
        if not len(rows):
            continue
        window = letters[bounds[rows][:, np.newaxis] + np.arange(length)]
        bits = _SIX_BITS[window]
        pads = np.count_nonzero(window[:, -2:] == _PAD, axis=1)
        right = (bits != _NO_LETTER).all(axis=1) & ~(window[:, :-2] == _PAD).any(axis=1)
        right &= (window[:, -2] != _PAD) | (window[:, -1] == _PAD)
        for pad in range(3):
            count = length * 3 // 4 - pad
            chosen = np.flatnonzero(right & (pads == pad))
            if count <= 8 and len(chosen):
                numbers[rows[chosen]] = _signed(bits[chosen].astype(np.uint64), 8 * count)
                known[rows[chosen]] = True
    return numbers, known


def _signed(six_bits: npt.NDArray[np.uint64], size: int) -> npt.NDArray[np.int64]:
    """Return the signed numbers of ``size`` bits whose bits each row has, six per element."""
    found = np.zeros(len(six_bits), np.uint64)
    for place in range(six_bits.shape[1]):
        left = size - 6 * (place + 1)
        if left > -6:
            part = six_bits[:, place]
            found |= part << np.uint64(left) if left >= 0 else part >> np.uint64(-left)
    unused = np.uint64(64 - size)
    signed: npt.NDArray[np.int64] = (found << unused).view(np.int64) >> unused.astype(np.int64)
    return signed


def _base64(values: pa.StringArray, *, url_safe: bool) -> pa.StringArray:
    """Return bytes in base64 in PostgreSQL's hexadecimal form."""
    lengths = pc.binary_length(values)
    whole = np.asarray(pc.fill_null(pc.equal(pc.bit_wise_and(lengths, 3), 0), False))
    if not whole.any():
        return pa.nulls(len(values), pa.string())
    letters, bounds = _letters_of(values.filter(pa.array(whole)))
    letters = letters[int(bounds[0]) : int(bounds[-1])]
    bounds = bounds - bounds[0]
    bits = (_URL_SAFE if url_safe else _SIX_BITS)[letters]
    ends, right = bounds[1:], np.ones(len(bounds) - 1, np.bool_)
    is_pad = letters == _PAD
    pad_at = np.flatnonzero(is_pad)
    pad_row = np.searchsorted(bounds, pad_at, "right") - 1
    # Padding may only stand at the end, and is at most two characters.
    last = ends[pad_row] - 1
    right[pad_row[(pad_at < last - 1) | ~is_pad[last]]] = False
    right[np.searchsorted(bounds, np.flatnonzero(bits == _NO_LETTER), "right") - 1] = False
    four = bits.reshape(-1, 4).astype(np.uint32)
    together = four[:, 0] << 18 | four[:, 1] << 12 | four[:, 2] << 6 | four[:, 3]
    content = np.stack((together >> 16, together >> 8, together), axis=1).astype(np.uint8).reshape(-1)
    pads = np.bincount(pad_row, minlength=len(right)).clip(max=2)
    byte_ends = ends // 4 * 3
    kept = np.ones(len(content), np.bool_)
    for number in (1, 2):
        kept[byte_ends[pads >= number] - number] = False
    offsets = np.zeros(len(right) + 1, np.int32)
    np.cumsum(2 * (np.diff(bounds) // 4 * 3 - pads), out=offsets[1:])
    texts = pa.StringArray.from_buffers(
        len(right), pa.py_buffer(offsets), pa.py_buffer(_HEX[content[kept]].tobytes())
    )
    found = pc.binary_join_element_wise(_HEX_PREFIX, _where(pa.array(right), texts), "")
    if whole.all():
        return found
    return pc.replace_with_mask(pa.nulls(len(values), pa.string()), pa.array(whole), found)


def _hexadecimal(values: pa.StringArray) -> pa.StringArray:
    plain = _where(pc.match_substring_regex(values, r"^([0-9a-f][0-9a-f])*$"), values)
    return pc.binary_join_element_wise(_HEX_PREFIX, plain, "")


def _letters_of(values: pa.StringArray) -> tuple[Letters, Places]:
    """Return the bytes of all ``values``, and their bounds: one more than there are values."""
    _, offsets, content = values.buffers()
    bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    letters: Any = np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8)
    return letters, bounds.astype(np.int64)


# ---- Moments as ISO 8601

_SHORTEST, _LONGEST = len('"2026-02-28T13:14:15Z"'), len('"2026-02-28T13:14:15.123456Z"')
_WIDTH = _LONGEST - 2
_IS_DIGIT = np.frombuffer(b"0000-00-00T00:00:00.000000Z", np.uint8) == ord("0")
_DAYS_OF_MONTHS = np.array([0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], np.uint8)


def zoned(block: Block, slot: Slot, zone: str) -> pa.StringArray:
    """Return ``2026-02-28T13:14:15.120000Z``, in quotes, as ``2026-02-28 13:14:15.12`` followed by ``zone``;
    null for every text of another form."""
    lengths = slot.ends - slot.begins
    rows = np.flatnonzero(~slot.is_null & (lengths >= _SHORTEST) & (lengths <= _LONGEST))
    lengths = lengths[rows]
    # After the shortest text other bytes may follow; they are not looked at.
    size = len(block.letters) - _WIDTH + 1
    windows = np.ndarray((size, _WIDTH), np.uint8, buffer=block.content, strides=(1, 1))
    made = windows[slot.begins[rows] + 1]
    fraction_digits = np.maximum(lengths - _SHORTEST - 1, 0)
    digits = made - ord("0")
    places = np.arange(_WIDTH)
    is_digit = _IS_DIGIT & (places < 20 + fraction_digits[:, np.newaxis])
    numbers = {at: digits[:, at] * 10 + digits[:, at + 1] for at in (0, 2, 5, 8, 11, 14, 17)}
    year = numbers[0].astype(np.int16) * 100 + numbers[2]
    leap = (year % 4 == 0) & ((year % 100 != 0) | (year % 400 == 0))
    month, day = numbers[5], numbers[8]
    right = ~(is_digit & (digits > 9)).any(axis=1)
    right &= (year >= 1000) & (month >= 1) & (month <= 12) & (day >= 1)
    right &= day <= _DAYS_OF_MONTHS[np.minimum(month, 12)] - ((month == 2) & ~leap)
    right &= (numbers[11] < 24) & (numbers[14] < 60) & (numbers[17] < 60)
    for at, letter in ((4, "-"), (7, "-"), (10, "T"), (13, ":"), (16, ":")):
        right &= made[:, at] == ord(letter)
    has_point = lengths > _SHORTEST
    right &= ~has_point | ((made[:, 19] == ord(".")) & (fraction_digits > 0))
    right &= block.letters[slot.ends[rows] - 2] == ord("Z")
    # The trailing zeros of a fraction are removed, and a point without digits after it.
    in_fraction = (places >= 20) & is_digit & (digits != 0)
    kept = np.where(in_fraction.any(axis=1), _WIDTH - in_fraction[:, ::-1].argmax(axis=1), 19)
    texts = _cut_behind(made[right], kept[right], rows[right], len(slot.begins))
    return pc.binary_join_element_wise(texts, zone, "") if zone else texts


def _cut_behind(made: Letters, kept: Places, rows: Places, count: int) -> pa.StringArray:
    """Return the first ``kept`` characters of each row of ``made``, as a time; null except in ``rows`` of
    ``count``."""
    full = made.copy()
    full[:, 10] = ord(" ")
    lengths, offsets = np.zeros(count, np.int64), np.zeros(count + 1, np.int32)
    lengths[rows] = kept
    np.cumsum(lengths, out=offsets[1:])
    content = full[np.arange(full.shape[1]) < kept[:, np.newaxis]]
    is_known = np.zeros(count, np.bool_)
    is_known[rows] = True
    validity = pa.py_buffer(np.packbits(is_known, bitorder="little"))
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(content), validity)
