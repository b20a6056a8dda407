"""``sweep``: delete the files that no version in use of any table holds."""

from __future__ import annotations

from datetime import timedelta

import click

from omnisupport_ingest.cli.opening import open_settings


@click.command()
@click.option(
    "--older-than-hours",
    "hours",
    # A run in progress has placed files that it has not committed yet.
    type=click.IntRange(min=1),
    default=24,
    show_default=True,
    help="Keep what is younger. A run must be able to finish within that time.",
)
def sweep(hours: int) -> None:
    """Delete what crashed runs left in the lake, and what newer versions of its tables replaced.

    The platform may go on meanwhile. Table versions older than that can no longer be read. Quarantined events
    that a window still names always stay.

    \b
    Example:
      omnisupport-ingest sweep --older-than-hours 48

    Exit code: 0 done, 2 usage or settings.
    """
    from omnisupport_ingest.lake.sweep import sweep as sweep_table
    from omnisupport_ingest.stages.quarantine_files import named_anywhere
    from omnisupport_ingest.stages.workspace import Workspace

    total, workspace = 0, Workspace.open(open_settings())
    named = {
        workspace.quarantine(source).spec.path: named_anywhere(workspace, source)
        for source in workspace.contracts.sources()
    }
    for table in workspace.tables():
        spare = named.get(table.spec.path, frozenset())
        removed = len(sweep_table(table, timedelta(hours=hours), spare=spare))
        if removed:
            click.echo(f"{table.spec.path}: {removed}")
        total += removed
    click.echo(f"{total} folders and single files that no table holds any more are removed.")
