"""Values for the rows of every domain: from a random generator, a clock, and awkward texts.

The same generator gives the same rows. Times come from a clock of the domain, not of the machine, so rows do
not depend on the day.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

LONG_TEXT = 2500
"""A text of more bytes is certainly stored out of line (PostgreSQL's limit is about 2 kB)."""

AWKWARD_TEXTS = (
    "",
    " leading and trailing ",
    "NULL",
    "null",
    "\\N",
    "\\",
    "it's",
    'she said "no"',
    "C:\\new\\table",
    "one\nline\r\nafter another",
    "a\ttab",
    "{curly,braces}",
    "comma, semicolon; pipe|",
    "100% %s %(name)s",
    "\u0001\u001f control",
    "Zoë Ångström 東京 🎫 e\u0301",
    "\u202eright to left",
)
"""Texts that break careless quoting, escaping, splitting or decoding."""

ROLLED_BACK = "must never be seen"
"""The text of rows that are never committed, so that a search downstream must not find it."""

_EPOCH = datetime(2026, 1, 1, 8, 0, 0, 250_000, tzinfo=UTC)


class Rows:
    """Makes values from ``rng``. Each row is one second of the domain's time later than the one before."""

    prose = ""
    """The source from which long texts are cut."""

    def __init__(self, rng: random.Random, *, first_second: int = 0) -> None:
        self._rng = rng
        self._now = _EPOCH + timedelta(seconds=first_second)

    def now(self) -> datetime:
        self._now += timedelta(seconds=1)
        return self._now

    def text(self, ordinary: Sequence[str]) -> str:
        """Return one of ``ordinary`` or, one time in twelve, an awkward text."""
        return self._rng.choice(AWKWARD_TEXTS if self._rng.random() < 1 / 12 else ordinary)

    def long_text(self) -> str:
        start = self._rng.randrange(150)
        return (
            f"{self._rng.getrandbits(64):016x} {self.prose[start : start + self._rng.randrange(3000, 6000)]}"
        )
