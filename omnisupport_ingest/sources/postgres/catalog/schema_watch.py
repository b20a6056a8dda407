"""Checks the schemas of captured tables: records changes, and applies the contract's policy for them.

A check (``look``) reads the catalogs and compares them with the record (``landing.schema_changes``). It runs
at every start, every few seconds, and before the first row with a newly described schema lands. Then
``x-cdc.evolution`` decides. Under ``additive``, the contract learns new nullable columns
(``contracts.learned``). Under ``block``, the table is left out of capture until a person has it read again.
Under ``pinned``, nothing happens. In each case raw has every value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.contracts.pg_types import Fit, PgType, fit
from omnisupport_ingest.landing.schema_changes import (
    Look,
    SchemaChange,
    SchemaChanges,
    SeenColumn,
    SeenTable,
    keeps_values,
)
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, read_live_tables
from omnisupport_ingest.sources.postgres.catalog.publication import read_publication
from omnisupport_ingest.sources.postgres.catalog.recording import (
    LiveSchema,
    in_words,
    record,
    shown_under_another_name,
)
from omnisupport_ingest.sources.postgres.catalog.table_differences import converted_columns
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import SchemaChangeBlocked
from omnisupport_ingest.sources.postgres.session.safe_watermark import CatalogWatermarks

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
        self._by_table = _by_table(self._contracts.values())
        self._watermarks, self._lock = CatalogWatermarks(), threading.Lock()
        self._described: dict[TableName, tuple[object, ...]] = {}

    @classmethod
    def of(
        cls,
        home: Path,
        source: str,
        changes: SchemaChanges,
        epoch: int,
        contracts: Sequence[TableContract],
        publication: str | None = None,
    ) -> SchemaWatch:
        """Return the watch of ``source`` in ``home``. ``changes``: the record of the source."""
        return cls(changes, LearnedColumns(home, source), epoch, contracts, publication)

    def add_tables(self, contracts: Sequence[TableContract]) -> None:
        """Check the tables of ``contracts`` too. These contracts replace older ones of the same name."""
        with self._lock:
            self._contracts |= {each.name: each for each in contracts}
            self._by_table = _by_table(self._contracts.values())

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
        captured: Callable[[str], TableContract | None],
    ) -> None:
        """Handle a description of table ``name`` in the stream, before rows of its transaction land.

        ``columns``: name → type, of a domain its base type. ``commit_lsn``: of that transaction.
        ``captured``: returns the contract of that name if its table is captured. The catalogs are asked if
        the table was described otherwise before, or the last look saw other columns or types.
        Raises ``SchemaChangeBlocked`` as ``require`` does.
        """
        contract = self._by_table.get(name)
        if contract is None:
            return
        description = tuple(columns.items())
        if self._described.get(name) == description:
            return
        if name in self._described or self._is_news(contract.name, columns, commit_lsn):
            self.look(connection)
            self._doubt_new_columns(contract.name, columns, commit_lsn)
        self.changes.first_rows(contract.name, columns, Lsn(commit_lsn))
        if (in_force := captured(contract.name)) is not None:
            self.require([in_force])
        self._described[name] = description

    def _is_news(self, table: str, columns: Mapping[str, str], commit_lsn: int) -> bool:
        """Whether the stream describes ``table`` with a schema that the last look may not have seen."""
        held = self.changes.held()
        seen = held.tables.get(table)
        if seen is None or {each.name for each in seen.columns} != columns.keys():
            return True
        # A type that is older than the last look is of a stream that is behind: another look shows no more.
        return commit_lsn >= held.certain.value and any(
            each.pg_type != columns[each.name] for each in seen.columns
        )

    def _doubt_new_columns(self, table: str, described: Collection[str], commit_lsn: int) -> None:
        """Take back what is proven of new columns if rows come with a name that no look has seen.

        A new column may have had that name, and older rows a value under it. ``described``: the names with
        which rows of the transaction at ``commit_lsn`` come.
        """
        held = self.changes.held()
        if table not in held.tables:
            return
        names = {each.name for each in held.tables[table].columns}
        added = set()
        for change in held.changes:
            # A name that a column lost before says nothing of this transaction.
            if change.table == table and change.column is not None and change.below >= Lsn(commit_lsn):
                names |= {change.column}
                if change.kind == "column_renamed" and change.after is not None:
                    names |= {change.after}
                if change.kind in ("column_added", "column_added_again"):
                    added.add(change.column)
        if added and not names.issuperset(described):
            self._learned.forget_defaults(table, added)
            self.changes.take_back_proof(table, added)

    def require(self, captured: Collection[TableContract]) -> None:
        """Raise ``SchemaChangeBlocked`` if a person must decide about changes of tables in ``captured``."""
        if problems := self.blocked(captured):
            raise SchemaChangeBlocked(problems)

    def blocked(self, tables: Collection[TableContract]) -> dict[str, str]:
        """Return the ``tables`` that need a person's decision: contract name → the changes, as a sentence."""
        problems = {}
        for contract in tables:
            if personal := self._personal_under_another_name(contract):
                problems[contract.name] = personal
            elif contract.evolution == BLOCK and (changes := self.changes.open_changes(contract.name)):
                description = "; ".join(in_words(each) for each in changes)
                problems[contract.name] = f"The schema of {contract.full_name} has changed: {description}."
        return problems

    def require_covered(self, contract: TableContract) -> None:
        """Raise ``SchemaChangeBlocked`` if a column of the contract would show personal values uncovered.

        That is one without a policy that a personal column was renamed to; only the contract can say more.
        """
        if problem := self._personal_under_another_name(contract):
            raise SchemaChangeBlocked({contract.name: problem})

    def _personal_under_another_name(self, contract: TableContract) -> str | None:
        changes = [each for each in self.changes.held().changes if each.table == contract.name]
        found = shown_under_another_name(contract, changes)
        if not found:
            return None
        described = "; ".join(f"{former} is called {name} now" for name, former in sorted(found.items()))
        return (
            f"A personal column of {contract.full_name} has the name of another column, without its policy: "
            f"{described}. Give that one a policy (x-cdc.pii): omnisupport-ingest contracts propose "
            f"{contract.name} --write"
        )

    def accept(self, tables: Collection[str]) -> None:
        """Accept the changes of ``tables`` so far: a person has had the tables read again.

        A table that does not fit its contract keeps its open changes, by which the next start still follows
        it. If its contract says ``block``, a person has decided.
        """
        with self._lock:
            contracts, seen = dict(self._contracts), self.changes.tables()
        fitting = {
            name
            for name in tables
            if name in contracts
            and (contracts[name].evolution == BLOCK or (name in seen and _fits(contracts[name], seen[name])))
        }
        self.changes.accept(fitting)

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


def _by_table(contracts: Iterable[TableContract]) -> dict[TableName, TableContract]:
    """Return ``contracts`` by the names of their tables; of two with one table, the first."""
    return {each.table_name: each for each in reversed([*contracts])}


def _fits(contract: TableContract, seen: SeenTable) -> bool:
    """Whether the table has every column of the contract, of a type whose values the contract can have."""
    types = {each.name: each.pg_type for each in seen.columns}
    return all(
        each.name in types
        and (not types[each.name] or fit(each.type, PgType.parse(types[each.name])) is not Fit.NONE)
        for each in contract.source_columns
    )


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
        columns: dict[int, dict[str, _ColumnFacts]] = {}
        for oid, name, *facts in cursor.fetchall():
            columns.setdefault(oid, {})[name] = _ColumnFacts(*facts)
    live = read_live_tables(connection, [(schema, table) for _, schema, table, *_ in rows])
    live_schemas: dict[str, LiveSchema] = {}
    # By name first: the contract describes the table with that name.
    for oid, schema, table, *facts in sorted(rows, key=lambda row: (row[1], row[2]) not in names):
        contract = names.get((schema, table)) or numbers[oid]
        table_now = live.get((schema, table))
        if contract not in live_schemas and table_now is not None:
            seen = _seen(oid, table_now, columns.get(oid, {}), *facts)
            live_schemas[contract] = LiveSchema(table_now, _with_older_rows(seen, known.get(contract)))
    return live_schemas


class _ColumnFacts(NamedTuple):
    """As of ``SeenColumn``. ``tells``: whether the catalog says what is in rows without the column."""

    number: int
    default: str | None
    before: str | None
    tells: bool


def _seen(
    oid: int,
    live: LiveTable,
    columns: Mapping[str, _ColumnFacts],
    rows: int | None,
    storage: str | None,
    last_number: int,
) -> SeenTable:
    seen = []
    for each in live.columns:
        if (facts := columns.get(each.name)) is not None:
            number, default, before, tells = facts
            tells = tells and not each.generated
            seen.append(
                SeenColumn(
                    number, each.name, each.pg_type, each.not_null, default, before, each.labels, tells
                )
            )
    return SeenTable(oid, live.full_name, tuple(seen), _key(live), rows, None, storage, last_number)


def _with_older_rows(now: SeenTable, before: SeenTable | None) -> SeenTable:
    """Return ``now`` with what is proven of the values that older rows have in each column.

    The catalog says what rows have in a column that they were written without. It does not say which rows
    were: once they are written anew (a default that differs by row, VACUUM FULL), each has a value of its
    own, and the catalog may say nothing of it any more. So it is a proof only for a column that is new since
    the last look, ``before``, if the files of the table are the same; and it is kept for the next looks.
    """
    if before is None or before.relation != now.relation:
        return replace(now, columns=tuple(replace(each, before_known=False) for each in now.columns))
    known, converted = {each.number: each for each in before.columns}, converted_columns(before, now)
    same_rows = now.storage is not None and now.storage == before.storage
    columns = []
    for each in now.columns:
        if (was := known.get(each.number)) is not None:
            # Of what rows carried under a former name, or the server converted, this proves nothing.
            same = was.name == each.name and keeps_values(was.pg_type, each.pg_type)
            same = same and set(was.labels) <= {*each.labels} and each.number not in converted
            each = replace(each, before=was.before, before_known=was.before_known and same)
        elif not same_rows or each.number <= before.last_number:
            each = replace(each, before_known=False)
        columns.append(each)
    return replace(now, columns=tuple(columns))


def _key(live: LiveTable) -> tuple[str, ...]:
    """Return the columns of the replica identity's index, else those of the primary key."""
    index = (
        next((each for each in live.unique if each.identity), None) if live.replica_identity == "i" else None
    )
    chosen = index or live.primary_key
    return chosen.columns if chosen is not None else ()


# The storage of a partitioned table is that of its partitions. ``relnatts`` counts dropped columns too.
_TABLES = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text,
       CASE WHEN c.reltuples > 0 THEN c.reltuples::bigint
            ELSE nullif(pg_stat_get_live_tuples(c.oid), 0) END,
       CASE WHEN c.relkind <> 'p' THEN pg_relation_filenode(c.oid)::text
            ELSE (SELECT md5(string_agg(p.relid::oid || ' ' || pg_relation_filenode(p.relid), ','
                                        ORDER BY p.relid::oid))
                  FROM pg_partition_tree(c.oid) p WHERE p.isleaf) END,
       c.relnatts::int
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind = ANY (%s::"char"[])
  AND ((n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
       OR c.oid = ANY (%s::bigint[]::oid[]))
"""

# ``attmissingval``: the value in rows older than the column, as an array of one element. Of a partitioned
# table each partition has its own; those that were there when the column was added have the same.
# An array is read as one of texts, which takes a delimiter of the type for a part of the value.
_COLUMNS = """
SELECT a.attrelid::bigint, a.attname::text, a.attnum::int,
       CASE WHEN a.attgenerated = '' THEN pg_get_expr(d.adbin, d.adrelid) END,
       CASE WHEN r.atthasmissing AND t.typdelim = ',' THEN (r.attmissingval::text::text[])[1] END,
       coalesce(NOT r.atthasmissing OR t.typdelim = ',', false)
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_type t ON t.oid = a.atttypid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
LEFT JOIN pg_attribute r ON r.attname = a.attname AND r.attrelid = CASE WHEN c.relkind <> 'p' THEN c.oid
    ELSE coalesce((SELECT min(p.relid::oid) FROM pg_partition_tree(c.oid) p WHERE p.isleaf), c.oid) END
WHERE a.attrelid = ANY (%s::bigint[]::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY 1, 3
"""
