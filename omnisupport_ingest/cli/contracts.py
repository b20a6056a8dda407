"""``contracts``: make table contracts, check them, put them in force, compare them with the source.

``contracts_new`` writes new contracts, ``contracts_diff`` compares them. Both connect to the source, so only
their commands import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from pydantic import SecretStr

from omnisupport_ingest.cli.contracts_reading import read_all, reading_document, show_reading
from omnisupport_ingest.cli.errors import FINDINGS
from omnisupport_ingest.cli.opening import (
    existing_home,
    has_home,
    has_log,
    log_of,
    open_settings,
    open_workspace,
    tables_named,
)
from omnisupport_ingest.cli.out import Out, out_option
from omnisupport_ingest.cli.render import Commands, counted, echo_json
from omnisupport_ingest.cli.withdraw import withdraw
from omnisupport_ingest.contracts.in_force import (
    in_force,
    proposed,
    put_in_force,
    tables_left,
)
from omnisupport_ingest.contracts.model import table_named
from omnisupport_ingest.contracts.sources import (
    SourceKind,
    SourceUnknown,
    load_sources,
    sources_folder,
    sources_in_force,
)
from omnisupport_ingest.runtime.home_lock import HomeLock

if TYPE_CHECKING:
    from omnisupport_ingest.settings import Settings

_NOBODY = "team:unassigned"
"""The owner of a table for which none is given."""

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group(cls=Commands)
def contracts() -> None:
    """Make table contracts, check them, and compare them with the source."""


@contracts.command()
@click.option(
    "--table", "tables", multiple=True, metavar="SCHEMA.TABLE", help="A table of the source; repeatable."
)
@click.option("--all", "every", is_flag=True, help="Every table of the source except partitions.")
@out_option(
    "Where to write; unset: the folder OMNISUPPORT_CONTRACTS_DIR, else the home's, else contracts/data."
)
@click.option(
    "--owner",
    default=_NOBODY,
    show_default=True,
    help="Owner of the tables: team:NAME or an email address.",
)
@click.option("--force", is_flag=True, help="Replace existing contracts.")
@click.option(
    "--source",
    metavar="NAME",
    help="A captured source, or one that is read by cursors.  [default: that of the settings]",
)
@_as_json
def new(
    tables: tuple[str, ...],
    every: bool,
    out: Out | None,
    owner: str,
    force: bool,
    source: str | None,
    as_json: bool,
) -> int:
    """Write a contract file for each table named, from its definition at the source.

    Types, key, NOT NULL, enum values, lengths and comments come from the source: the one that
    OMNISUPPORT_SOURCE_DSN names, else the embedded PostgreSQL of the home, which must be running; --source
    names another captured source, or one that is read by cursors. For such a table a column is proposed as
    cursor, with the reasons for and against it and all others. What a database other than PostgreSQL does not
    say is noted in the descriptions: look through types and cursor.

    Columns that seem to be personal data by their names are noted in x-cdc.pii, each with a policy that
    would fit, and every value is kept: look through them and the others, and decide (`pii scan` looks at
    values that have landed). Owner, descriptions and rules are yours to write, too.

    A table whose changes do not identify their rows is refused, with the ways to repair it. The others are
    written.

    \b
    Examples:
      omnisupport-ingest contracts new --all
      omnisupport-ingest contracts new --table sales.orders --table 'public."Weird Name"'
      omnisupport-ingest contracts new --all --source shop_replica

    Exit code: 0 done, 1 a table was refused, 2 usage or settings, 3 no home, 4 the source is away.
    """
    from omnisupport_ingest.cli.contracts_new import (
        NewContracts,
        document,
        folders_of,
        show,
        warn_if_not_in_force,
        write_contracts,
    )

    if every == bool(tables):
        raise click.UsageError("Name tables with --table, or take all with --all.")
    settings, by_query = _source_of_new(open_settings(), source)
    outcomes = write_contracts(NewContracts(settings, tables, out, owner, force, by_query))
    if as_json:
        echo_json(document(outcomes))
    else:
        show(outcomes, by_query=by_query, owned=owner != _NOBODY)
        warn_if_not_in_force(settings, folders_of(outcomes))
    return FINDINGS if any(outcome.refused for outcome in outcomes) else 0


def _source_of_new(settings: Settings, name: str | None) -> tuple[Settings, bool]:
    """Return ``settings`` for the source whose tables get contracts, and whether it is read by queries."""
    if name is None and settings.source_dsn is None and not has_home(settings):
        kinds = (SourceKind.LOG, SourceKind.QUERY)
        defined = [each.name for each in load_sources(sources_folder(settings)) if each.kind in kinds]
        if defined and settings.source not in defined:
            raise click.UsageError(f"Name the source of the tables: --source {' or '.join(defined)}")
    if name is None or has_log(settings, name):
        return log_of(settings, name), False
    definition = sources_in_force(settings).find(name)
    if definition.kind is not SourceKind.QUERY:
        raise SourceUnknown(
            f"{name} is a source of the kind {definition.kind}: there is no database whose tables could be "
            "looked at.",
            fix="Write its contracts by hand: docs/contracts.md",
        )
    dsn = SecretStr(definition.connection_text())
    return settings.model_copy(update={"source": name, "source_dsn": dsn}), True


@contracts.command()
@_as_json
def validate(as_json: bool) -> int:
    """Read every contract, and print each problem with its file, its place in it, and the fix.

    Contracts are held against the definitions of their sources, too: what only a captured source can do
    (retention of net changes) is refused of other kinds, and a table that is read by a cursor has to name
    it.

    \b
    Example:
      omnisupport-ingest contracts validate

    Exit code: 0 all are valid, 1 one is not, 2 usage or settings.
    """
    settings = open_settings()
    found = read_all(settings.contracts_dir or in_force(settings).contracts, settings)
    if as_json:
        echo_json(reading_document(found))
    else:
        show_reading(found)
    return FINDINGS if found.problems else 0


@contracts.command()
@click.argument("folder", required=False)
@click.option("--decision-table", metavar="FILE", help="A decision table, besides a FOLDER or alone.")
@click.option("--yes", is_flag=True, help="Do not ask, where tables of the home have no contract in FOLDER.")
def use(folder: str | None, decision_table: str | None, yes: bool) -> None:
    """Put the contracts in FOLDER in force for the home, which records where they are.

    A home keeps the contracts and the decision table that it was first opened with, wherever a command is
    started; `status` shows them. Afterwards the windows that other rules have judged are stale, and replayed
    (`windows`). FOLDER may be the word packaged: the contracts that come with the program.

    \b
    Examples:
      omnisupport-ingest contracts use contracts/data
      omnisupport-ingest contracts use packaged --decision-table reports/decisions.csv

    Exit code: 0 recorded, 2 usage, settings or a contract that cannot be used, 3 no home, 6 the platform
    runs on this home.
    """
    if folder is None and decision_table is None:
        raise click.UsageError("Name a FOLDER of contracts, or a --decision-table.")
    settings = open_settings()
    home = existing_home(settings)
    with HomeLock(home, "contracts use"):
        chosen = proposed(settings, home, folder, decision_table)
        if left := tables_left(home, chosen):
            click.echo(f"No contract in {chosen.contracts} names these tables, which the home has:")
            for each in left:
                click.echo(f"  {each.replace(':', '.', 1)}")
            click.echo("Nothing more of them would be taken in, and no command would show them.")
            if not yes:
                click.confirm("Go on?", abort=True)
        put_in_force(chosen, home)
    click.echo(
        f"{home.path} has {counted(len(chosen.tables), 'table')}, by the contracts in {chosen.contracts}, "
        f"and the decision table {chosen.decision_table}."
    )


@contracts.command()
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="NAME",
    help="Only this table, by its name in the lake or schema.table; repeatable.",
)
@click.option("--source", metavar="NAME", help="A captured source.  [default: that of the settings]")
@_as_json
def diff(tables: tuple[str, ...], source: str | None, as_json: bool) -> int:
    """Compare the contracts of the source with its tables as they are now.

    A difference matters if it would stop capture or quarantine rows. A column that no contract names does not
    matter: it stays in the raw layers.

    \b
    Example:
      omnisupport-ingest contracts diff --table tickets

    Exit code: 0 no difference that matters, 1 there is one, 2 usage or settings, 3 no home, 4 the source
    is away.
    """
    from omnisupport_ingest.cli.contracts_diff import compare, document, show

    compared = compare(log_of(open_settings(), source), tables)
    if as_json:
        echo_json(document(compared))
    else:
        show(compared)
    return FINDINGS if compared.matters else 0


@contracts.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
def retype(name: str, yes: bool) -> int:
    """Have the tables of the contract NAME made again, if their types differ from the contract's.

    The next run takes a wider type by itself. Any other change of a type waits for this command, as it
    changes what readers of the tables see. Then the next run, of `up` or of `materialize`, makes net
    changes, dimension and history again from deduped_events. Each is replaced in one commit, so readers
    never find a part of it. The source is not read.

    \b
    Example:
      omnisupport-ingest contracts retype invoices

    Exit code: 0 done or nothing to do, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.layers.type_changes import ask_for, other_types

    workspace = open_workspace()
    (contract,) = tables_named(workspace, [name])
    retyped = other_types(workspace, contract)
    if not retyped:
        click.echo(f"The tables of {name} have the types of its contract.")
        return 0
    for path, columns in retyped.items():
        click.echo(f"{path}: {', '.join(map(str, columns))}")
    click.echo("Each is made again whole from deduped_events; the source is not read.")
    if not yes:
        click.confirm("Go on?", abort=True)
    ask_for(workspace, contract)
    click.echo(
        "The next run makes them: that of `omnisupport-ingest up`, else omnisupport-ingest materialize"
    )
    return 0


@contracts.command()
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@_as_json
def changes(tables: tuple[str, ...], as_json: bool) -> int:
    """Show the schema changes of tables, and the edit of the contract that each needs.

    Capture sees a change when it starts, within ten seconds while it runs, and before the first row with the
    new schema lands; a reading by a cursor when it begins; of events and files, the rows that land show it.
    Each has the time, its place, about how many rows the table had (of events and files: how many rows of its
    batch show it), and whether the contract has to follow. Values are in raw whatever the contract says
    (docs/schema_change.md). Also shown is each contract whose key does not count, or no longer tells the rows
    apart.

    \b
    Examples:
      omnisupport-ingest contracts changes
      omnisupport-ingest contracts changes tickets --json

    Exit code: 0 nothing to be looked after, 1 there is, 2 usage or settings, 3 no home.
    """
    from omnisupport_ingest.cli.contracts_changes import (
        changes_of,
        document_of,
        key_document,
        keys_that_wait,
        show_changes,
    )

    workspace = open_workspace()
    judged = changes_of(workspace, tables)
    keys = keys_that_wait(workspace, judged, tables)
    if as_json:
        waiting = [key_document(*each) for each in keys]
        echo_json({"changes": [document_of(*each) for each in judged], "keys_that_wait": waiting})
    else:
        show_changes(judged, keys)
    return FINDINGS if keys or any(each.asks for _, each in judged) else 0


@contracts.command()
@click.argument("name", metavar="TABLE")
@click.option("--write", "writes", is_flag=True, help="Replace the contract's file by it.")
@click.option("--all-columns", is_flag=True, help="Take in every column that the contract does not name.")
@click.option("--source", metavar="NAME", help="Its source, where several have such a table.")
@_as_json
def propose(name: str, writes: bool, all_columns: bool, source: str | None, as_json: bool) -> int:
    """Write the next version of the contract of TABLE, by its table as it is now; print it unless --write.

    A table that comes as events or files is what the rows that landed show. Each step is judged: additive
    (a column more), widening (a value more), breaking (a column less, or other values). Additive and widening
    raise the minor version, breaking the major one. What the contract says on purpose stays. A column that
    seems to be personal data is added to x-cdc.pii, for you to decide.

    \b
    Examples:
      omnisupport-ingest contracts propose tickets
      omnisupport-ingest contracts propose tickets --write

    Exit code: 0 done or nothing to do, 1 something is left to a person, 2 usage or settings, 3 no home,
    4 the source is away.
    """
    from omnisupport_ingest.cli import contracts_changes as proposing

    workspace = open_workspace()
    among = workspace.contracts.of_source(source) if source else workspace.contracts.all
    contract = table_named(name, among)
    settings = workspace.settings
    log = has_log(settings, contract.source)
    if log:
        settings = log_of(settings, contract.source)
    proposal = proposing.propose(settings, workspace, contract, every=all_columns)
    same = proposing.is_in_file(contract, proposal)
    if writes and not same:
        proposing.write(workspace.home.path, contract, proposal)
    if as_json:
        echo_json(proposing.proposal_document(contract, proposal, written=writes and not same))
    else:
        proposing.show_proposal(contract, proposal, written=writes, same=same, log=log)
    return FINDINGS if proposal.for_a_person else 0


contracts.add_command(withdraw)
