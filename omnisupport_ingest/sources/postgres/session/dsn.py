"""The connection string of a home's source, for every command and process."""

from __future__ import annotations

from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres, database_of
from omnisupport_ingest.sources.postgres.session.connection import with_silence
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable


def embedded_server(settings: Settings, home: Home) -> EmbeddedPostgres:
    """Return the embedded server of ``home``, with the database of the source that ``settings`` names."""
    return EmbeddedPostgres(home.postgres, database=database_of(settings.source))


def source_dsn(settings: Settings, home: Home) -> str:
    """Return the connection string of the source: the configured one, else that of the embedded server.

    Raises ``SourceUnavailable`` if the embedded server is needed and not running.
    """
    if settings.source_dsn is not None:
        return with_silence(settings.source_dsn.get_secret_value(), settings.source_silence_seconds)
    server = embedded_server(settings, home)
    if not server.running:
        raise SourceUnavailable(
            f"The embedded PostgreSQL of {home.path} is not running.",
            fix="Start it with the platform: omnisupport-ingest up",
        )
    return with_silence(server.dsn(), settings.source_silence_seconds)
