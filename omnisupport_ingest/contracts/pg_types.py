"""PostgreSQL types: the kind of lake column for each, and whether a contract's type holds a source's values.

Names are those of ``format_type`` and their usual aliases (PostgreSQL manual, table "Data Types"). An unknown
type is kept as exact text, never refused.

Values travel as PostgreSQL's text. So a contract may give a column a wider type than the source, or text, but
not a type that its values do not have.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Kind(Enum):
    """The kind of a column in the lake."""

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
"""Kinds whose typed column holds every value that PostgreSQL can send. Not so the others: a numeric may be
``NaN``, a date ``infinity``, an array two-dimensional.
"""

MAX_DECIMAL_PRECISION = 38
"""The most digits a Spark decimal holds."""

DUCKDB_TYPES = {
    Kind.BOOLEAN: "BOOLEAN",
    Kind.SHORT: "SMALLINT",
    Kind.INTEGER: "INTEGER",
    Kind.LONG: "BIGINT",
    Kind.FLOAT: "FLOAT",
    Kind.DOUBLE: "DOUBLE",
    Kind.NUMERIC_TEXT: "VARCHAR",
    Kind.DATE: "DATE",
    Kind.TIMESTAMP: "TIMESTAMP WITH TIME ZONE",
    Kind.TIMESTAMPTZ: "TIMESTAMP WITH TIME ZONE",
    Kind.BINARY: "BLOB",
    Kind.TEXT_ARRAY: "VARCHAR[]",
    Kind.INTEGER_ARRAY: "BIGINT[]",
    Kind.TEXT: "VARCHAR",
}
"""DuckDB's names for the types of columns in the lake, as it prints them; a decimal has its digits
(``PgType.in_duckdb``)."""

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
    """A column type: its kind, and for decimals the digits in total and after the point."""

    kind: Kind
    precision: int = 0
    scale: int = 0

    @classmethod
    def parse(cls, text: str) -> PgType:
        """Read a type name as PostgreSQL writes it, ``numeric(12,2)`` or ``public.plan``."""
        return _parse(text)

    @property
    def in_duckdb(self) -> str:
        """DuckDB's name for the type of the column in the lake."""
        if self.kind is Kind.DECIMAL:
            return f"DECIMAL({self.precision},{self.scale})"
        return DUCKDB_TYPES[self.kind]


def nearest_type(text: str) -> str | None:
    """Return the known type of which ``text`` may be a misspelling; None if it is known or resembles none."""
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
        # A type of an extension may be in any schema, which the server names if it is not in the search path.
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


_SPELLED_ALIKE = frozenset({"text", "varchar", "character varying", "name"})
"""Types whose values are spelled as somebody wrote them."""

_PADDED = frozenset({"char", "character", "bpchar"})

_SPELLED_TWICE = frozenset({"bpchar", "citext", "decimal", "jsonb", "numeric", "numrange", "nummultirange"})
"""Types, without a modifier, that write equal values as several texts: they compare without trailing spaces,
in any case, or by the number. With a modifier ``numeric`` and ``bpchar`` write each value in one way."""

_ALIASES = {"decimal": "numeric", "char": "character", "bpchar": "character"}


def spelling(text: str) -> str | None:
    """Return what the values of the type ``text`` are spelled as: equal values of two types with the same
    answer are equal texts. None if equal values of the one type may be different texts.

    A column of ``char(n)``, or of ``numeric`` with digits after the point, fills up each value in the same
    way. So these are spelled as their whole type.
    """
    modifier = _MODIFIER.search(text)
    name = " ".join(_MODIFIER.sub(" ", text).lower().split())
    if name.endswith("[]"):
        element = spelling(text.strip().removesuffix("[]"))
        return None if element is None else f"{element}[]"
    whole = _ALIASES.get(name, name)
    if modifier is None and name.rpartition(".")[2] in _SPELLED_TWICE:
        return None
    if name.startswith("interval"):
        # 24 hours equal one day.
        return None
    if name in _PADDED:
        return f"{whole}({int(modifier.group(1)) if modifier is not None else 1})"
    if whole == "numeric" and modifier is not None and (scale := int(modifier.group(2) or 0)) != 0:
        return f"{whole}({int(modifier.group(1))},{scale})"
    kind = PgType.parse(text).kind
    if kind in INTEGERS or whole == "numeric":
        return "integer"
    if name in _SPELLED_ALIKE:
        return "text"
    return name if kind is Kind.TEXT else kind.name.lower()


class Fit(Enum):
    """How a contract's type holds values of the source's type."""

    ALL = "the column holds every value"
    EXACT_TEXT = "a value that does not fit is NULL in its column, with its exact text beside it"
    NONE = "values are not of the contract's type, and their rows would be quarantined"


_DIGITS = {Kind.SHORT: 5, Kind.INTEGER: 10, Kind.LONG: 19}

_WIDER: dict[Kind, frozenset[Kind]] = {
    Kind.INTEGER: frozenset({Kind.SHORT}),
    Kind.LONG: frozenset({Kind.SHORT, Kind.INTEGER}),
    Kind.FLOAT: frozenset({Kind.SHORT}),
    Kind.DOUBLE: frozenset({Kind.SHORT, Kind.INTEGER, Kind.FLOAT}),
    Kind.NUMERIC_TEXT: INTEGERS | FLOATS | {Kind.DECIMAL},
    Kind.TIMESTAMP: frozenset({Kind.TIMESTAMPTZ}),
    Kind.TIMESTAMPTZ: frozenset({Kind.TIMESTAMP}),
    Kind.TEXT_ARRAY: frozenset({Kind.INTEGER_ARRAY}),
    Kind.TEXT: frozenset(Kind),
}
"""Kind of the contract → kinds of the source that it holds without loss. A timestamp without a zone is read
as UTC.
"""


def fit(contract: PgType, source: PgType) -> Fit:
    """Return how the type ``contract`` holds values of the type ``source``."""
    if contract.kind is Kind.DECIMAL:
        return _of_decimal(contract, source)
    if contract.kind is source.kind or source.kind in _WIDER.get(contract.kind, ()):
        return Fit.ALL
    if contract.kind in ARRAYS and source.kind in ARRAYS:
        return Fit.EXACT_TEXT
    return Fit.NONE


def _of_decimal(contract: PgType, source: PgType) -> Fit:
    if source.kind in _DIGITS:
        enough = contract.precision - contract.scale >= _DIGITS[source.kind]
        return Fit.ALL if enough else Fit.EXACT_TEXT
    if source.kind is Kind.DECIMAL:
        whole = contract.precision - contract.scale >= source.precision - source.scale
        return Fit.ALL if whole and contract.scale >= source.scale else Fit.EXACT_TEXT
    return Fit.EXACT_TEXT if source.kind in FLOATS | {Kind.NUMERIC_TEXT} else Fit.NONE
