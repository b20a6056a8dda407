"""``contracts changes`` and ``contracts propose``: what has changed at the source, and the contract that
follows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from dataclasses import replace as with_other
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest.cli import render
from omnisupport_ingest.cli.contracts_diff import connect_to_source
from omnisupport_ingest.cli.opening import tables_named
from omnisupport_ingest.contracts.documents import document_text, program_file, read_document
from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.learned import LearnedColumns, with_learned
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, TableContract
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind, sources_in_force
from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.schema_changes import UNKNOWN, SchemaChange, SchemaChanges
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.schema_changes import (
    JudgedChange,
    WaitingKey,
    command_to_read,
    judged_changes,
    seen_at,
    waiting_keys,
)
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.next_contract import NextContract, next_contract
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.postgres.catalog.schema_watch import read_seen
from omnisupport_ingest.sources.postgres.session.errors import TableUnreadable
from omnisupport_ingest.sources.shown_columns import live_as_contracted, with_types_of


def changes_of(workspace: Workspace, tables: Sequence[str]) -> list[tuple[str, JudgedChange]]:
    """Return every recorded change with its source, or only those of the given ``tables``."""
    named = {(each.source, each.name) for each in tables_named(workspace, list(tables))} if tables else None
    return [
        (source, each)
        for source in workspace.contracts.sources()
        for each in judged_changes(workspace, source)
        if named is None or (source, each.change.table) in named
    ]


def keys_that_wait(
    workspace: Workspace, judged: Sequence[tuple[str, JudgedChange]], tables: Sequence[str] = ()
) -> list[tuple[str, WaitingKey]]:
    """Return, with its source, every key that waits, of ``tables`` alone, if any are given. A key of whose
    table a change in ``judged`` asks something is left out, unless nothing lands of the table."""
    named = {(each.source, each.name) for each in tables_named(workspace, list(tables))} if tables else None
    asking = {(source, each.change.table) for source, each in judged if each.asks}
    return [
        (source, each)
        for source in workspace.contracts.sources()
        for each in waiting_keys(workspace, source)
        if (each.parked or (source, each.table) not in asking)
        and (named is None or (source, each.table) in named)
    ]


def document_of(source: str, each: JudgedChange) -> dict[str, Any]:
    """Return a change for ``--json``: LSNs as text, times in ISO 8601."""
    change = each.change
    return {
        "source": source,
        "table": change.table,
        "number": change.number,
        "kind": change.kind,
        "column": change.column,
        "before": change.before,
        "after": change.after,
        "noticed_at": change.noticed_at.isoformat(),
        "epoch": change.epoch,
        "above_lsn": _lsn(change.above),
        "below_lsn": _lsn(change.below),
        "first_commit_lsn": str(change.first_commit) if change.first_commit is not None else None,
        "place": change.place,
        "rows": change.rows,
        "compatibility": each.compatibility,
        "edit": each.edit or None,
        "asks": each.asks,
    }


def key_document(source: str, key: WaitingKey) -> dict[str, Any]:
    """Return a key that waits for ``--json``."""
    return {"source": source, **asdict(key)}


def _lsn(lsn: Lsn) -> str | None:
    return None if lsn == UNKNOWN else str(lsn)


def _rows(change: SchemaChange) -> str:
    if change.rows is None:
        return "rows not known"
    if change.place is not None:
        return f"{render.counted(change.rows, 'row')} of its batch"
    return f"about {change.rows:,} rows"


def show_changes(
    judged: Sequence[tuple[str, JudgedChange]], keys: Sequence[tuple[str, WaitingKey]] = ()
) -> None:
    """Print the changes, the oldest first, each with the action that it needs, and the ``keys`` that wait."""
    for source, each in judged:
        change = each.change
        click.echo(
            f"{render.clock(change.noticed_at.isoformat())}  {source}.{change.table}  {each.what}  "
            f"({each.compatibility}; {seen_at(change)}, {_rows(change)})"
        )
        if each.asks:
            click.echo(f"  To do: {each.edit}")
    for source, key in keys:
        click.echo(f"{source}.{key.table}  {key.what}\n  To do: {key.edit}")
    asks = sum(each.asks for _, each in judged) + len(keys)
    click.echo(f"{render.counted(len(judged), 'schema change')}, {asks or 'none'} to be looked after.")


def propose(
    settings: Settings, workspace: Workspace, contract: TableContract, *, every: bool
) -> NextContract:
    """Return the next version of ``contract``, from its table as it is now and the recorded changes.

    ``settings``: of its log, if a log is read. Raises ``TableUnreadable`` if the table does not exist.
    """
    document = with_learned(workspace.home.path, read_document(Path(contract.path), ContractError))
    record = SchemaChanges(workspace.landing(contract.source).folder)
    definition = sources_in_force(settings, workspace.contracts).find(contract.source)
    changes = [each for each in record.all() if each.table == contract.name]
    if definition.kind is SourceKind.LOG:
        with closing(connect_to_source(settings)) as connection:
            form = read_seen(connection, [contract], record.tables()).get(contract.name)
    elif definition.kind is SourceKind.QUERY:
        form = _read_by_query(definition, contract, record, changes)
    else:
        form = _shown(contract, record, changes)
    if form is None:
        raise TableUnreadable(
            f"The source has no table {contract.full_name}.",
            fix="Create it again. If it is gone for good: omnisupport-ingest contracts withdraw "
            f"{contract.name}",
            table=contract.full_name,
        )
    again = command_to_read(contract, definition.kind)
    # Where nobody can read the table again, no key but that of what landed can name its rows.
    proposal = next_contract(document, form, changes, every=every, again=again, key_follows=again is not None)
    # Parsed as it will be read from the file, so that what is written can be used.
    contract_of(proposal.document, Path(contract.path))
    return proposal


def _read_by_query(
    definition: SourceDefinition,
    contract: TableContract,
    record: SchemaChanges,
    changes: Sequence[SchemaChange],
) -> LiveSchema | None:
    from omnisupport_ingest.sources.query.landed_key import is_unique
    from omnisupport_ingest.sources.query.run import open_reader

    with closing(open_reader(definition.connection_text())) as reader:
        reader.begin()
        found = reader.schemas([contract], record.tables())
        loose = reader.loose_columns(contract) if found and contract.name in found else frozenset()
    if found is None:
        raise TableUnreadable(
            f"The database does not tell the columns of {contract.full_name}.",
            fix="Edit the contract by hand.",
            table=contract.full_name,
        )
    shown, contract = found.get(contract.name), contract.as_captured
    if shown is not None:
        shown.live = with_types_of(contract, shown.live, loose, changes)
    if shown is not None and is_unique(contract, shown):
        # Whatever the table's key is, the contract's tells its rows apart, and history goes on by it.
        shown.seen = with_other(shown.seen, key=contract.key)
    return shown


def _shown(contract: TableContract, record: SchemaChanges, changes: Sequence[SchemaChange]) -> LiveSchema:
    """Return the table as the landed rows show it."""
    seen = record.tables().get(contract.name)
    if seen is None:
        raise TableUnreadable(
            f"No row of {contract.full_name} that has landed shows its columns.",
            fix="Land some first.",
            table=contract.full_name,
        )
    return live_as_contracted(contract, seen, changes)


def is_in_file(contract: TableContract, proposal: NextContract) -> bool:
    """Return whether the file of ``contract`` has the proposed content already."""
    same: bool = read_document(Path(contract.path), ContractError) == proposal.document
    return same


def write(home: Path, contract: TableContract, proposal: NextContract) -> None:
    """Replace the file of ``contract`` by the proposal; durable on return.

    ``home``: its folder. The record of learned columns loses those that the proposal does not have. Raises
    ``ContractError`` if the file belongs to an installed program.
    """
    path = Path(contract.path)
    program = program_file("contracts")
    if path.is_relative_to(program) and program.parent.name == "packaged":
        raise ContractError(
            f"{path} comes with the program, which replaces it when it is installed again.",
            fix=f"Copy {path.parent} to a folder of yours, and let the home have that: omnisupport-ingest "
            "contracts use FOLDER",
        )
    with failpoint("contract.file", contract.path):
        replace(Path(contract.path), document_text(proposal.document).encode())
    landed = LandedKeys(home / "landing" / contract.source)
    keys = landed.of(contract.full_name)
    # A contract whose key waits for its read speaks of another one than that with which rows land.
    if keys is not None and proposal.renamed_key and keys.newest == contract.as_captured.key:
        # Its rows have the keys that they had. Else nothing of them would count until capture has seen it.
        name, key = contract.full_name, proposal.renamed_key
        landed.update(lambda known: {name: known[name].renamed(key)})
    # After the file: an interrupted call is finished by the next one, as the column is still proposed away.
    LearnedColumns(home, contract.source).forget_others(contract.name, proposal.document["properties"])


def show_proposal(
    contract: TableContract, proposal: NextContract, *, written: bool, same: bool, log: bool
) -> None:
    """Print the steps with their reasons, what a person must decide, and the document unless it is written.

    ``log``: the source is read by its log, so a restart of its capture is needed.
    """
    version = proposal.document["x-cdc"]["version"]
    for step in proposal.steps:
        click.echo(f"{step.compatibility:9} {step.at}: {step.what}: {step.why}.")
    for each in proposal.for_a_person:
        click.echo(f"by hand   {each}")
    if same:
        click.echo(f"{contract.path} says what its table is: version {version}.")
        return
    if not proposal.steps:
        click.echo("The contract has learned by itself what follows; its file does not have it yet.")
    if written:
        click.echo(
            f"Written: {contract.path}, version {version}, {proposal.compatibility or 'as it is in force'}."
        )
        if log:
            click.echo("Capture takes it in when it starts again: omnisupport-ingest source restart")
        return
    click.echo(document_text(proposal.document), nl=False)
    click.echo(
        f"Version {version} would be {proposal.compatibility or 'the one in force'}. To write it: --write"
    )


def proposal_document(contract: TableContract, proposal: NextContract, *, written: bool) -> dict[str, Any]:
    """Return the proposal for ``--json``."""
    return {
        "table": contract.name,
        "path": contract.path,
        "version": proposal.document["x-cdc"]["version"],
        "compatibility": proposal.compatibility,
        "steps": [asdict(step) for step in proposal.steps],
        "for_a_person": list(proposal.for_a_person),
        "written": written,
        "document": proposal.document,
    }
