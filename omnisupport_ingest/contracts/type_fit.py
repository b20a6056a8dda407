"""Does a contract's type hold what a column at the source sends?

Values travel as PostgreSQL's text, so a contract may type a column more widely than the source does,
or keep it as text; it may not type it as something that its values are not.
"""

from __future__ import annotations

from enum import Enum

from omnisupport_ingest.contracts.pg_types import ARRAYS, FLOATS, INTEGERS, Kind, PgType


class Fit(Enum):
    """How a contract's type stands to the source's."""

    ALL = "every value has its place"
    EXACT_TEXT = "a value without a place is NULL in its column, and its exact text stands beside it"
    NONE = "values are no values of the contract's type, and their rows would be quarantined"


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
"""Kind of the contract → kinds of the source that it holds without loss. (A timestamp without a zone
is read as UTC.)"""


def fit(contract: PgType, source: PgType) -> Fit:
    """How ``contract`` holds values of ``source``."""
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
