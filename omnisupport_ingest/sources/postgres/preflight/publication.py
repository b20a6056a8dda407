"""Checks whether the publication sends every change of every table with a contract, or capture may fix it.

PostgreSQL refuses the application's updates and deletes if a row filter uses a column outside the replica
identity, or if a column list leaves out a part of it. It checks this at each update and delete, not when the
table is published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.sources.postgres.catalog.publication import (
    Publication,
    add_statement,
    create_statement,
    drop_statement,
    operations_statement,
    read_publication,
)
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.preflight.tables import SourceTable
from omnisupport_ingest.sources.postgres.session.connection import one_row
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified


class PublishedIdentity(NamedTuple):
    """A table or partition that is published with a row filter or a column list.

    ``identity``: letter of its replica identity, with the columns ``in_identity``. ``filtered``: columns that
    the row filter uses. ``listed``: those of the column list; None without one.
    """

    schema: str
    name: str
    identity: str
    in_identity: list[str]
    filtered: list[str]
    listed: list[str] | None


def read_identities(
    connection: Connection, publication: str, oids: Collection[int]
) -> dict[int, list[PublishedIdentity]]:
    """Return by oid the identities of those tables of ``oids`` with a row filter or a column list.

    Of a partitioned table, of each partition. For PostgreSQL 15 and newer.
    """
    with connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_IDENTITIES, (publication, [*oids]))
        rows = cursor.fetchall()
    identities: dict[int, list[PublishedIdentity]] = {}
    for oid, *facts in rows:
        identities.setdefault(oid, []).append(PublishedIdentity(*facts))
    return identities


def refused_writes(
    publication: str, contract: TableContract, identities: Collection[PublishedIdentity], unlist: str
) -> Iterator[Finding]:
    """Yield a warning for each of ``identities``, of the contract's table, whose writes PostgreSQL refuses.

    ``unlist``: the SQL that publishes the table without a column list.
    """
    for schema, name, identity, in_identity, filtered, listed in identities:
        whole = identity == "f"
        beyond = [] if whole else sorted(set(filtered) - set(in_identity))
        unlisted = [] if listed is None or whole else sorted(set(in_identity) - set(listed))
        at = f"{schema}.{name}"
        of_root = "" if at == contract.full_name else f", a partition of {contract.full_name},"
        refuses = f"PostgreSQL refuses updates and deletes of {at}{of_root}"
        if beyond:
            yield Finding(
                "refused_writes",
                f"{refuses} as the row filter in publication {publication} is about {', '.join(beyond)}, "
                "which is not in the replica identity.",
                # A column list and replica identity FULL exclude each other.
                f"{'' if listed is None else f'{unlist} '}"
                f"ALTER TABLE {qualified(schema, name)} REPLICA IDENTITY FULL;",
                Severity.WARNS,
            )
        elif unlisted or (whole and listed is not None):
            lacks = f"leaves out {', '.join(unlisted)}, which is in" if unlisted else "does not go with"
            yield Finding(
                "refused_writes",
                f"{refuses} as the column list in publication {publication} {lacks} the replica identity"
                f"{'' if unlisted else ' FULL'}.",
                f"ALTER TABLE {qualified(schema, name)} REPLICA IDENTITY DEFAULT;"
                "  -- or publish the table without a column list",
                Severity.WARNS,
            )


# Only the stored expression of a filter shows which columns it uses.
_IDENTITIES = r"""
SELECT r.prrelid::bigint, n.nspname::text, c.relname::text, c.relreplident::text,
       ARRAY(SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid
               AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
             WHERE i.indrelid = c.oid
               AND (c.relreplident = 'd' AND i.indisprimary OR c.relreplident = 'i' AND i.indisreplident)),
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = r.prrelid AND a.attnum IN (
             SELECT found[1]::int FROM regexp_matches(r.prqual::text, ':varattno (\d+)', 'g') AS found)),
       (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs))
FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
CROSS JOIN LATERAL (SELECT r.prrelid UNION SELECT relid FROM pg_partition_tree(r.prrelid)) AS part (oid)
JOIN pg_class c ON c.oid = part.oid
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s AND r.prrelid = ANY (%s::bigint[]::oid[]) AND c.relkind = 'r' AND c.relreplident <> 'n'
  AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
ORDER BY 2, 3
"""


Tables = Mapping[TableContract, SourceTable]
"""The tables with contracts that exist and can be published."""


def publication_findings(connection: Connection, name: str, tables: Tables, role: str) -> Iterator[Finding]:
    """Yield what is wrong with publication ``name`` for ``tables``. ``role``: for messages."""
    publication = read_publication(connection, name)
    if publication is None:
        yield from _missing(connection, name, tables, role)
        return
    if publication.left_out:
        yield Finding(
            "publication_operations",
            f"Publication {name} leaves out {', '.join(publication.left_out)}.",
            operations_statement(name),
        )
    for contract in tables:
        for finding in _of_partitions(publication, contract):
            yield replace(finding, table=contract.name)
    yield from _uncovered(publication, tables, role)
    listed = [
        table.oid
        for contract, table in tables.items()
        if (published := publication.tables.get(contract.table_name)) is not None and published.columns
    ]
    # Without column lists, the server is too old to have them, or row filters.
    identities = read_identities(connection, name, listed) if listed else {}
    for contract, table in tables.items():
        for finding in _of_table(publication, contract, table, identities.get(table.oid, ())):
            yield replace(finding, table=contract.name)


def _missing(connection: Connection, name: str, tables: Tables, role: str) -> Iterator[Finding]:
    if not tables:
        return
    database, may_create = one_row(
        connection, "SELECT current_database(), has_database_privilege(current_database(), 'CREATE')"
    )
    obstacles = [] if may_create else [f"has no CREATE right on the database {database}"]
    obstacles += _not_owned(list(tables), tables)
    if not obstacles:
        yield Finding(
            "publication",
            f"Publication {name} is not there yet; capture makes it, for {len(tables)} tables.",
            "",
            Severity.NOTES,
        )
        return
    yield Finding(
        "publication",
        f"Publication {name} is not there, and role {role} cannot make it: it {' and '.join(obstacles)}.",
        f"{create_statement(name, _names(tables))}  -- run by the owner of the tables",
    )


def _uncovered(publication: Publication, tables: Tables, role: str) -> Iterator[Finding]:
    uncovered = [
        each for each in tables if not publication.covers(each.table_name) and not publication.all_tables
    ]
    if not uncovered:
        return
    refused = [each for each in uncovered if not (publication.ours and tables[each].owned)]
    added = [each for each in uncovered if each not in refused]
    if added:
        listed = ", ".join(each.full_name for each in added)
        yield Finding(
            "publication",
            f"Publication {publication.name} does not cover {listed} yet; capture adds what is missing.",
            "",
            Severity.NOTES,
        )
    for each in refused:
        obstacles = [] if publication.ours else ["does not own the publication"]
        obstacles += _not_owned([each], tables)
        yield Finding(
            "publication",
            f"{each.full_name} is not in publication {publication.name}, and role {role} cannot add it: "
            f"it {' and '.join(obstacles)}.",
            f"{add_statement(publication.name, _names([each]))}"
            "  -- run by the owner of the publication and the tables",
            table=each.name,
        )


def _of_partitions(publication: Publication, contract: TableContract) -> Iterator[Finding]:
    """Check partitions sent under their own names: none may have its own row filter or column list."""
    differing = publication.roots.get(contract.table_name, ())
    if differing:
        listed = ", ".join(f"{schema}.{table}" for schema, table in differing)
        yield Finding(
            "publication_partition",
            f"Publication {publication.name} sends only some rows or columns of {listed}, which is a "
            f"partition of {contract.full_name}: it is listed with a row filter or a column list of its own, "
            "and a snapshot reads all of the table.",
            f"{drop_statement(publication.name, differing)}  -- its changes are sent all the same, as its "
            "table is published",
        )


def _of_table(
    publication: Publication,
    contract: TableContract,
    table: SourceTable,
    identities: Collection[PublishedIdentity],
) -> Iterator[Finding]:
    """Check column list and row filter. What they leave out is not read, so the contract must not name it."""
    published = publication.tables.get(contract.table_name)
    if published is None:
        return
    name = qualified(contract.schema, contract.table)
    filtered = published.row_filter is not None
    anew = (
        f"BEGIN; ALTER PUBLICATION {identifier(publication.name)} DROP TABLE {name};"
        f" ALTER PUBLICATION {identifier(publication.name)} ADD TABLE {name}"
        f"{f' WHERE ({published.row_filter})' if filtered else ''}; COMMIT;"
    )
    if filtered:
        yield Finding(
            "row_filter",
            f"Publication {publication.name} sends only the rows of {contract.full_name} with "
            f"{published.row_filter}. Others are not in the lake; a row that leaves the filter is deleted "
            "there, one that enters it is inserted.",
            "",
            Severity.NOTES,
        )
    if not published.columns:
        return
    yield from refused_writes(publication.name, contract, identities, anew)
    unsent = [each.name for each in contract.source_columns if each.name not in published.columns]
    # If the table itself lacks a column, the comparison with the contract reports it.
    unsent = [each for each in unsent if each in table.not_null]
    if unsent:
        yield Finding(
            "column_list",
            f"Publication {publication.name} does not send {', '.join(unsent)} of {contract.full_name}, "
            "which the contract names.",
            f"{anew}  -- or take it out of the contract",
        )
        return
    left_out = [each for each in table.not_null if each not in published.columns]
    if left_out:
        yield Finding(
            "column_list",
            f"Publication {publication.name} does not send {', '.join(left_out)} of {contract.full_name} (a "
            "column list, or generated columns). The contract does not name them.",
            "",
            Severity.NOTES,
        )


def _not_owned(wanted: list[TableContract], tables: Tables) -> list[str]:
    others = [each.full_name for each in wanted if not tables[each].owned]
    return [f"does not own {', '.join(others)}"] if others else []


def _names(tables: Tables | list[TableContract]) -> list[TableName]:
    return [each.table_name for each in tables]
