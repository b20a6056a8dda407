"""Writes the contracts of new tables: a file for each, and the outcome for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from omnisupport_ingest.cli.contracts_diff import connect_to_source
from omnisupport_ingest.cli.out import Out
from omnisupport_ingest.cli.render import counted, say_err
from omnisupport_ingest.contracts.documents import document_text, is_of_program
from omnisupport_ingest.contracts.in_force import in_force, recorded
from omnisupport_ingest.contracts.load import ContractError, TableContract, contract_of, load_contract
from omnisupport_ingest.contracts.names import TableName, lake_names
from omnisupport_ingest.contracts.pii_scan import with_notes
from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.cursor_candidates import cursor_candidates
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import Draft, LeftOut, all_tables, choose, draft
from omnisupport_ingest.sources.query.first_contracts import ShownTables, draft_by_query, shown_tables


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome for one table. ``status``: ``written``, ``kept`` or ``refused``.

    A refused table has ``problem`` and ``fix``; any other has its ``contract``.
    """

    table: str
    status: str
    path: Path | None = None
    contract: TableContract | None = None
    left_out: tuple[LeftOut, ...] = field(default=())
    problem: str = ""
    fix: str = ""

    @property
    def refused(self) -> bool:
        return self.status == "refused"


@dataclass(frozen=True, slots=True)
class NewContracts:
    """What to write: contracts of ``tables`` (empty: all of the source), to ``out`` if given.

    ``force``: replace existing contracts. ``by_query``: the connection in the settings is that of a source
    which is read by queries.
    """

    settings: Settings
    tables: Sequence[str]
    out: Out | None
    owner: str
    force: bool = False
    by_query: bool = False


def write_contracts(request: NewContracts) -> list[Outcome]:
    """Write a contract for each table of ``request``; return the outcomes in the same order."""
    settings = request.settings
    given = request.out
    folder = _folder(given) if given is not None else settings.contracts_dir or own_folder(settings)
    contracts = _contracts_in(folder, settings.source)
    shown = _shown_tables(request)
    chosen, outcomes = _choose(request.tables, shown.live)
    taken = {table: contract.name for table, contract in contracts.items()}
    names = lake_names([(table.schema, table.table) for table in chosen], taken)
    # Refused here if several tables would become one file.
    file = None
    if given is not None and not given.is_folder and chosen:
        (file,) = given.files([each.full_name for each in chosen])
    # No failpoint: a folder: one that is there already is as good.
    folder.mkdir(parents=True, exist_ok=True)
    for table in chosen:
        key = table.schema, table.table
        known = contracts.get(key)
        new = file or _free_path(folder, names[key], settings.source)
        path = Path(known.path) if known is not None else new
        make = partial(
            draft_by_query if request.by_query else draft,
            table,
            source=settings.source,
            name=names[key],
            owner=request.owner,
            candidates=shown.candidates.get(key, ()),
        )
        outcomes.append(_write(table, None if request.force else known, path, make))
    return outcomes


def _shown_tables(request: NewContracts) -> ShownTables:
    settings = request.settings
    if request.by_query:
        assert settings.source_dsn is not None, "that of the definition"
        return shown_tables(settings.source_dsn.get_secret_value())
    with closing(connect_to_source(settings)) as connection:
        return ShownTables(read_live_tables(connection), cursor_candidates(connection))


def _folder(out: Out) -> Path:
    return out.path if out.is_folder else out.path.parent


def _choose(
    names: Sequence[str], live: Mapping[TableName, LiveTable]
) -> tuple[list[LiveTable], list[Outcome]]:
    """Return the tables called ``names``, or all, and a refusal for each name without a table."""
    if not names:
        return all_tables(live.values()), []
    chosen: list[LiveTable] = []
    refused: list[Outcome] = []
    for name in dict.fromkeys(names):
        try:
            table = live[choose(name, live)]
        except IngestError as error:
            refused.append(Outcome(name, "refused", problem=error.problem, fix=error.fix))
            continue
        if table not in chosen:
            chosen.append(table)
    return chosen, refused


def _write(table: LiveTable, kept: TableContract | None, path: Path, make: Callable[[], Draft]) -> Outcome:
    if kept is not None:
        return Outcome(table.full_name, "kept", path, kept)
    try:
        proposal = make()
        # Parsed as it will be read from the file, so that what is written can be used.
        document = with_notes(proposal.document)
        contract = contract_of(document, path)
    except ContractError as error:
        if "x-cdc.owner" in error.problem:
            raise
        return Outcome(table.full_name, "refused", problem=error.problem, fix=error.fix)
    except IngestError as error:
        return Outcome(table.full_name, "refused", problem=error.problem, fix=error.fix)
    with failpoint("contract.file", path):
        replace(path, document_text(document).encode())
    return Outcome(table.full_name, "written", path, contract, proposal.left_out)


def own_folder(settings: Settings) -> Path:
    """Return the folder for new contracts: that of the home, or ``contracts/data`` if the home uses the
    program's, which are not changed."""
    usual, has = Path("contracts/data"), in_force(settings).contracts
    return usual if is_of_program(has) or has == usual.absolute() else has


def folders_of(outcomes: Sequence[Outcome]) -> list[Path]:
    """Return the folders of the contracts that exist now."""
    return sorted({outcome.path.absolute().parent for outcome in outcomes if outcome.path is not None})


def warn_if_not_in_force(settings: Settings, folders: Sequence[Path]) -> None:
    """Print how to put the contracts in ``folders`` in force, if the home uses others."""
    has = recorded(settings)
    for folder in folders:
        if has is not None and folder.resolve() != has.contracts.resolve():
            say_err(
                f"The home {settings.home} has its contracts in {has.contracts}. To put these in force: "
                f"omnisupport-ingest contracts use {folder}"
            )


def _contracts_in(folder: Path, source: str) -> dict[TableName, TableContract]:
    loaded = (load_contract(path) for path in sorted(folder.glob("*.json")))
    return {contract.table_name: contract for contract in loaded if contract.source == source}


def _free_path(folder: Path, name: str, source: str) -> Path:
    # The folder may also hold contracts of other sources.
    path = folder / f"{name}.json"
    return folder / f"{source}.{name}.json" if path.exists() else path


def show(outcomes: Sequence[Outcome], *, by_query: bool = False, owned: bool = False) -> None:
    """Print the outcome for every table, refused ones with their fix, and a summary.

    ``by_query``: the tables are read by cursors. ``owned``: an owner was given.
    """
    width = max((len(outcome.table) for outcome in outcomes if not outcome.refused), default=0)
    for outcome in outcomes:
        if outcome.contract is None:
            continue
        columns = counted(len(outcome.contract.columns), "column")
        about = f"{columns}, key {', '.join(outcome.contract.key)}"
        kept = "  (it exists: --force replaces it)" if outcome.status == "kept" else ""
        click.echo(f"{outcome.status}  {outcome.table:{width}}  {outcome.path}  {about}{kept}")
        for each in outcome.left_out:
            click.echo(f"         without the column {each.column!r}: {each.why}")
        if by_query and outcome.contract.cursor is None:
            click.echo(
                f"         {outcome.table}  names no cursor: choose x-cdc.cursor.field by the reasons in its "
                "candidates, or take the file away"
            )
    refused = [outcome for outcome in outcomes if outcome.refused]
    for outcome in refused:
        click.echo(f"refused  {outcome.problem}\n  Fix: " + outcome.fix.replace("\n", "\n  "))
    counts = {
        status: sum(outcome.status == status for outcome in outcomes)
        for status in ("written", "kept", "refused")
    }
    click.echo(", ".join(f"{count} {status}" for status, count in counts.items()) + ".")
    if counts["written"]:
        click.echo(
            f"Before you capture: describe the columns{'' if owned else ', name an owner'}, and decide on "
            "personal data in x-cdc.pii (what seems to be some has a note; every value is kept)."
        )


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes for ``--json``."""
    return {
        "tables": [
            {
                "table": outcome.table,
                "status": outcome.status,
                "path": str(outcome.path) if outcome.path else None,
                "name": outcome.contract.name if outcome.contract else None,
                "columns": len(outcome.contract.columns) if outcome.contract else None,
                "key": list(outcome.contract.key) if outcome.contract else None,
                "left_out": [{"column": each.column, "why": each.why} for each in outcome.left_out],
                "problem": outcome.problem or None,
                "fix": outcome.fix or None,
            }
            for outcome in outcomes
        ]
    }
