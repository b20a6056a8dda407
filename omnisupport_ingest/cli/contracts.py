"""``contracts``: make table contracts, check them, and compare them with the source."""

from __future__ import annotations

import json
from pathlib import Path

import click

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.source_opening import log_of

FINDINGS = 1
"""Exit code when something was refused, or found to matter."""

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def contracts() -> None:
    """Make the table contracts, check them, compare them with the source."""


@contracts.command()
@click.option(
    "--table", "tables", multiple=True, metavar="SCHEMA.TABLE", help="A table of the source; may be repeated."
)
@click.option("--all", "every", is_flag=True, help="Every table of the source, but for partitions.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to.  [default: OMNISUPPORT_CONTRACTS_DIR, the home's own, else contracts/data]",
)
@click.option("--owner", default="team:unassigned", show_default=True, help="team:NAME or an email address.")
@click.option("--force", is_flag=True, help="Write contracts anew that are there already.")
@click.option("--source", metavar="NAME", help="A log of the home.  [default: that of the settings]")
@_as_json
def new(
    tables: tuple[str, ...],
    every: bool,
    out: Path | None,
    owner: str,
    force: bool,
    source: str | None,
    as_json: bool,
) -> int:
    """Write a contract file for each table named, from what the source says of it.

    Types, key, NOT NULL, enum values, lengths and comments come from the source. The source is the one that
    OMNISUPPORT_SOURCE_DSN names, else the embedded PostgreSQL of the home, which must be running; --source
    names another log.

    Columns that seem to be personal data by their names are noted in x-cdc.pii, each with a policy that
    would fit, and every value is kept: look through them and the others, and decide (`pii scan` looks at
    values that have landed). Owner, descriptions and rules are yours to write, too.

    A table whose changes cannot name their rows is refused with the ways to repair it; the others are
    written all the same.

    \b
    Examples:
      omnisupport-ingest contracts new --all
      omnisupport-ingest contracts new --table sales.orders --table 'public."Weird Name"'

    Exit code: 0 done, 1 a table was refused, 2 usage or settings, 3 no home, 4 the source is away.
    """
    from omnisupport_ingest.cli.contracts_new import document, say_if_not_in_force, show, write_contracts

    if every == bool(tables):
        raise click.UsageError("Name tables by --table, or take every one by --all.")
    settings = log_of(open_settings(), source)
    outcomes = write_contracts(settings, tables, out=out, owner=owner, force=force)
    if as_json:
        click.echo(json.dumps(document(outcomes), indent=2, ensure_ascii=False))
    else:
        show(outcomes)
        say_if_not_in_force(settings, outcomes)
    return FINDINGS if any(outcome.refused for outcome in outcomes) else 0


@contracts.command()
@_as_json
def validate(as_json: bool) -> int:
    """Read every contract; each problem is told with its file, its place and the fix.

    \b
    Example:
      omnisupport-ingest contracts validate

    Exit code: 0 all are valid, 1 one is not, 2 usage or settings.
    """
    from omnisupport_ingest.cli.contracts_validate import document, read_all, show
    from omnisupport_ingest.contracts.in_force import in_force

    settings = open_settings()
    found = read_all(settings.contracts_dir or in_force(settings).contracts)
    if as_json:
        click.echo(json.dumps(document(found), indent=2, ensure_ascii=False))
    else:
        show(found)
    return FINDINGS if found.problems else 0


@contracts.command()
@click.argument("folder", required=False)
@click.option("--decision-table", metavar="FILE", help="Another decision table, too, or alone.")
def use(folder: str | None, decision_table: str | None) -> None:
    """Let the home have the contracts in FOLDER from now on; it records where they are.

    A home keeps to the contracts and the decision table that it was first opened with, wherever a
    command is started; `status` shows them. Windows that other rules judged are stale afterwards: see
    `windows --stale`. The word packaged stands for what comes with the program.

    \b
    Examples:
      omnisupport-ingest contracts use contracts/data
      omnisupport-ingest contracts use packaged --decision-table reports/decisions.csv

    Exit code: 0 recorded, 2 usage, settings or a contract that cannot be used, 3 no home, 6 the platform
    runs on this home.
    """
    from omnisupport_ingest.cli.opening import existing_home
    from omnisupport_ingest.contracts.in_force import use as take
    from omnisupport_ingest.runtime.home_lock import HomeLock

    if folder is None and decision_table is None:
        raise click.UsageError("Name a FOLDER of contracts, or a --decision-table.")
    settings = open_settings()
    home = existing_home(settings)
    with HomeLock(home, "contracts use"):
        chosen = take(settings, home, folder, decision_table)
    click.echo(
        f"{home.path} has {len(chosen.tables)} tables, by the contracts in {chosen.contracts}, and the "
        f"decision table {chosen.decision_table}."
    )


@contracts.command()
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME",
    help="Only this table, by its name in the lake or schema.table; may be repeated.",
)
@click.option("--source", metavar="NAME", help="A log of the home.  [default: that of the settings]")
@_as_json
def diff(tables: tuple[str, ...], source: str | None, as_json: bool) -> int:
    """Compare the contracts of the source with its tables as they are now.

    A difference that would stop capture or quarantine rows matters. A column that no contract names does
    not: it stays in the raw layers, and never fails ingestion.

    \b
    Example:
      omnisupport-ingest contracts diff --table tickets

    Exit code: 0 no difference that matters, 1 there is one, 2 usage or settings, 3 no home, 4 the source
    is away.
    """
    from omnisupport_ingest.cli.contracts_diff import compare, document, show

    found = compare(log_of(open_settings(), source), tables)
    if as_json:
        click.echo(json.dumps(document(found), indent=2, ensure_ascii=False))
    else:
        show(found)
    return FINDINGS if found.matters else 0


@contracts.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def retype(name: str, yes: bool) -> int:
    """Have the tables of the contract NAME made again under its types, where theirs are others.

    A type that holds every value of the old one needs nothing: the next run takes it. Any other change waits
    for this command, as it changes what readers of the tables see. Net changes, dimension and
    history are made again from the events in deduped_events, each in one commit: until then readers find
    the old one whole. The source is not asked. The next run does it: that of `up`, or of `materialize`.

    \b
    Example:
      omnisupport-ingest contracts retype invoices

    Exit code: 0 done or nothing to do, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.cli.opening import existing_home
    from omnisupport_ingest.contracts.model import table_named
    from omnisupport_ingest.stages.retyping import ask_for, other_types
    from omnisupport_ingest.stages.workspace import Workspace

    settings = open_settings()
    existing_home(settings)
    workspace = Workspace.open(settings)
    contract = table_named(name, workspace.contracts.all)
    found = other_types(workspace, contract)
    if not found:
        click.echo(f"The tables of {name} have the types of its contract.")
        return 0
    for path, columns in found.items():
        click.echo(f"{path}: {', '.join(map(str, columns))}")
    click.echo("Each is made again whole, from deduped_events; nothing is read at the source.")
    if not yes:
        click.confirm("Go on?", abort=True)
    ask_for(workspace, contract)
    click.echo(
        "The next run makes them: that of `omnisupport-ingest up`, else omnisupport-ingest materialize"
    )
    return 0
