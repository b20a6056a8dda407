"""The rules of a contract about a typed column, as Spark columns: what the pandera gate asks of a table.

They are those of ``row_rules`` that bear on a value that is there, and are named alike.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

from pyspark.sql import Column
from pyspark.sql import functions as F

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.pg_text import as_double
from omnisupport_ingest.contracts.pg_types import FLOATS, Kind

Judge = Callable[[Column], Column]
"""From a value to whether it breaks a rule: true, or else false or NULL."""


def value_rules(column: model.Column) -> dict[str, Judge]:
    """The rules about a value that is there: name of the rule → how it judges the typed column.

    A judge gives true for a value that breaks the rule, false or NULL for one that is NULL.
    """
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


def _number(column: model.Column, value: Column) -> Column:
    return as_double(value) if column.type.kind is Kind.NUMERIC_TEXT else value


def _bound(column: model.Column, bound: Decimal | None) -> Column:
    rounded = column.type.kind in FLOATS or column.type.kind is Kind.NUMERIC_TEXT
    return _double(bound) if rounded else F.lit(bound)


def _double(bound: Decimal | None) -> Column:
    return F.lit(None if bound is None else float(bound))
