"""The least that a capture role needs, as SQL: what preflight asks for, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.catalog.publication import create_statement
from omnisupport_ingest.sources.postgres.session.quoting import identifier, qualified

DEFAULT_ROLE = "omnisupport_capture"


def grants_sql(role: str, database: str, publication: str, tables: Sequence[TableContract]) -> str:
    """A script for psql that makes ``role`` and gives it what capturing ``tables`` takes.

    It holds no password: that is set afterwards. The publication is made by whoever runs the
    script, so the role needs neither CREATE on the database nor the ownership of a table.
    """
    name = identifier(role)
    schemas = sorted({table.schema for table in tables})
    lines = [
        "-- 1. As a superuser, or as the administrator of a managed service.",
        f"CREATE ROLE {name} LOGIN REPLICATION;",
        f"--    Its password, in psql:  \\password {role}",
        f"--    Amazon RDS has no REPLICATION; there:  GRANT rds_replication TO {name};",
        f"GRANT CONNECT ON DATABASE {identifier(database)} TO {name};",
        "",
        f"-- 2. In database {database}, as the owner of the schemas and tables, with CREATE on the database",
        "--    (for the publication), or as a superuser.",
        *(f"GRANT USAGE ON SCHEMA {identifier(schema)} TO {name};" for schema in schemas),
        *(f"GRANT SELECT ON {qualified(table.schema, table.table)} TO {name};" for table in tables),
        create_statement(publication, [(table.schema, table.table) for table in tables]),
    ]
    return "\n".join(lines)
