"""Withdraws a table, or a whole source, from the home: plans and shows it first, then does it in resumable
steps.

First the table leaves the definition of its source, where that names it. Then the contract, with the columns
that it has learned, is moved to the folder ``withdrawn`` beside the contracts, from where it can be put back;
the assets of the table disappear at the next start. Then the home's record of the contracts in force is
updated, then the publication at the source, and last, only on request, the data is dropped. After a crash,
the same call does only the remaining steps. Raw and deduped events have the events of all tables of a source,
so those of a withdrawn table stay in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltalake.exceptions import DeltaError
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.documents import document_text, read_document
from omnisupport_ingest.contracts.in_force import contracts_in_force, in_force, use
from omnisupport_ingest.contracts.learned import LearnedColumns, with_learned
from omnisupport_ingest.contracts.model import (
    ContractError,
    TableContract,
    UnknownTable,
    table_named,
    tables_named,
)
from omnisupport_ingest.contracts.pii_policies import TOKENIZE
from omnisupport_ingest.contracts.protection import needs_protection
from omnisupport_ingest.contracts.sources import SourceKind, source_of, sources_folder, sources_in_force
from omnisupport_ingest.contracts.withdrawn import free_path, readable_withdrawn, withdrawn_folder
from omnisupport_ingest.durable import replace, sync_folder
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.home import Home
from omnisupport_ingest.json_values import compact
from omnisupport_ingest.lake.log_files import LogUnreadable
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.export_ledger import exported_files
from omnisupport_ingest.read.verified import folder_of
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.inbox import LANDED, REFUSED
from omnisupport_ingest.sources.postgres.catalog.publication import (
    drop_statement,
    only_statement,
    read_publication,
    remove_table,
)
from omnisupport_ingest.sources.postgres.slot.home_slot import may_have_slot
from omnisupport_ingest.storage import storage_of

_PACKAGE = Path(__file__).resolve().parent


class WithdrawalRefused(IngestError):
    """The table or the source cannot be withdrawn as things are. Nothing was changed.

    Fix: Do first what the message says, then give the command again.
    """


@dataclass(frozen=True, slots=True)
class Data:
    """A ``folder`` of the home with data of what is withdrawn, and the ``bytes`` in use in it."""

    folder: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class Unnamed:
    """A definition that names a table which is to be withdrawn.

    ``file``: its file. ``place``: where it names the table. ``entry``: what stands there, as JSON.
    ``document``: the definition without it.
    """

    file: Path
    place: str
    entry: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """What is to be withdrawn.

    ``contracts``: those still in force. ``definition``: the file of the source that is withdrawn with them;
    None for a table. ``unnamed``: the definition that a withdrawn table is taken out of; None if it does not
    name the table. ``to``: the destination of each of these files. ``data``: what ``--drop-data`` drops.
    ``windows``: number of windows of the source that are judged again for the remaining tables. ``stays``:
    what may have values of these tables and is never dropped here, and what each is called.
    """

    source: str
    contracts: tuple[TableContract, ...]
    definition: Path | None
    unnamed: Unnamed | None
    to: Mapping[Path, Path]
    data: tuple[Data, ...]
    windows: int
    stays: Mapping[str, tuple[str, ...]]


def contract_to_withdraw(settings: Settings, name: str, source: str | None) -> TableContract:
    """Return the contract that people call ``name``, among those in force and those withdrawn.

    Both are searched together, so the same call names the same table before and after its withdrawal. Raises
    ``UnknownTable``, and ``WithdrawalRefused`` if the contract's file was removed but the lake still has the
    dimension.
    """
    in_use = contracts_in_force(settings)
    there = [each for each in in_use if source in (None, each.source)]
    gone = [each for each in readable_withdrawn(settings, in_use) if source in (None, each.source)]
    found = tables_named(name, [*there, *gone])
    if not found:
        _refuse_without_file(settings, name, source)
    if any(each in gone for each in found) and len(found) > 1:
        calls = [
            f"omnisupport-ingest contracts withdraw {each.name} --source {each.source} "
            f"({'withdrawn already' if each in gone else 'in force'}: {each.full_name})"
            for each in found
        ]
        raise UnknownTable(f"{name!r} may be one of several tables.", fix=f"Give one of: {'; '.join(calls)}.")
    return found[0] if len(found) == 1 else table_named(name, there)


def _refuse_without_file(settings: Settings, name: str, source: str | None) -> None:
    lake = settings.home / "lake"
    left = [each for each in sorted(lake.glob(f"{source or '*'}/dim_*")) if each.name == f"dim_{name}"]
    if left:
        raise WithdrawalRefused(
            f"{left[0]} is in the lake, and no file of a contract says any more what table it is of.",
            fix=f"Put the contract of {name} back into {in_force(settings).contracts}, from a backup or "
            "version control, and give the command again: it says first what becomes of the rest, and moves "
            "the file.",
        )


def plan_table(settings: Settings, home: Home, contract: TableContract) -> Withdrawal:
    """Return what the withdrawal of ``contract`` involves. Changes nothing. Raises ``WithdrawalRefused``."""
    workspace = Workspace(settings, home, contracts_in_force(settings))
    there = _in_force(workspace, [contract])
    _refuse(workspace, there)
    unnamed = _unnamed(settings, contract) if there else None
    tables = (workspace.net_changes(contract), workspace.dimension(contract), workspace.history(contract))
    stay = [each for each in workspace.contracts.of_source(contract.source) if each not in there]
    if there and not stay:
        _refuse_to_leave_a_slot(workspace, contract)
    _refuse_while_referenced(there, stay)
    _refuse_to_uncover(there, stay)
    judged = workspace.deduped(contract.source).look() if there and stay else None
    windows = len(judged.windows()) if judged is not None else 0
    to = _destinations(settings, there, None)
    events: dict[str, tuple[str, ...]] = {
        "Events, with those of other tables": ("landing", "raw", "deduped events", "quarantine")
    }
    stays = events | _copies(home, [contract])
    return Withdrawal(contract.source, there, None, unnamed, to, tuple(_data(tables)), windows, stays)


def plan_source(settings: Settings, home: Home, source: str) -> Withdrawal:
    """Return what retiring ``source`` with all of its tables involves. Changes nothing. Raises
    ``WithdrawalRefused``."""
    workspace = Workspace(settings, home, contracts_in_force(settings))
    there = workspace.contracts.of_source(source)
    _refuse(workspace, there)
    file = sources_folder(settings) / f"{source}.json"
    definition = file if file.exists() else None
    tables = [each for each in workspace.tables() if each.spec.path.startswith(f"{source}/")]
    sizes = sum(each.bytes for each in _data(tables))
    delivered = home.inbox / source
    folders = (
        *(home.landing / source, home.lake / source, folder_of(home, source)),
        *(delivered / LANDED, delivered / REFUSED),
    )
    data = tuple(Data(each, sizes if each.parent == home.lake else 0) for each in folders if _holds(each))
    if not there and definition is None and not data:
        raise WithdrawalRefused(
            f"The home has no source {source}: no contract, no definition, no data.",
            fix="Name one of `omnisupport-ingest sources list`.",
        )
    of_source = [each for each in readable_withdrawn(settings, workspace.contracts) if each.source == source]
    to = _destinations(settings, there, definition)
    stays = _copies(home, [*there, *of_source])
    return Withdrawal(source, there, definition, None, to, data, 0, stays)


def _copies(home: Home, contracts: Sequence[TableContract]) -> dict[str, tuple[str, ...]]:
    """Return what may have values of the tables of ``contracts`` outside landing and lake."""
    of_tables = {f"{each.source}.{each.name}" for each in contracts}
    tokens = [
        f"{each.full_name}.{column.name}"
        for each in contracts
        for column in each.columns
        if column.pii == TOKENIZE
    ]
    targets = [f"{each.target.schema}.{each.target.table}" for each in contracts if each.target is not None]
    found = {
        "Exports": sorted({each.path for each in exported_files(home.path) if each.table in of_tables}),
        "Rows in targets": targets,
        "Values in the map of tokens (pii forget)": tokens,
        "Keys of subjects (erase --subject)": [
            each.full_name for each in contracts if each.encrypted_subject
        ],
    }
    return {what: tuple(names) for what, names in found.items() if names}


def take_out_contracts(settings: Settings, home: Home, plan: Withdrawal) -> list[Path]:
    """Move the contracts of ``plan`` to the folder ``withdrawn``, with the columns that they have learned.
    Before that, the table leaves the definition that names it.

    Returns their new paths.
    """
    if plan.unnamed is not None:
        with failpoint("contract.file", plan.unnamed.file):
            replace(plan.unnamed.file, document_text({**plan.unnamed.document}).encode())
    for each in plan.contracts:
        _write_learned(home, each)
    moved = [_move(Path(each.path), plan.to[Path(each.path)]) for each in plan.contracts]
    use(settings, home, None, None)
    return moved


def take_out_definition(plan: Withdrawal) -> Path | None:
    """Move the definition of the source, if it has one. Returns its new path."""
    return _move(plan.definition, plan.to[plan.definition]) if plan.definition is not None else None


def stays_published(
    settings: Settings, connection: Connection, publication: str, contract: TableContract
) -> str | None:
    """Return why ``publication`` keeps publishing the table, with the SQL that ends it; None if the table can
    be taken out alone, or is not in it."""
    published, name = read_publication(connection, publication), contract.table_name
    if published is None or not published.covers(name) or published.lets_go(name):
        return None
    if published.all_tables:
        how = "is FOR ALL TABLES"
    elif contract.schema in published.schemas:
        how = f"has schema {contract.schema} as a whole"
    else:
        how = "has a partitioned table above it"
    stay = [
        each.table_name
        for each in contracts_in_force(settings).of_source(contract.source)
        if each.table_name != name
    ]
    return (
        f"Publication {publication} {how}: {contract.full_name} stays published, as it cannot be taken "
        "out alone. If nobody else reads the publication, have it publish only the tables "
        "that stay (add the row filters and column lists that they have now): "
        f"{only_statement(published, stay)}"
    )


def leave_publication(connection: Connection, publication: str, contract: TableContract) -> str | None:
    """Take the table out of ``publication`` if this role may. Otherwise return the SQL that an owner must
    run.

    None: ``publication`` does not list the table (any more).
    """
    published, name = read_publication(connection, publication), contract.table_name
    if published is None or not published.lets_go(name):
        return None
    if not published.ours:
        return drop_statement(publication, [name])
    remove_table(connection, publication, name)
    return None


def drop_data(data: Iterable[Data]) -> int:
    """Delete the folders. Returns how many existed."""
    dropped = 0
    for each in data:
        with failpoint("lake.withdrawn", each.folder):
            dropped += storage_of(each.folder).remove_folder(each.folder)
    return dropped


def _in_force(workspace: Workspace, wanted: Sequence[TableContract]) -> tuple[TableContract, ...]:
    names = {(each.source, each.name) for each in wanted}
    return tuple(each for each in workspace.contracts if (each.source, each.name) in names)


def _destinations(
    settings: Settings, contracts: Iterable[TableContract], definition: Path | None
) -> dict[Path, Path]:
    """Return the destination of each of these files; none replaces a file that was withdrawn earlier under
    the same name."""
    folder = withdrawn_folder(settings)
    files = {
        Path(each.path): free_path(folder, f"{each.source}.{each.name}", Path(each.path))
        for each in contracts
    }
    if definition is not None:
        files[definition] = free_path(folder / "sources", definition.stem, definition)
    return files


def _refuse(workspace: Workspace, going: Sequence[TableContract]) -> None:
    if going and len(going) == len(tuple(workspace.contracts)):
        raise WithdrawalRefused(
            "No contract would be left, and a home without one does nothing.",
            fix="To remove the home with all it has: omnisupport-ingest clean",
        )
    packaged = next((each.path for each in going if Path(each.path).resolve().is_relative_to(_PACKAGE)), None)
    if packaged is not None:
        raise WithdrawalRefused(
            f"{packaged} comes with the program, so it is not moved.",
            fix="Copy the contracts that stay to a folder of your own, then: omnisupport-ingest contracts "
            "use FOLDER",
        )


def _unnamed(settings: Settings, contract: TableContract) -> Unnamed | None:
    """Return the definition of the source without the table; None if it does not name it. Raises
    ``WithdrawalRefused`` if it names no other."""
    file = sources_folder(settings) / f"{contract.source}.json"
    if not file.exists():
        return None
    document = read_document(file, ContractError)
    source_of(document, file)
    if contract.name not in document.get("tables", {}):
        # ``events.tables`` may name it and stays: without its pattern, events of it would come to the table
        # of a wider one.
        return None
    tables = {**document["tables"]}
    entry = compact(tables.pop(contract.name))
    if not tables:
        raise WithdrawalRefused(
            f"{contract.name} is the only one of the tables that {file} names.",
            fix=f"Retire the source: omnisupport-ingest sources retire {contract.source}. Or name in "
            "`tables` what is to be read instead.",
        )
    return Unnamed(file, f"tables.{contract.name}", entry, {**document, "tables": tables})


def _refuse_to_leave_a_slot(workspace: Workspace, last: TableContract) -> None:
    """Raise ``WithdrawalRefused`` if the source of its ``last`` table is a log for which a slot was made.

    Nobody would read that slot any more, and the server keeps all WAL for it.
    """
    definition = sources_in_force(workspace.settings, workspace.contracts).find(last.source)
    if definition.kind is SourceKind.LOG and may_have_slot(workspace.home.landing, last.source):
        raise WithdrawalRefused(
            f"{last.name} is the last table of {last.source}. Without it nobody reads the slot of that log, "
            "and its server keeps all WAL for it.",
            fix=f"Retire the source, which drops the slot: omnisupport-ingest sources retire {last.source}",
        )


def _refuse_while_referenced(going: Sequence[TableContract], stay: Sequence[TableContract]) -> None:
    """Raise ``WithdrawalRefused`` while a contract that stays refers to a table of ``going``."""
    names = {each.name for each in going}
    places = [
        (each, f"x-cdc.quality.references[{place}], {reference.name}")
        for each in stay
        for place, reference in enumerate(each.quality.references)
        if reference.table in names
    ]
    if places:
        listed = ", ".join(f"{Path(each.path).name} ({place})" for each, place in places)
        raise WithdrawalRefused(
            f"{going[0].name} is referenced by the contracts of tables that stay: {listed}.",
            fix=f"Take these references out, in {Path(places[0][0].path).parent}: a reference names a table "
            "that has a contract.",
        )


def _refuse_to_uncover(going: Sequence[TableContract], stay: Sequence[TableContract]) -> None:
    """Raise ``WithdrawalRefused`` if events of ``going`` would be judged again with uncovered personal
    values.

    While any table of the source has a policy, values of a table without a contract are left out.
    """
    covered = [each.full_name for each in going if needs_protection(each)]
    if covered and stay and not any(map(needs_protection, stay)):
        raise WithdrawalRefused(
            f"{covered[0]} is the last table of {going[0].source} with a policy for personal data. Without "
            "its contract its events, which stay in deduped_events, would be judged again with their values "
            "uncovered.",
            fix="Give a column of another table of the source a policy (x-cdc.pii), or retire the source: "
            f"omnisupport-ingest sources retire {going[0].source}. To stop its changes alone, take the table "
            "out of the publication.",
        )


def _data(tables: Iterable[LakeTable]) -> Iterable[Data]:
    for table in tables:
        if _holds(table.folder):
            try:
                snapshot = table.look()
                files = snapshot.all_files() if snapshot is not None else ()
            except (DeltaError, LogUnreadable):
                # An earlier call was cut off within its log: there is nothing to count, and it still goes.
                files = ()
            yield Data(table.folder, sum(file.bytes for file in files))


def _holds(folder: Path) -> bool:
    """Whether ``folder`` exists, here or in the object store behind it."""
    return folder.is_dir() or any(True for _ in storage_of(folder).listed(folder))


def _write_learned(home: Home, contract: TableContract) -> None:
    """Write the columns that the contract has learned into its file, and remove them from the home's record.

    There, a later contract of that name would have them, whatever its table is.
    """
    file = Path(contract.path)
    document = read_document(file, ContractError)
    whole = with_learned(home.path, document)
    if whole != document:
        with failpoint("contract.file", file):
            replace(file, document_text(whole).encode())
    LearnedColumns(home.path, contract.source).forget_others(contract.name, ())


def _move(file: Path, to: Path) -> Path:
    with failpoint("contract.withdrawn", file):
        to.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, to)
        sync_folder(to.parent)
        sync_folder(file.parent)
    return to
