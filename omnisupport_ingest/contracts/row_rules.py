"""The rules of a contract about one row: their meaning, and the names of the rules that a row breaks.

A rule is named ``<column>:<rule>``, where the rule is one of ``not_null``, ``type``, ``enum``, ``minimum``,
``maximum``, ``max_length`` and ``pattern``; a rule of several columns (``expressions``) has the name that the
contract gives it. Rules read the row as PostgreSQL's text. The gate (``pandera_schema``) checks those about
typed values again, before the dimension shows the rows.

The policy of a rule defines what happens to a row that breaks it. A rule with ``accept`` is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from omnisupport_ingest.contracts import model
from omnisupport_ingest.contracts.expressions import ExpressionRules
from omnisupport_ingest.contracts.pg_types import NUMBERS, Kind, PgType
from omnisupport_ingest.contracts.pg_values import above, below, number, value_test
from omnisupport_ingest.contracts.quality import ACCEPT, QUARANTINE, WITHHOLDING

Breaks = Callable[[str], bool]
"""Whether a text breaks a rule."""


@dataclass(frozen=True, slots=True)
class ValueRule:
    """A rule that a contract may give the values of a column.

    ``name``: of the rule, and of the field of ``Column`` that has it; the field is ``unset`` without the
    rule. ``keyword``: of JSON Schema, by which a document gives it. ``kinds``: of columns that may have it.
    """

    name: str
    keyword: str
    kinds: frozenset[Kind]
    unset: object = None


VALUE_RULES = (
    ValueRule("enum", "enum", frozenset({Kind.TEXT}), ()),
    ValueRule("minimum", "minimum", NUMBERS),
    ValueRule("maximum", "maximum", NUMBERS),
    ValueRule("max_length", "maxLength", frozenset({Kind.TEXT})),
    ValueRule("pattern", "pattern", frozenset({Kind.TEXT})),
)
"""Every such rule. To add one: a member here, a field of ``Column``, its meaning in ``rules_of``, and the
same for typed values in ``column_rules`` (``_values_surely_kept``) and ``pandera_schema`` (``_checks``). Its
quick check (``column_rules._surely``) may be left out."""


@dataclass(frozen=True)
class RulesOfColumn:
    """The rules of one column.

    ``not_null``: the full name of that rule; None if NULL is allowed. ``by_name``: the others, by the part of
    the name after the colon.
    """

    column: str
    not_null: str | None
    by_name: Mapping[str, Breaks]


class RowRules:
    """Every rule of a contract, in the order of its columns."""

    def __init__(self, contract: model.TableContract) -> None:
        self._columns = tuple(rules_of(column) for column in contract.source_columns)
        self._expressions = ExpressionRules(contract.quality.asked, contract.source_columns)
        self._policies = policies_of(contract)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all rules."""
        return tuple(
            name
            for each in self._columns
            for name in (
                *([each.not_null] if each.not_null else []),
                *(f"{each.column}:{name}" for name in each.by_name),
            )
        ) + tuple(rule.name for rule in self._expressions.rules)

    def withheld(self, broken: Iterable[str]) -> bool:
        """Whether one of the ``broken`` rules withholds the row."""
        return any(self._policies.get(name, QUARANTINE) in WITHHOLDING for name in broken)

    def broken_of(self, images: Sequence[Mapping[str, str | None]]) -> list[list[str]]:
        """Return the names of all rules that each of ``images`` breaks: those of columns, then the others."""
        return [
            self.broken(image) + others
            for image, others in zip(images, self._expressions.of_images(images), strict=True)
        ]

    def broken(self, image: Mapping[str, str | None]) -> list[str]:
        """Return the names of the rules of single columns that a row image breaks.

        ``image``: column name → text. A column without an entry was not sent and is not judged.
        """
        broken = []
        for column in self._columns:
            if column.column not in image:
                continue
            text = image[column.column]
            if text is None:
                if column.not_null is not None:
                    broken.append(column.not_null)
                continue
            broken += [f"{column.column}:{name}" for name, breaks in column.by_name.items() if breaks(text)]
        return broken


def rules_of(column: model.Column) -> RulesOfColumn:
    """Return the rules of a contract's column that are checked."""
    rules: dict[str, Breaks] = {}
    kind = column.type.kind
    if kind is not Kind.TEXT:
        kinds = (kind, *(PgType.parse(each).kind for each in column.former_types))
        rules["type"] = _of_none(tuple(map(value_test, kinds)))
    if column.enum:
        rules["enum"] = _unless(frozenset(column.enum).__contains__)
    if column.minimum is not None:
        rules["minimum"] = _beyond(below, column.minimum, kind)
    if column.maximum is not None:
        rules["maximum"] = _beyond(above, column.maximum, kind)
    if column.max_length is not None:
        rules["max_length"] = _longer_than(column.max_length)
    if column.pattern is not None:
        rules["pattern"] = _without(re.compile(column.pattern))
    rules = {name: breaks for name, breaks in rules.items() if column.policies.of(name) != ACCEPT}
    return RulesOfColumn(column.name, None if column.nullable else f"{column.name}:not_null", rules)


def policies_of(contract: model.TableContract) -> dict[str, str]:
    """Return the policies that ``contract`` gives, by rule name; any other rule has quarantine."""
    of_columns = {
        f"{column.name}:{rule}": policy
        for column in contract.source_columns
        for rule, policy in column.policies.given
    }
    return of_columns | {rule.name: rule.policy for rule in contract.quality.rules}


def _of_none(tests: Sequence[Callable[[str], bool]]) -> Breaks:
    if len(tests) == 1:
        return _unless(tests[0])
    return lambda text: not any(test(text) for test in tests)


def _unless(holds: Callable[[str], bool]) -> Breaks:
    return lambda text: not holds(text)


def _beyond(compare: Callable[[Decimal | float, Decimal], bool], bound: Decimal, kind: Kind) -> Breaks:
    def breaks(text: str) -> bool:
        value = number(text, kind)
        return value is not None and compare(value, bound)

    return breaks


def _longer_than(length: int) -> Breaks:
    return lambda text: len(text) > length


def _without(pattern: re.Pattern[str]) -> Breaks:
    return lambda text: pattern.search(text) is None
