"""Rows of the support desk, made from a random generator: the same generator, the same rows.

Times are a clock of the desk's own, not the machine's, so that rows do not depend on the day.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

from psycopg2.extras import Json

COLUMNS = {
    "organizations": ("name", "plan", "settings", "seats", "created_at", "updated_at"),
    "customers": (
        *("id", "organization_id", "email", "full_name", "locale", "is_vip", "lifetime_value", "tags"),
        *("created_at", "updated_at", "deleted_at"),
    ),
    "agents": (
        *("handle", "display_name", "team", "skills", "hourly_cost", "hired_on", "is_active"),
        "updated_at",
    ),
    "tickets": (
        *("id", "organization_id", "customer_id", "agent_handle", "subject", "body", "status"),
        *("priority", "channel", "metadata", "satisfaction", "created_at", "updated_at"),
    ),
    "ticket_comments": (
        *("ticket_id", "comment_no", "author", "body", "is_public", "attachments", "created_at"),
    ),
}
"""Columns of the rows below, in order; an organization's id is given by the database."""

PLANS = ("free", "team", "business", "enterprise")
STATUSES = ("new", "open", "pending", "solved", "closed")
LONG_BODY = 2500
"""Bodies of more bytes than this are surely stored out of line (PostgreSQL's limit is about 2 kB)."""

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
"""Text that breaks careless quoting, escaping, splitting or decoding."""

_EPOCH = datetime(2026, 1, 1, 8, 0, 0, 250_000, tzinfo=UTC)
_NAMES = ("Ada", "Bo", "Chidi", "Dana", "Eun-ji", "Farid", "Gül", "Håkon", "Inés", "Jürgen")
_SURNAMES = ("Okafor", "Nguyen", "Silva", "O'Brien", "Müller", "Kowalski", "Haddad", "Tanaka")
_LOCALES = ("en-GB", "de-DE", "ja-JP", "pt-BR", None)
_TEAMS = ("billing", "technical", "onboarding", None)
_SKILLS = ("refunds", "api", "sso", "exports", 'the "hard" ones', "a,b", "NULL", None)
_CHANNELS = ("email", "chat", "phone", "web", None)
_SUBJECTS = ("Cannot sign in", "Invoice is wrong", "Export never ends", "Feature request", "Slow today")
_PROSE = (
    "The export starts and the bar reaches ninety percent, then nothing happens for an hour. "
    "We tried another browser, a private window and a colleague's machine. Grüße aus Köln! "
) * 60


class RowMaker:
    """Makes rows from ``rng``; every row is one second of desk time later than the one before."""

    def __init__(self, rng: random.Random, *, first_second: int = 0) -> None:
        self._rng = rng
        self._now = _EPOCH + timedelta(seconds=first_second)

    def now(self) -> datetime:
        self._now += timedelta(seconds=1)
        return self._now

    def text(self, ordinary: Sequence[str]) -> str:
        """One of ``ordinary``, or, one time in twelve, an awkward text."""
        return self._rng.choice(AWKWARD_TEXTS if self._rng.random() < 1 / 12 else ordinary)

    def long_body(self) -> str:
        start = self._rng.randrange(150)
        return f"{self._rng.getrandbits(64):016x} {_PROSE[start : start + self._rng.randrange(3000, 6000)]}"

    def body(self) -> str | None:
        """One in three is long, one in ten is NULL, the rest is short."""
        draw = self._rng.random()
        if draw < 0.33:
            return self.long_body()
        return None if draw < 0.43 else self.text(("Any news?", "Thank you, solved.", "See attachment."))

    def organization(self) -> tuple[object, ...]:
        now = self.now()
        settings = {"sso": self._rng.random() < 0.5, "limits": {"seats": [1, None, "∞"]}, "note": 'a"b\\c'}
        return (
            f"{self._rng.choice(_SURNAMES)} & {self._rng.choice(_SURNAMES)} {self._rng.randrange(1000)}",
            self._rng.choice(PLANS),
            Json(settings) if self._rng.random() < 0.8 else None,
            self._rng.choice((None, 1, 25, 2**31 - 1)),
            now,
            now,
        )

    def customer(self, organization: int, *, key: str | None = None) -> tuple[object, ...]:
        now = self.now()
        identity = key or str(UUID(int=self._rng.getrandbits(128), version=4))
        name = f"{self._rng.choice(_NAMES)} {self._rng.choice(_SURNAMES)}"
        return (
            identity,
            organization,
            f"user-{identity[:8]}@example.com",
            None if self._rng.random() < 0.1 else self.text((name,)),
            self._rng.choice(_LOCALES),
            self._rng.random() < 0.05,
            self.amount(10),
            self.tags(),
            now,
            now,
            None,
        )

    def agent(self, handle: str) -> tuple[object, ...]:
        return (
            handle,
            f"{self._rng.choice(_NAMES)} {self._rng.choice(_SURNAMES)}",
            self._rng.choice(_TEAMS),
            self.tags(),
            self.amount(6),
            self._rng.choice((None, date(2019, 2, 28), date(2024, 2, 29), date(2026, 1, 1))),
            self._rng.random() < 0.9,
            self.now(),
        )

    def ticket(
        self, key: int, organization: int, customer: str | None, agent: str | None
    ) -> tuple[object, ...]:
        now = self.now()
        metadata = {"browser": self.text(("Firefox", "Safari")), "retries": self._rng.randrange(5)}
        return (
            key,
            organization,
            customer,
            agent,
            self.text(_SUBJECTS),
            self.body(),
            self._rng.choice(STATUSES),
            self._rng.choice((None, 1, 2, 3, 4)),
            self._rng.choice(_CHANNELS),
            Json(metadata) if self._rng.random() < 0.7 else None,
            self._rng.choice((None, 0.1, 1 / 3, 5.0, 1e-300)),
            now,
            now,
        )

    def comment(self, key: tuple[int, int]) -> tuple[object, ...]:
        files = [{"name": self.text(("log.txt", "screen shot.png")), "bytes": self._rng.randrange(10**9)}]
        return (
            *key,
            self.text(_NAMES),
            self.body(),
            self._rng.random() < 0.8,
            Json(files) if self._rng.random() < 0.3 else None,
            self.now(),
        )

    def tags(self) -> list[str | None] | None:
        """NULL, or an array of up to three elements, some of them NULL, quoted or with commas."""
        if self._rng.random() < 0.15:
            return None
        return [self._rng.choice(_SKILLS) for _ in range(self._rng.randrange(4))]

    def amount(self, digits: int) -> Decimal | None:
        """An amount of money with up to ``digits`` digits before the point, or NULL."""
        if self._rng.random() < 0.1:
            return None
        return Decimal(self._rng.randrange(10 ** (digits + 1))) / 100
