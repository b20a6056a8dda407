r"""Which texts of a column are numbers, dates or times in PostgreSQL's usual spelling, and their values.

Such a text is called plain. That decides nothing: what is not plain is left to the exact reader
(``typed_values``) or rule (``row_rules``), which take every spelling. Plain texts mean the same to both.

One compiled pass reads a column (``compiled_values.c``). Where it is not installed regular expressions find
the plain texts, of somewhat fewer days and zones, and Arrow casts them, at three to ten times the
processor time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.compiled import Memory, buffer_of, compiled_values
from omnisupport_ingest.contracts.pg_types import Kind

TIME = pa.timestamp("us", tz="UTC")

SAFE_DIGITS = {Kind.SHORT: 4, Kind.INTEGER: 9, Kind.LONG: 18}
"""The digits that surely fit into a whole number of each kind."""

# Patterns of RE2. Each matches only texts that Arrow's cast reads as PostgreSQL means them.
_DAY = (
    r"(?:1[0-9]|20)[0-9]{2}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])"
    r"|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
)
_UTC = r"(?:Z|\+00(?::?00)?)"
_MOMENT = rf"{_DAY}[ T](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,6}})?{_UTC}?"


@dataclass(frozen=True)
class PlainTexts:
    """``plain``: whether each text is; null for a null text. ``values``: those of the plain texts, null for
    the others."""

    plain: pa.BooleanArray
    values: pa.Array


def whole_numbers(texts: pa.StringArray, digits: int) -> PlainTexts:
    """Read whole numbers of at most ``digits`` digits (1 to 18) as 64-bit integers."""
    if compiled_values is None:
        return _cast(texts, rf"-?[0-9]{{1,{digits}}}", pa.int64())
    return _read(compiled_values.wholes(*_given(texts), digits), len(texts), pa.int64())


def integer_keys(keys: pa.StringArray) -> PlainTexts:
    """Read row keys of one column, which are JSON arrays of one text, as 64-bit integers: whole numbers of at
    most 18 digits, without leading zeros."""
    if compiled_values is None:
        plain = _matching(keys, r'\["(?:0|-?[1-9][0-9]{0,17})"\]')
        return PlainTexts(plain, pc.utf8_slice_codeunits(_where(plain, keys), 2, -2).cast(pa.int64()))
    return _read(compiled_values.keys(*_given(keys)), len(keys), pa.int64())


def dates(texts: pa.StringArray) -> PlainTexts:
    """Read dates of four-digit years."""
    if compiled_values is None:
        return _cast(texts, _DAY, pa.date32())
    found = _read(compiled_values.moments(*_given(texts), False), len(texts), pa.int64())
    return PlainTexts(found.plain, found.values.cast(pa.int32()).cast(pa.date32()))


def moments(texts: pa.StringArray) -> PlainTexts:
    """Read times of four-digit years; one without a zone is in UTC."""
    if compiled_values is None:
        plain = _matching(texts, _MOMENT)
        bare = pc.replace_substring_regex(_where(plain, texts), rf"{_UTC}\z", "")
        return PlainTexts(plain, bare.cast(pa.timestamp("us")).cast(pa.int64()).cast(TIME))
    return _read(compiled_values.moments(*_given(texts), True), len(texts), TIME)


def are_decimals(texts: pa.StringArray, before: int, after: int, exponent: int = 0) -> pa.BooleanArray:
    """Return which texts are numbers with at most ``before`` digits (at least one), ``after`` ones behind a
    point, and ``exponent`` ones of an exponent; null for a null text."""
    if compiled_values is None:
        point = rf"(?:\.[0-9]{{1,{after}}})?" if after else ""
        power = rf"(?:[eE][+-]?[0-9]{{1,{exponent}}})?" if exponent else ""
        return _matching(texts, rf"-?[0-9]{{1,{before}}}{point}{power}")
    plain, known = compiled_values.decimals(*_given(texts), before, after, exponent)
    return _bits(plain, known, len(texts))


def _given(texts: pa.StringArray) -> tuple[Any, Any, pa.Buffer | None, int]:
    """Return ``texts`` as the compiled functions take them. Raises ``TypeError`` for texts with other
    offsets."""
    if texts.type != pa.string():
        raise TypeError(f"Texts of the type {texts.type} have other offsets than those of the type string.")
    valid, offsets, content = texts.buffers()
    count = len(texts)
    bounds = np.frombuffer(offsets, np.int32, count + 1, 4 * texts.offset) if count else np.zeros(1, np.int32)
    return content if count and content is not None else b"", bounds, valid, texts.offset


def _read(found: tuple[Memory, Memory | None, Memory], count: int, kind: pa.DataType) -> PlainTexts:
    plain, known, numbers = found
    values = pa.Array.from_buffers(kind, count, [buffer_of(plain), buffer_of(numbers)])
    return PlainTexts(_bits(plain, known, count), values)


def _bits(plain: Memory, known: Memory | None, count: int) -> pa.BooleanArray:
    valid = None if known is None else buffer_of(known)
    return pa.BooleanArray.from_buffers(pa.bool_(), count, [valid, buffer_of(plain)])


def _matching(texts: pa.StringArray, pattern: str) -> pa.BooleanArray:
    return pc.match_substring_regex(texts, rf"\A(?:{pattern})\z")


def _cast(texts: pa.StringArray, pattern: str, kind: pa.DataType) -> PlainTexts:
    plain = _matching(texts, pattern)
    return PlainTexts(plain, _where(plain, texts).cast(kind))


def _where(plain: pa.BooleanArray, texts: pa.StringArray) -> pa.StringArray:
    return pc.if_else(plain, texts, pa.scalar(None, pa.string()))
