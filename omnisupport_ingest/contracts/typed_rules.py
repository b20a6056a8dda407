"""The rules of a contract about a typed column, as Spark columns: what the pandera gate asks of a table.

They are those of ``row_rules`` that bear on a value that is there, and are named alike.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from pyspark.sql import Column
from pyspark.sql import functions as F

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.column_rules import gated
from omnisupport_ingest.contracts.pg_types import FLOATS, Kind

# Java's regular expressions: \z is the true end, where $ would let a line break follow. A cast alone would
# not do: Spark reads '1.5d' as a number. Possessive: no long text is tried again at each of its digits.
_NUMBER = r"^[+-]?(\d++\.?+\d*+|\.\d++)([eE][+-]?\d{1,9})?\z"
_NOT_FINITE = r"^(NaN|[+-]?[Ii]nf(inity)?)\z"

Judge = Callable[[Column], Column]
"""From a value to whether it breaks a rule: true, or else false or NULL."""


def value_rules(of: model.Column) -> dict[str, Judge]:
    """The rules about a value that is there: name of the rule → how it judges the typed column.

    Those that keep rows out; a dimension has rows that break the others. A judge gives true for a value that
    breaks the rule, false or NULL for one that is NULL.
    """
    column = gated(of)
    rules: dict[str, Judge] = {}
    if column.enum:
        rules["enum"] = lambda value: ~value.isin(*column.enum)
    if column.minimum is not None:
        rules["minimum"] = lambda value: _number(column, value) < _bound(column, column.minimum)
    if column.maximum is not None:
        rules["maximum"] = lambda value: _number(column, value) > _bound(column, column.maximum)
    if column.max_length is not None:
        rules["max_length"] = lambda value: F.length(value) > F.lit(column.max_length)
    if column.pattern is not None:
        rules["pattern"] = lambda value: ~value.rlike(str(column.pattern))
    return {f"{column.name}:{rule}": judge for rule, judge in rules.items()}


def _as_double(text: Column) -> Column:
    """The number that ``text`` spells, rounded to a double; NULL if it spells none.

    Spark orders ``NaN`` above every number, as PostgreSQL does.
    """
    return F.when(text.rlike(_NUMBER) | text.rlike(_NOT_FINITE), text.try_cast("double"))


def _number(column: model.Column, value: Column) -> Column:
    return _as_double(value) if column.type.kind is Kind.NUMERIC_TEXT else value


def _bound(column: model.Column, bound: Decimal | None) -> Column:
    rounded = column.type.kind in FLOATS or column.type.kind is Kind.NUMERIC_TEXT
    return _double(bound) if rounded else F.lit(bound)


def _double(bound: Decimal | None) -> Column:
    return F.lit(None if bound is None else float(bound))
