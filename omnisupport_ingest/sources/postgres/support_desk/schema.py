"""Making the support desk's tables."""

from __future__ import annotations

from importlib.resources import files

import psycopg2

SCHEMA = "support"
TABLES = ("agents", "customers", "organizations", "ticket_comments", "tickets")


def create(connection: psycopg2.extensions.connection) -> bool:
    """Make the schema ``support`` in the open transaction; false if it is there already."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_namespace WHERE nspname = %s", (SCHEMA,))
        if cursor.fetchone() is not None:
            return False
        cursor.execute(files(__package__).joinpath("schema.sql").read_text(encoding="utf-8"))
        return True
