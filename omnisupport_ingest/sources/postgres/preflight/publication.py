"""Does the publication send every change of every contracted table, or may capture make it so?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity
from omnisupport_ingest.sources.postgres.preflight.rows import one_row
from omnisupport_ingest.sources.postgres.preflight.tables import SourceTable
from omnisupport_ingest.sources.postgres.publication import (
    Publication,
    add_statement,
    create_statement,
    operations_statement,
    read_publication,
    via_root_statement,
)
from omnisupport_ingest.sources.postgres.quoting import identifier, qualified

Tables = Mapping[TableContract, SourceTable]
"""The contracted tables that exist and can be published."""


def publication_findings(connection: Connection, name: str, tables: Tables, role: str) -> Iterator[Finding]:
    """What is wrong with publication ``name`` for ``tables``."""
    found = read_publication(connection, name)
    if found is None:
        yield from _missing(connection, name, tables, role)
        return
    if found.left_out:
        yield Finding(
            "publication_operations",
            f"Publication {name} leaves out {', '.join(found.left_out)}.",
            operations_statement(name),
        )
    partitioned = [each for each, table in tables.items() if table.partitioned]
    if partitioned and not found.via_root:
        listed = ", ".join(each.full_name for each in partitioned)
        yield Finding(
            "publication_via_root",
            f"Publication {name} sends the changes of {listed} under the names of its partitions.",
            via_root_statement(name),
        )
    yield from _uncovered(found, tables, role)
    for contract in tables:
        yield from _of_table(found, contract, tables[contract])


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


def _uncovered(found: Publication, tables: Tables, role: str) -> Iterator[Finding]:
    uncovered = [
        each
        for each, table in tables.items()
        if (each.schema, each.table) not in found.tables
        and not found.all_tables
        # Listed by its partitions; that is a finding of its own.
        and not (table.partitioned and not found.via_root)
    ]
    if not uncovered:
        return
    listed = ", ".join(each.full_name for each in uncovered)
    obstacles = [] if found.ours else ["does not own the publication"]
    obstacles += _not_owned(uncovered, tables)
    if not obstacles:
        yield Finding(
            "publication",
            f"Publication {found.name} does not cover {listed} yet; capture adds what is missing.",
            "",
            Severity.NOTES,
        )
        return
    yield Finding(
        "publication",
        f"{listed} is not in publication {found.name}, and role {role} cannot add it: "
        f"it {' and '.join(obstacles)}.",
        f"{add_statement(found.name, _names(uncovered))}"
        "  -- run by the owner of the publication and the tables",
    )


def _of_table(found: Publication, contract: TableContract, table: SourceTable) -> Iterator[Finding]:
    """Column list and row filter: the snapshot reads the whole table, so the stream must send it."""
    published = found.tables.get((contract.schema, contract.table))
    if published is None:
        return
    name = qualified(contract.schema, contract.table)
    anew = (
        f"BEGIN; ALTER PUBLICATION {identifier(found.name)} DROP TABLE {name};"
        f" ALTER PUBLICATION {identifier(found.name)} ADD TABLE {name}; COMMIT;"
    )
    if published.row_filter is not None:
        yield Finding(
            "row_filter",
            f"Publication {found.name} sends only some rows of {contract.full_name} (it has a row filter), "
            "and a snapshot reads all of them.",
            anew,
        )
    if not published.columns:
        return
    unsent = [each for each in contract.column_names if each not in published.columns]
    # A column that the table itself lacks is told by the comparison of contract and table.
    unsent = [each for each in unsent if each in table.not_null]
    if unsent:
        yield Finding(
            "column_list",
            f"Publication {found.name} does not send {', '.join(unsent)} of {contract.full_name}, which the "
            "contract names.",
            anew,
        )
        return
    left_out = [each for each in table.not_null if each not in published.columns]
    if left_out:
        yield Finding(
            "column_list",
            f"Publication {found.name} does not send {', '.join(left_out)} of {contract.full_name} (a column "
            "list, or generated columns). The contract does not name them.",
            "",
            Severity.NOTES,
        )


def _not_owned(wanted: list[TableContract], tables: Tables) -> list[str]:
    others = [each.full_name for each in wanted if not tables[each].owned]
    return [f"does not own {', '.join(others)}"] if others else []


def _names(tables: Tables | list[TableContract]) -> list[tuple[str, str]]:
    return [(each.schema, each.table) for each in tables]
