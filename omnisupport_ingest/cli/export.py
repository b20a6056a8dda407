"""``export``: the current state of one table as a file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from omnisupport_ingest.cli.opening import existing_home, open_settings


@click.command()
@click.argument("table")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "parquet", "jsonl"]),
    help="What to write.  [default: as the file's name ends]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write; one that is there is replaced.",
)
@click.option("--include-deleted", is_flag=True, help="Softly deleted rows too, marked by _cdc_is_deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as one JSON document.")
def export(table: str, form: str | None, out: Path, include_deleted: bool, as_json: bool) -> None:
    """Write the current state of TABLE, its dimension, to a file that only you can read.

    TABLE is its name in the lake or at the source, with source or schema where it alone is not enough.

    Needs neither Spark nor a running platform. The file is complete or not there at all. Values that
    a column's type cannot hold (NaN in a numeric, infinity in a timestamp) are exact text in csv and
    jsonl; in parquet the column is NULL and _cdc_exact has the text. A value that is not known is
    NULL, and _cdc_unresolved names its column; a `*` there says that the row itself may be gone.
    In csv, NULL is an empty field and an empty text is "". In jsonl, decimals are text.

    \b
    Examples:
      omnisupport-ingest export tickets --out tickets.csv
      omnisupport-ingest export 'public."Odd Table"' --out odd.csv
      omnisupport-ingest export support_desk.tickets --format parquet --out tickets.parquet

    Exit code: 0 written, 1 not there yet or not writable, 2 usage, settings or no such table,
    3 no home.
    """
    from omnisupport_ingest.contracts.model import table_named
    from omnisupport_ingest.stages.export import Format
    from omnisupport_ingest.stages.export import export as write
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    contract = table_named(table, workspace.contracts.all)
    chosen = form or out.suffix.lstrip(".").lower()
    if chosen not in {each.value for each in Format}:
        raise click.UsageError(f"The name {out.name} does not say what to write: add --format.")
    if not out.parent.is_dir():
        raise click.UsageError(f"{out.parent} is not a folder.")
    done = write(workspace, contract, out.absolute(), Format(chosen), deleted=include_deleted)
    if as_json:
        record = asdict(done)
        record["watermark"] = done.watermark.isoformat() if done.watermark else None
        click.echo(json.dumps(record, indent=2))
        return
    click.echo(f"{done.rows:,} rows of {done.table} in {out} ({done.bytes:,} bytes).")
    mark = f", watermark {done.watermark:%Y-%m-%d %H:%M:%S} UTC" if done.watermark else ""
    if done.pending_batches:
        click.echo(f"Up to its event {done.cursor}{mark}; {done.pending_batches} batches are not in it yet.")
    else:
        click.echo(f"Complete to {done.complete_to or 'all that has landed'}{mark}.")
    if done.unresolved:
        click.echo(f"{done.unresolved:,} rows have values that are not known: see _cdc_unresolved.", err=True)
