"""The connection string of a home's source, for every command and process."""

from __future__ import annotations

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.files import Location
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres, database_of
from omnisupport_ingest.sources.postgres.session.connection import with_silence
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable


def embedded_server(settings: Settings, home: Home) -> EmbeddedPostgres:
    """Return the embedded server of ``home``, with the database of the source that ``settings`` names.

    Raises ``SourceUnavailable`` if it was never made and the source was captured: from another server, which
    the settings do not name now. An empty one must not take its place.
    """
    if Location.read(home.path / "postgres") is None:
        _require_not_captured(settings.source, home)
    return EmbeddedPostgres(home.postgres, database=database_of(settings.source))


def source_dsn(settings: Settings, home: Home) -> str:
    """Return the connection string of the source: the configured one, else that of the embedded server.

    Raises ``SourceUnavailable`` if the embedded server is needed and not running, or was never made and the
    source was captured.
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


def _require_not_captured(source: str, home: Home) -> None:
    landing = home.path / "landing"
    if not (landing / source / "epochs").is_dir():
        return
    epoch = LandingStore(landing, source).current_epoch()
    if epoch is None or epoch.facts is None:
        return
    raise SourceUnavailable(
        f"{source} was captured from a server with the system identifier {epoch.facts.system_identifier}, "
        f"database {epoch.facts.database}. OMNISUPPORT_SOURCE_DSN is not set, and {home.path} has no "
        "embedded PostgreSQL.",
        fix="Set OMNISUPPORT_SOURCE_DSN, in the environment or in .env of the working directory. If the "
        "source was the embedded PostgreSQL, restore postgres/ of the home.",
    )
