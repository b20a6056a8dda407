"""Care of a home: ``settings`` shows what is set, ``sweep`` and ``clean`` remove files."""

from __future__ import annotations

import shutil
import textwrap
from datetime import timedelta
from typing import Any

import click
from pydantic import SecretStr

from omnisupport_ingest.cli.opening import has_home, open_settings, open_workspace
from omnisupport_ingest.cli.render import echo_json, without_links
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.processes import remove_all_left_behind
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.runtime.private_folders import remove_socket_folder
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.storage import forget_home, recorded_storage


@click.command()
@click.option("--set", "only_set", is_flag=True, help="List only those that are set.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def settings(only_set: bool, as_json: bool) -> None:
    """List every setting with its value and meaning. Secrets are not shown.

    A setting is an environment variable, or a line of .env in the working directory; the variable
    wins. A home that exists keeps its own window size.

    \b
    Examples:
      omnisupport-ingest settings
      omnisupport-ingest settings --set

    Exit code: 0 listed, 2 a setting cannot be used.
    """
    values = open_settings()
    listed = []
    for name, field in type(values).model_fields.items():
        value: Any = getattr(values, name)
        secret = isinstance(value, SecretStr)
        # Numbers stay numbers; a path becomes its text.
        shown = value if isinstance(value, (int, float)) else value and str(value)
        listed.append(
            {
                "name": f"{PREFIX}{name.upper()}",
                "value": None if secret else shown,
                "secret": secret,
                "set": name in values.model_fields_set,
                "meaning": field.description,
            }
        )
    listed = [each for each in listed if each["set"] or not only_set]
    if as_json:
        echo_json(listed)
        return
    for each in listed:
        shown = "(not set)" if each["value"] is None else each["value"]
        click.echo(f"{each['name']}={'(set, not shown)' if each['secret'] else shown}")
        text = without_links(str(each["meaning"]))
        click.echo(textwrap.fill(text, 100, initial_indent="    ", subsequent_indent="    "))


@click.command()
@click.option(
    "--older-than-hours",
    "hours",
    # A run in progress has files in place that it has not committed yet.
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Keep younger files. No run may take longer than that.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def sweep(hours: int, as_json: bool) -> None:
    """Delete files of the lake that no table needs: leftovers of crashed runs, and replaced versions.

    The platform may keep running. Afterwards, table versions older than the given hours can no longer be
    read. Quarantined events that a window still refers to always stay.

    \b
    Example:
      omnisupport-ingest sweep --older-than-hours 48

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.lake.sweep import sweep as sweep_table
    from omnisupport_ingest.layers.events.quarantine_files import named_anywhere

    workspace = open_workspace()
    remove_all_left_behind(workspace.home.run)
    named = {
        workspace.quarantine(source).spec.path: named_anywhere(workspace, source)
        for source in workspace.contracts.sources()
    }
    tables = {
        table.spec.path: len(
            sweep_table(table, timedelta(hours=hours), spare=named.get(table.spec.path, frozenset()))
        )
        for table in workspace.tables()
    }
    batches = {
        source: len(workspace.landing(source).sweep(timedelta(hours=hours)))
        for source in workspace.contracts.sources()
    }
    total = sum(tables.values()) + sum(batches.values())
    if as_json:
        echo_json({"removed": total, "tables": tables, "batches_that_never_landed": batches})
        return
    for path, removed in tables.items():
        if removed:
            click.echo(f"{path}: {removed}")
    for source, removed in batches.items():
        if removed:
            click.echo(f"{source}: data of {removed} batches that never landed")
    click.echo(f"{total:,} folders and single files that no table holds any more are removed.")


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
    folder = settings.home.absolute()
    if not folder.exists():
        click.echo(f"{folder} is not there.")
        return
    if not has_home(settings):
        raise IngestError(
            f"{folder} is not a home of this program, as it has no home.json. Nothing was removed.",
            fix="Point OMNISUPPORT_HOME at the home to remove, or remove the folder yourself.",
        )
    remove_home(Home.open(folder, settings.window_size, earlier=True))
    click.echo(f"{folder} is removed.")


def remove_home(home: Home) -> None:
    """Stop and remove the embedded database, then remove the folder. Raises ``HomeInUse``."""
    from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

    with HomeLock(home, "clean"):
        # The database's data may be outside of the home.
        EmbeddedPostgres(home.postgres).destroy()
        remove_socket_folder(home.run)
        kept = recorded_storage(home.path)
        # No failpoint: a person removes everything; what a crash leaves, the same command removes.
        shutil.rmtree(home.path)
        forget_home(home.path)
    if kept is not None:
        click.echo(f"What is in {kept} stays: remove it with the tools of its provider.", err=True)
