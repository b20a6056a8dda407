"""``up``: the whole platform in the foreground, until Ctrl-C."""

from __future__ import annotations

import click

from omnisupport_ingest.cli import services
from omnisupport_ingest.cli.captures import Captures
from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import interrupt_on_terminate
from omnisupport_ingest.runtime.dagster_services import start_dagster
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.ports import require_port
from omnisupport_ingest.runtime.spark_connect import stop_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor


@click.command()
@click.option(
    "--workload",
    "rate",
    type=click.FloatRange(0, min_open=True),
    metavar="RATE",
    help="Keep changing the database of the demo, RATE changes per second.",
)
def up(rate: float | None) -> None:
    """Run everything: source, capture, Spark, the Dagster UI and its daemon. Ctrl-C stops it.

    The source is the embedded PostgreSQL unless OMNISUPPORT_SOURCE_DSN names another one. That one is
    checked first, and what it lacks is told with the SQL that repairs it. If it is away, capture
    tries again until it answers. Every other log that is defined (`sources list`) has a capture of its own
    beside it, and what one of them lacks holds up no other; so has one that is defined while this runs.
    Files of Debezium events are taken from the folder inbox in the home, once it is there; see `land`.

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
        # Refused before anything starts, not after a minute.
        port = require_port(settings.webserver_port, "OMNISUPPORT_WEBSERVER_PORT")
        settings = settings.model_copy(update={"webserver_port": port})
        captures = Captures(settings, home)
        with Supervisor(home, report=click.echo) as supervisor:
            try:
                captures.start(supervisor)
                if rate is not None:
                    supervisor.start(services.workload(settings, rate))
                services.start_spark(supervisor, settings, home)
                click.echo("Starting Dagster …")
                ui = start_dagster(supervisor, settings, home)
                click.echo(f"\nThe platform runs. UI: {ui}\nHome: {home.path}   Stop with Ctrl-C.")
                for name in captures.names:
                    click.echo(f"Source {name}: {captures.shown(name)}")
                click.echo("Connect to it in another terminal: omnisupport-ingest source connect\n")

                def look() -> bool:
                    services.watch_inbox_when_used(supervisor, settings, home)
                    captures.start_new(supervisor)
                    return False

                supervisor.run(look)
            except KeyboardInterrupt:
                click.echo("\nStopping …")
            finally:
                stop_spark_connect(supervisor, home)
    click.echo("Stopped. Nothing is lost; `omnisupport-ingest up` goes on from here.")
