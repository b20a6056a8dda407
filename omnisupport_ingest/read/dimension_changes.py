"""Shows how the rows of a dimension change, version by version, from its Delta log.

A version removes files and adds others, and unchanged rows are in both. So the keys whose row has another
hash are found first, and only their rows are read. Files of older versions exist until `sweep` deletes them;
changes before that are not known.

Older files may hold values that the dimension must no longer show: of a row that was erased since, or of
columns that a policy protects since. These values are not shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import duckdb
from deltalake.exceptions import DeltaError

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.erasing import Erasures
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pii_policies import is_plain
from omnisupport_ingest.lake.deletion_vectors import are_there
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.lake.log import committed_at, files_since
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.erasures import ErasureLedger
from omnisupport_ingest.layers.versions import of_contract
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position

INSERT, UPDATE, DELETE, PURGE = "insert", "update", "delete", "purge"
"""Kinds of changes: a row that is new or lives again, another state of a row, its soft delete, and a
deleted row that the dimension no longer shows."""

UNRESOLVED, _EXACT = "_cdc_unresolved", "_cdc_exact"
_HIDDEN = ("_cdc_state",)


@dataclass(frozen=True, slots=True)
class RowChange:
    """The change of one row in one version.

    Attributes:
        at: when the version was committed.
        row: the columns after the change; before it, if the row was purged.
        before: the contract's columns that had another value, with that value.
        unresolved_before: columns that changed and had no known value before.
        hidden: columns that have or had a value which must not be shown any more. They are missing in
            ``row``, in ``before``, or in both.
    """

    version: int
    at: datetime
    kind: str
    key: str
    position: Position
    row: dict[str, Any]
    before: dict[str, Any]
    unresolved_before: frozenset[str] = frozenset()
    hidden: frozenset[str] = frozenset()

    @property
    def unresolved(self) -> frozenset[str]:
        """The columns whose value is not known."""
        return frozenset(self.row.get(UNRESOLVED) or ())

    def value(self, column: str) -> Any:
        """Return the value after the change, as text if the column's type cannot hold it; None for NULL
        and for an unknown value."""
        return _value(self.row, column)


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a dimension. A dimension that is made anew has another ``table_id``, and begins again at
    0."""

    table_id: str
    number: int


def newest_version(workspace: Workspace, contract: TableContract) -> Version | None:
    """Return the current version of the dimension; None if it does not exist yet."""
    table = workspace.dimension(contract)
    if not table.exists:
        return None
    handle = open_delta(table.folder)
    return Version(str(handle.metadata().id), handle.version())


def last_changes(
    workspace: Workspace, contract: TableContract, count: int, newest: Version
) -> list[RowChange]:
    """Return the last ``count`` changes up to ``newest``, the oldest first; fewer if the files of older
    versions are gone."""
    last: list[RowChange] = []
    version = newest.number
    while version >= 0 and len(last) < count:
        changes = changes_of(workspace, contract, version, most=count - len(last))
        if changes is None:
            break
        last = [*changes, *last]
        version -= 1
    return last[-count:] if count else []


def changes_of(
    workspace: Workspace, contract: TableContract, version: int, *, most: int | None = None
) -> list[RowChange] | None:
    """Return the changes of one version, by position; None if its log entry or one of its files is gone.

    ``most``: return at most so many, those with the highest positions.
    """
    table = workspace.dimension(contract)
    try:
        snapshot = TableSnapshot(table, open_delta(table.folder, version=version))
        files = files_since(snapshot, version - 1)
    except DeltaError:
        return None
    if files is None:
        return None
    added, gone = files.added, files.gone
    if not are_there((*added, *gone)):
        return None
    if not added and not gone:
        return []
    after, before = _rows_of(added, gone, most)
    erased = ErasureLedger.open(workspace, contract.source).in_force()
    now, then = (
        _Version(contract, erased, _protected(contract, each))
        for each in (snapshot, _snapshot(table, version - 1))
    )
    at = committed_at(table, version)
    row_changes = [
        _change(contract, version, at, now.row(after.get(key)), then.row(before.get(key)))
        for key in after.keys() | before.keys()
    ]
    return sorted(row_changes, key=lambda each: (each.position, each.key))


# --- what must not be shown any more -----------------------------------------------------------------------


def _snapshot(table: LakeTable, version: int) -> TableSnapshot | None:
    try:
        return TableSnapshot(table, open_delta(table.folder, version=version)) if version >= 0 else None
    except DeltaError:
        return None


def _protected(contract: TableContract, snapshot: TableSnapshot | None) -> frozenset[str]:
    """Return the columns with a policy, unless the version was made by the contract in force."""
    state = snapshot.state(WHOLE_TABLE) if snapshot is not None else None
    if state is not None and set(of_contract(contract)) <= set(state.versions):
        return frozenset()
    return frozenset(each.name for each in contract.columns if not is_plain(each))


@dataclass(frozen=True)
class _Row:
    """A row of a version. ``hidden``: the columns whose values must not leave here."""

    columns: Mapping[str, Any]
    hidden: frozenset[str]

    def cell(self, column: str) -> tuple[bool, Any]:
        """Return whether the value is known, and the value."""
        return column not in (self.columns.get(UNRESOLVED) or ()), _value(self.columns, column)

    def shown_columns(self, contract: TableContract) -> dict[str, Any]:
        """Return the columns that may be shown: no column that the contract has dropped."""
        names = frozenset(contract.column_names) - self.hidden
        columns = {
            name: each for name, each in self.columns.items() if name in names or name.startswith("_cdc_")
        }
        if columns.get(_EXACT):
            columns[_EXACT] = {name: text for name, text in columns[_EXACT].items() if name in names}
        return columns


@dataclass(frozen=True)
class _Version:
    """What may be shown of the rows of one version, whose columns ``protected`` may hold plain values."""

    contract: TableContract
    erased: Erasures
    protected: frozenset[str]

    def row(self, columns: Mapping[str, Any] | None) -> _Row | None:
        if columns is None:
            return None
        table_name = (self.contract.schema, self.contract.table)
        if self.erased.holds(table_name, columns["_cdc_key"], _position(columns)):
            return _Row(columns, frozenset(self.contract.column_names) - set(self.contract.key))
        return _Row(columns, self.protected)


def _change(
    contract: TableContract, version: int, at: datetime, row: _Row | None, then: _Row | None
) -> RowChange:
    shown = row or then
    assert shown is not None, "a key is of one of both"
    changed: dict[str, tuple[bool, Any]] = {}
    hidden = shown.hidden
    if row is not None and then is not None:
        names = [name for name in contract.column_names if name in then.columns]
        cells = {name: then.cell(name) for name in names}
        changed = {name: cell for name, cell in cells.items() if not columnar.is_same(cell, row.cell(name))}
        hidden |= then.hidden & changed.keys()
    shown_cells = {name: cell for name, cell in changed.items() if name not in hidden}
    epoch, commit_lsn, ordinal = _position(shown.columns)
    return RowChange(
        version=version,
        at=at,
        kind=_kind(row.columns if row else None, then.columns if then else None),
        key=shown.columns["_cdc_key"],
        position=Position(epoch, Lsn(commit_lsn), ordinal),
        row=shown.shown_columns(contract),
        before={name: value for name, (known, value) in shown_cells.items() if known},
        unresolved_before=frozenset(name for name, (known, _) in shown_cells.items() if not known),
        hidden=hidden,
    )


def _position(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["_cdc_epoch"], row["_cdc_commit_lsn"], row["_cdc_ordinal"]


def _value(row: Mapping[str, Any], column: str) -> Any:
    exact = (row.get(_EXACT) or {}).get(column)
    return row.get(column) if exact is None else exact


# --- the rows ----------------------------------------------------------------------------------------------


def _rows_of(
    added: Sequence[LakeFile], gone: Sequence[LakeFile], most: int | None
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return the rows that differ between the files that a version added and those it removed, by key."""
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        new, old = (_rows(connection, name, files) for name, files in (("new", added), ("old", gone)))
        state = "SELECT _cdc_key, _cdc_row_hash FROM"
        either = f"({state} {new} EXCEPT {state} {old}) UNION ALL ({state} {old} EXCEPT {state} {new})"
        keys = f"SELECT DISTINCT _cdc_key FROM ({either})"
        if most is not None:
            order = ", ".join(f"coalesce(n.{name}, o.{name}) DESC" for name in _ORDER)
            keys = (
                f"SELECT _cdc_key FROM ({keys}) LEFT JOIN {new} n USING (_cdc_key)"
                f" LEFT JOIN {old} o USING (_cdc_key) ORDER BY {order} LIMIT {most:d}"
            )
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        connection.execute(f"CREATE TABLE keys AS {keys}")
        after, before = (_of_keys(connection, name) for name in (new, old))
    return after, before


_ORDER = ("_cdc_epoch", "_cdc_commit_lsn", "_cdc_ordinal", "_cdc_key")


def _rows(connection: duckdb.DuckDBPyConnection, name: str, files: Sequence[LakeFile]) -> str:
    """Create the view ``name`` of the rows in ``files``; without files, an empty table with the columns
    that are read. Return its name."""
    if files:
        # No failpoint: nothing here outlives the process (a database or buffer in memory).
        connection.execute(f"CREATE VIEW {name} AS SELECT * FROM {live_sql(connection, files)}")
    else:
        connection.execute(
            f"CREATE TABLE {name} (_cdc_key VARCHAR, _cdc_row_hash BIGINT, _cdc_epoch INTEGER,"
            " _cdc_commit_lsn BIGINT, _cdc_ordinal BIGINT)"
        )
    return name


def _of_keys(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, dict[str, Any]]:
    result = connection.execute(f"SELECT * FROM {name} SEMI JOIN keys USING (_cdc_key)")
    columns = [each[0] for each in result.description or ()]
    rows = (dict(zip(columns, values, strict=True)) for values in result.fetchall())
    return {
        row["_cdc_key"]: {column: value for column, value in row.items() if column not in _HIDDEN}
        for row in rows
    }


def _kind(row: Mapping[str, Any] | None, then: Mapping[str, Any] | None) -> str:
    if row is None:
        return PURGE
    lived = then is not None and not then["_cdc_is_deleted"]
    if row["_cdc_is_deleted"]:
        return DELETE if lived or then is None else UPDATE
    return UPDATE if lived else INSERT
