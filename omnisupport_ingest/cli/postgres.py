"""``postgres``: the embedded PostgreSQL in the foreground, as a service of ``up`` and ``demo``, or alone."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import open_home, open_settings
from omnisupport_ingest.cli.stopping import stop_on_signal
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import EMBEDDED_SERVER, HomeInUse, HomeLock, holder

if TYPE_CHECKING:
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

SERVICE = "a service that keeps it"
"""What the holder of the server's lock is called if it is no command of a person's."""

_LOOK_SECONDS = 2.0
_FREE_SECONDS = 0.2


@click.command(hidden=True)
@click.option("--service", is_flag=True, help="It is a service of the command that holds the home.")
def postgres(service: bool) -> None:
    """Run the embedded PostgreSQL of the home until Ctrl-C. To connect to it, see `source connect`.

    Refused while another command runs it. Ctrl-C ends the server if this command has started it.
    """
    from omnisupport_ingest.sources.postgres.session.dsn import embedded_server

    settings = open_settings()
    home = open_home(settings)
    server = embedded_server(settings, home)
    if not service:
        refuse_if_kept(home, server)
    with stop_on_signal() as stop, ExitStack() as held:
        if service:
            # That of a command that was killed may be ending the server at this moment.
            while holder(home, EMBEDDED_SERVER) is not None and not stop.wait(_FREE_SECONDS):
                pass
        if not stop.is_set():
            held.enter_context(HomeLock(home, SERVICE if service else "postgres", EMBEDDED_SERVER))
            _keep(server, stop, ends_it=service or not server.running)


def refuse_if_kept(home: Home, server: EmbeddedPostgres) -> None:
    """``HomeInUse`` if another process runs the embedded server of ``home``, or is about to."""
    # Who is named is whoever can be stopped: the command, not its service.
    found = holder(home) or holder(home, EMBEDDED_SERVER)
    if found is None:
        return
    runs = f"runs as process {server.pid}, started" if server.running else "belongs to a home that is used"
    raise HomeInUse(
        f"The embedded PostgreSQL of {home.path} {runs} by {found}.",
        fix="To connect to it: omnisupport-ingest source connect. To run it by this command alone: "
        f"{found.stop[0].lower()}{found.stop[1:]} first.",
    )


def _keep(server: EmbeddedPostgres, stop: threading.Event, *, ends_it: bool) -> None:
    if not ends_it:
        click.echo(f"PostgreSQL runs already, as process {server.pid}; this leaves it running.", err=True)
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
