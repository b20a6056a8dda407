"""Tables and rows of the support desk, made from a random generator, and its first rows."""

from __future__ import annotations

import random
from datetime import date
from decimal import Decimal
from typing import cast
from uuid import UUID

from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import Json

from omnisupport_ingest.demo.actor import Table
from omnisupport_ingest.demo.rows import Rows

SCHEMA = "support"


def _table(name: str, key: tuple[tuple[str, str], ...], *columns: str) -> Table:
    return Table(f"{SCHEMA}.{name}", columns, key)


TABLES = {
    "organizations": _table(
        "organizations",
        (("id", "bigint"),),
        *("name", "plan", "settings", "seats", "created_at", "updated_at"),
    ),
    "customers": _table(
        "customers",
        (("id", "uuid"),),
        *("id", "organization_id", "email", "full_name", "locale", "is_vip", "lifetime_value", "tags"),
        *("created_at", "updated_at", "deleted_at"),
    ),
    "agents": _table(
        "agents",
        (("handle", "text"),),
        *("handle", "display_name", "team", "skills", "hourly_cost", "hired_on", "is_active", "updated_at"),
    ),
    "tickets": _table(
        "tickets",
        (("id", "bigint"),),
        *("id", "organization_id", "customer_id", "agent_handle", "subject", "body", "status"),
        *("priority", "channel", "metadata", "satisfaction", "created_at", "updated_at"),
    ),
    "ticket_comments": _table(
        "ticket_comments",
        (("ticket_id", "bigint"), ("comment_no", "integer")),
        *("ticket_id", "comment_no", "author", "body", "is_public", "attachments", "created_at"),
    ),
}
"""The tables, with the columns of the rows below; an organization's id is given by the database."""

PLANS = ("free", "team", "business", "enterprise")
STATUSES = ("new", "open", "pending", "solved", "closed")
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


class RowMaker(Rows):
    """Makes the rows of the support desk."""

    prose = _PROSE

    def body(self) -> str | None:
        """Return a body: one in three is long, one in ten is NULL, the rest is short."""
        draw = self._rng.random()
        if draw < 0.33:
            return self.long_text()
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
        """Return NULL, or an array of up to three elements, some of them NULL, quoted or with commas."""
        if self._rng.random() < 0.15:
            return None
        return [self._rng.choice(_SKILLS) for _ in range(self._rng.randrange(4))]

    def amount(self, digits: int) -> Decimal | None:
        """Return an amount of money with up to ``digits`` digits before the point, or NULL."""
        if self._rng.random() < 0.1:
            return None
        return Decimal(self._rng.randrange(10 ** (digits + 1))) / 100


_AGENTS = 24


def fill(cursor: Cursor, seed: int, tickets: int) -> None:
    """Insert ``tickets``: two comments for each, a customer for every three, an organization for every 60;
    and 24 agents."""
    rng = random.Random(f"seed {seed}")  # noqa: S311 (repeatable, not secret)
    rows = RowMaker(rng)
    organizations = range(1, tickets // 60 + 2)
    TABLES["organizations"].insert(cursor, [rows.organization() for _ in organizations])
    handles = [f"agent-{number:04d}" for number in range(1, _AGENTS + 1)]
    TABLES["agents"].insert(cursor, [rows.agent(handle) for handle in handles])
    customers = [rows.customer(rng.choice(organizations)) for _ in range(tickets // 3 + 2)]
    TABLES["customers"].insert(cursor, customers)
    TABLES["tickets"].insert(
        cursor,
        [
            rows.ticket(
                number,
                rng.choice(organizations),
                cast(str, rng.choice(customers)[0]) if rng.random() < 0.9 else None,
                rng.choice(handles) if rng.random() < 0.8 else None,
            )
            for number in range(1, tickets + 1)
        ],
    )
    comments = [(ticket, number) for ticket in range(1, tickets + 1) for number in (1, 2)]
    TABLES["ticket_comments"].insert(cursor, [rows.comment(key) for key in comments])
