"""Schema changes as people see them: each recorded change, what it means for the contract, and whether it
still needs an action.

A change needs an action until the contract matches the source as it was last seen, so a change that was taken
back needs none. If no contract can express it (a column that was dropped and added again, a type that altered
the stored values, a table that was created again), it needs one until the table has been read again. Only a
table that is read from its source can be read again; delivered events and files cannot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from omnisupport_ingest.contracts.landed_keys import LOST, LandedKeys
from omnisupport_ingest.contracts.model import BLOCK, Column, TableContract
from omnisupport_ingest.contracts.pg_types import Fit, PgType, fit
from omnisupport_ingest.contracts.sources import SourceKind, blocks_rows, sources_in_force
from omnisupport_ingest.foreign import on_one_line
from omnisupport_ingest.landing.schema_changes import (
    KINDS,
    KINDS_OF_TYPES,
    UNKNOWN,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
    gives_other_keys,
    may_alter_values,
)
from omnisupport_ingest.layers.workspace import Workspace

NONE, ADDITIVE, WIDENING, BREAKING = "none", "additive", "widening", "breaking"
"""What a change means for readers of the table once the contract follows it."""


@dataclass(frozen=True, slots=True)
class JudgedChange:
    """A recorded change, and what it needs.

    ``what``: the change in words. ``edit``: the line of the contract to edit, or another action; empty if
    there is none. ``asks``: whether somebody still has to act.
    """

    change: SchemaChange
    what: str
    compatibility: str
    edit: str
    asks: bool


def judged_changes(workspace: Workspace, source: str) -> list[JudgedChange]:
    """Return every recorded change of the tables of ``source`` that have contracts, in the order of
    notice."""
    seen = SchemaChanges(workspace.landing(source).folder).read()
    contracts = {each.name: each for each in workspace.contracts.of_source(source)}
    if not seen.changes or not contracts:
        return []
    kind = sources_in_force(workspace.settings, workspace.contracts).find(source).kind
    keys = LandedKeys(workspace.landing(source).folder).all()
    lost = {name for name, each in keys.items() if each.apart == LOST}
    return [
        judged(
            change,
            contracts[change.table],
            seen.tables[change.table],
            read_again=change.number <= seen.accepted.get(change.table, 0),
            kind=kind,
            key_lost=contracts[change.table].full_name in lost,
        )
        for change in seen.changes
        if change.table in contracts and change.table in seen.tables
    ]


@dataclass(frozen=True, slots=True)
class WaitingKey:
    """A contract whose key does not count yet, or cannot (``contracts.landed_keys``): what the matter is, and
    what to do. ``parked``: no event of the table lands until then."""

    table: str
    what: str
    edit: str
    parked: bool = False


def waiting_keys(workspace: Workspace, source: str) -> list[WaitingKey]:
    """Return the tables of ``source`` that have landed by another key than their contracts' files have, or
    whose key no longer tells their rows apart."""
    found = []
    recorded = LandedKeys(workspace.landing(source).folder).all()
    waiting = [
        (each, recorded[each.full_name])
        for each in workspace.contracts.of_source(source)
        if each.full_name in recorded and (each.next_key or recorded[each.full_name].apart == LOST)
    ]
    if not waiting:
        return []
    kind = sources_in_force(workspace.settings, workspace.contracts).find(source).kind
    for contract, landed in waiting:
        begun = not contract.next_key or landed.newest == contract.next_key
        if begun and landed.apart == LOST:
            key = ", ".join(landed.newest)
            what = f"nothing unique at the source is within its key ({key}) any more, so it is not read"
            edit = f"{contract.path}: x-cdc.key, or give the table a unique index of those columns"
            found.append(WaitingKey(contract.name, on_one_line(what), on_one_line(edit)))
            continue
        if begun:
            # Its reading by that key goes on by itself.
            continue
        former, asked = (", ".join(key) for key in (landed.eras[landed.in_force].key, contract.next_key))
        what = f"its rows have landed with the key ({former}), and ({asked}) of its contract does not count"
        again = command_to_read(contract, kind)
        # Its rows can land by the former key only if the contract still has those columns.
        parked = again is None and contract.key != landed.newest
        if again is not None:
            what += " until it is read by it"
        else:
            again = f"{contract.path}: x-cdc.key is {former}; with another key the table needs its own home"
        if parked:
            what = (
                f"its rows have landed with the key ({former}), and its contract, with the key ({asked}), "
                "has no readable columns for that, so nothing of it lands: partitions of a topic wait before "
                "its next row, and a file with one waits, too"
            )
            again = (
                f"{contract.path}: x-cdc.key is {former}, with its columns readable and in required; with "
                "another key the table needs its own home"
            )
        found.append(WaitingKey(contract.name, on_one_line(what), on_one_line(again), parked))
    return found


def seen_at(change: SchemaChange) -> str:
    """Return where ``change`` was seen, in words: a place in the WAL, a row, or a reading."""
    if change.place is not None:
        return f"first row in {on_one_line(change.place)}"
    if change.first_commit is not None:
        return f"first row at {change.first_commit}"
    return "seen by a reading" if change.below == UNKNOWN else f"before {change.below}"


def asking(changes: Iterable[JudgedChange], table: str) -> list[JudgedChange]:
    """Return the ``changes`` of the contract ``table`` that a person still has to act on."""
    return [each for each in changes if each.asks and each.change.table == table]


def judged(
    change: SchemaChange,
    contract: TableContract,
    table: SeenTable,
    *,
    read_again: bool,
    kind: SourceKind = SourceKind.LOG,
    key_lost: bool = False,
) -> JudgedChange:
    """Return what ``change`` means for the present ``contract``. ``table``: as it was last seen.
    ``read_again``: a person had the table read since. ``kind``: of its source. ``key_lost``: the
    contract's key no longer tells the rows that a cursor reads apart."""
    again = None if read_again else command_to_read(contract, kind)
    if change.kind == "key_changed" and kind is SourceKind.QUERY and not key_lost and not contract.next_key:
        # Whatever the table's key is, the contract's tells its rows apart.
        compatibility, edit, asks = BREAKING, "", False
    elif change.column is None:
        compatibility, edit, asks = _of_table(change, contract, table, again)
    else:
        now = {each.name: each for each in table.columns}
        compatibility, edit, asks = _of_column(change, contract, now, again)
        if blocks_rows(contract, kind) and change.kind in ("column_added", "column_dropped"):
            # An edit by hand may forget that rows from before have other columns.
            edit = f"omnisupport-ingest contracts propose {contract.name} --write"
            if change.kind == "column_added":
                # Who lists a new column that the contract does not name has decided to leave it out.
                asks &= change.column not in contract.optional_columns
                edit += "; its rows wait in quarantine until then"
    if contract.evolution == BLOCK and kind is SourceKind.QUERY and again is not None and not asks:
        # Until then the table is not read at all.
        edit, asks = again, True
    name = f" {change.column}" if change.column is not None else ""
    description = " → ".join(each for each in (change.before, change.after) if each is not None)
    if change.kind == "column_renamed":
        name = ""
    return JudgedChange(
        change,
        on_one_line(f"{KINDS[change.kind]}:{name}{f' {description}' if description else ''}"),
        compatibility,
        on_one_line(edit) if asks else "",
        asks,
    )


def command_to_read(contract: TableContract, kind: SourceKind) -> str | None:
    """Return the command that has the table of ``contract`` read again; None where its rows come by
    themselves. ``kind``: of its source."""
    if kind is SourceKind.LOG:
        return f"omnisupport-ingest source snapshot {contract.name}"
    if kind is SourceKind.QUERY:
        return (
            f"omnisupport-ingest sync {contract.source} --table {contract.name} "
            '--full-refresh "its schema changed"'
        )
    return None


_Judgement = tuple[str, str, bool]


def _of_table(
    change: SchemaChange, contract: TableContract, table: SeenTable, again: str | None
) -> _Judgement:
    """``again``: the command that has the table read; None if nothing has to, or can."""
    if change.kind == "key_changed":
        key = contract.as_captured.key
        if set(table.key) != set(key):
            return BREAKING, f"{contract.path}: x-cdc.key says {', '.join(key)}", True
        return BREAKING, again or "", bool(contract.next_key) and again is not None
    if change.kind == "table_renamed":
        asks = table.name != contract.full_name
        return BREAKING, f"rename it back, or write a contract for {table.name}", asks
    if change.kind == "table_gone":
        gone = f"create it again, or: omnisupport-ingest contracts withdraw {contract.name}"
        return BREAKING, gone, again is not None
    return BREAKING, again or "", again is not None


def _of_column(
    change: SchemaChange, contract: TableContract, now: Mapping[str, SeenColumn], again: str | None
) -> _Judgement:
    """``now``: the columns of the table as it was last seen, by name. ``again``: as of ``_of_table``."""
    name, kind = change.column or "", change.kind
    columns = {each.name: each for each in contract.source_columns}
    column, live = columns.get(name), now.get(name)
    at = f"{contract.path}: properties.{name}"
    if kind == "column_added":
        if column is None:
            return ADDITIVE, f"{contract.path}: add {name} under properties", live is not None
        # Only reading the table again shows what rows from before have in it, unless the contract says it.
        unresolved = any(each.name == name and each.default is None for each in contract.columns)
        return ADDITIVE, again or "", unresolved and live is not None and again is not None
    if kind == "column_renamed":
        if name not in columns:
            # Where the contract follows, what was written before has landed under the former name.
            asks = change.after in columns and again is not None
            return BREAKING if asks else NONE, again or "", asks
        if column is not None and column.personal and change.after in now:
            # Its policy goes with it, which an edit by hand may forget.
            propose = f"omnisupport-ingest contracts propose {contract.name} --write"
            taken = columns.get(change.after or "")
            if live is None or taken is None:
                return BREAKING, propose, True
            if not (taken.personal or taken.pii_note):
                # It waits for the contract, even if it has been read again.
                return BREAKING, propose if again is None else f"{propose}; then {again}", True
        if live is not None and change.after in now and change.after not in columns:
            return BREAKING, f"{contract.path}: add {change.after} under properties", True
        if live is not None:
            # The column has this name again; what was written meanwhile landed under the other name.
            return BREAKING, again or "", again is not None
        return BREAKING, f"{contract.path}: properties.{name} → {change.after}", True
    if column is None:
        # The contract does not name it: only raw has it.
        return NONE, "", False
    if kind == "column_added_again" or (kind == "column_dropped" and live is not None):
        if live is not None and live.pg_type and fit(column.type, PgType.parse(live.pg_type)) is Fit.NONE:
            return BREAKING, f'{at}: "x-pg-type": "{live.pg_type}"', True
        return BREAKING, again or "", again is not None
    if kind == "column_dropped":
        return BREAKING, f"{at} is gone at the source", True
    compatibility, edit, asks = _of_values(change, column, live, at)
    other_keys = name in contract.key and kind in KINDS_OF_TYPES and gives_other_keys(change)
    if other_keys or may_alter_values(change):
        # Rows have landed with their former keys or values, and only reading the table again shows the new.
        return BREAKING, edit if asks else again or "", asks or again is not None
    return compatibility, edit, asks


def _of_values(change: SchemaChange, column: Column, live: SeenColumn | None, at: str) -> _Judgement:
    """A change of what ``column`` may hold. ``live``: the column as it was last seen. ``at``: its line."""
    kind = change.kind
    if kind == "column_nullable":
        asks = not column.nullable and live is not None and not live.not_null
        return WIDENING, f"{at} is in required: take it out there", asks
    if kind in ("enum_value_added", "enum_values_changed"):
        labels = live.labels if live is not None else ()
        new = [each for each in labels if column.enum and each not in column.enum]
        return WIDENING, f"{at}.enum: add {', '.join(new)}", bool(new)
    if kind in KINDS_OF_TYPES and live is not None:
        how = fit(column.type, PgType.parse(live.pg_type))
        meaning = WIDENING if kind == "column_widened" else BREAKING if how is Fit.NONE else NONE
        return meaning, f'{at}: "x-pg-type": "{live.pg_type}"', how is not Fit.ALL
    return NONE, "", False
