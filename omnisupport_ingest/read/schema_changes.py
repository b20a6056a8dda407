"""Schema changes as people see them: each recorded change, what it means for the contract, and whether it
still needs an action.

A change needs an action until the contract matches the source. Where no contract can express it (a column
that was dropped and added again, a table that was created again), it needs one until the table has been read
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pg_types import Fit, PgType, fit
from omnisupport_ingest.landing.schema_changes import KINDS, SchemaChange, SchemaChanges
from omnisupport_ingest.layers.workspace import Workspace

NONE, ADDITIVE, WIDENING, BREAKING = "none", "additive", "widening", "breaking"
"""What a change means for readers of the table once the contract follows it."""


@dataclass(frozen=True, slots=True)
class JudgedChange:
    """``what``: the change in words. ``edit``: the line of the contract to edit, or what else to do, empty if
    there is nothing. ``asks``: whether somebody still has to do it.
    """

    change: SchemaChange
    what: str
    compatibility: str
    edit: str
    asks: bool


def judged_changes(workspace: Workspace, source: str) -> list[JudgedChange]:
    """Every recorded change of the tables of ``source`` that have contracts, in the order of notice."""
    seen = SchemaChanges(workspace.landing(source).folder).read()
    contracts = {each.name: each for each in workspace.contracts.of_source(source)}
    return [
        judged(
            change, contracts[change.table], read_again=change.number <= seen.accepted.get(change.table, 0)
        )
        for change in seen.changes
        if change.table in contracts
    ]


def asking(changes: Iterable[JudgedChange], table: str) -> list[JudgedChange]:
    """Return the ``changes`` of the contract ``table`` that a person still has to act on."""
    return [each for each in changes if each.asks and each.change.table == table]


def judged(change: SchemaChange, contract: TableContract, *, read_again: bool) -> JudgedChange:
    """Return what ``change`` means for the present ``contract``. ``read_again``: a person had the table read
    since."""
    columns = {each.name: each for each in contract.source_columns}
    column = columns.get(change.column or "")
    compatibility, edit, asks = _of_table(change, contract, read_again)
    if change.column is not None:
        compatibility, edit, asks = _of_column(change, contract, column, columns, read_again)
    name = f" {change.column}" if change.column is not None else ""
    description = " → ".join(each for each in (change.before, change.after) if each is not None)
    if change.kind == "column_renamed":
        name = ""
    return JudgedChange(
        change,
        f"{KINDS[change.kind]}:{name}{f' {description}' if description else ''}",
        compatibility,
        edit if asks else "",
        asks,
    )


_Judgement = tuple[str, str, bool]


def _of_table(change: SchemaChange, contract: TableContract, read_again: bool) -> _Judgement:
    again = f"omnisupport-ingest source snapshot {contract.name}"
    if change.kind == "key_changed":
        same = set((change.after or "").split(", ")) == set(contract.key)
        return BREAKING, f"{contract.path}: x-cdc.key says {', '.join(contract.key)}", not same
    if change.kind == "table_renamed":
        asks = change.after != contract.full_name
        return BREAKING, f"rename it back, or write a contract for {change.after}", asks
    if change.kind == "table_gone":
        return BREAKING, f"create it again, or take {contract.path} away", not read_again
    return BREAKING, again, not read_again


def _of_column(
    change: SchemaChange,
    contract: TableContract,
    column: Column | None,
    columns: dict[str, Column],
    read_again: bool,
) -> _Judgement:
    name, kind = change.column or "", change.kind
    at = f"{contract.path}: properties.{name}"
    if kind == "column_added":
        return ADDITIVE, f"{contract.path}: add {name} under properties", column is None
    if kind == "column_renamed":
        old = change.before or ""
        return (
            BREAKING if old in columns else NONE,
            f"{contract.path}: properties.{old} → {change.after}",
            (old in columns),
        )
    if column is None:
        # The contract does not name it: only raw has it.
        return NONE, "", False
    if kind == "column_dropped":
        return BREAKING, f"{at} is gone at the source", True
    if kind == "column_added_again":
        return BREAKING, f"omnisupport-ingest source snapshot {contract.name}", not read_again
    if kind == "column_nullable":
        return WIDENING, f"{contract.path}: take {name} out of required", not column.nullable
    if kind == "enum_value_added":
        new = [each for each in (change.after or "").split(", ") if each not in column.enum]
        return WIDENING, f"{at}.enum: add {', '.join(new)}", bool(column.enum and new)
    if kind in ("column_widened", "column_retyped", "column_narrowed") and change.after is not None:
        how = fit(column.type, PgType.parse(change.after))
        meaning = WIDENING if kind == "column_widened" else BREAKING if how is Fit.NONE else NONE
        return meaning, f'{at}: "x-pg-type": "{change.after}"', how is not Fit.ALL
    return NONE, "", False
