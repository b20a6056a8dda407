"""``postgres``: the embedded PostgreSQL in the foreground, as a service of ``up`` and ``demo``."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal

_LOOK_SECONDS = 2.0


@click.command(hidden=True)
def postgres() -> None:
    """Run the embedded PostgreSQL of the home until Ctrl-C."""
    from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres

    server = EmbeddedPostgres(open_home(open_settings()).postgres)
    with stop_on_signal() as stop:
        server.start()
        try:
            while not stop.wait(_LOOK_SECONDS):
                if not server.running:
                    click.echo("PostgreSQL ended by itself; starting it again.", err=True)
                    server.start()
        finally:
            server.stop()
