"""What a contract says about the quality of its rows, as values: policies, rules of several columns, and what
is expected of a table.

A rule judges one row, and its policy says what becomes of a row that breaks it. An expectation is about a
table or a window as a whole: it is a check, which keeps nothing back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

ACCEPT, WARN, QUARANTINE, REJECT_BATCH = "accept", "warn", "quarantine", "reject_batch"

POLICIES = (ACCEPT, WARN, QUARANTINE, REJECT_BATCH)
"""What is done about a row that breaks a rule. ``accept``: the rule is written down and not asked. ``warn``:
the row passes and is counted. ``quarantine``: the row waits in quarantine. ``reject_batch``: so does every
event of its table that came with the same batch into the same window."""

WITHHOLDING = frozenset({QUARANTINE, REJECT_BATCH})
"""The policies that keep a row out."""

ERROR = "error"
SEVERITIES = (WARN, ERROR)
"""The colour of a check that fails."""


@dataclass(frozen=True, slots=True)
class ExpressionRule:
    """A rule about several columns of a row: ``expression`` (SQL) must not be false.

    A row for which it is NULL keeps the rule, as with CHECK in PostgreSQL. ``columns``: those it names.
    """

    name: str
    expression: str
    columns: tuple[str, ...]
    policy: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Reference:
    """``columns`` of a row name the key of a living row of ``table`` (its name in the lake), unless one of
    them is NULL."""

    name: str
    columns: tuple[str, ...]
    table: str
    severity: str = WARN


@dataclass(frozen=True, slots=True)
class Expected:
    """A range of numbers that is given, or learned from ``windows`` earlier closed windows as their median
    and ``spread`` times the median of their distances from it. A bound that is null bounds nothing."""

    at_least: float | None = None
    at_most: float | None = None
    learned: bool = False
    windows: int = 48
    spread: float = 6.0
    severity: str = WARN


@dataclass(frozen=True, slots=True)
class Freshness:
    """The service level of a table: how far behind the clock the dimension may be (``max_lag``), and how long
    ago it was found equal to its source (``verified_within``). Or, with ``quiet`` of ``learned``, how long
    the table may have no event."""

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
        """The rules that rows are judged by."""
        return tuple(rule for rule in self.rules if rule.policy != ACCEPT)


NO_QUALITY = Quality()


@dataclass(frozen=True, slots=True)
class Policies:
    """The policies of a column's own rules, by the rule's name (``maximum``, ``not_null``); quarantine where
    none is given."""

    given: tuple[tuple[str, str], ...] = field(default=())

    def of(self, rule: str) -> str:
        return dict(self.given).get(rule, QUARANTINE)

    def withholds(self, rule: str) -> bool:
        return self.of(rule) in WITHHOLDING


DEFAULT = Policies()
