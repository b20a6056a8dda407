"""The source as a command that only looks at it opens it: no home is made for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omnisupport_ingest.cli.errors import NAMED_LOG
from omnisupport_ingest.cli.opening import existing_home
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.model import TableContract


def home_if_any(settings: Settings) -> Home | None:
    """The home of ``settings`` if it is there; ``HomeMismatch`` if it is another kind."""
    if not (settings.home.expanduser() / "home.json").exists():
        return None
    return existing_home(settings)


def log_of(settings: Settings, name: str | None) -> Settings:
    """The settings that capture the log ``name``, or without one that of ``settings`` themselves.

    ``SourceUnknown`` if the home has no such source, or if it has no log.
    """
    from omnisupport_ingest.contracts.sources import log_settings, own_log_settings, sources_in_force

    if name is None or name == settings.source:
        NAMED_LOG.set(None)
        return own_log_settings(settings)
    NAMED_LOG.set(name)
    return log_settings(settings, sources_in_force(settings).find(name))


def open_source_dsn(settings: Settings, home: Home | None) -> str | IngestError:
    """The connection string of the source, or the error that says why there is none now."""
    from omnisupport_ingest.sources.postgres.session.connection import with_silence
    from omnisupport_ingest.sources.postgres.session.dsn import source_dsn
    from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable

    if settings.source_dsn is not None:
        return with_silence(settings.source_dsn.get_secret_value(), settings.source_silence_seconds)
    if home is None:
        return SourceUnavailable(
            f"There is no home at {settings.home.expanduser().absolute()}, so no embedded PostgreSQL, and "
            "OMNISUPPORT_SOURCE_DSN names no other source.",
            fix="Set OMNISUPPORT_SOURCE_DSN to the source, or make the embedded one: omnisupport-ingest demo",
        )
    try:
        return source_dsn(settings, home)
    except SourceUnavailable as error:
        return error


def contracted_tables(settings: Settings) -> tuple[TableContract, ...]:
    """The tables of the source that are captured, by the contracts of ``settings``."""
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.sources.postgres.preflight import source_check

    contracts = contracts_in_force(settings)
    return source_check.contracted_tables(contracts, settings.source)
