"""The captures that ``up`` runs: one for each log of the home, each a service of its own.

The home's own source is what the command is started for: what it lacks is refused before anything starts, as
ever. A log that is defined beside it holds up nobody: what it lacks is said, and its capture tries again. One
whose definition and contract come while ``up`` runs is captured from then on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli import services
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from omnisupport_ingest.contracts.sources import SourceDefinition

_Files = tuple[tuple[str, int], ...]


class Captures:
    """The logs of one home and their services."""

    def __init__(self, settings: Settings, home: Home) -> None:
        """Find the logs, and check them. ``IngestError`` if the home's own source lacks something, a contract
        among it; only a home that reads other sources may do without."""
        from omnisupport_ingest.contracts.in_force import contracts_in_force
        from omnisupport_ingest.sources.postgres.preflight.source_check import contracted_tables

        self._settings, self._home = settings, home
        self._seen = self._files()
        self._logs = _logs(settings)
        contracts = contracts_in_force(settings)
        if settings.source_dsn is not None or not contracts.sources():
            contracted_tables(contracts, settings.source)
        elif settings.source not in contracts.sources():
            click.echo(f"No contract names {settings.source}, so the embedded PostgreSQL is not captured.")
        for each in self._logs:
            if each.name == settings.source:
                services.check_source(self._of(each), home)
            else:
                self._say_what_lacks(each)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._logs)

    def shown(self, name: str) -> str:
        """The connection string of the log ``name``, without a password; else how it is named."""
        from omnisupport_ingest.cli.source_connect import shown_dsn
        from omnisupport_ingest.sources.postgres.session.dsn import source_dsn

        (log,) = (each for each in self._logs if each.name == name)
        try:
            return shown_dsn(source_dsn(self._of(log), self._home))
        except IngestError:
            return log.connection

    def start(self, supervisor: Supervisor) -> None:
        """Start every capture, and before them the embedded server if one of them reads it."""
        if any(each.embedded for each in self._logs):
            services.start_source(supervisor, self._settings, self._home)
        for each in self._logs:
            supervisor.start(services.capture(self._settings, each.name))

    def start_new(self, supervisor: Supervisor) -> None:
        """Start the captures of logs that were defined since. A definition that is wrong is told, once."""
        found = self._files()
        if found == self._seen:
            return
        self._seen = found
        try:
            logs = _logs(self._settings)
        except IngestError as error:
            click.echo(f"{error.problem} No source is added until it is right. Fix: {error.fix}", err=True)
            return
        for each in logs:
            if each.name in self.names:
                continue
            self._logs = (*self._logs, each)
            click.echo(f"Source {each.name} is captured from now on, from {each.connection}.")
            if each.embedded and services.POSTGRES not in supervisor.names:
                services.start_source(supervisor, self._settings, self._home)
            self._say_what_lacks(each)
            supervisor.start(services.capture(self._settings, each.name))

    def _of(self, log: SourceDefinition) -> Settings:
        from omnisupport_ingest.contracts.sources import log_settings

        return log_settings(self._settings, log)

    def _say_what_lacks(self, log: SourceDefinition) -> None:
        try:
            services.check_source(self._of(log), self._home)
        except IngestError as error:
            click.echo(
                f"{log.name}: {error.problem} Its capture tries again; the others run. Fix: {error.fix}",
                err=True,
            )

    def _files(self) -> _Files:
        """The definitions and contracts there are, each with when it changed."""
        from omnisupport_ingest.contracts.in_force import in_force
        from omnisupport_ingest.contracts.sources import sources_folder

        folders = sources_folder(self._settings), in_force(self._settings).contracts
        found = [(str(path), _changed(path)) for folder in folders for path in folder.glob("*.json")]
        return tuple(sorted(found))


def _logs(settings: Settings) -> tuple[SourceDefinition, ...]:
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.contracts.sources import log_sources

    return log_sources(settings, contracts_in_force(settings))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
