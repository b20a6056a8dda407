"""The support desk's first rows: what a snapshot finds before any change is captured."""

from __future__ import annotations

import random
from typing import cast

from psycopg2.extensions import cursor as Cursor

from omnisupport_ingest.demo.support_desk.rows import TABLES, RowMaker

_AGENTS = 24


def fill(cursor: Cursor, seed: int, tickets: int) -> None:
    """Insert ``tickets``: two comments for each, a customer for three, an organization for 60; 24 agents."""
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
