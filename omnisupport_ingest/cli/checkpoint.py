"""``checkpoint``: what each window of each table is complete to."""

from __future__ import annotations

import click

from omnisupport_ingest.cli.opening import open_home, open_settings


@click.group()
def checkpoint() -> None:
    """Show the checkpoints of the lake, or report them to Dagster again."""


@checkpoint.command()
def show() -> None:
    """List the checkpoint of every window, as the lake's own log holds it."""
    from rich.console import Console
    from rich.table import Table

    from omnisupport_ingest.stages import checkpoints
    from omnisupport_ingest.stages.workspace import Workspace

    found = checkpoints.read(Workspace.open(open_settings()).tables())
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("table", "window", "cursor", "watermark", "rows", "generation"):
        shown.add_column(title, no_wrap=True)
    for each in found:
        watermark = each.watermark.isoformat(timespec="seconds") if each.watermark else "-"
        shown.add_row(
            each.table,
            each.window or "(all)",
            each.cursor,
            watermark,
            str(each.rows),
            str(each.generation),
        )
    # A line that is too long for the terminal wraps; cut off it would say nothing.
    Console(width=max(Console().width, 140), highlight=False).print(shown)
    click.echo(f"{len(found)} checkpoints.")


@checkpoint.command()
def rebuild() -> None:
    """Report every committed partition to Dagster as materialized, after its event log was lost."""
    import os

    settings = open_settings()
    home = open_home(settings)
    from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home

    write_dagster_home(settings, home)
    os.environ.update(dagster_environment(settings, home))
    from dagster import DagsterInstance

    from omnisupport_ingest.defs.checkpoints import rebuild_materializations
    from omnisupport_ingest.stages.workspace import Workspace

    with DagsterInstance.get() as instance:
        count = rebuild_materializations(instance, Workspace.open(settings))
    click.echo(f"{count} partitions are reported materialized again.")
