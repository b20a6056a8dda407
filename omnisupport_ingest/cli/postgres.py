"""``postgres``: the embedded PostgreSQL in the foreground, as a service of ``up`` and ``demo``, or alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import EMBEDDED_SERVER, HomeInUse, HomeLock, holder

if TYPE_CHECKING:
    from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres

_LOOK_SECONDS = 2.0


@click.command(hidden=True)
@click.option("--service", is_flag=True, help="It is a service of the command that holds the home.")
def postgres(service: bool) -> None:
    """Run the embedded PostgreSQL of the home until Ctrl-C. To connect to it, see `source connect`.

    Refused while another command runs it. Ctrl-C ends the server if this command has started it.
    """
    from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres

    home = open_home(open_settings())
    server = EmbeddedPostgres(home.postgres)
    if not service:
        refuse_if_kept(home, server)
    with HomeLock(home, "postgres", EMBEDDED_SERVER):
        _keep(server, ends_it=service or not server.running)


def refuse_if_kept(home: Home, server: EmbeddedPostgres) -> None:
    """``HomeInUse`` if another process runs the embedded server of ``home``, or is about to."""
    found = holder(home, EMBEDDED_SERVER) or holder(home)
    if found is None:
        return
    runs = f"runs as process {server.pid}, started" if server.running else "belongs to a home that is used"
    raise HomeInUse(
        f"The embedded PostgreSQL of {home.path} {runs} by {found}.",
        fix="To connect to it: omnisupport-ingest source connect. To run it by this command alone: "
        f"{found.stop.lower()} first.",
    )


def _keep(server: EmbeddedPostgres, *, ends_it: bool) -> None:
    with stop_on_signal() as stop:
        if not ends_it:
            click.echo(
                f"PostgreSQL runs already, as process {server.pid}; it stays when this ends.", err=True
            )
        server.start()
        try:
            while not stop.wait(_LOOK_SECONDS):
                if not server.running:
                    click.echo("PostgreSQL ended by itself; starting it again.", err=True)
                    server.start()
                    ends_it = True
        finally:
            if ends_it:
                server.stop()
