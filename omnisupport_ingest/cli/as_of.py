"""``as-of``: tables as they were at one place in the log."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings
from omnisupport_ingest.position import Lsn, Position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.stages.as_of_files import TableAsOf
    from omnisupport_ingest.stages.workspace import Workspace

_POSITION = re.compile(r"\d+:[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}:-?\d+")


def _read_at(_context: click.Context, _param: click.Parameter, text: str) -> Position | Lsn | datetime:
    """A position, an LSN, or a time with its zone."""
    try:
        if _POSITION.fullmatch(text):
            return Position.parse(text)
        if "/" in text:
            return Lsn.parse(text)
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time (2026-01-31T09:00:00Z), LSN (16/B374D848) or position (1:16/B374D848:4)."
        ) from None
    if moment.tzinfo is None:
        raise click.BadParameter(f"{text!r} has no time zone: add Z for UTC, or +02:00.")
    return moment


@click.command("as-of")
@click.argument("at", callback=_read_at)
@click.option(
    "--table",
    "tables",
    metavar="NAME",
    multiple=True,
    help="Read this table; repeatable.  [default: all of the source]",
)
@click.option(
    "--epoch",
    type=click.IntRange(min=1),
    help="Epoch of an LSN.  [default: the newest whose stream reached it]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder to write a file per table into; one that is there is replaced.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "jsonl"]),
    default="csv",
    show_default=True,
    help="What to write.",
)
@click.option("--include-deleted", is_flag=True, help="Softly deleted rows too, marked by _cdc_is_deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print what was read as one JSON document.")
def as_of(
    at: Position | Lsn | datetime,
    tables: tuple[str, ...],
    epoch: int | None,
    out: Path | None,
    form: str,
    include_deleted: bool,
    as_json: bool,
) -> None:
    """Read tables as they were AT a time, an LSN or a position.

    All tables are read at one and the same position, which the answer names. An LSN is everything
    that was committed at or below it. A time is everything up to the first transaction, in log
    order, that was committed later; so a transaction is in whole or not at all, and none without
    those before it in the log. A position is everything at or below that event.

    Prints the rows of each table, or writes them with --out, as `export` does, to files that only
    you can read. Folds the events anew with Spark: needs neither source nor a running platform.
    Refused where a table's snapshot was still being read, where the stream has not landed yet, and
    where something that landed is not in the lake yet.

    \b
    Examples:
      omnisupport-ingest as-of 2026-01-31T09:00:00Z --table tickets --table customers
      omnisupport-ingest as-of 16/B374D848 --out then --format parquet --json

    Exit code: 0 read, 1 no state there, 2 usage, settings or no such table, 3 no home, 4 no Java or
    no Spark.
    """
    from omnisupport_ingest.runtime.spark import session
    from omnisupport_ingest.stages.as_of import open_reading
    from omnisupport_ingest.stages.as_of_files import count_tables, write_tables
    from omnisupport_ingest.stages.export import Format
    from omnisupport_ingest.stages.workspace import Workspace

    if epoch is not None and not isinstance(at, Lsn):
        raise click.UsageError("--epoch goes with an LSN only.")
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"{out.parent} is not a folder.")
    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    reading = open_reading(workspace, _contracts(workspace, tables), at, epoch=epoch)
    if out is None:
        found = count_tables(reading, session(settings))
    else:
        out.mkdir(mode=0o700, exist_ok=True)
        found = write_tables(
            workspace,
            reading,
            session(settings),
            out.absolute(),
            Format(form),
            deleted=include_deleted,
        )
    source = reading.contracts[0].source
    if as_json:
        click.echo(json.dumps(_document(source, reading.below, found), indent=2))
        return
    click.echo(f"{source} as it was before {reading.below} (epoch {reading.below.epoch}).")
    _print(found)


def _contracts(workspace: Workspace, tables: Sequence[str]) -> list[TableContract]:
    from omnisupport_ingest.contracts.model import table_named

    if tables:
        return list(dict.fromkeys(table_named(name, workspace.contracts.all) for name in tables))
    found = list(workspace.contracts.of_source(workspace.settings.source))
    if not found:
        raise click.UsageError(f"No contract is of the source {workspace.settings.source}: name a --table.")
    return found


def _document(source: str, below: Position, found: Sequence[TableAsOf]) -> dict[str, object]:
    return {
        "source": source,
        "epoch": below.epoch,
        "below_position": str(below),
        "below_lsn": str(below.commit_lsn),
        "tables": {
            each.table: {
                "rows": each.live,
                "deleted_rows": each.deleted,
                "rows_unresolved": each.unresolved,
                "path": each.path,
                "bytes": each.bytes,
            }
            for each in found
        },
    }


def _print(found: Sequence[TableAsOf]) -> None:
    width = max(len(each.table) for each in found)
    for each in found:
        line = f"  {each.table:<{width}}  {each.live:>9,} rows, {each.deleted:,} softly deleted"
        click.echo(line if each.path is None else f"{line}; {each.path} ({each.bytes:,} bytes)")
    unresolved = sum(each.unresolved for each in found)
    if unresolved:
        click.echo(f"{unresolved:,} rows have values that are not known: see _cdc_unresolved.", err=True)
