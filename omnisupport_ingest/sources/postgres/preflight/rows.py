"""One row of a catalog query."""

from __future__ import annotations

from typing import Any

from psycopg2.extensions import connection as Connection


def one_row(connection: Connection, query: str, parameters: tuple[object, ...] | None = None) -> Any:
    """The first row of ``query`` as a tuple; null if there is none."""
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchone()
