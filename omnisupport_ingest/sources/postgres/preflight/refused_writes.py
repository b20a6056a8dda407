"""Does PostgreSQL refuse the application's updates and deletes for how their table is published?

What a row filter reads of the old row must be in the replica identity, and all of the identity in a column
list. PostgreSQL checks that at each update and delete, not when the table is published.
"""

from __future__ import annotations

from collections.abc import Iterator

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.preflight.tables import SourceTable
from omnisupport_ingest.sources.postgres.session.quoting import qualified


def refused_writes(
    connection: Connection, publication: str, contract: TableContract, table: SourceTable, unlist: str
) -> Iterator[Finding]:
    """A warning for ``table``, or each partition of it, of which that is so. For PostgreSQL 15 and newer.

    ``unlist``: the SQL that publishes the table without a column list.
    """
    with connection.cursor() as cursor:
        cursor.execute(_IDENTITIES, (publication, table.oid))
        rows = cursor.fetchall()
    for schema, name, identity, in_identity, filtered, listed in rows:
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
                # FULL does not go with a column list.
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


# The catalogs know the columns of a filter apart from those of a list only by the expression as it is stored.
_IDENTITIES = r"""
SELECT n.nspname::text, c.relname::text, c.relreplident::text,
       ARRAY(SELECT a.attname::text FROM pg_index i JOIN pg_attribute a ON a.attrelid = c.oid
               AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1])
             WHERE i.indrelid = c.oid
               AND (c.relreplident = 'd' AND i.indisprimary OR c.relreplident = 'i' AND i.indisreplident)),
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = r.prrelid AND a.attnum IN (
             SELECT found[1]::int FROM regexp_matches(r.prqual::text, ':varattno (\d+)', 'g') AS found)),
       (SELECT array_agg(a.attname::text) FROM pg_attribute a
        WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs))
FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
JOIN pg_class c ON c.oid = r.prrelid OR c.oid IN (SELECT relid FROM pg_partition_tree(r.prrelid))
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s AND r.prrelid = %s AND c.relkind = 'r' AND c.relreplident <> 'n'
  AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
ORDER BY 1, 2
"""
