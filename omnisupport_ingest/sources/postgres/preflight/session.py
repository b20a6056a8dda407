"""Do we talk to PostgreSQL itself, in a session of our own, with a replication connection beside it?"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.preflight.findings import Finding
from omnisupport_ingest.sources.postgres.preflight.rows import one_row
from omnisupport_ingest.sources.postgres.session.connection import (
    QUOTING_SETTINGS,
    VALUE_SETTINGS,
    connect_replication,
)
from omnisupport_ingest.sources.postgres.session.errors import SourceRefused, SourceUnavailable

_TO_POSTGRES = "Set host and port in OMNISUPPORT_SOURCE_DSN to PostgreSQL itself."


def session_findings(connection: Connection) -> Iterator[Finding]:
    """Signs of a pooler between us and the server."""
    (pid,) = one_row(connection, "SELECT pg_backend_pid()")
    if pid != connection.info.backend_pid:
        yield Finding(
            "pooler",
            f"A connection pooler such as PgBouncer answers in place of the server: the session runs in "
            f"process {pid}, the connection was told {connection.info.backend_pid}. It does not keep a "
            "session, or refuses replication.",
            _TO_POSTGRES,
        )
    # A pooler may take the settings of a connection and forget them; DateStyle has a second part.
    changed = [
        name
        for name, value in (VALUE_SETTINGS | QUOTING_SETTINGS).items()
        if one_row(connection, "SELECT current_setting(%s)", (name,))[0].split(",")[0] != value
    ]
    if changed:
        yield Finding(
            "session_settings",
            f"The session does not keep the settings that it was opened with: {', '.join(changed)}. Values "
            "would be written as other text in the snapshot than in the stream, or read as others.",
            _TO_POSTGRES,
        )


def replication_findings(dsn: str) -> Iterator[Finding]:
    """Whether a replication connection can be opened, which a rule or a pooler may forbid."""
    try:
        connection = connect_replication(dsn)
    except (SourceRefused, SourceUnavailable) as error:
        yield Finding(
            "replication_connection",
            f"SQL works, but a replication connection does not. {error.problem}",
            error.fix,
        )
        return
    connection.close()
