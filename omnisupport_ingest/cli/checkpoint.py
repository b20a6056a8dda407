"""``checkpoint``: how far each window of each table is, in words, in a file, and in Dagster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import home_of_landed, open_settings, open_workspace
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.cli.render import Commands, clock, counted, echo_json, heading
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.json_values import to_plain
from omnisupport_ingest.layers import checkpoints
from omnisupport_ingest.layers.checkpoint_file import describe, read_file, require_held
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.records import encode
from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home

if TYPE_CHECKING:
    from omnisupport_ingest.lake.checkpoint import Checkpoint
    from omnisupport_ingest.settings import Settings


@click.group(cls=Commands)
def checkpoint() -> None:
    """Show the checkpoints of the lake, back them up, or report them to Dagster again."""


@checkpoint.command()
@click.option("--table", metavar="TABLE", help="Only this table: `dim_orders`, or its whole path.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every field.")
def show(table: str | None, as_json: bool) -> None:
    """List the checkpoint of every window, as the tables' Delta logs have it.

    \b
    cursor       the last position that the window contains
    watermark    of its input, UTC
    rows         that it has
    generation   rises with every replacement of the window

    \b
    Example:
      omnisupport-ingest checkpoint show --table raw_cdc_staging

    Exit code: 0 done, 2 usage, settings or no such table, 3 no home.
    """
    tables = list(open_workspace().tables())
    chosen = [each for each in tables if table is None or _names(table, each.spec.path)]
    if not chosen:
        names = ", ".join(each.spec.path for each in tables)
        raise click.UsageError(f"{table} is not a table of this lake. There are: {names}")
    listed = checkpoints.read(chosen)
    if as_json:
        echo_json(to_plain(tuple(listed)))
        return
    _print(listed)
    click.echo(f"{counted(len(listed), 'checkpoint')}.")


@checkpoint.command()
@out_option("Where to write checkpoints.json; an existing file is replaced.", required=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def export(out: Out, as_json: bool) -> None:
    """Write to a file how far landing and every window of the lake are, for `checkpoint import`.

    The file is no backup: it has no row and no key. It shows whether a restored home is complete. Back up
    landing/ and lake/ after it, so that they are as new as the file.

    \b
    Example:
      omnisupport-ingest checkpoint export --out checkpoints.json

    Exit code: 0 written, 1 not writable or landing is damaged, 2 usage or settings, 3 no home.
    """
    record = describe(open_workspace())
    path = out.file("checkpoints.json")
    with failpoint("checkpoint.file"):
        replace(path, encode(record))
    checkpoints, sources = record.checkpoints, record.sources
    if as_json:
        echo_json({"file": str(path), "checkpoints": len(checkpoints), "sources": sorted(sources)})
        return
    click.echo(f"{counted(len(checkpoints), 'checkpoint')} of {counted(len(sources), 'source')} in {path}.")


@checkpoint.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--check", "check_only", is_flag=True, help="Only compare; report nothing to Dagster.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def import_file(file: Path, check_only: bool, as_json: bool) -> None:
    """Compare the home with a FILE of `checkpoint export`, then report its checkpoints to Dagster.

    A file cannot bring back what landing and lake have lost. So a home that is behind the file, or has
    another history, is refused with a list of the differences, and nothing is changed. If the home has
    everything that the file says, or more, every partition that Dagster does not know is reported to it, as
    by `checkpoint rebuild`. Cursors of sensors need no restoring: the next tick finds them from landing and
    lake.

    \b
    Examples:
      omnisupport-ingest checkpoint import checkpoints.json --check
      omnisupport-ingest checkpoint import checkpoints.json

    Exit code: 0 the home holds what the file says, 1 it does not, 2 usage or settings, 3 no home.
    """
    settings = open_settings()
    workspace = open_workspace(settings)
    record = read_file(file)
    require_held(workspace, record, file)
    held = len(record.checkpoints)
    if as_json:
        echo_json({"held": held, "partitions_reported": None if check_only else _rebuild(settings)})
        return
    click.echo(f"The home holds all {held} checkpoints of {file}, or has gone on from them.")
    if not check_only:
        click.echo(_reported(_rebuild(settings)))


@checkpoint.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def rebuild(as_json: bool) -> None:
    """Report every committed partition to Dagster as materialized, after Dagster lost its event log.

    \b
    Example:
      omnisupport-ingest checkpoint rebuild

    Exit code: 0 done, 2 usage or settings, 3 no home.
    """
    partitions = _rebuild(open_settings())
    if as_json:
        echo_json({"partitions_reported": partitions})
    else:
        click.echo(_reported(partitions))


def _reported(partitions: int) -> str:
    return f"{partitions} partitions are reported materialized again."


def _rebuild(settings: Settings) -> int:
    """Report the windows of the lake to the Dagster instance of the home; return how many partitions were
    new."""
    home = home_of_landed(settings)
    write_dagster_home(settings, home)
    os.environ.update(dagster_environment(settings, home))
    from dagster import DagsterInstance

    from omnisupport_ingest.defs.checkpoints import rebuild_materializations

    with DagsterInstance.get() as instance:
        return rebuild_materializations(instance, Workspace.open(settings))


def _names(table: str, path: str) -> bool:
    """Whether ``table`` is the ``path`` of a table, or the end of it, such as ``dim_tickets``."""
    return path == table or path.endswith(f"/{table}")


def _print(listed: Sequence[Checkpoint]) -> None:
    for path, of_table in groupby(listed, key=lambda each: each.table):
        heading(path)
        rows = [
            [
                f"  {each.window or '(all)'}",
                each.cursor or "-",
                clock(each.watermark) if each.watermark else "-",
                f"{each.rows:,}",
                str(each.generation),
            ]
            for each in of_table
        ]
        show_table(
            ["  window", "cursor", "watermark", "rows", "generation"], rows, right=("rows", "generation")
        )
