"""The quality part of a contract as values: policies, rules of several columns, expectations of a table.

A rule judges one row, and its policy defines what happens to a row that breaks it. An expectation is about a
table or a window as a whole: it is a check, which withholds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

ACCEPT, WARN, QUARANTINE, REJECT_BATCH = "accept", "warn", "quarantine", "reject_batch"

POLICIES = (ACCEPT, WARN, QUARANTINE, REJECT_BATCH)
"""What happens to a row that breaks a rule. ``accept``: the rule is documented and not checked. ``warn``: the
row passes and is counted. ``quarantine``: the row is quarantined. ``reject_batch``: so is every event of its
table that the same batch brought into the same window.
"""

WITHHOLDING = frozenset({QUARANTINE, REJECT_BATCH})
"""The policies that withhold a row."""

ERROR = "error"
"""The severity of a failed check, beside ``WARN``."""


@dataclass(frozen=True, slots=True)
class ExpressionRule:
    """A rule about several columns of a row: ``expression`` (SQL) must not be false.

    A row for which it is NULL keeps the rule, as with CHECK in PostgreSQL. ``columns``: those in
    ``expression``.
    """

    name: str
    expression: str
    columns: tuple[str, ...]
    policy: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference: ``columns`` of a row hold the key of a living row of ``table`` (its name in the lake),
    unless one of them is NULL.
    """

    name: str
    columns: tuple[str, ...]
    table: str
    severity: str = WARN


@dataclass(frozen=True, slots=True)
class Expected:
    """An expected range: given, or learned from ``windows`` earlier closed windows as their median plus and
    minus ``spread`` times their median absolute deviation. None: no bound.
    """

    at_least: float | None = None
    at_most: float | None = None
    learned: bool = False
    windows: int = 48
    spread: float = 6.0
    severity: str = WARN


@dataclass(frozen=True, slots=True)
class Freshness:
    """The service level of a table; None: the contract sets none.

    ``max_lag``: how far its dimension may be behind the clock. ``verified_within``: how long ago, at most, it
    was found equal to its source. ``quiet``: how long it may have no event.
    """

    max_lag: timedelta | None = None
    quiet: Expected | None = None
    severity: str = WARN
    verified_within: timedelta | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """``rules`` judge rows; the others are checks. ``volume``: events of the table in a window."""

    rules: tuple[ExpressionRule, ...] = ()
    references: tuple[Reference, ...] = ()
    freshness: Freshness | None = None
    volume: Expected | None = None

    @property
    def asked(self) -> tuple[ExpressionRule, ...]:
        """The rules that are checked."""
        return tuple(rule for rule in self.rules if rule.policy != ACCEPT)


NO_QUALITY = Quality()


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a column's own rules, by rule name (``maximum``, ``not_null``); quarantine if none is
    given.
    """

    given: tuple[tuple[str, str], ...] = field(default=())

    def of(self, rule: str) -> str:
        return dict(self.given).get(rule, QUARANTINE)

    def withholds(self, rule: str) -> bool:
        return self.of(rule) in WITHHOLDING


DEFAULT = Policies()
