"""``up``: the whole platform in the foreground, and ``postgres`` and ``workload``, two of its services.

``up`` runs a capture for each log of the home, each a service of its own. A problem of the home's own source
stops the command before anything starts. A problem of another log is only a warning, and its capture tries
again. A log that is defined while ``up`` runs is captured from then on.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.alarms import has_receiver
from omnisupport_ingest.cli.metrics import require_library
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.probes import READY
from omnisupport_ingest.cli.render import say_err
from omnisupport_ingest.cli.source_connect import shown_dsn
from omnisupport_ingest.cli.stopping import interrupt_on_terminate, stop_on_signal
from omnisupport_ingest.contracts.in_force import contracts_in_force, in_force
from omnisupport_ingest.contracts.sources import SourceDefinition, log_settings, log_sources, sources_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_services import start_dagster, stop_dagster
from omnisupport_ingest.runtime.home_lock import EMBEDDED_SERVER, HomeInUse, HomeLock, holder
from omnisupport_ingest.runtime.ports import LOOPBACK, require_port
from omnisupport_ingest.runtime.recorded_runs import recorded
from omnisupport_ingest.runtime.running import Beat
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify import services

if TYPE_CHECKING:
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres


@click.command()
@click.option(
    "--workload",
    "rate",
    type=click.FloatRange(0, min_open=True),
    metavar="RATE",
    help="Also change rows of the demo's database, RATE changes per second.",
)
def up(rate: float | None) -> None:
    """Run everything: source, capture, Spark, the Dagster UI and its daemon. Ctrl-C stops it.

    The source is the embedded PostgreSQL, unless OMNISUPPORT_SOURCE_DSN names another one. That one is
    checked first, and each problem is printed with the SQL that repairs it. If it does not answer, capture
    tries again until it does.

    Every other captured source (`sources list`) has a capture of its own. A problem with one of them holds up
    no other. One that is defined while this runs is captured, too.

    Files of Debezium events are taken from the folder inbox of the home as soon as it exists; see `land`.

    \b
    Example:
      omnisupport-ingest up --workload 20

    Exit code: 0 stopped, 2 usage or settings, 4 Java is missing, 5 the source is not set up or
    the port of the UI is taken, 6 the home is in use, 7 a service did not start.
    """
    settings = open_settings()
    if rate is not None and settings.source_dsn is not None:
        raise click.UsageError("--workload changes rows: it runs on the embedded PostgreSQL only.")
    home = open_home(settings)
    with interrupt_on_terminate(), HomeLock(home, "up"):
        # Checked first: a taken port is refused before anything starts, not after a minute.
        port = require_port(settings.webserver_port, "OMNISUPPORT_WEBSERVER_PORT")
        settings = settings.model_copy(update={"webserver_port": port})
        if settings.metrics_port is not None:
            require_library()
            require_port(settings.metrics_port, "OMNISUPPORT_METRICS_PORT")
        captures, beat = Captures(settings, home), Beat(home.run)
        with Supervisor(home, report=click.echo) as supervisor:
            try:
                services.launch_spark(supervisor, settings, home)
                captures.start(supervisor)
                if rate is not None:
                    supervisor.start(services.workload(settings, rate))
                services.start_spark(supervisor, settings, home, click.echo)
                click.echo("Starting Dagster …")
                ui = start_dagster(supervisor, settings, home)
                click.echo(f"\nThe platform runs. UI: {ui}\nHome: {home.path}   Stop with Ctrl-C.")
                if settings.metrics_port is not None:
                    beat()
                    supervisor.start(services.metrics(settings, LOOPBACK))
                    at = f"http://{LOOPBACK}:{settings.metrics_port}"
                    click.echo(f"Metrics: {at}/metrics   Health: {at}{READY}")
                if has_receiver(settings):
                    supervisor.start(services.alarms(settings))
                for name in captures.names:
                    click.echo(f"Source {name}: {captures.shown(name)}")
                click.echo("Connect to it in another terminal: omnisupport-ingest source connect\n")

                def look() -> bool:
                    beat()
                    services.watch_inbox_when_used(supervisor, settings, home)
                    captures.start_new(supervisor)
                    return False

                supervisor.run(look)
            except KeyboardInterrupt:
                click.echo("\nStopping; runs in progress have 10 seconds to end …")
            finally:
                stopped_at = datetime.now(UTC)
                stop_dagster(supervisor)
                stop_spark_connect(supervisor, home)
    _say_what_was_cancelled(settings, home, stopped_at)
    click.echo("Stopped. Nothing is lost; `omnisupport-ingest up` goes on from here.")


def _say_what_was_cancelled(settings: Settings, home: Home, since: datetime) -> None:
    seen = recorded(home.dagster, settings.dagster_pg_url, most=100)
    jobs = [
        each.job
        for each in (seen.runs if seen is not None else ())
        if each.status == "CANCELED" and each.ended is not None and each.ended >= since
    ]
    if not jobs:
        return
    click.echo(f"Runs that this has cancelled: {', '.join(sorted(jobs))}.")
    if "replay" in jobs:
        click.echo(
            "Their backfill has ended with them. Next time run it again: in the UI, on its page under "
            "Re-execute → From failure, or by `omnisupport-ingest replay`."
        )


_Files = tuple[tuple[str, int], ...]


class Captures:
    """The logs of one home, and the capture service of each."""

    def __init__(self, settings: Settings, home: Home) -> None:
        """Find the logs and check them.

        Raises ``IngestError`` for a problem of the home's own source. That source may have no contracts only
        if the home has other sources.
        """
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
                services.check_source(self._of(each), home, say_err)
            else:
                self._warn(each)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self._logs)

    def shown(self, name: str) -> str:
        """Return the connection string of the log ``name`` without a password; its name if there is none
        yet."""
        from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn

        (log,) = (each for each in self._logs if each.name == name)
        try:
            return shown_dsn(source_dsn(self._of(log), self._home))
        except IngestError:
            return log.connection

    def start(self, supervisor: Supervisor) -> None:
        """Start the embedded server if one of the logs is in it, then a capture for each log."""
        if any(each.embedded for each in self._logs):
            services.start_source(supervisor, self._settings, self._home, click.echo)
        for each in self._logs:
            supervisor.start(services.capture(self._settings, each.name))

    def start_new(self, supervisor: Supervisor) -> None:
        """Start captures of logs that were defined since the last call; warn once about a wrong
        definition."""
        files = self._files()
        if files == self._seen:
            return
        self._seen = files
        try:
            logs = _logs(self._settings)
        except IngestError as error:
            say_err(f"{error.problem} No source is added until it is right. Fix: {error.fix}")
            return
        for each in logs:
            if each.name in self.names:
                continue
            self._logs = (*self._logs, each)
            click.echo(f"Source {each.name} is captured from now on, from {each.connection}.")
            if each.embedded and services.POSTGRES not in supervisor.names:
                services.start_source(supervisor, self._settings, self._home, click.echo)
            self._warn(each)
            supervisor.start(services.capture(self._settings, each.name))

    def _of(self, log: SourceDefinition) -> Settings:
        return log_settings(self._settings, log)

    def _warn(self, log: SourceDefinition) -> None:
        try:
            services.check_source(self._of(log), self._home, say_err)
        except IngestError as error:
            say_err(f"{log.name}: {error.problem} Its capture tries again; the others run. Fix: {error.fix}")

    def _files(self) -> _Files:
        """Return the files of definitions and contracts, each with its modification time in nanoseconds."""
        folders = sources_folder(self._settings), in_force(self._settings).contracts
        changed = [(str(path), _changed(path)) for folder in folders for path in folder.glob("*.json")]
        return tuple(sorted(changed))


def _logs(settings: Settings) -> tuple[SourceDefinition, ...]:
    return log_sources(settings, contracts_in_force(settings))


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


SERVICE = "a service that keeps it"
"""Holder of the server's lock if a service holds it, and not a command of a person."""

_LOOK_SECONDS = 2.0
_FREE_SECONDS = 0.2


@click.command(hidden=True)
@click.option("--service", is_flag=True, help="Run as a service of the command that holds the home.")
def postgres(service: bool) -> None:
    """Run the embedded PostgreSQL of the home until Ctrl-C. To connect to it, see `source connect`.

    Refused while another command runs the server. Ctrl-C ends the server if this command has started it.
    """
    from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server

    settings = open_settings()
    home = open_home(settings)
    server = embedded_server(settings, home)
    if not service:
        refuse_if_kept(home, server)
    with stop_on_signal() as stop, ExitStack() as locks:
        if service:
            # The service of a killed command may be stopping the server just now.
            while holder(home, EMBEDDED_SERVER) is not None and not stop.wait(_FREE_SECONDS):
                pass
        if not stop.is_set():
            locks.enter_context(HomeLock(home, SERVICE if service else "postgres", EMBEDDED_SERVER))
            _keep_running(server, stop, ends_it=service or not server.running)


def refuse_if_kept(home: Home, server: EmbeddedPostgres) -> None:
    """Raise ``HomeInUse`` if another process runs the embedded server of ``home``, or is about to run it."""
    # The error names what a person can stop: the command, not its service.
    lock_holder = holder(home) or holder(home, EMBEDDED_SERVER)
    if lock_holder is None:
        return
    runs = f"runs as process {server.pid}, started" if server.running else "belongs to a home that is used"
    raise HomeInUse(
        f"The embedded PostgreSQL of {home.path} {runs} by {lock_holder}.",
        fix="To connect to it: omnisupport-ingest source connect. To run it by this command alone: "
        f"{lock_holder.stop[0].lower()}{lock_holder.stop[1:]} first.",
    )


def _keep_running(server: EmbeddedPostgres, stop: threading.Event, *, ends_it: bool) -> None:
    if not ends_it:
        say_err(f"PostgreSQL runs already, as process {server.pid}; this command leaves it running.")
    server.start()
    try:
        while not stop.wait(_LOOK_SECONDS):
            if not server.running:
                say_err("PostgreSQL ended by itself; starting it again.")
                server.start()
                ends_it = True
    finally:
        if ends_it:
            server.stop()


@click.command()
@click.option(
    "--rate",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="Changes per second.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Same seed, same changes.")
def workload(rate: float, seed: int) -> None:
    """Change rows of the demo's database, RATE changes per second, until Ctrl-C.

    \b
    Example:
      omnisupport-ingest workload --rate 50

    Exit code: 0 stopped, 2 usage or settings, 4 the embedded PostgreSQL is not running.
    """
    from omnisupport_ingest.demo.domains import embedded_domain
    from omnisupport_ingest.demo.workload import Workload
    from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn

    settings = open_settings()
    if settings.source_dsn is not None:
        raise click.UsageError(
            "workload changes rows: it runs on the embedded PostgreSQL only. Unset OMNISUPPORT_SOURCE_DSN."
        )
    dsn = source_dsn(settings, open_home(settings))
    domain = embedded_domain(settings)
    domain.prepare(dsn, seed)
    with stop_on_signal() as stop:
        Workload(domain, dsn, seed).run_forever(rate, stop)
