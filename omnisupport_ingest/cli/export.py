"""``export`` and ``as-of``: tables as files, as they are now or as they were."""

from __future__ import annotations

import re
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from omnisupport_ingest.cli.long_look import speaking
from omnisupport_ingest.cli.opening import open_workspace, tables_named
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.cli.render import clock, counted, echo_json, iso, say_err, size
from omnisupport_ingest.cli.render import table as show_table
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import open_reading
from omnisupport_ingest.read.as_of_files import TableAsOf, count_tables, write_tables
from omnisupport_ingest.read.export import Format
from omnisupport_ingest.read.export import export as write
from omnisupport_ingest.runtime.spark import session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnisupport_ingest.contracts.model import TableContract
    from omnisupport_ingest.layers.workspace import Workspace

_FORM_HELP = "What to write.  [default: as the file's name ends, in a folder csv]"


@click.command()
@click.argument("table")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "jsonl"]),
    help=_FORM_HELP,
)
@out_option("Where to write the rows; an existing file is replaced.", required=True)
@click.option("--include-deleted", is_flag=True, help="Also softly deleted rows; _cdc_is_deleted marks them.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
def export(table: str, form: str | None, out: Out, include_deleted: bool, as_json: bool) -> None:
    """Write the current state of TABLE, its dimension, to a file that only you can read.

    TABLE is the name in the lake or at the source, with its source or schema where the name is not unique.
    Needs neither Spark nor a running platform. The file is written whole, or not at all.

    A value that the type of its column cannot hold (NaN in a numeric, infinity in a timestamp) is exact text
    in csv and jsonl; in parquet it is NULL, and _cdc_exact has the text. An unresolved value is NULL, and
    _cdc_unresolved names its column; a `*` there means that the row itself may not exist any more. In csv,
    NULL is an empty field and an empty text is "". In jsonl, decimals are text.

    \b
    Examples:
      omnisupport-ingest export tickets --out tickets.csv
      omnisupport-ingest export 'public."Odd Table"' --out odd.csv
      omnisupport-ingest export support_desk.tickets --format parquet --out tickets.parquet

    Exit code: 0 written, 1 not there yet or not writable, 2 usage, settings or no such table,
    3 no home.
    """
    workspace = open_workspace()
    (contract,) = tables_named(workspace, [table])
    chosen = _format(form, out)
    path = out.file(f"{contract.name}.{chosen.value}")
    with speaking():
        done = write(workspace, contract, path, chosen, deleted=include_deleted)
    if as_json:
        echo_json(asdict(done) | {"watermark": iso(done.watermark)})
        return
    click.echo(f"{counted(done.rows, 'row')} of {done.table} in {path} ({size(done.bytes)}).")
    mark = f", watermark {clock(done.watermark)}" if done.watermark else ""
    if done.pending_batches:
        behind = f"{counted(done.pending_batches, 'landed batch')} not in it yet"
        click.echo(f"Up to its event {done.cursor}{mark}; {behind}.")
    else:
        click.echo(f"Complete to {done.complete_to or 'all that has landed'}{mark}.")
    if done.unresolved:
        _warn_of_unresolved(done.unresolved)


_POSITION = re.compile(r"\d+:[0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8}:-?\d+")


def _read_at(_context: click.Context, _param: click.Parameter, text: str) -> Position | Lsn | datetime:
    """Return the argument AT: a position, an LSN, or a time with its zone."""
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
@out_option("Where to write a file for each table; existing files are replaced.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "jsonl"]),
    help=_FORM_HELP,
)
@click.option("--include-deleted", is_flag=True, help="Also softly deleted rows; _cdc_is_deleted marks them.")
@click.option("--json", "as_json", is_flag=True, help="Print what was read as one JSON document.")
def as_of(
    at: Position | Lsn | datetime,
    tables: tuple[str, ...],
    epoch: int | None,
    out: Out | None,
    form: str | None,
    include_deleted: bool,
    as_json: bool,
) -> None:
    """Read tables as they were AT a time, an LSN or a position.

    All tables are read at the same position, which the answer names. AT an LSN means everything that was
    committed at or below it. AT a time means everything before the first transaction in log order that was
    committed later, so transactions are whole and in log order. AT a position means everything at or below
    that event.

    Prints the number of rows of each table; with --out it writes the rows, as `export` does, to files that
    only you can read. Folds the events with Spark; needs neither the source nor a running platform.

    Refused if a table's snapshot was not complete there, if the stream has not landed up to there, or if
    something that has landed is not in the lake yet.

    \b
    Examples:
      omnisupport-ingest as-of 2026-01-31T09:00:00Z --table tickets --table customers
      omnisupport-ingest as-of 16/B374D848 --out then --format parquet --json

    Exit code: 0 read, 1 no state there, 2 usage, settings or no such table, 3 no home, 4 no Java or
    no Spark.
    """
    if epoch is not None and not isinstance(at, Lsn):
        raise click.UsageError("--epoch goes with an LSN only.")
    if form is not None and out is None:
        raise click.UsageError("--format goes with --out, which says where the rows are written.")
    workspace = open_workspace()
    settings, chosen = workspace.settings, _chosen(workspace, tables)
    if out is None:
        with speaking():
            reading = open_reading(workspace, chosen, at, epoch=epoch)
            tables_as_of = count_tables(reading, session(settings))
    else:
        as_format = _format(form, out)
        # Checked before anything is read.
        places = out.files([f"{each.name}.{as_format.value}" for each in chosen])
        paths = {contract.name: place for contract, place in zip(chosen, places, strict=True)}
        with speaking():
            reading = open_reading(workspace, chosen, at, epoch=epoch)
            tables_as_of = write_tables(
                workspace, reading, session(settings), paths, as_format, deleted=include_deleted
            )
    source = reading.contracts[0].source
    if as_json:
        echo_json(_document(source, reading.below, tables_as_of))
        return
    click.echo(f"{source} as it was before {reading.below} (epoch {reading.below.epoch}).")
    _print_tables(tables_as_of)


def _format(given: str | None, out: Out) -> Format:
    """Return the requested format, else that of the file's suffix; in a folder, CSV."""
    name = given or ("csv" if out.is_folder else out.suffix)
    if name not in {each.value for each in Format}:
        raise click.UsageError(f"The name {out.path.name} does not say what to write: add --format.")
    return Format(name)


def _chosen(workspace: Workspace, tables: Sequence[str]) -> list[TableContract]:
    if tables:
        return tables_named(workspace, tables)
    contracts = list(workspace.contracts.of_source(workspace.settings.source))
    if not contracts:
        raise click.UsageError(f"No contract is of the source {workspace.settings.source}: name a --table.")
    return contracts


def _document(source: str, below: Position, tables_as_of: Sequence[TableAsOf]) -> dict[str, object]:
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
            for each in tables_as_of
        },
    }


def _print_tables(tables_as_of: Sequence[TableAsOf]) -> None:
    columns = ["table", "rows", "softly deleted"]
    rows = [[each.table, f"{each.live:,}", f"{each.deleted:,}"] for each in tables_as_of]
    if any(each.path for each in tables_as_of):
        columns += ["bytes", "file"]
        for row, each in zip(rows, tables_as_of, strict=True):
            row += [f"{each.bytes or 0:,}", each.path or ""]
    show_table(columns, rows, right=("rows", "softly deleted", "bytes"))
    if unresolved := sum(each.unresolved for each in tables_as_of):
        _warn_of_unresolved(unresolved)


def _warn_of_unresolved(rows: int) -> None:
    say_err(f"{counted(rows, 'row')} with unresolved values: see _cdc_unresolved.")
