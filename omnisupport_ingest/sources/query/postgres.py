"""Reads PostgreSQL by a cursor: pages of an index, each by one COPY, all in one snapshot.

COPY gives the same text as the stream, and whole blocks of its lines become events in bulk. The role needs
only SELECT. Nothing is written, no slot is made, and any ``wal_level`` will do.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC
from queue import Full, Queue

import psycopg2
import pyarrow as pa
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.pg_types import INTEGERS, PgType
from omnisupport_ingest.contracts.row_checksum import RowChecksum
from omnisupport_ingest.landing.schema_changes import SeenTable
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.postgres.catalog.schema_watch import READABLE, read_seen
from omnisupport_ingest.sources.postgres.protocol.copy_rows import copied_rows, copy_lines, parse_row
from omnisupport_ingest.sources.postgres.protocol.copy_socket import Lines
from omnisupport_ingest.sources.postgres.protocol.row_events import row_key
from omnisupport_ingest.sources.postgres.protocol.text_columns import keep_freed_memory
from omnisupport_ingest.sources.postgres.session.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.session.quoting import identifier, literal, qualified
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import server_checksum
from omnisupport_ingest.sources.query.advice import propose, read_anew
from omnisupport_ingest.sources.query.cursor import CursorColumn, KeysetPosition, cursor_kind, micros_of
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.reader import KeyBounds, Moment, Rows, Span
from omnisupport_ingest.sources.shown_columns import ShownColumn, schema_by_name

_log = logging.getLogger(__name__)

BLOCK_BYTES = 6 * 1024 * 1024
"""Bytes of rows that are converted to columns at a time."""

_OVERHEAD = 100
"""Estimated bytes of an event in addition to its line."""

_KEYS_AT_ONCE = 10_000

_BLOCKS_AHEAD = 2
"""Most blocks of ``BLOCK_BYTES`` that are read ahead."""

_CHECK_SECONDS = 0.2
"""While the queue is full, seconds between two checks whether the blocks are still wanted."""

_IDENTITY = "SELECT system_identifier::text FROM pg_control_system()"

_LSN = (
    "SELECT pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()"
    " ELSE pg_current_wal_insert_lsn() END, '0/0')::bigint"
)

_REPLACED = """
WITH RECURSIVE stored (oid) AS (
    SELECT {}::regclass::oid
    UNION
    SELECT below.oid FROM stored CROSS JOIN LATERAL (
        SELECT inhrelid FROM pg_inherits WHERE inhparent = stored.oid
        UNION ALL
        SELECT d.refobjid
        FROM pg_class v JOIN pg_rewrite r ON r.ev_class = v.oid JOIN pg_depend d ON d.objid = r.oid
        WHERE v.oid = stored.oid AND v.relkind = 'v'
        AND d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
    ) below (oid)
)
SELECT bool_or(
    c.oid IS NULL
    OR (c.relfilenode <> 0 AND c.relfilenode IS DISTINCT FROM pg_relation_filenode(c.oid))
)
FROM stored LEFT JOIN pg_class c USING (oid)
"""
"""Whether a table, a partition of it, or a table of a view got another file after the snapshot was taken. The
catalog shows the file as of the snapshot; the function returns the file that is read now."""


class PostgresReader:
    """A ``Reader`` of a PostgreSQL database."""

    def __init__(self, dsn: str) -> None:
        """Connect. Raises ``SourceUnavailable``, ``SourceRefused`` or ``BadDsn``."""
        keep_freed_memory()
        self._connection = connect(dsn)
        self._columns: dict[str, tuple[str, ...]] = {}
        self._types: dict[str, list[tuple[int, ...]]] = {}
        self._gone: dict[str, frozenset[str]] = {}

    def begin(self) -> Moment:
        database, low, high = self._identity(), self._lsn(), None
        with source_errors("opening a transaction"), self._connection.cursor() as cursor:
            # Read before the snapshot is taken, so every commit that the snapshot misses is later.
            cursor.execute("SELECT clock_timestamp()")
            clock = cursor.fetchone()[0]
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            if low is not None:
                # The snapshot has been taken by now; the function runs after that.
                # No failpoint: a SELECT, written above.
                cursor.execute(_LSN)
                high = cursor.fetchone()[0]
            cursor.execute("SAVEPOINT tables")
        self._columns = {}
        return Moment(clock.astimezone(UTC), database, low, high)

    def cursor_type(self, table: TableContract, cursor: CursorColumn, /) -> str:
        self._columns_of(table)
        found = str(
            self._value(
                table,
                "SELECT format_type(atttypid, atttypmod) FROM pg_attribute WHERE attrelid ="
                f" {literal(_name(table))}::regclass AND attname = {literal(cursor.name)}",
            )
        )
        if cursor_kind(PgType.parse(found).kind) is not cursor.kind:
            raise QueryRefused(
                f"The cursor column {cursor.name} of {table.full_name} is {found} now, not {cursor.pg_type}: "
                "its values have another order.",
                fix=f"See what the contract has to say: {propose(table)}. A column of this type may not be a "
                "cursor: then name another one (x-cdc.cursor.field). Then read the table anew: "
                + read_anew(table.source, "type of the cursor changed", table),
            )
        return found

    def schemas(
        self, tables: Sequence[TableContract], known: Mapping[str, SeenTable], /
    ) -> dict[str, LiveSchema] | None:
        with source_errors("reading the catalogs"), self._connection.cursor() as cursor:
            cursor.execute("SAVEPOINT catalogs")
            try:
                found = read_seen(self._connection, tables, known, READABLE)
            except (psycopg2.ProgrammingError, psycopg2.NotSupportedError) as error:
                # An old server, or a database that only speaks PostgreSQL's protocol, has other catalogs.
                cursor.execute("ROLLBACK TO catalogs")
                _log.warning("schema changes of this database cannot be seen: %s", type(error).__name__)
                return None
        for table in tables:
            schema = found.get(table.name)
            if schema is not None and schema.live.kind in "vm":
                # A view has no rows of its own, and is recreated when it gets another column.
                columns = [
                    ShownColumn(each.name, each.pg_type, each.not_null) for each in schema.live.columns
                ]
                shown = schema_by_name(table, columns, known.get(table.name))
                shown.live = replace(shown.live, kind=schema.live.kind)
                found[table.name] = shown
        return found

    def go_on_without(self, table: TableContract, columns: frozenset[str], /) -> None:
        self._gone[table.full_name] = columns

    def columns(self, table: TableContract, /) -> str:
        names = self._columns_of(table)
        # The number distinguishes a column from an earlier one of the same name. The catalog may still show
        # the state before a concurrent ALTER; names and types are taken from the rows that are read. A value
        # of an enum is written as its label, which can be renamed.
        catalog = self._value(
            table,
            "SELECT coalesce(jsonb_agg(jsonb_build_array(attnum, atttypmod) || coalesce(("
            "SELECT jsonb_agg(enumlabel ORDER BY enumtypid, enumsortorder) FROM pg_enum JOIN pg_type t"
            " ON enumtypid IN (t.oid, t.typelem, t.typbasetype) WHERE t.oid = atttypid"
            "), '[]') ORDER BY attnum), '[]')::text"
            f" FROM pg_attribute WHERE attrelid = {literal(_name(table))}::regclass AND attnum > 0"
            " AND NOT attisdropped",
        )
        return json.dumps([names, self._types[table.full_name], json.loads(str(catalog))], ensure_ascii=False)

    def loose_columns(self, _table: TableContract, /) -> frozenset[str]:
        return frozenset()

    def indexes(self, table: TableContract, /) -> tuple[tuple[str, ...], ...]:
        found = self._value(
            table,
            "SELECT coalesce(jsonb_agg(ARRAY(SELECT a.attname::text FROM unnest(i.indkey)"
            " WITH ORDINALITY k(number, place) JOIN pg_attribute a ON a.attrelid = i.indrelid AND"
            " a.attnum = k.number WHERE k.place <= i.indnkeyatts ORDER BY k.place)), '[]')::text"
            " FROM pg_index i JOIN pg_class x ON x.oid = i.indexrelid JOIN pg_am m ON m.oid = x.relam"
            f" WHERE i.indrelid = {literal(_name(table))}::regclass AND m.amname = 'btree' AND i.indisvalid"
            " AND i.indpred IS NULL AND i.indexprs IS NULL",
        )
        return tuple(tuple(each) for each in json.loads(str(found)))

    def index_sql(self, table: TableContract, name: str, columns: Sequence[str], /) -> str:
        listed = ", ".join(map(identifier, columns))
        kind = self._value(
            table, f"SELECT relkind::text FROM pg_class WHERE oid = {literal(_name(table))}::regclass"
        )
        if kind in ("v", "f"):
            what = "a view" if kind == "v" else "a foreign table"
            return f"{table.full_name} is {what}: give the tables that it reads an index on ({listed})."
        if kind == "p":
            # The server refuses CONCURRENTLY for all partitions at once.
            return (
                f"CREATE INDEX {identifier(name)} ON {_name(table)} ({listed}); -- Writes to the table wait "
                "while it is built. Without that: CREATE INDEX … ON ONLY the table, CREATE INDEX "
                "CONCURRENTLY on each partition, then ALTER INDEX … ATTACH PARTITION for each."
            )
        # The table may be written to meanwhile.
        return f"CREATE INDEX CONCURRENTLY {identifier(name)} ON {_name(table)} ({listed});"

    def not_null_fix(self, table: TableContract, column: str, /) -> str:
        return f"ALTER TABLE {_name(table)} ALTER {identifier(column)} SET NOT NULL;"

    def newest(self, table: TableContract, cursor: CursorColumn, /) -> str | None:
        name = identifier(cursor.name)
        found = self._value(table, f"SELECT max({name})::text FROM {_name(table)}")
        return None if found is None else str(found)

    def rows(
        self, table: TableContract, cursor: CursorColumn, span: Span, take: Callable[[Rows], None], /
    ) -> int:
        return self._copy(table, cursor, page_sql(table, cursor, self._columns_of(table), span), take)

    def _copy(
        self, table: TableContract, cursor: CursorColumn, query: str, take: Callable[[Rows], None]
    ) -> int:
        columns = self._columns_of(table)
        key = [columns.index(name) for name in table.key]
        at = columns.index(cursor.name)
        time = columns.index(cursor.event_time) if cursor.event_time is not None else None
        count = 0

        def copy(give: Callable[[Lines], None]) -> None:
            copy_lines(
                self._connection,
                query,
                doing=f"reading {table.full_name}",
                block_bytes=BLOCK_BYTES,
                lines=give,
            )

        with _refusals(table, self._connection), read_ahead(copy) as blocks:
            for lines in blocks:
                rows = _rows(lines, columns, key, at, time, cursor)
                count += len(rows)
                take(rows)
        return count

    def key_checksum(self, table: TableContract, bounds: KeyBounds, /) -> RowChecksum | None:
        keyed = replace(table, columns=tuple(table.column(name) for name in table.key), unprotected=())
        with _refusals(table, self._connection), source_errors(f"comparing the keys of {table.full_name}"):
            return server_checksum(self._connection, keyed, f"{_name(table)} WHERE {_within(table, bounds)}")

    def keys(self, table: TableContract, bounds: KeyBounds, /) -> Iterator[list[str]]:
        order = [_in_order(table, name) for name in table.key]
        texts = ", ".join(f"concat({identifier(name)})" for name in table.key)
        after = bounds
        while True:
            with (
                _refusals(table, self._connection),
                source_errors(f"reading the keys of {table.full_name}"),
                self._connection.cursor() as cursor,
            ):
                cursor.execute(
                    f"SELECT {texts} FROM {_name(table)} WHERE {_within(table, after)}"
                    f" ORDER BY {', '.join(order)} LIMIT {_KEYS_AT_ONCE}"
                )
                found = cursor.fetchall()
            if found:
                yield [row_key(list(row)) for row in found]
            if len(found) < _KEYS_AT_ONCE:
                return
            after = KeyBounds(tuple(found[-1]), bounds.end)

    def rows_of(
        self, table: TableContract, cursor: CursorColumn, keys: Sequence[str], take: Callable[[Rows], None], /
    ) -> None:
        names = ", ".join(f"concat({identifier(name)})" for name in table.key)
        if all(table.column(name).type.kind in INTEGERS for name in table.key):
            # In this form the key's index is used.
            names = ", ".join(map(identifier, table.key))
        rows = ", ".join(f"({', '.join(literal(part) for part in json.loads(key))})" for key in keys)
        columns = self._columns_of(table)
        self._copy(
            table,
            cursor,
            f"SELECT {', '.join(map(identifier, columns))} FROM {_name(table)} WHERE ({names}) IN ({rows})",
            take,
        )

    def step_over(self) -> None:
        # An error of the server undoes everything after the savepoint; the snapshot stays.
        with source_errors("going on with the next table"), self._connection.cursor() as cursor:
            cursor.execute("ROLLBACK TO tables")

    def end(self) -> None:
        if not self._connection.closed:
            with source_errors("ending a read"), self._connection.cursor() as cursor:
                cursor.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()

    def _identity(self) -> str | None:
        try:
            with self._connection.cursor() as cursor:
                # No failpoint: a SELECT, put together elsewhere.
                cursor.execute(_IDENTITY)
                system = cursor.fetchone()[0]
                cursor.execute("SELECT current_database()")
                return f"{system}/{cursor.fetchone()[0]}"
        except psycopg2.ProgrammingError:
            # On this server, only some roles may query it.
            return None

    def _lsn(self) -> int | None:
        try:
            with source_errors("reading the LSN"), self._connection.cursor() as cursor:
                # No failpoint: a SELECT, put together elsewhere.
                cursor.execute(_LSN)
                found: int | None = cursor.fetchone()[0]
                return found
        except (psycopg2.ProgrammingError, psycopg2.NotSupportedError):
            # Databases that only speak PostgreSQL's protocol have other logs.
            return None

    def _columns_of(self, table: TableContract) -> tuple[str, ...]:
        if table.full_name not in self._columns:
            with (
                _refusals(table, self._connection),
                source_errors(f"reading {table.full_name}"),
                self._connection.cursor() as cursor,
            ):
                cursor.execute(f"SELECT * FROM {_name(table)} LIMIT 0")
                found = tuple(column.name for column in cursor.description)
                types: list[tuple[int, ...]] = [
                    (each.type_code, each.precision, each.scale) for each in cursor.description
                ]
            self._require_snapshot(table)
            there = {*found, *self._gone.get(table.full_name, ())}
            missing = [each.name for each in table.source_columns if each.name not in there]
            if missing:
                raise QueryRefused(
                    f"{table.full_name} has no column {missing[0]!r}, which {table.path} names.",
                    fix="Correct the contract, or give the column back. This shows the corrected contract: "
                    + propose(table),
                )
            self._columns[table.full_name] = found
            self._types[table.full_name] = types
        return self._columns[table.full_name]

    def _require_snapshot(self, table: TableContract) -> None:
        """Raise ``QueryRefused`` if the rows of ``table`` are not those of the open transaction.

        After a TRUNCATE or a rewriting ALTER TABLE, a read in an older snapshot finds no rows (PostgreSQL
        manual, "Caveats" of concurrency control), even if it had to wait for the lock of that statement. A
        comparison would then take all rows for deleted. The caller holds a lock, so the result stays true.
        """
        if self._value(table, _REPLACED.format(literal(_name(table)))):
            raise QueryRefused(
                f"{table.full_name} was truncated or rewritten (TRUNCATE, ALTER TABLE, VACUUM FULL …) while "
                "this reading began, so its transaction may find none of the rows.",
                fix="Run it again: a new transaction finds what the table has now.",
            )

    def _value(self, table: TableContract, query: str) -> object:
        with (
            _refusals(table, self._connection),
            source_errors(f"reading {table.full_name}"),
            self._connection.cursor() as cursor,
        ):
            # No failpoint: a SELECT, put together elsewhere.
            cursor.execute(query)
            return cursor.fetchone()[0]


@contextmanager
def read_ahead(produce: Callable[[Callable[[Lines], None]], None]) -> Iterator[Iterator[Lines]]:
    """Return a context with the blocks of ``produce``, which runs in a thread while earlier blocks are
    handled.

    At most ``_BLOCKS_AHEAD`` blocks wait. An error of ``produce`` is raised after its blocks. If the context
    is left early, ``produce`` ends at its next block.
    """
    waiting: Queue[Lines | None] = Queue(_BLOCKS_AHEAD)
    left = threading.Event()

    def give(block: Lines | None) -> None:
        while not left.is_set():
            with suppress(Full):
                waiting.put(block, timeout=_CHECK_SECONDS)
                return
        raise _Left

    def work() -> None:
        try:
            produce(give)
        finally:
            with suppress(_Left):
                give(None)

    with ThreadPoolExecutor(1, thread_name_prefix="read ahead") as pool:
        reading = pool.submit(work)
        try:
            yield iter(waiting.get, None)
        finally:
            left.set()
        with suppress(_Left):
            reading.result()


class _Left(Exception):
    """Raised to end a read whose blocks are no longer wanted."""


def page_sql(table: TableContract, cursor: CursorColumn, columns: tuple[str, ...], span: Span) -> str:
    """Return the SELECT of one page in the order of the index on (cursor, key), so it can begin at
    any row.
    """
    name = identifier(cursor.name)
    key = [identifier(each) for each in table.key]
    order = key if span.nulls else [name, *key]
    conditions = [f"{name} IS NULL" if span.nulls else f"{name} IS NOT NULL"]
    if not span.nulls:
        conditions += [] if span.low is None else [f"{name} >= {literal(span.low)}"]
        conditions += [] if span.high is None else [f"{name} <= {literal(span.high)}"]
    if span.after is not None:
        values = [*([] if span.nulls else [span.after.cursor or ""]), *span.after.key]
        conditions.append(f"({', '.join(order)}) > ({', '.join(map(literal, values))})")
    return (
        f"SELECT {', '.join(map(identifier, columns))} FROM {_name(table)} WHERE {' AND '.join(conditions)}"
        f" ORDER BY {', '.join(order)} LIMIT {span.limit}"
    )


def _rows(
    lines: Lines, columns: tuple[str, ...], key: list[int], at: int, time: int | None, cursor: CursorColumn
) -> Rows:
    copied = copied_rows(lines, columns, key, [at] if time is None else [at, time])
    # Texts of cursors and times have no characters that JSON escapes.
    cursors, times = copied.texts(at), copied.texts(time) if time is not None else None
    last = parse_row(lines.last().decode())
    keys = copied.keys
    return Rows(
        keys,
        copied.images,
        cursor.numbers(cursors),
        pa.nulls(len(keys), pa.int64()) if times is None else micros_of(times),
        KeysetPosition(last[at], tuple(str(last[each]) for each in key)),
        lines.size + _OVERHEAD * len(keys),
    )


def _within(table: TableContract, bounds: KeyBounds) -> str:
    """Return the condition that a key is in ``bounds``, in the order of ``KeyBounds``."""
    order = f"({', '.join(_in_order(table, name) for name in table.key)})"
    conditions = ["true"]
    for bound, compared in ((bounds.start, ">"), (bounds.end, "<=")):
        if bound is not None:
            conditions.append(f"{order} {compared} ({', '.join(map(literal, bound))})")
    return " AND ".join(conditions)


def _in_order(table: TableContract, name: str) -> str:
    column = identifier(name)
    return column if table.column(name).type.kind in INTEGERS else f'concat({column}) COLLATE "C"'


def _name(table: TableContract) -> str:
    return qualified(table.schema, table.table)


def _grants(connection: Connection, table: TableContract) -> str:
    """Return the statements that let the role of ``connection`` read ``table``; the server has just refused
    that."""
    with suppress(psycopg2.Error), connection.cursor() as cursor:
        # The refusal has undone the transaction up to the savepoint.
        cursor.execute("ROLLBACK TO tables")
    with source_errors("asking who may read"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_user, coalesce((SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace"
            " WHERE nspname = %s), true)",
            (table.schema,),
        )
        role, enters = cursor.fetchone()
    select = f"GRANT SELECT ON {_name(table)} TO {identifier(role)};"
    if enters:
        return select
    return f"GRANT USAGE ON SCHEMA {identifier(table.schema)} TO {identifier(role)}; {select}"


_NOT_UTF8 = (psycopg2.errors.CharacterNotInRepertoire, psycopg2.errors.UntranslatableCharacter)


class _refusals:
    """Turns the server's refusal to read one table into ``QueryRefused``."""

    def __init__(self, table: TableContract, connection: Connection) -> None:
        self._table, self._connection = table, connection

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, psycopg2.errors.InsufficientPrivilege):
            raise QueryRefused(
                f"The role may not read {self._table.full_name}.",
                fix=_grants(self._connection, self._table),
            ) from None
        if isinstance(error, _NOT_UTF8):
            raise QueryRefused(
                f"{self._table.full_name} has a text that cannot be written as UTF-8: the encoding of its "
                "database (SQL_ASCII, say) lets it pass.",
                fix="Correct the text in the source, or name a view in the contract that converts it.",
            ) from None
        if isinstance(error, psycopg2.ProgrammingError | psycopg2.DataError):
            raise QueryRefused(
                f"{self._table.full_name} cannot be read by its cursor: {type(error).__name__} "
                f"({error.pgcode}).",
                fix="Compare the contract with the table, that of the cursor above all: "
                f"{propose(self._table)}. If the type of the cursor has changed, then: "
                + read_anew(self._table.source, "type of the cursor changed", self._table),
            ) from None
