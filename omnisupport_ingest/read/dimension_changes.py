"""Rows of a dimension as they change, version by version: what its Delta log says was replaced by what.

A version takes files out and puts others in, and rows that did not change stand in both. So the keys are
found whose row has another hash, and of these alone the rows are read. Files of older versions are there
until `sweep` deletes them: from there on back nothing can be told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.lake.log import files_since
from omnisupport_ingest.lake.table import LakeTable, TableSnapshot
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position

INSERT, UPDATE, DELETE, PURGE = "insert", "update", "delete", "purge"
"""Kinds of changes: a row that was not there or lives again, another state of it, its soft delete, and a
deleted row that the dimension shows no more."""

_HIDDEN = ("_cdc_state",)


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row in one version. ``row``: its columns afterwards, before it where it was purged; ``before``:
    those columns of the contract that had another value, with that value. ``at``: when it was committed.
    """

    version: int
    at: datetime
    kind: str
    key: str
    position: Position
    row: dict[str, Any]
    before: dict[str, Any]


def newest_version(workspace: Workspace, contract: TableContract) -> int | None:
    """The version of the dimension now; None where it is not there yet."""
    table = workspace.dimension(contract)
    return DeltaTable(str(table.folder)).version() if table.exists else None


def last_changes(workspace: Workspace, contract: TableContract, count: int) -> list[RowChange]:
    """The last ``count`` changes, the oldest first; fewer where older versions can not be told any more."""
    newest = newest_version(workspace, contract)
    found: list[RowChange] = []
    version = newest or 0
    while newest is not None and version >= 0 and len(found) < count:
        changes = changes_of(workspace, contract, version)
        if changes is None:
            break
        found = [*changes, *found]
        version -= 1
    return found[-count:] if count else []


def changes_of(workspace: Workspace, contract: TableContract, version: int) -> list[RowChange] | None:
    """The changes of one version, by position; None if its log entry or a file of it is gone."""
    table = workspace.dimension(contract)
    try:
        snapshot = TableSnapshot(table, DeltaTable(str(table.folder), version=version))
        files = files_since(snapshot, version - 1)
    except DeltaError:
        return None
    if files is None:
        return None
    added, gone = ([each.uri for each in held] for held in (files.added, files.gone))
    if not all(Path(each).exists() for each in (*added, *gone)):
        return None
    at = _committed_at(table, version)
    return sorted(_changes(contract, version, at, added, gone), key=lambda each: (each.position, each.key))


def _committed_at(table: LakeTable, version: int) -> datetime:
    entry = table.folder / "_delta_log" / f"{version:020d}.json"
    return datetime.fromtimestamp(entry.stat().st_mtime, UTC)


def _changes(
    contract: TableContract, version: int, at: datetime, added: Sequence[str], gone: Sequence[str]
) -> Iterator[RowChange]:
    if not added and not gone:
        return
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        new, old = (_rows(connection, name, held) for name, held in (("new", added), ("old", gone)))
        state = "SELECT _cdc_key, _cdc_row_hash FROM"
        either = f"({state} {new} EXCEPT {state} {old}) UNION ALL ({state} {old} EXCEPT {state} {new})"
        connection.execute(f"CREATE TABLE keys AS SELECT DISTINCT _cdc_key FROM ({either})")
        after, before = (_of_keys(connection, name) for name in (new, old))
    for key in after.keys() | before.keys():
        row, then = after.get(key), before.get(key)
        shown = row or then or {}
        yield RowChange(
            version=version,
            at=at,
            kind=_kind(row, then),
            key=key,
            position=Position(shown["_cdc_epoch"], Lsn(shown["_cdc_commit_lsn"]), shown["_cdc_ordinal"]),
            row=shown,
            before={
                name: then[name]
                for name in contract.column_names
                if row is not None and then is not None and name in then and then[name] != row.get(name)
            },
        )


def _rows(connection: duckdb.DuckDBPyConnection, name: str, files: Sequence[str]) -> str:
    """A view of the rows in ``files``; without any, an empty one of the columns that are asked for."""
    if files:
        listed = ", ".join("'" + each.replace("'", "''") + "'" for each in files)
        source = f"read_parquet([{listed}], hive_partitioning = false, union_by_name = true)"
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {source}")
    else:
        connection.execute(f"CREATE TABLE {name} (_cdc_key VARCHAR, _cdc_row_hash BIGINT)")
    return name


def _of_keys(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, dict[str, Any]]:
    found = connection.execute(f"SELECT * FROM {name} SEMI JOIN keys USING (_cdc_key)")
    columns = [each[0] for each in found.description or ()]
    rows = (dict(zip(columns, values, strict=True)) for values in found.fetchall())
    return {
        row["_cdc_key"]: {column: value for column, value in row.items() if column not in _HIDDEN}
        for row in rows
    }


def _kind(row: dict[str, Any] | None, then: dict[str, Any] | None) -> str:
    if row is None:
        return PURGE
    lived = then is not None and not then["_cdc_is_deleted"]
    if row["_cdc_is_deleted"]:
        return DELETE if lived or then is None else UPDATE
    return UPDATE if lived else INSERT
