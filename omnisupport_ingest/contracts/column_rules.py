"""The rules of a contract applied to whole columns by Arrow.

``row_rules`` defines what a rule means, and names the broken rule. Here one pass over a column
(``plain_texts``) or a comparison shows for most texts that they keep a rule. Every other distinct text is
checked by the rule itself, once, however many rows have it. Rules of several columns are one query over
their typed values (``expressions``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.expressions import ExpressionRules
from omnisupport_ingest.contracts.pg_types import ARRAYS, INTEGERS, NUMBERS, Kind
from omnisupport_ingest.contracts.plain_texts import SAFE_DIGITS, are_decimals, dates, moments, whole_numbers
from omnisupport_ingest.contracts.quality import WITHHOLDING
from omnisupport_ingest.contracts.row_rules import VALUE_RULES, Breaks, rules_of

Surely = Callable[[pa.StringArray], pa.BooleanArray]
"""Returns which texts certainly keep a rule; null for a null text."""

_FRACTIONAL = {
    # With at most 15 digits before and after the point a double is neither infinite nor rounded to zero.
    Kind.FLOAT: (15, 15),
    Kind.DOUBLE: (15, 15),
    Kind.DECIMAL: (99, 99),
    Kind.NUMERIC_TEXT: (99, 99),
}
"""The digits before and after the point that surely make a number of each kind."""

_FEW_DIGITS = (11, 4)
"""Digits before and after the point up to which a number's double and float differ, relatively, by less than
``_MARGIN``."""

_BYTES = r"\A\\x(?:[0-9a-fA-F]{2})*\z"

_MARGIN = 1e-6


@dataclass(frozen=True)
class JudgedRows:
    """The result for rows. ``kept``: rows that break no withholding rule. ``warned``: by rule that lets rows
    pass, the rows that break it; rules that no row breaks are left out.
    """

    kept: pa.BooleanArray
    warned: Mapping[str, pa.BooleanArray]


class ColumnRules:
    """All rules of a contract that are checked."""

    def __init__(self, contract: model.TableContract) -> None:
        self._columns = {column.name: _ColumnRules(column) for column in contract.source_columns}
        self._expressions = ExpressionRules(contract.quality.asked, contract.source_columns)
        self._withholding = {rule.name for rule in contract.quality.asked if rule.policy in WITHHOLDING}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that rules are about, in the contract's order."""
        named = frozenset(self._expressions.columns)
        return tuple(name for name, rules in self._columns.items() if rules.any or name in named)

    def judged(self, texts: Mapping[str, pa.StringArray], sent: Mapping[str, pa.BooleanArray]) -> JudgedRows:
        """Judge rows.

        ``texts``, ``sent``: by column, for all of ``columns`` and at least one: the texts (null for NULL and
        for values that were not sent), and which values were sent. A value that was not sent is not judged.
        """
        rows = len(next(iter(texts.values())))
        kept = pa.array(np.ones(rows, np.bool_))
        warned: dict[str, pa.BooleanArray] = {}
        for name in self.columns:
            of_column, broken = self._columns[name].judged(texts[name], sent[name])
            kept = pc.and_(kept, of_column)
            warned |= broken
        for name, broken in self._expressions.broken(texts, sent).items():
            if name in self._withholding:
                kept = pc.and_not(kept, broken)
            elif broken.true_count:
                warned[name] = broken
        return JudgedRows(kept, warned)

    def kept(
        self, texts: Mapping[str, pa.StringArray], sent: Mapping[str, pa.BooleanArray]
    ) -> pa.BooleanArray:
        """Return which rows break no withholding rule. Parameters as in ``judged``."""
        return self.judged(texts, sent).kept


def gated(column: model.Column) -> model.Column:
    """Return ``column`` with its withholding rules only: a dimension may have rows that break the others."""
    if not column.policies.given:
        return column
    unset: dict[str, Any] = {
        rule.name: rule.unset for rule in VALUE_RULES if not column.policies.withholds(rule.name)
    }
    return replace(column, **unset)


def surely_kept(rows: pa.Table, contract: model.TableContract) -> bool:
    """Whether certainly no value of ``rows`` breaks a rule of ``pandera_schema``.

    ``rows``: living ones without unresolved cells, with the typed columns of ``contract``. False means
    unknown: the gate decides.
    """
    return all(_values_surely_kept(rows[column.name], column) for column in contract.columns)


def _values_surely_kept(values: pa.ChunkedArray, of: model.Column) -> bool:
    column = gated(of)
    kind = column.type.kind
    if not column.nullable and column.always_fits and values.null_count:
        return False
    if column.pattern is not None:
        return False
    of_text = pa.types.is_string(values.type) and kind is not Kind.NUMERIC_TEXT
    if column.enum or column.max_length is not None:
        if not of_text:
            return False
        known = values.drop_null()
        allowed = pc.is_in(known, pa.array(column.enum or [], pa.string()))
        if column.enum and not pc.all(allowed, min_count=0).as_py():
            return False
        longest = pc.max(pc.utf8_length(known)).as_py()
        if column.max_length is not None and longest is not None and longest > column.max_length:
            return False
    return _surely_within(values, column)


def _surely_within(values: pa.ChunkedArray, column: model.Column) -> bool:
    if column.minimum is None and column.maximum is None:
        return True
    is_float = pa.types.is_floating(values.type)
    if not (is_float or pa.types.is_integer(values.type) or pa.types.is_decimal(values.type)):
        return False
    if is_float and pc.any(pc.is_nan(values)).as_py():
        return False
    found = pc.min_max(values)
    low, high = found["min"].as_py(), found["max"].as_py()
    if low is None:
        return True
    lowest, highest = (
        float(bound) if is_float and bound is not None else bound
        for bound in (column.minimum, column.maximum)
    )
    return (lowest is None or low >= lowest) and (highest is None or high <= highest)


class _ColumnRules:
    def __init__(self, column: model.Column) -> None:
        rules = rules_of(column)
        self._nullable = rules.not_null is None
        withholding, warning = [], {}
        for name, breaks in rules.by_name.items():
            if column.policies.withholds(name):
                withholding.append((_surely(column, name), breaks))
            else:
                warning[f"{column.name}:{name}"] = (_surely(column, name), breaks)
        self._withholding, self._warning = withholding, warning

    @property
    def any(self) -> bool:
        return bool(self._withholding) or bool(self._warning) or not self._nullable

    def judged(
        self, texts: pa.StringArray, sent: pa.BooleanArray
    ) -> tuple[pa.BooleanArray, dict[str, pa.BooleanArray]]:
        missing = texts.is_null()
        # A NULL keeps every rule but one.
        kept = missing if self._nullable else pc.and_(missing, pc.invert(sent))
        values = texts.is_valid()
        for surely, breaks in self._withholding:
            values = pc.and_(values, pc.fill_null(_keep(texts, surely, breaks), False))
        warned = {}
        for name, (surely, breaks) in self._warning.items():
            broken = pc.invert(pc.fill_null(_keep(texts, surely, breaks), True))
            if broken.true_count:
                warned[name] = broken
        return pc.or_(kept, values), warned


def _keep(texts: pa.StringArray, surely: Surely | None, breaks: Breaks) -> pa.BooleanArray:
    if surely is None:
        return _checked(texts, breaks)
    sure = surely(texts)
    doubted = pc.fill_null(pc.invert(sure), False)
    if not doubted.true_count:
        return sure
    return pc.replace_with_mask(sure, doubted, _checked(texts.filter(doubted), breaks))


def _checked(texts: pa.StringArray, breaks: Breaks) -> pa.BooleanArray:
    """Return which texts keep a rule; each distinct text is checked once."""
    distinct = texts.dictionary_encode()
    keeps = pa.array([not breaks(text) for text in distinct.dictionary.to_pylist()], pa.bool_())
    return keeps.take(distinct.indices)


def _surely(column: model.Column, rule: str) -> Surely | None:
    """Return the quick check of ``rule`` of ``column``; None if there is none, as for a Python pattern."""
    kind = column.type.kind
    if rule == "type":
        return _spelled(kind)
    if rule == "enum":
        return _one_of(column.enum)
    if rule == "max_length":
        return lambda texts: pc.less_equal(pc.utf8_length(texts), column.max_length)
    if kind not in NUMBERS:
        return None
    if rule == "minimum" and column.minimum is not None:
        return _bounded(kind, column.minimum, above=True)
    if rule == "maximum" and column.maximum is not None:
        return _bounded(kind, column.maximum, above=False)
    return None


def _spelled(kind: Kind) -> Surely | None:
    """Return the quick check that a text is a value of ``kind``; None if there is none."""
    if kind in SAFE_DIGITS:
        return lambda texts: whole_numbers(texts, SAFE_DIGITS[kind]).plain
    if kind in _FRACTIONAL:
        return lambda texts: are_decimals(texts, *_FRACTIONAL[kind])
    if kind in (Kind.TIMESTAMP, Kind.TIMESTAMPTZ):
        return lambda texts: moments(texts).plain
    if kind is Kind.DATE:
        return lambda texts: dates(texts).plain
    if kind is Kind.BOOLEAN:
        return _one_of(("t", "f", "true", "false"))
    if kind is Kind.BINARY:
        return lambda texts: pc.match_substring_regex(texts, _BYTES)
    if kind in ARRAYS:
        return lambda texts: pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))
    return None


def _one_of(allowed: Sequence[str]) -> Surely:
    values = pa.array(allowed, pa.string())
    return lambda texts: pc.if_else(texts.is_valid(), pc.is_in(texts, values), None)


def _bounded(kind: Kind, bound: Decimal, *, above: bool) -> Surely | None:
    """Return the quick check of a minimum (``above``) or maximum ``bound``; None if there is none."""
    keeps = pc.greater_equal if above else pc.less_equal
    if kind in INTEGERS:
        whole = int(bound.to_integral_value(ROUND_CEILING if above else ROUND_FLOOR))
        limit = max(-(2**63), min(2**63 - 1, whole))
        if limit != whole:
            return None

        def of_whole(texts: pa.StringArray) -> pa.BooleanArray:
            found = whole_numbers(texts, SAFE_DIGITS[kind])
            return pc.if_else(found.plain, keeps(found.values, limit), found.plain)

        return of_whole
    margin = _MARGIN * max(1.0, abs(float(bound)))
    certainly = float(bound) + (margin if above else -margin)

    def of_fraction(texts: pa.StringArray) -> pa.BooleanArray:
        readable = are_decimals(texts, *_FEW_DIGITS)
        numbers = pc.if_else(readable, texts, None).cast(pa.float64())
        return pc.if_else(readable, keeps(numbers, certainly), readable)

    return of_fraction
