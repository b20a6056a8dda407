"""Is the source set up for capture? Every finding comes with the SQL that repairs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.connection import connect, source_errors
from omnisupport_ingest.sources.postgres.errors import PreflightFailed
from omnisupport_ingest.sources.postgres.quoting import identifier, literal, qualified


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that stands in the way of capture: ``fix`` is SQL, or what to do besides SQL."""

    check: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class _Table:
    oid: int
    kind: str
    persistence: str
    identity: str
    may_read: bool
    owned: bool
    not_null: dict[str, bool]


def preflight(
    dsn: str, tables: Sequence[TableContract], *, slot: str, publication: str
) -> tuple[Finding, ...]:
    """Everything that would stop the capture of ``tables``; empty if nothing would.

    Works with no right beyond connecting. Raises ``SourceUnavailable`` if even that fails.
    """
    connection = connect(dsn)
    try:
        with source_errors("checking the source"):
            found = [*_server(connection, slot)]
            for contract in tables:
                found += _of_table(connection, contract, publication)
            return tuple(found)
    finally:
        connection.close()


def require_ready(findings: Sequence[Finding]) -> None:
    """Raise ``PreflightFailed`` with every finding and every fix, if there is any finding."""
    if findings:
        raise PreflightFailed(
            "The source is not ready for capture:\n" + "\n".join(f"- {each.problem}" for each in findings),
            fix="\n" + "\n".join(dict.fromkeys(f"  {each.fix}" for each in findings)),
        )


def _server(connection: Connection, slot: str) -> Iterator[Finding]:
    wal_level, encoding, user = _row(
        connection,
        "SELECT current_setting('wal_level'), current_setting('server_encoding'), current_user::text",
    )
    if wal_level != "logical":
        yield Finding(
            "wal_level",
            f"wal_level is {wal_level}; logical decoding needs logical.",
            "ALTER SYSTEM SET wal_level = 'logical';  -- then restart PostgreSQL",
        )
    if encoding == "SQL_ASCII":
        yield Finding(
            "encoding",
            "The database has the encoding SQL_ASCII, so its text cannot be read as UTF-8 with certainty.",
            "Dump the database and restore it into one created with ENCODING 'UTF8'.",
        )
    (may_replicate,) = _row(
        connection,
        "SELECT rolreplication OR rolsuper OR EXISTS (SELECT FROM pg_roles cloud WHERE cloud.rolname ="
        " 'rds_replication' AND pg_has_role(current_user, cloud.oid, 'MEMBER'))"
        " FROM pg_roles WHERE rolname = current_user",
    )
    if not may_replicate:
        yield Finding(
            "replication_right",
            f"Role {user} may not use replication.",
            f"ALTER ROLE {identifier(user)} REPLICATION;",
        )
    # Capture keeps one slot; a snapshot and a comparison each need another for a short time.
    yield from _headroom(
        connection,
        "max_replication_slots",
        f"SELECT count(*) FROM pg_replication_slots WHERE slot_name <> {literal(slot)}",
        needed=2,
    )
    yield from _headroom(
        connection,
        "max_wal_senders",
        "SELECT count(*) FROM pg_stat_replication WHERE application_name <> 'omnisupport-ingest'",
        needed=2,
    )


def _headroom(connection: Connection, setting: str, used_query: str, *, needed: int) -> Iterator[Finding]:
    (limit,) = _row(connection, f"SELECT current_setting({literal(setting)})::int")
    (used,) = _row(connection, used_query)
    if limit - used < needed:
        yield Finding(
            setting,
            f"{setting} is {limit} and {used} are in use by others; capture needs {needed}.",
            f"ALTER SYSTEM SET {setting} = {used + needed + 2};  -- then restart PostgreSQL",
        )


def _of_table(connection: Connection, contract: TableContract, publication: str) -> Iterator[Finding]:
    table = _read_table(connection, contract)
    name = qualified(contract.schema, contract.table)
    if table is None:
        yield Finding(
            "table",
            f"Table {contract.full_name} does not exist in this database ({contract.path}).",
            f"Create table {contract.full_name}, correct the contract, or connect to the right database.",
        )
        return
    if table.kind not in ("r", "p") or table.persistence != "p":
        yield Finding(
            "table",
            f"{contract.full_name} is no ordinary, permanent, logged table: its changes are not in the WAL.",
            f"ALTER TABLE {name} SET LOGGED;  -- or take the contract out, if it is a view or foreign table",
        )
        return
    if not table.may_read:
        yield Finding(
            "select_right",
            f"This role may not read {contract.full_name}, which the snapshot needs.",
            f"GRANT SELECT ON {name} TO CURRENT_USER;  -- run by the owner, naming the capture role",
        )
    if not table.owned and not _published(connection, table, publication):
        yield Finding(
            "publication",
            f"{contract.full_name} is not in publication {publication}, and this role does not own it.",
            f"CREATE PUBLICATION {identifier(publication)};  -- if missing; then, by the table's owner: "
            f"ALTER PUBLICATION {identifier(publication)} ADD TABLE {name};",
        )
    yield from _columns_and_key(connection, contract, table)


def _columns_and_key(connection: Connection, contract: TableContract, table: _Table) -> Iterator[Finding]:
    name = qualified(contract.schema, contract.table)
    for column in contract.column_names:
        if column not in table.not_null:
            yield Finding(
                "column",
                f"{contract.full_name} has no column {column}, which {contract.path} names.",
                f"Add the column to {contract.full_name}, or take it out of the contract.",
            )
    for column in contract.key:
        if table.not_null.get(column) is False:
            yield Finding(
                "key_not_null",
                f"Key column {column} of {contract.full_name} may be NULL.",
                f"ALTER TABLE {name} ALTER COLUMN {identifier(column)} SET NOT NULL;",
            )
    identity, deferrable = _identity(connection, table)
    missing = [column for column in contract.key if column in table.not_null and column not in identity]
    if missing and table.identity != "f":
        columns = ", ".join(identifier(column) for column in contract.key)
        yield Finding(
            "replica_identity",
            f"Key column {', '.join(missing)} of {contract.full_name} is not in its replica identity.",
            f"ALTER TABLE {name} ADD PRIMARY KEY ({columns});"
            f"  -- or, if it has another primary key: ALTER TABLE {name} REPLICA IDENTITY FULL;",
        )
    if deferrable:
        yield Finding(
            "deferrable_key",
            f"The primary key of {contract.full_name} is deferrable: two rows may share a key for a time.",
            f"ALTER TABLE {name} DROP CONSTRAINT {identifier(deferrable)}, ADD CONSTRAINT"
            f" {identifier(deferrable)} PRIMARY KEY"
            f" ({', '.join(identifier(column) for column in contract.key)}) NOT DEFERRABLE;",
        )


def _read_table(connection: Connection, contract: TableContract) -> _Table | None:
    row = _row(
        connection,
        "SELECT c.oid, c.relkind::text, c.relpersistence::text, c.relreplident::text,"
        " has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'),"
        " pg_has_role(c.relowner, 'USAGE'),"
        " ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0"
        "       AND NOT attisdropped ORDER BY attnum),"
        " ARRAY(SELECT attnotnull FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0"
        "       AND NOT attisdropped ORDER BY attnum)"
        " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE n.nspname = %s AND c.relname = %s",
        (contract.schema, contract.table),
    )
    if row is None:
        return None
    oid, kind, persistence, identity, may_read, owned, names, not_null = row
    columns = dict(zip(names, not_null, strict=True))
    return _Table(oid, kind, persistence, identity, may_read, owned, columns)


def _identity(connection: Connection, table: _Table) -> tuple[set[str], str | None]:
    """The columns of the replica identity, and the name of the primary key if it is deferrable."""
    chosen = {"d": "i.indisprimary AND i.indimmediate", "i": "i.indisreplident"}.get(table.identity, "false")
    (columns, deferrable) = _row(
        connection,
        "SELECT ARRAY(SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid"
        f" AND a.attnum = ANY (i.indkey) WHERE i.indrelid = %s AND {chosen}),"
        " (SELECT conname::text FROM pg_constraint WHERE conrelid = %s AND contype = 'p' AND condeferrable)",
        (table.oid, table.oid),
    )
    return set(columns), deferrable


def _published(connection: Connection, table: _Table, publication: str) -> bool:
    (published,) = _row(
        connection,
        "SELECT EXISTS (SELECT FROM pg_publication p WHERE p.pubname = %s AND (p.puballtables OR EXISTS"
        " (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = %s)))",
        (publication, table.oid),
    )
    return bool(published)


def _row(connection: Connection, query: str, parameters: tuple[object, ...] | None = None) -> Any:
    with connection.cursor() as cursor:
        cursor.execute(query, parameters)
        return cursor.fetchone()
