"""Checks whether each table with a contract can be read, and its changes captured with the contract's key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable
from omnisupport_ingest.sources.postgres.catalog.partitions import without_key
from omnisupport_ingest.sources.postgres.preflight.contract_match import contract_findings
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table as this role sees it. ``hides_rows``: a row-level security policy applies to this role.

    ``not_null``: column → whether it is declared NOT NULL, in the table's order.
    """

    oid: int
    kind: str
    persistence: str
    identity: str
    may_use_schema: bool
    may_read: bool
    owned: bool
    hides_rows: bool
    not_null: dict[str, bool]

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"

    @property
    def is_logged(self) -> bool:
        return self.kind in ("r", "p") and self.persistence == "p"


def read_tables(connection: Connection, contracts: Sequence[TableContract]) -> dict[TableName, SourceTable]:
    """Return the tables of ``contracts`` that the database has, by one query."""
    named = [each.schema for each in contracts], [each.table for each in contracts]
    with connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_TABLES, named)
        rows = cursor.fetchall()
    tables = {}
    for schema, table, *facts, columns, not_null in rows:
        oid, kind, persistence, identity, may_use, may_read, owned, hides_rows = facts
        declared = dict(zip(columns, not_null, strict=True))
        tables[schema, table] = SourceTable(
            oid, kind, persistence, identity, may_use, may_read, owned, hides_rows, declared
        )
    return tables


_TABLES = """
SELECT n.nspname::text, c.relname::text, c.oid, c.relkind::text, c.relpersistence::text,
       c.relreplident::text, has_schema_privilege(n.oid, 'USAGE'), has_table_privilege(c.oid, 'SELECT'),
       pg_has_role(c.relowner, 'USAGE'), row_security_active(c.oid),
       ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
             AND NOT attisdropped ORDER BY attnum),
       ARRAY(SELECT attnotnull FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0
             AND NOT attisdropped ORDER BY attnum)
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%s::text[], %s::text[]))
"""


def table_findings(
    contract: TableContract, table: SourceTable | None, live: LiveTable | None, role: str
) -> Iterator[Finding]:
    """Yield what is wrong with one table for ``role``, apart from its publication.

    ``live``: the same table as ``read_live_tables`` returns it; None if it does not exist.
    """
    if table is not None and table.is_logged:
        yield from _rights(contract, table, role)
    for finding in contract_findings(contract, live):
        if finding.severity is not Severity.NOTES:
            yield finding


def _rights(contract: TableContract, table: SourceTable, role: str) -> Iterator[Finding]:
    name = qualified(contract.schema, contract.table)
    if not table.may_use_schema:
        yield Finding(
            "schema_right",
            f"Role {role} may not use the schema {contract.schema}.",
            f"GRANT USAGE ON SCHEMA {identifier(contract.schema)} TO {identifier(role)};"
            "  -- run by the owner of the schema",
        )
    if not table.may_read:
        yield Finding(
            "select_right",
            f"Role {role} may not read {contract.full_name}, which the snapshot needs.",
            f"GRANT SELECT ON {name} TO {identifier(role)};  -- run by the owner of the table",
        )
    if table.hides_rows:
        yield Finding(
            "row_security",
            f"Row security of {contract.full_name} hides rows from role {role}; a snapshot would miss them.",
            f"ALTER ROLE {identifier(role)} BYPASSRLS;  -- run by a superuser",
        )


def partition_findings(
    connection: Connection, contract: TableContract, table: SourceTable
) -> Iterator[Finding]:
    """Yield a finding for every partition that does not send the key of its contract."""
    for each in without_key(connection, table.oid, contract.key):
        yield Finding(
            "partition_identity",
            f"Key column {', '.join(each.missing)} of {contract.full_name} is not in the replica identity of "
            f"its partition {each.schema}.{each.table}.",
            f"ALTER TABLE {qualified(each.schema, each.table)} REPLICA IDENTITY DEFAULT;"
            "  -- or FULL, if the primary key is another one",
        )
