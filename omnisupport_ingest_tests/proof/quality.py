"""What contracts of the proof say of the rows of a table: rules whose policy is drawn, and looser ones later.

A rule is worked out here anew from what the documentation says of it, by plain Python on the texts that
PostgreSQL sent. A few rows are written so that they break the rules that reject a whole batch; most of the
others are broken by values that the histories have anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from random import Random
from typing import Any

from omnisupport_ingest_tests.oracle.judging import ACCEPT, QUARANTINE, REJECT_BATCH, WARN, RowRule
from omnisupport_ingest_tests.oracle.model import Event, Image

_NO_NUMBERS = frozenset(("NaN", "infinity", "no value of its type"))

REFUSED, FAR_BELOW = "refused", "-99999.99"
"""Values that rows have for the sake of the rules that reject a batch."""


@dataclass(frozen=True)
class Rule(RowRule):
    """A rule as a contract has it.

    ``keyword``, ``bound``: of a column, in the words of JSON Schema; of several columns the keyword is empty,
    and the bound is SQL. ``needs``: how the types of its columns begin, by name; text where it says nothing.
    ``looser``: a bound that fewer rows break, and how; None: there is none.
    """

    keyword: str = ""
    bound: Any = None
    needs: Mapping[str, str] = field(default_factory=dict)
    looser: Rule | None = None

    @property
    def withholds(self) -> bool:
        return self.policy in (QUARANTINE, REJECT_BATCH)

    def fits(self, types: Mapping[str, str]) -> bool:
        """Whether a table with columns of ``types`` may have the rule."""
        return all(
            name in types and types[name].startswith(self.needs.get(name, "text")) for name in self.columns
        )

    def loosened(self, rng: Random) -> Rule:
        """The rule as fewer rows break it, or as those that do pass all the same."""
        if self.looser is not None and rng.random() < 0.5:
            return replace(self.looser, policy=self.policy)
        return replace(self, policy=rng.choice((WARN, ACCEPT)))


def _of_value(breaks: Callable[[str], bool]) -> Callable[..., bool]:
    return lambda text: text is not None and breaks(text)


def longest(column: str, characters: int, policy: str = QUARANTINE) -> Rule:
    """A text of ``column`` has at most so many characters."""
    return Rule(
        f"{column}:max_length",
        policy,
        (column,),
        _of_value(lambda text: len(text) > characters),
        "maxLength",
        characters,
    )


def lengths(**columns: int) -> tuple[Rule, ...]:
    return tuple(longest(column, characters) for column, characters in columns.items())


def _least(column: str, kind: str, least: int) -> Rule:
    def breaks(text: str) -> bool:
        return text not in _NO_NUMBERS and Decimal(text) < least

    return Rule(
        f"{column}:minimum", QUARANTINE, (column,), _of_value(breaks), "minimum", least, {column: kind}
    )


def _most(column: str, kind: str, most: float) -> Rule:
    # NaN is more than every number, as it is to PostgreSQL.
    def breaks(text: str) -> bool:
        return text == "NaN" or (text not in _NO_NUMBERS and float(text) > most)

    return Rule(
        f"{column}:maximum", QUARANTINE, (column,), _of_value(breaks), "maximum", most, {column: kind}
    )


def _ends_without(column: str, end: str, pattern: str) -> Rule:
    def breaks(text: str) -> bool:
        return text.endswith(end)

    return Rule(f"{column}:pattern", QUARANTINE, (column,), _of_value(breaks), "pattern", pattern)


def _one_of(column: str, texts: Sequence[str]) -> Rule:
    def breaks(text: str) -> bool:
        return text not in texts

    return Rule(f"{column}:enum", QUARANTINE, (column,), _of_value(breaks), "enum", list(texts))


def _of_several(
    name: str, sql: str, breaks: Callable[..., bool], columns: Sequence[str], needs: Mapping[str, str]
) -> Rule:
    return Rule(name, QUARANTINE, tuple(columns), breaks, "", sql, needs)


def _dear_and_short(cost: str | None, status: str | None) -> bool:
    known = cost is not None and status is not None and cost not in _NO_NUMBERS
    return known and Decimal(cost or "0") >= 1000 and len(status or "") <= 11


def _long_and_high(note: str | None, rate: str | None) -> bool:
    known = note is not None and rate is not None and rate not in _NO_NUMBERS
    return known and float(rate or "0") >= 2 and len(note or "") >= 40


def _left_late(body: str | None, left: str | None) -> bool:
    if body is None or left is None or left in _NO_NUMBERS:
        return False
    return datetime.fromisoformat(left) >= datetime.fromisoformat("2026-02-01 16:00+00:00") and len(body) < 10


def _refused(text: str | None, other: str | None) -> bool:
    # What the type of the lake cannot hold is not known to a rule of several columns.
    return text == REFUSED and other is not None and other not in _NO_NUMBERS


_LEFT_LATE = "\"left\" < CAST('2026-02-01 16:00:00+00' AS TIMESTAMPTZ) OR length(body) >= 10"
_TIME = {"left": "timestamp with time zone"}
_NUMERIC, _DOUBLE = {"cost": "numeric"}, {"rate": "double"}

_OFTEN: Mapping[str, tuple[Rule, ...]] = {
    "tickets": (
        replace(_least("cost", "numeric", -120), looser=_least("cost", "numeric", -1010)),
        _ends_without("status", "37", "[^3]7$|[^7]$"),
        _of_several(
            "dear_has_name",
            "cost < 1000 OR length(status) > 11",
            _dear_and_short,
            ("cost", "status"),
            _NUMERIC,
        ),
        _of_several("left_early", _LEFT_LATE, _left_late, ("body", "left"), _TIME),
    ),
    "agents": (
        replace(_most("rate", "double", 145.5), looser=_most("rate", "double", 290)),
        _of_several(
            "long_note_is_low", "rate < 2 OR length(note) < 40", _long_and_high, ("note", "rate"), _DOUBLE
        ),
    ),
}
"""By table, rules that values of the histories break."""

_REJECTING: Mapping[str, tuple[Rule, ...]] = {
    "tickets": (
        _of_several(
            "not_turned_down", "status <> 'refused' OR cost IS NULL", _refused, ("status", "cost"), _NUMERIC
        ),
        _of_several(
            "none_turned_down", "status <> 'refused' OR body IS NULL", _refused, ("status", "body"), {}
        ),
        _least("cost", "numeric", -50_000),
    ),
    "agents": (
        _of_several("not_turned_down", "note <> 'refused' OR body IS NULL", _refused, ("note", "body"), {}),
        _least("rate", "double", -50_000),
    ),
}
"""Rules that few rows break, as all others of their batch wait with them."""


def drawn(
    rng: Random, table: str, own: Sequence[Rule], types: Mapping[str, str], gone: Sequence[str]
) -> tuple[Rule, ...]:
    """Rules for one version of the contract of ``table``, with columns of ``types``.

    ``own``: which it has at any rate. ``gone``: texts of which agents may have most in that column.
    """
    found: dict[str, Rule] = {}
    for each in own:
        policy = rng.choice((QUARANTINE, QUARANTINE, QUARANTINE, WARN, ACCEPT))
        found[each.name] = replace(each, policy=policy)
    often = _OFTEN[table]
    if table == "agents":
        texts = rng.sample(gone, len(gone))
        few, most = (_one_of("gone", sorted(texts[: len(gone) * each // 20])) for each in (16, 19))
        often += (replace(few, looser=most),)
    for each in often:
        if rng.random() < 0.6 and each.fits(types):
            found[each.name] = replace(each, policy=rng.choice((ACCEPT, WARN, QUARANTINE, QUARANTINE)))
    for each in _REJECTING[table]:
        if rng.random() < 0.6 and each.fits(types) and each.name not in found:
            found[each.name] = replace(each, policy=rng.choice((REJECT_BATCH, REJECT_BATCH, QUARANTINE)))
    return tuple(found.values())


def refused(rng: Random, events: Sequence[Event]) -> list[Event]:
    """``events`` with one or two that break a rule for which a batch may be rejected, if any of them can."""
    column, least = {"tickets": ("status", "cost"), "agents": ("note", "rate")}[events[0].table]
    values: tuple[Image, ...] = ({column: REFUSED}, {least: FAR_BELOW})
    found = list(events)
    for number in rng.sample(range(len(events)), min(2, len(events))):
        event, value = events[number], rng.choice(values)
        if event.op in "cur" and event.after and value.keys() <= event.after.keys():
            found[number] = replace(event, after={**event.after, **value})
    return found


def document(rules: Sequence[Rule], column: str) -> dict[str, Any]:
    """What the line of a contract for ``column`` has of ``rules``."""
    own = [each for each in rules if each.keyword and each.columns == (column,)]
    found = {each.keyword: each.bound for each in own}
    policies = {each.keyword: each.policy for each in own if each.policy != QUARANTINE}
    return found | ({"x-policy": policies} if policies else {})


def of_several(rules: Sequence[Rule]) -> list[dict[str, str]]:
    """The rules of several columns as a contract has them."""
    return [
        {"name": each.name, "expression": each.bound, "policy": each.policy, "note": "Drawn by lot."}
        for each in rules
        if not each.keyword
    ]
