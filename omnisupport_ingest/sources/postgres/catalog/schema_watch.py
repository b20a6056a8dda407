"""Checks the schemas of captured tables: records changes, and applies the contract's policy for them.

A check (``look``) reads the catalogs and compares them with the record (``landing.schema_changes``). It runs
at every start, every few seconds, and before the first row with a newly described schema lands. Then
``x-cdc.evolution`` decides. Under ``additive``, the contract learns new nullable columns
(``contracts.learned``). Under ``block``, the table is left out of capture until a person has it read again.
Under ``pinned``, nothing happens. In each case raw has every value.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.schema_changes import (
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, read_live_tables
from omnisupport_ingest.sources.postgres.catalog.publication import read_publication
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema, in_words, record
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import SchemaChangeBlocked
from omnisupport_ingest.sources.postgres.snapshot.safe_watermark import CatalogWatermarks

LOGGED, READABLE = "rp", "rpvmf"
"""Kinds of tables (``pg_class.relkind``): those with changes in the log, and those with readable rows."""

_READINGS = 5
"""Largest number of times that the catalogs are read until two readings agree."""


class SchemaWatch:
    """Checks the schemas of the tables of ``contracts`` for one capture. Thread-safe."""

    def __init__(
        self,
        changes: SchemaChanges,
        learned: LearnedColumns,
        epoch: int,
        contracts: Sequence[TableContract],
        publication: str | None = None,
    ) -> None:
        """``publication``: columns that it leaves out are ignored; None: no column is."""
        self.changes, self._publication = changes, publication
        self._learned, self._epoch = learned, epoch
        self._contracts = {each.name: each for each in contracts}
        self._watermarks, self._lock = CatalogWatermarks(), threading.Lock()
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
        """Return the watch of ``source`` in ``home``. ``folder``: the landing folder of the source."""
        return cls(SchemaChanges(folder), LearnedColumns(home, source), epoch, contracts, publication)

    def add_tables(self, contracts: Sequence[TableContract]) -> None:
        """Check the tables of ``contracts`` too. These contracts replace older ones of the same name."""
        with self._lock:
            self._contracts |= {each.name: each for each in contracts}

    def look(self, connection: Connection) -> tuple[SchemaChange, ...]:
        """Record what has changed since the last check, let additive contracts learn; return the changes."""
        with self._lock:
            certain = self._watermarks.next(connection)
            known = self.changes.tables()
            live = self._read(connection, known)
            with source_errors("reading the end of the WAL"), connection.cursor() as cursor:
                cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
                end = Lsn.parse(cursor.fetchone()[0])
            return record(
                self.changes, Look(self._epoch, certain, end), self._contracts, live, learned=self._learned
            )

    def described(
        self,
        connection: Connection,
        name: TableName,
        columns: Mapping[str, str],
        commit_lsn: int,
        captured: Collection[TableContract],
    ) -> None:
        """Handle a description of table ``name`` in the stream, before rows of its transaction land.

        ``columns``: name → type. ``commit_lsn``: of that transaction. ``captured``: the captured tables.
        Raises ``SchemaChangeBlocked`` as ``require`` does.
        """
        contract = next((each for each in self._contracts.values() if each.table_name == name), None)
        if contract is None:
            return
        description = tuple(columns.items())
        if self._described.get(name) == description:
            return
        known = self.changes.tables().get(contract.name)
        names = None if known is None else {each.name for each in known.columns}
        if name in self._described or names != set(columns):
            self.look(connection)
        self.changes.first_rows(contract.name, columns, Lsn(commit_lsn))
        self.require([each for each in captured if each.name == contract.name])
        self._described[name] = description

    def require(self, captured: Collection[TableContract]) -> None:
        """Raise ``SchemaChangeBlocked`` if a person must decide about changes of tables in ``captured``."""
        if problems := self.blocked(captured):
            raise SchemaChangeBlocked(problems)

    def blocked(self, tables: Collection[TableContract]) -> dict[str, str]:
        """Return the ``tables`` that need a person's decision: contract name → the changes, as a sentence."""
        problems = {}
        for contract in tables:
            if contract.evolution != BLOCK:
                continue
            if changes := self.changes.open_changes(contract.name):
                description = "; ".join(in_words(each) for each in changes)
                problems[contract.name] = f"The schema of {contract.full_name} has changed: {description}."
        return problems

    def accept(self, tables: Collection[str]) -> None:
        """Unblock ``tables``: a person has had them read again after the changes so far."""
        self.changes.accept(tables)

    def _read(self, connection: Connection, known: Mapping[str, SeenTable]) -> dict[str, LiveSchema]:
        """Return the tables as they are now, by the names of their contracts.

        Several statements read a table. A column that is renamed between them is in none of the results and
        would look dropped. So a difference counts only when two readings agree.
        """
        before = {name: replace(known[name], rows=None) for name in self._contracts if name in known}
        for _ in range(_READINGS):
            live = read_seen(connection, tuple(self._contracts.values()), known)
            self._leave_out_unpublished(connection, live)
            now = {name: replace(each.seen, rows=None) for name, each in live.items()}
            if now == before:
                break
            before = now
        return live

    def _leave_out_unpublished(self, connection: Connection, live: Mapping[str, LiveSchema]) -> None:
        """Remove columns that a column list leaves out: not even their names may be stored in the home."""
        published = read_publication(connection, self._publication) if self._publication else None
        if published is None:
            return
        for each in live.values():
            table = published.tables.get((each.live.schema, each.live.table))
            if table is not None and table.columns:
                columns = tuple(column for column in each.seen.columns if column.name in table.columns)
                each.seen = replace(each.seen, columns=columns)


def read_seen(
    connection: Connection,
    contracts: Sequence[TableContract],
    known: Mapping[str, SeenTable],
    kinds: str = LOGGED,
) -> dict[str, LiveSchema]:
    """Return the tables of ``contracts``, found by their names, else by their oids in ``known``.

    ``kinds``: letters of ``pg_class.relkind``; relations of other kinds are ignored.
    """
    names = {each.table_name: each.name for each in contracts}
    numbers = {known[each.name].relation: each.name for each in contracts if each.name in known}
    with source_errors("reading which tables there are"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        named = [schema for schema, _ in names], [table for _, table in names]
        cursor.execute(_TABLES, ([*kinds], *named, [*numbers]))
        rows = cursor.fetchall()
        cursor.execute(_COLUMNS, ([oid for oid, *_ in rows],))
        columns: dict[int, list[tuple[int, str, str | None, str | None]]] = {}
        for oid, *facts in cursor.fetchall():
            columns.setdefault(oid, []).append((facts[0], facts[1], facts[2], facts[3]))
    live = read_live_tables(connection, [(schema, table) for _, schema, table, _ in rows])
    live_schemas: dict[str, LiveSchema] = {}
    # By name first: the contract describes the table with that name.
    for oid, schema, table, estimate in sorted(rows, key=lambda row: (row[1], row[2]) not in names):
        contract = names.get((schema, table)) or numbers[oid]
        table_now = live.get((schema, table))
        if contract not in live_schemas and table_now is not None:
            live_schemas[contract] = LiveSchema(
                table_now, _seen(oid, table_now, columns.get(oid, []), estimate)
            )
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
    """Return the columns of the replica identity's index, else those of the primary key."""
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
WHERE c.relkind = ANY (%s::"char"[])
  AND ((n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
       OR c.oid = ANY (%s::bigint[]::oid[]))
"""

# ``attmissingval``: the value in rows older than the column, as an array of one element.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attnum::int, a.attname::text,
       CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END,
       CASE WHEN a.atthasmissing THEN (a.attmissingval::text::text[])[1] END
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = ANY (%s::bigint[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY 1, 2
"""
