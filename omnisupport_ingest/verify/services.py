"""The services of ``up``, ``demo`` and a pass: embedded server, Spark, capture, workload, inbox watcher.

Each is a command of ours that a supervisor starts; ``say`` takes lines of progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.home_lock import EMBEDDED_SERVER, HomeInUse, holder
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.supervisor import Backoff, Service, Supervisor
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

Say = Callable[[str], None]

POSTGRES = "postgres"
CAPTURE = "capture"
WORKLOAD = "workload"
METRICS = "metrics"
ALARMS = "alarms"
WATCHER = "land"

_START_SECONDS = 120.0
SEED = 1
"""Seed of the first rows of the embedded database."""


def start_source(
    supervisor: Supervisor,
    settings: Settings,
    home: Home,
    say: Say,
    *,
    seed: int = SEED,
) -> None:
    """Start the embedded PostgreSQL, and make its domain if it does not exist yet.

    Raises ``HomeInUse`` if a person runs the server by hand.
    """
    from omnisupport_ingest.demo.domains import embedded_domain
    from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server

    server = embedded_server(settings, home)
    lock_holder = holder(home, EMBEDDED_SERVER)
    if lock_holder is not None and lock_holder.command == POSTGRES:
        # When that command ends, it would stop the server that the services need.
        raise HomeInUse(
            f"The embedded PostgreSQL of {home.path} is run by {lock_holder}.",
            fix=f"{lock_holder.stop}, then start again.",
        )
    say("Starting PostgreSQL …")
    supervisor.start(_own(POSTGRES, settings, "--service", grace=60.0))
    supervisor.wait(
        lambda: _is_kept(home) and server.running and _accepts(server),
        service="PostgreSQL",
        seconds=_START_SECONDS,
    )
    embedded_domain(settings).prepare(server.dsn(), seed)


def check_source(settings: Settings, home: Home, warn: Say) -> None:
    """Raise the problem that a person must fix at the log of ``settings`` before its capture can start.

    A source that does not answer only causes a warning, because capture tries again. Of the embedded source
    only this is checked: that it does not take over from a configured one.
    """
    if settings.source_dsn is None:
        from omnisupport_ingest.sources.postgres.embedded.dsn import embedded_server

        embedded_server(settings, home)
        return
    from omnisupport_ingest.contracts.in_force import contracts_in_force
    from omnisupport_ingest.sources.postgres.capture.capture import Capture
    from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable

    contracts = contracts_in_force(settings)
    try:
        Capture(settings, home, contracts).check()
    except SourceUnavailable as error:
        warn(f"{error.problem} Capture tries again until it answers.")


def launch_spark(supervisor: Supervisor, settings: Settings, home: Home) -> None:
    """Launch the server for which ``start_spark`` waits, so that it starts beside earlier services."""
    if settings.spark_remote is None:
        from omnisupport_ingest.runtime.spark_connect import launch_spark_connect

        launch_spark_connect(supervisor, settings, home)


def start_spark(supervisor: Supervisor, settings: Settings, home: Home, say: Say) -> None:
    """Start the warm Spark Connect server of the home, unless the settings name one elsewhere."""
    if settings.spark_remote is not None:
        say(f"Spark is at {settings.spark_server}.")
        return
    from omnisupport_ingest.runtime.spark_connect import start_spark_connect

    say("Starting Spark …")
    start_spark_connect(supervisor, settings, home)


def capture(settings: Settings, name: str | None = None) -> Service:
    """Return the capture of the log ``name`` as a service; by default, of the settings' own source.

    It is restarted when it fails, because a source may be away for hours.
    """
    if name is None or name == settings.source:
        return _own(CAPTURE, settings, grace=30.0)
    return replace(_own(CAPTURE, settings, name, grace=30.0), name=f"{CAPTURE}-{name}")


def watch_inbox_when_used(supervisor: Supervisor, settings: Settings, home: Home) -> None:
    """Start the watcher of the home's inbox as soon as that folder exists."""
    if WATCHER not in supervisor.names and home.inbox.is_dir():
        supervisor.start(_own(WATCHER, settings, "--watch", grace=30.0))


def workload(settings: Settings, rate: float) -> Service:
    """Return the workload as a service: traffic of ``rate`` changes per second."""
    return _own(WORKLOAD, settings, f"--rate={rate}")


def metrics(settings: Settings, listen: str) -> Service:
    """Return the service for Prometheus metrics and health, on ``metrics_port`` of the address ``listen``."""
    return _own(METRICS, settings, f"--listen={listen}")


def alarms(settings: Settings) -> Service:
    """Return the service that reports problems to people."""
    return _own(ALARMS, settings, "--watch")


def _own(name: str, settings: Settings, *options: str, grace: float = 10.0) -> Service:
    return Service(
        name,
        (sys.executable, "-m", "omnisupport_ingest.cli.main", name, *options),
        environment=settings_environment(settings) | {"PYTHONUNBUFFERED": "1"},
        restart=Backoff(),
        grace=grace,
    )


def _is_kept(home: Home) -> bool:
    """Whether the service of this supervisor runs the server, not an earlier service that is stopping it."""
    lock_holder = holder(home, EMBEDDED_SERVER)
    return lock_holder is not None and lock_holder.pid == running_services(home.run).get(POSTGRES)


def _accepts(server: EmbeddedPostgres) -> bool:
    """Whether the server answers and has its database, which it makes after its first start.

    It connects to another database: PostgreSQL logs a connection to a missing one as FATAL.
    """
    import psycopg2

    try:
        with closing(psycopg2.connect(server.dsn("postgres"), connect_timeout=2)) as connection:
            cursor = connection.cursor()
            cursor.execute("SELECT FROM pg_database WHERE datname = %s", (server.database,))
            return cursor.fetchone() is not None
    except (psycopg2.Error, IngestError):
        return False
