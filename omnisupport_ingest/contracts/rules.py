"""The rules of a contract as Spark columns: every row judged in one pass, every broken rule named.

A rule is named ``<column>:<rule>``, where the rule is one of ``not_null``, ``type``, ``enum``,
``minimum``, ``maximum``, ``max_length`` and ``pattern``. Rules read the row as PostgreSQL's text;
``value_rules`` are those that can also be asked of the typed column, which is what pandera does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from pyspark.sql import Column
from pyspark.sql import functions as F

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.pg_text import as_double
from omnisupport_ingest.contracts.pg_types import FLOATS, Kind
from omnisupport_ingest.contracts.spark_types import is_value, typed

ColumnGetter = Callable[[str], Column]
"""Gives the text of a column of the row, by the column's name."""

Judge = Callable[[Column], Column]
"""From a value to whether it breaks a rule: true, or else false or NULL."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """One rule about one column. ``broken`` is true for a row that breaks it, else false or NULL."""

    name: str
    column: str
    broken: Callable[[ColumnGetter], Column]


def row_rules(contract: model.TableContract) -> tuple[RowRule, ...]:
    """Every rule of ``contract``, in the order of its columns; there is always one."""
    return tuple(rule for column in contract.columns for rule in _rules_of(column))


def broken_rules(contract: model.TableContract, image: Column) -> Column:
    """The names of the rules that a row image breaks: ``array<string>``, empty when it is fine.

    ``image`` is ``map<string,string>``, column name → text. A column that the map does not name
    was not sent and is not judged; nor is anything in an image that is NULL.
    """

    def text(name: str) -> Column:
        return F.try_element_at(image, F.lit(name))

    def name_if_broken(rule: RowRule) -> Column:
        sent = F.map_contains_key(image, rule.column)
        return F.when(sent & rule.broken(text), F.lit(rule.name))

    return F.array_compact(F.array(*[name_if_broken(rule) for rule in row_rules(contract)]))


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


def _rules_of(column: model.Column) -> list[RowRule]:
    judges: dict[str, Judge] = {}
    if not column.nullable:
        judges[f"{column.name}:not_null"] = lambda text: text.isNull()
    if column.type.kind is not Kind.TEXT:
        judges[f"{column.name}:type"] = lambda text: ~is_value(text, column)
    for name, judge in value_rules(column).items():
        judges[name] = _on_text(column, name, judge)
    return [_rule(name, column, judge) for name, judge in judges.items()]


def _rule(name: str, column: model.Column, judge: Judge) -> RowRule:
    return RowRule(name, column.name, lambda get: judge(get(column.name)))


def _on_text(column: model.Column, name: str, judge: Judge) -> Judge:
    if column.type.kind is not Kind.DECIMAL:
        return lambda text: judge(typed(text, column))
    # NaN, the infinities and numbers too large for the type have no typed value, but a size.
    if name.endswith(":minimum"):
        return lambda text: F.coalesce(judge(typed(text, column)), as_double(text) < _double(column.minimum))
    return lambda text: F.coalesce(judge(typed(text, column)), as_double(text) > _double(column.maximum))


def _number(column: model.Column, value: Column) -> Column:
    return as_double(value) if column.type.kind is Kind.NUMERIC_TEXT else value


def _bound(column: model.Column, bound: Decimal | None) -> Column:
    rounded = column.type.kind in FLOATS or column.type.kind is Kind.NUMERIC_TEXT
    return _double(bound) if rounded else F.lit(bound)


def _double(bound: Decimal | None) -> Column:
    return F.lit(None if bound is None else float(bound))
