"""The transactions of a server that have an id and have not ended, as a person can find them.

They may be of any database of the server, and prepared ones have no session. ``pg_locks`` shows them to
every role: a transaction holds the lock on its own id. When it began is hidden from a role that may not see
the sessions of others (PostgreSQL manual, "pg_stat_activity").
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.session.connection import source_errors

_QUERY = """
SELECT array_agg(l.transactionid::text::bigint), l.pid, p.gid, coalesce(a.datname, p.database),
    coalesce(a.usename, p.owner),
    min(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)))::float8
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
LEFT JOIN pg_prepared_xacts p ON p.transaction = l.transactionid
WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock'
    AND (l.pid IS NOT NULL OR p.gid IS NOT NULL)
GROUP BY 2, 3, 4, 5
ORDER BY 6 DESC NULLS LAST, 2, 3
"""
_LONGEST = 80


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """One of them. ``pid`` is None for a prepared one, ``gid`` for one of a session."""

    ids: frozenset[int]
    """Its id and those of its subtransactions, the lower 32 bits."""
    pid: int | None
    gid: str | None
    database: str | None
    user: str | None
    seconds: float | None
    """Since it began, of a prepared one since it was prepared; None where that is hidden."""

    @property
    def name(self) -> str:
        """How to find it: process id or gid, database and user."""
        where = f"{self.user or 'an unknown user'} in database {self.database or 'unknown'}"
        if self.pid is None:
            gid = self.gid or ""
            shown = gid if len(gid) <= _LONGEST else f"{gid[:_LONGEST]}…"
            return f"prepared as {shown!r} by {where}"
        return f"of process {self.pid}, {where}"

    def __str__(self) -> str:
        if self.seconds is None:
            return self.name
        return f"{self.name}, for {max(self.seconds, 0):,.0f} s"


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return every open transaction of the server that has an id, the oldest first."""
    with source_errors("looking for transactions"), connection.cursor() as cursor:
        cursor.execute(_QUERY)
        return [OpenTransaction(frozenset(ids), *rest) for ids, *rest in cursor.fetchall()]


def listed(transactions: Iterable[OpenTransaction]) -> str:
    """The transactions as a part of a sentence."""
    return "; ".join(map(str, transactions))
