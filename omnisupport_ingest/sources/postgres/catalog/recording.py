"""Records what has changed in tables, and lets additive contracts learn, wherever the change was seen.

A table as it is now (``LiveSchema``) comes from the catalogs, or from the rows themselves. It is compared
with what was last seen, and both are recorded in one step. Then a contract with ``x-cdc.evolution: additive``
adds new nullable columns automatically. What it may not add automatically (a column that the lake cannot
name, personal data, NOT NULL, an unknown type) is only reported.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from omnisupport_ingest.contracts.columns import read_columns
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import ADDITIVE, Column, ContractError, TableContract
from omnisupport_ingest.contracts.pii_scan import scan
from omnisupport_ingest.foreign import on_one_line
from omnisupport_ingest.landing.schema_changes import (
    KINDS,
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable
from omnisupport_ingest.sources.postgres.catalog.new_contract import column_document, left_out_columns
from omnisupport_ingest.sources.postgres.catalog.table_differences import differences

_log = logging.getLogger(__name__)


def record(
    changes: SchemaChanges,
    look: Look,
    contracts: Mapping[str, TableContract],
    live: Mapping[str, LiveSchema],
    *,
    learned: LearnedColumns | None,
) -> tuple[SchemaChange, ...]:
    """Record what has changed in the tables of ``contracts`` (by name) since the last look; return it.

    ``live``: the tables that exist, by the names of their contracts. ``learned``: where additive contracts
    learn new columns; None: no contract learns.
    """
    known = changes.tables()
    changed = {
        name: [*differences(known[name], live[name].seen if name in live else None)]
        for name in contracts
        if name in known and (name in live or not _is_gone(changes, name))
    }
    new = changes.seen(look, {name: each.seen for name, each in live.items()}, changed)
    for change in new:
        _log.warning("schema change of %s: %s", change.table, on_one_line(in_words(change)))
    if learned is not None:
        learn(changes, contracts, live, learned)
    return new


def _is_gone(changes: SchemaChanges, name: str) -> bool:
    kinds = [each.kind for each in changes.held().changes if each.table == name]
    return bool(kinds) and kinds[-1] == "table_gone"


def in_words(change: SchemaChange) -> str:
    """Return the change for a message, such as ``column added: priority integer``."""
    column = f" {change.column}" if change.column is not None else ""
    if change.kind in ("column_renamed", "table_renamed", "key_changed", "table_made_anew"):
        return f"{KINDS[change.kind]}: {change.before} → {change.after}"
    if change.kind == "column_added":
        return f"{KINDS[change.kind]}:{column} {change.after}"
    parts = " → ".join(each for each in (change.before, change.after) if each is not None)
    about = ", ".join(each for each in (change.column, parts) if each)
    return f"{KINDS[change.kind]}: {about}" if about else KINDS[change.kind]


class LiveSchema:
    """A table as it is now: its definition (``live``), and the form in which it is recorded (``seen``)."""

    def __init__(self, live: LiveTable, seen: SeenTable) -> None:
        self.live, self.seen = live, seen

    def line(self, column: str) -> dict[str, Any]:
        """Return the contract's entry for ``column``; its default is the value in older rows, if proven."""
        live, seen = self.live.column(column), self.column(column)
        assert live is not None and seen is not None, "a column of this table"
        line = column_document(live, in_key=False)
        if seen.before_known and (seen.before is not None or not live.not_null):
            line["default"] = seen.before
        return line

    def column(self, name: str) -> SeenColumn | None:
        return next((each for each in self.seen.columns if each.name == name), None)


def why_not_by_itself(schema: LiveSchema, name: str) -> str | None:
    """Return why an additive contract does not add the new column ``name`` automatically; None if it does."""
    live = schema.live.column(name)
    if live is None or schema.column(name) is None:
        return "it is not there any more, or the publication leaves it out"
    if not live.pg_type:
        return "nothing tells its type"
    for each in left_out_columns(schema.live):
        if each.column == name:
            return each.why
    if live.not_null:
        return "it may not be NULL, and what older rows have in it is for a person to say"
    for proposal in scan([Column(name, live.pg_type)], ()):
        return f"it seems to be {proposal.what} {proposal.why}: a person has to choose its policy"
    return None


def personal_columns_gone(contract: TableContract, schema: LiveSchema) -> tuple[str, ...]:
    """Return the personal columns of the contract that the table no longer has.

    A new column may be one of them under another name, for example in a copy that replaced the table.
    """
    return tuple(
        each.name
        for each in contract.source_columns
        if each.personal and schema.live.column(each.name) is None
    )


def renamed_from(names: Collection[str], changes: Iterable[SchemaChange]) -> dict[str, str]:
    """Return the columns that have got another name than one of ``names``, each with that name of its own.

    ``names``: those of a contract, which are left out: somebody has decided about them. ``changes``: of its
    table, in the order in which they were seen.
    """
    now: dict[str, str] = {}
    for _, look in groupby(changes, key=lambda each: each.noticed_at):
        gone, moved = set(), {}
        for change in look:
            if change.kind == "column_renamed" and change.before is not None and change.after is not None:
                gone.add(change.before)
                if (origin := now.get(change.before, change.before)) in names:
                    moved[change.after] = origin
            elif change.kind in ("column_dropped", "column_added_again") and change.column is not None:
                gone.add(change.column)
        now = {name: origin for name, origin in now.items() if name not in gone} | moved
    return {name: origin for name, origin in now.items() if name not in names}


def shown_under_another_name(contract: TableContract, changes: Iterable[SchemaChange]) -> dict[str, str]:
    """Return the columns of the contract without a policy that hold a personal column's values now.

    Each with the former name of that column: policies go by name. ``changes``: of the table.
    """
    columns = {each.name: each for each in contract.source_columns}
    decided = {each.name for each in columns.values() if each.personal or each.pii_note}
    if not any(each.personal for each in columns.values()):
        return {}
    return {
        name: former
        for name, former in renamed_from(decided, changes).items()
        if name in columns and columns[former].personal
    }


def _new_columns(changes: Iterable[SchemaChange]) -> dict[str, set[str]]:
    """Return by table the columns that ``changes`` added."""
    added: dict[str, set[str]] = {}
    for change in changes:
        if change.kind == "column_added" and change.column is not None:
            added.setdefault(change.table, set()).add(change.column)
    return added


def learn(
    changes: SchemaChanges,
    contracts: Mapping[str, TableContract],
    live: Mapping[str, LiveSchema],
    learned: LearnedColumns,
) -> None:
    """Let additive contracts learn the recorded new columns that they may add automatically.

    A contract that encrypts learns none: columns that it does not name land encrypted, and a column that it
    learned would land readable.
    """
    for name, columns in _new_columns(changes.held().changes).items():
        contract = contracts.get(name)
        if contract is None or name not in live or contract.evolution != ADDITIVE:
            continue
        named = {*(each.name for each in contract.source_columns), *learned.of(name)}
        # Names that differ only in case, even from a dropped column, would make the contract invalid.
        lower = {each.lower() for each in named}
        new = {column for column in columns if column.lower() not in lower}
        gone = personal_columns_gone(contract, live[name])
        if new and gone:
            message = "the contract %s learns nothing by itself: %s is gone, and may have another name now"
            _log.warning(message, name, ", ".join(gone))
            continue
        if new and contract.encrypted_subject is not None:
            message = "the contract %s learns nothing by itself, as it encrypts: is %s personal?"
            _log.warning(message, name, ", ".join(sorted(new)))
            continue
        lines = {
            column: live[name].line(column)
            for column in sorted(new)
            if why_not_by_itself(live[name], column) is None
        }
        if lines := {column: each for column, line in lines.items() if (each := _readable(column, line))}:
            learned.learn(name, lines)
            _log.warning("the contract %s has learned %s", name, ", ".join(lines))


def _readable(column: str, line: dict[str, Any]) -> dict[str, Any] | None:
    """Return ``line``, if need be without its default, such that a contract with it can be loaded.

    None if it cannot: a contract that learned it would keep all contracts from being loaded.
    """
    for each in (line, {keyword: value for keyword, value in line.items() if keyword != "default"}):
        with suppress(ContractError):
            read_columns(Path(), {"properties": {column: each}, "required": [], "x-cdc": {"key": []}})
            return each
    return None
