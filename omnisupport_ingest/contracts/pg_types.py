"""PostgreSQL type names, sorted into the few kinds that the platform types or keeps as exact text.

The names are those of ``format_type`` and their usual aliases (PostgreSQL manual, table "Data
Types"). A type that is not known here is kept as exact text, never refused.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """What a column becomes in the lake."""

    BOOLEAN = "boolean"
    SHORT = "smallint"
    INTEGER = "integer"
    LONG = "bigint"
    FLOAT = "real"
    DOUBLE = "double precision"
    DECIMAL = "numeric with a precision that fits a 38-digit decimal"
    NUMERIC_TEXT = "numeric without such a precision, kept as exact text"
    DATE = "date"
    TIMESTAMP = "timestamp, without a zone, read as UTC"
    TIMESTAMPTZ = "timestamp with time zone"
    BINARY = "bytea"
    TEXT_ARRAY = "one-dimensional array of strings"
    INTEGER_ARRAY = "one-dimensional array of integers"
    TEXT = "everything else, kept as exact text"


INTEGERS = frozenset({Kind.SHORT, Kind.INTEGER, Kind.LONG})
FLOATS = frozenset({Kind.FLOAT, Kind.DOUBLE})
NUMBERS = INTEGERS | FLOATS | {Kind.DECIMAL, Kind.NUMERIC_TEXT}
ARRAYS = frozenset({Kind.TEXT_ARRAY, Kind.INTEGER_ARRAY})

ALWAYS_FITS = INTEGERS | FLOATS | {Kind.BOOLEAN, Kind.NUMERIC_TEXT, Kind.BINARY, Kind.TEXT}
"""Kinds whose typed column holds every value that PostgreSQL can send. (A numeric may be ``NaN``,
a date ``infinity``, an array two-dimensional.)"""

MAX_DECIMAL_PRECISION = 38
"""The most digits a Spark decimal holds."""

_KINDS = {
    "boolean": Kind.BOOLEAN,
    "bool": Kind.BOOLEAN,
    "smallint": Kind.SHORT,
    "int2": Kind.SHORT,
    "integer": Kind.INTEGER,
    "int": Kind.INTEGER,
    "int4": Kind.INTEGER,
    "bigint": Kind.LONG,
    "int8": Kind.LONG,
    "real": Kind.FLOAT,
    "float4": Kind.FLOAT,
    "double precision": Kind.DOUBLE,
    "float8": Kind.DOUBLE,
    "numeric": Kind.NUMERIC_TEXT,
    "decimal": Kind.NUMERIC_TEXT,
    "date": Kind.DATE,
    "timestamp": Kind.TIMESTAMP,
    "timestamp without time zone": Kind.TIMESTAMP,
    "timestamptz": Kind.TIMESTAMPTZ,
    "timestamp with time zone": Kind.TIMESTAMPTZ,
    "bytea": Kind.BINARY,
}
_STRING_LIKE = frozenset(
    {"text", "varchar", "character varying", "char", "character", "bpchar", "name", "citext"}
    | {"uuid", "inet", "cidr", "json", "jsonb"}
)
_MODIFIER = re.compile(r"\(\s*([0-9]{1,9})\s*(?:,\s*(-?[0-9]{1,9})\s*)?\)")


@dataclass(frozen=True, slots=True)
class PgType:
    """A column type: its kind, and for decimals the digits in all and after the point."""

    kind: Kind
    precision: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> PgType:
        """Read a type name as PostgreSQL writes it, ``numeric(12,2)`` or ``public.plan``."""
        return _parse(text)


def nearest_type(text: str) -> str | None:
    """The known type that ``text`` may be a misspelling of, None if it is known itself or like no other."""
    name, array = text.lower().removesuffix("[]"), text.endswith("[]")
    if name in _KINDS or name in _STRING_LIKE:
        return None
    near = difflib.get_close_matches(name, sorted((*_KINDS, *_STRING_LIKE)), n=1, cutoff=0.75)
    return near[0] + "[]" * array if near else None


@lru_cache(maxsize=1024)
def _parse(text: str) -> PgType:
    modifier = _MODIFIER.search(text)
    name = " ".join(_MODIFIER.sub(" ", text).lower().split())
    bare = name.rpartition(".")[2]
    if bare.removesuffix("[]") == "citext":
        # Of an extension, so in any schema; the server names that where it is not looked in by itself.
        name = bare
    if name.endswith("[]"):
        element = name.removesuffix("[]").strip()
        if element in _STRING_LIKE:
            return PgType(Kind.TEXT_ARRAY)
        return PgType(Kind.INTEGER_ARRAY if _KINDS.get(element) in INTEGERS else Kind.TEXT)
    kind = _KINDS.get(name, Kind.TEXT)
    if kind is Kind.NUMERIC_TEXT and modifier is not None:
        precision, scale = int(modifier.group(1)), int(modifier.group(2) or 0)
        # PostgreSQL 15 allows a negative scale, and one above the precision; Spark neither.
        if 1 <= precision <= MAX_DECIMAL_PRECISION and 0 <= scale <= precision:
            return PgType(Kind.DECIMAL, precision, scale)
    return PgType(kind)
