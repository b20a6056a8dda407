"""``checkpoint``: what each window of each table is complete to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_home, open_settings

if TYPE_CHECKING:
    from omnisupport_ingest.lake.checkpoint import Checkpoint
    from omnisupport_ingest.settings import Settings


@click.group()
def checkpoint() -> None:
    """Show the checkpoints of the lake, back them up, or report them to Dagster again."""


@checkpoint.command()
@click.option("--table", metavar="TABLE", help="Only this table: `dim_orders`, or its whole path.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with every field.")
def show(table: str | None, as_json: bool) -> None:
    """List the checkpoint of every window, as the lake's own log holds it.

    Per window: the last position taken (cursor), the watermark (UTC), the rows held, and the
    generation, which a replacement raises.

    \b
    Example:
      omnisupport-ingest checkpoint show --table raw_cdc_staging

    Exit code: 0 done, 2 usage, settings or no such table, 3 no home.
    """
    from omnisupport_ingest.stages import checkpoints
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    tables = list(Workspace.open(settings).tables())
    chosen = [each for each in tables if table is None or _names(table, each.spec.path)]
    if not chosen:
        names = ", ".join(each.spec.path for each in tables)
        raise click.UsageError(f"{table} is not a table of this lake. There are: {names}")
    found = checkpoints.read(chosen)
    if as_json:
        click.echo(json.dumps([each.to_json() for each in found], indent=2))
        return
    _print(found)
    click.echo(f"{len(found)} checkpoints.")


@checkpoint.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write; one that is there is replaced.",
)
def export(out: Path) -> None:
    """Write how far landing and every window of the lake are to a file, for `checkpoint import`.

    It is proof for a restored home, not a backup of data: no row and no key is in it. Back up
    landing/ and lake/ with it, afterwards, so that they are as new as the file.

    \b
    Example:
      omnisupport-ingest checkpoint export --out checkpoints.json

    Exit code: 0 written, 1 not writable or landing is damaged, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.durable import replace
    from omnisupport_ingest.failpoints import gate
    from omnisupport_ingest.stages.checkpoint_file import describe
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    record = describe(Workspace.open(settings))
    if not out.absolute().parent.is_dir():
        raise click.UsageError(f"{out.parent} is not a folder.")
    with gate("checkpoint.file"):
        replace(out.absolute(), json.dumps(record, indent=1).encode() + b"\n")
    click.echo(f"{len(record['checkpoints'])} checkpoints of {len(record['sources'])} sources in {out}.")


@checkpoint.command(name="import")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--check", "check_only", is_flag=True, help="Compare only; report nothing to Dagster.")
def import_file(file: Path, check_only: bool) -> None:
    """Compare the home with a FILE of `checkpoint export`, then report its checkpoints to Dagster.

    Landing and lake hold the truth, and a file cannot bring back what they have lost. So a home that
    is behind the file, or of another history, is refused with every difference, and nothing is
    changed. A home that holds what the file says, or more, is restored: Dagster is told of every
    partition that it does not know (as by `checkpoint rebuild`). The cursors of the sensors need no
    restoring: they are found again from landing and lake at the next tick.

    \b
    Examples:
      omnisupport-ingest checkpoint import checkpoints.json --check
      omnisupport-ingest checkpoint import checkpoints.json

    Exit code: 0 the home holds what the file says, 1 it does not, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.stages.checkpoint_file import read_file, require_held
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    record = read_file(file)
    require_held(Workspace.open(settings), record, file)
    click.echo(
        f"The home holds all {len(record['checkpoints'])} checkpoints of {file}, or has gone on from them."
    )
    if not check_only:
        click.echo(f"{_rebuild(settings)} partitions are reported materialized again.")


@checkpoint.command()
def rebuild() -> None:
    """Report every committed partition to Dagster as materialized, after its event log was lost.

    \b
    Example:
      omnisupport-ingest checkpoint rebuild

    Exit code: 0 done, 2 usage or settings.
    """
    click.echo(f"{_rebuild(open_settings())} partitions are reported materialized again.")


def _rebuild(settings: Settings) -> int:
    """Tell the Dagster instance of the home what the lake holds; returns how many partitions were new."""
    import os

    home = open_home(settings)
    from omnisupport_ingest.runtime.dagster_home import dagster_environment, write_dagster_home

    write_dagster_home(settings, home)
    os.environ.update(dagster_environment(settings, home))
    from dagster import DagsterInstance

    from omnisupport_ingest.defs.checkpoints import rebuild_materializations
    from omnisupport_ingest.stages.workspace import Workspace

    with DagsterInstance.get() as instance:
        return rebuild_materializations(instance, Workspace.open(settings))


def _names(table: str, path: str) -> bool:
    """Whether ``table`` means the table at ``path``, or its end, as in ``dim_tickets``."""
    return path == table or path.endswith(f"/{table}")


def _print(found: Sequence[Checkpoint]) -> None:
    table = None
    for each in found:
        if each.table != table:
            table = each.table
            click.echo(click.style(table, bold=True))
        mark = f"{each.watermark:%Y-%m-%d %H:%M:%S}" if each.watermark else "-"
        click.echo(
            f"  {each.window or '(all)':<15}  {each.cursor or '-':<29}  {mark:<19}  {each.rows:>12,} rows"
            f"  gen. {each.generation}"
        )
