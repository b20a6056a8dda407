"""``clean``: remove the home and everything in it."""

from __future__ import annotations

import shutil

import click

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.private_folders import remove_socket_folder


@click.command()
@click.confirmation_option("--yes", "-y", prompt="Remove the home with its lake, landing and database?")
def clean() -> None:
    """Remove the home: lake, landing, logs, Dagster's files, the embedded database.

    \b
    Example:
      OMNISUPPORT_HOME=trial omnisupport-ingest clean --yes

    Exit code: 0 removed or not there, 1 the folder is no home, 2 usage or settings, 6 in use.
    """
    settings = open_settings()
    folder = settings.home.expanduser().absolute()
    if not folder.exists():
        click.echo(f"{folder} is not there.")
        return
    if not (folder / "home.json").exists():
        raise IngestError(
            f"{folder} is not a home of this program (it has no home.json), so it is left alone.",
            fix="Point OMNISUPPORT_HOME at the home to remove, or remove the folder yourself.",
        )
    remove_home(Home.open(folder, settings.window_size, earlier=True))
    click.echo(f"{folder} is removed.")


def remove_home(home: Home) -> None:
    """Stop and remove the embedded database, then the folder; ``HomeInUse`` while it is in use."""
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

    with HomeLock(home, "clean"):
        # Its data may lie outside of the home, see the class.
        EmbeddedPostgres(home.postgres).destroy()
        remove_socket_folder(home.run)
        shutil.rmtree(home.path)
