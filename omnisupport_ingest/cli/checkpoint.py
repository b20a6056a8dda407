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
    shown = Table("table", "window", "cursor", "watermark", "rows", "last batch", "generation", box=None)
    for each in found:
        watermark = each.watermark.isoformat(timespec="seconds") if each.watermark else "-"
        shown.add_row(
            each.table,
            each.window or "(all)",
            each.cursor,
            watermark,
            str(each.rows),
            each.last_batch_id or "-",
            str(each.generation),
        )
    Console().print(shown)
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
