"""The support desk's first rows: what a snapshot finds before any change is captured."""

from __future__ import annotations

import random
from contextlib import closing
from typing import cast

import psycopg2

from omnisupport_ingest.sources.postgres.connection import writer_dsn
from omnisupport_ingest.sources.postgres.support_desk import schema
from omnisupport_ingest.sources.postgres.support_desk.rows import RowMaker
from omnisupport_ingest.sources.postgres.support_desk.statements import insert

_AGENTS = 24


def prepare(dsn: str, seed: int, *, tickets: int = 3000) -> bool:
    """Make the tables and fill them in one transaction; false, and no change, if they are there.

    ``tickets`` sets the size: two comments for every ticket, a customer for three, an organization
    for sixty, and 24 agents. The same ``seed`` and ``tickets`` give the same rows.
    """
    with closing(psycopg2.connect(writer_dsn(dsn))) as connection, connection:
        if not schema.create(connection):
            return False
        with connection.cursor() as cursor:
            _fill(cursor, seed, tickets)
        return True


def _fill(cursor: psycopg2.extensions.cursor, seed: int, tickets: int) -> None:
    rng = random.Random(f"seed {seed}")  # noqa: S311 (repeatable, not secret)
    rows = RowMaker(rng)
    organizations = range(1, tickets // 60 + 2)
    insert(cursor, "organizations", [rows.organization() for _ in organizations])
    handles = [f"agent-{number:04d}" for number in range(1, _AGENTS + 1)]
    insert(cursor, "agents", [rows.agent(handle) for handle in handles])
    customers = [rows.customer(rng.choice(organizations)) for _ in range(tickets // 3 + 2)]
    insert(cursor, "customers", customers)
    insert(
        cursor,
        "tickets",
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
    insert(cursor, "ticket_comments", [rows.comment(key) for key in comments])
