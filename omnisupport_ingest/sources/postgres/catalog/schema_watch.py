"""Capture's looks at the schemas of its tables: what has changed is recorded, and the contract's policy
applied.

A look reads the catalogs and compares them with what is recorded (``landing.schema_changes``). It is made at
every start, every few seconds, and before the first row lands that the stream describes with another schema.
Then ``x-cdc.evolution`` decides: a table that is ``additive`` learns its nullable new columns
(``contracts.learned``); one that is ``block`` is left out of capture until a person has it read again;
``pinned`` goes on. Raw has every value in each case.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import ADDITIVE, BLOCK, Column, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pii_scan import scan
from omnisupport_ingest.landing.schema_changes import (
    KINDS,
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import column_document, left_out_columns
from omnisupport_ingest.sources.postgres.catalog.publication import read_publication
from omnisupport_ingest.sources.postgres.catalog.table_differences import differences
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import SchemaChangeBlocked
from omnisupport_ingest.sources.postgres.snapshot.safe_watermark import CatalogLooks

_log = logging.getLogger(__name__)


class SchemaWatch:
    """The looks of one capture at the tables of ``contracts``. For use by several threads."""

    def __init__(
        self,
        changes: SchemaChanges,
        learned: LearnedColumns,
        epoch: int,
        contracts: Sequence[TableContract],
        publication: str | None = None,
    ) -> None:
        """``publication``: what it leaves out of a table is no column of it here."""
        self.changes, self._publication = changes, publication
        self._learned, self._epoch = learned, epoch
        self._contracts = {each.name: each for each in contracts}
        self._looks, self._lock = CatalogLooks(), threading.Lock()
        self._described: dict[TableName, tuple[object, ...]] = {}

    @classmethod
    def of(
        cls,
        home: Path,
        source: str,
        folder: Path,
        epoch: int,
        contracts: Sequence[TableContract],
        publication: str | None = None,
    ) -> SchemaWatch:
        """The watch of ``source`` into ``home``. ``folder``: its landing folder."""
        return cls(SchemaChanges(folder), LearnedColumns(home, source), epoch, contracts, publication)

    def add_tables(self, contracts: Sequence[TableContract]) -> None:
        """Look at the tables of ``contracts``, too, or by them: they were read anew."""
        with self._lock:
            self._contracts |= {each.name: each for each in contracts}

    def look(self, connection: Connection) -> tuple[SchemaChange, ...]:
        """Record what has changed since the last look, and let additive contracts learn; returns the
        changes."""
        with self._lock:
            certain = self._looks.begin(connection)
            known = self.changes.tables()
            live = read_seen(connection, tuple(self._contracts.values()), known)
            self._leave_out_unpublished(connection, live)
            with source_errors("reading the end of the WAL"), connection.cursor() as cursor:
                cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
                end = Lsn.parse(cursor.fetchone()[0])
            changed = {
                name: [*differences(known[name], live[name].seen if name in live else None)]
                for name in self._contracts
                if name in known and (name in live or not self._is_gone(name))
            }
            seen = {name: each.seen for name, each in live.items()}
            new = self.changes.seen(Look(self._epoch, certain, end), seen, changed)
            self._learn(live)
        for change in new:
            _log.warning("schema change of %s: %s", change.table, in_words(change))
        return new

    def described(
        self,
        connection: Connection,
        name: TableName,
        columns: Mapping[str, str],
        commit_lsn: int,
        captured: Collection[TableContract],
    ) -> None:
        """The stream describes table ``name`` with ``columns`` (name → type), before rows of the transaction
        that commits at ``commit_lsn``. ``SchemaChangeBlocked`` before any of them lands, as ``require``.
        """
        contract = next((each for each in self._contracts.values() if each.table_name == name), None)
        if contract is None:
            return
        form = tuple(columns.items())
        if self._described.get(name) == form:
            return
        known = self.changes.tables().get(contract.name)
        names = None if known is None else {each.name for each in known.columns}
        if name in self._described or names != set(columns):
            self.look(connection)
        self.changes.first_rows(contract.name, columns, Lsn(commit_lsn))
        self.require([each for each in captured if each.name == contract.name])
        self._described[name] = form

    def require(self, captured: Collection[TableContract]) -> None:
        """Raise ``SchemaChangeBlocked`` if contracts of ``captured`` want a person to decide on a change."""
        if problems := self.blocked(captured):
            raise SchemaChangeBlocked(problems)

    def blocked(self, tables: Collection[TableContract]) -> dict[str, str]:
        """Those of ``tables`` that a person has to decide about, each with what has changed."""
        problems = {}
        for contract in tables:
            if contract.evolution != BLOCK:
                continue
            if changes := self.changes.open_changes(contract.name):
                description = "; ".join(in_words(each) for each in changes)
                problems[contract.name] = f"The schema of {contract.full_name} has changed: {description}."
        return problems

    def accept(self, tables: Collection[str]) -> None:
        """A person has had ``tables`` read again: their changes so far block them no more."""
        self.changes.accept(tables)

    def _leave_out_unpublished(self, connection: Connection, live: Mapping[str, LiveSchema]) -> None:
        """Forget the columns that a column list leaves out: not even their names are for the home."""
        published = read_publication(connection, self._publication) if self._publication else None
        if published is None:
            return
        for each in live.values():
            table = published.tables.get((each.live.schema, each.live.table))
            if table is not None and table.columns:
                columns = tuple(column for column in each.seen.columns if column.name in table.columns)
                each.seen = replace(each.seen, columns=columns)

    def _is_gone(self, name: str) -> bool:
        changes = [each.kind for each in self.changes.all() if each.table == name]
        return bool(changes) and changes[-1] == "table_gone"

    def _learn(self, live: Mapping[str, LiveSchema]) -> None:
        """Let additive contracts learn the recorded new columns that they may take by themselves."""
        added: dict[str, set[str]] = {}
        for change in self.changes.all():
            if change.kind == "column_added" and change.column is not None:
                added.setdefault(change.table, set()).add(change.column)
        for name, columns in added.items():
            contract = self._contracts.get(name)
            if contract is None or name not in live or contract.evolution != ADDITIVE:
                continue
            named = {*(each.name for each in contract.source_columns), *self._learned.of(name)}
            # A name that differs only in case from one that is gone would be a contract that nobody can read.
            lower = {each.lower() for each in named}
            new = {column for column in columns if column.lower() not in lower}
            gone = personal_columns_gone(contract, live[name])
            if new and gone:
                message = (
                    "the contract %s learns nothing by itself: %s is gone, and may have another name now"
                )
                _log.warning(message, name, ", ".join(gone))
                continue
            lines = {
                column: live[name].line(column)
                for column in sorted(new)
                if why_not_by_itself(live[name], column) is None
            }
            if lines:
                self._learned.learn(name, lines)
                _log.warning("the contract %s has learned %s", name, ", ".join(lines))


class LiveSchema:
    """A table as it is now: ``live``, by its definition, and ``seen``, as it is recorded."""

    def __init__(self, live: LiveTable, seen: SeenTable) -> None:
        self.live, self.seen = live, seen

    def line(self, column: str) -> dict[str, Any]:
        """The line of ``column`` for a contract that takes it: with what older rows have in it, if known."""
        live, seen = self.live.column(column), self.column(column)
        assert live is not None and seen is not None, "a column of this table"
        line = column_document(live, in_key=False)
        if seen.before is not None or (seen.default is None and not live.not_null):
            line["default"] = seen.before
        return line

    def column(self, name: str) -> SeenColumn | None:
        return next((each for each in self.seen.columns if each.name == name), None)


def why_not_by_itself(form: LiveSchema, name: str) -> str | None:
    """Why no contract takes the new column ``name`` by itself; None if an additive one does."""
    live = form.live.column(name)
    if live is None:
        return "it is not there any more"
    for each in left_out_columns(form.live):
        if each.column == name:
            return each.why
    if live.not_null:
        return "it may not be NULL, and what older rows have in it is for a person to say"
    for proposal in scan([Column(name, live.pg_type)], ()):
        return f"it seems to be {proposal.what} {proposal.why}: a person has to choose its policy"
    return None


def personal_columns_gone(contract: TableContract, form: LiveSchema) -> tuple[str, ...]:
    """The columns with personal data that the table has no more: a new column may be one of them, under a
    name that does not tell (a table that was made anew, a copy that took its place)."""
    return tuple(
        each.name for each in contract.source_columns if each.personal and form.live.column(each.name) is None
    )


def in_words(change: SchemaChange) -> str:
    """The change in words, as ``column added: priority integer``."""
    column = f" {change.column}" if change.column is not None else ""
    if change.kind in ("column_renamed", "table_renamed", "key_changed", "table_made_anew"):
        return f"{KINDS[change.kind]}: {change.before} → {change.after}"
    if change.kind == "column_added":
        return f"{KINDS[change.kind]}:{column} {change.after}"
    parts = " → ".join(each for each in (change.before, change.after) if each is not None)
    return f"{KINDS[change.kind]}:{column}{f', {parts}' if parts else ''}"


def read_seen(
    connection: Connection, contracts: Sequence[TableContract], known: Mapping[str, SeenTable]
) -> dict[str, LiveSchema]:
    """Return the tables of ``contracts`` by their names, or by the numbers that they had in ``known``."""
    names = {each.table_name: each.name for each in contracts}
    numbers = {known[each.name].relation: each.name for each in contracts if each.name in known}
    with source_errors("reading which tables there are"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_TABLES, ([schema for schema, _ in names], [table for _, table in names], [*numbers]))
        rows = cursor.fetchall()
        cursor.execute(_COLUMNS, ([oid for oid, *_ in rows],))
        columns: dict[int, list[tuple[int, str, str | None, str | None]]] = {}
        for oid, *facts in cursor.fetchall():
            columns.setdefault(oid, []).append((facts[0], facts[1], facts[2], facts[3]))
    live = read_live_tables(connection, [(schema, table) for _, schema, table, _ in rows])
    live_schemas: dict[str, LiveSchema] = {}
    # By name first: a table that has the name of the contract is the table that it is about.
    for oid, schema, table, estimate in sorted(rows, key=lambda row: (row[1], row[2]) not in names):
        contract = names.get((schema, table)) or numbers[oid]
        form = live.get((schema, table))
        if contract not in live_schemas and form is not None:
            live_schemas[contract] = LiveSchema(form, _seen(oid, form, columns.get(oid, []), estimate))
    return live_schemas


def _seen(
    oid: int, live: LiveTable, columns: Sequence[tuple[int, str, str | None, str | None]], rows: int | None
) -> SeenTable:
    by_name = {name: (number, default, before) for number, name, default, before in columns}
    return SeenTable(
        oid,
        live.full_name,
        tuple(
            SeenColumn(
                by_name[each.name][0], each.name, each.pg_type, each.not_null, by_name[each.name][1],
                by_name[each.name][2], each.labels,
            )
            for each in live.columns
            if each.name in by_name
        ),
        _key(live),
        rows,
    )  # fmt: skip


def _key(live: LiveTable) -> tuple[str, ...]:
    """The columns that name a row: of the replica identity's index, else the primary key's."""
    index = (
        next((each for each in live.unique if each.identity), None) if live.replica_identity == "i" else None
    )
    chosen = index or live.primary_key
    return chosen.columns if chosen is not None else ()


_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       CASE WHEN c.reltuples > 0 THEN c.reltuples::bigint
            ELSE nullif(pg_stat_get_live_tuples(c.oid), 0) END
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p')
  AND ((n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
       OR c.oid = ANY (%s::bigint[]::oid[]))
"""

# ``attmissingval`` is what rows have that are older than the column: one value, in an array.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attnum::int, a.attname::text,
       CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END,
       CASE WHEN a.atthasmissing THEN (a.attmissingval::text::text[])[1] END
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = ANY (%s::bigint[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY 1, 2
"""
