"""Preflight: checks whether the source is set up for capture. Each finding has the SQL that repairs it.

``preflight`` changes nothing at the source. ``require_ready`` turns its findings into one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.preflight.findings import Finding, Severity, blocking, require_ready
from omnisupport_ingest.sources.postgres.preflight.publication import publication_findings
from omnisupport_ingest.sources.postgres.preflight.server import (
    replication_findings,
    right_findings,
    server_findings,
    session_findings,
    slot_findings,
)
from omnisupport_ingest.sources.postgres.preflight.tables import (
    partition_findings,
    read_tables,
    table_findings,
)
from omnisupport_ingest.sources.postgres.session.connection import connect, one_row, source_errors
from omnisupport_ingest.sources.postgres.slot.home_slot import ExpectedSlot

__all__ = ["Finding", "Severity", "blocking", "preflight", "preflight_tables", "require_ready"]


def preflight(
    dsn: str,
    tables: Sequence[TableContract],
    *,
    publication: str,
    slot: ExpectedSlot,
    slot_wait_seconds: float = 0.0,
) -> tuple[Finding, ...]:
    """Return every finding about the source at ``dsn``, the worst first. Changes nothing there.

    Needs no right except to connect. ``slot_wait_seconds``: how long to wait for a slot of ours that is still
    being read. Raises ``BadDsn``, ``SourceRefused`` or ``SourceUnavailable`` if connecting fails.
    """
    connection = connect(dsn)
    try:
        with source_errors("checking the source"):
            return _worst_first(_findings(dsn, connection, tables, publication, slot, slot_wait_seconds))
    finally:
        connection.close()


def preflight_tables(
    connection: Connection, tables: Sequence[TableContract], *, publication: str
) -> tuple[Finding, ...]:
    """Return every finding about ``tables`` alone, and about ``publication`` as far as it concerns them.

    Used for tables that are added to a running capture. Raises ``SourceUnavailable``.
    """
    with source_errors("checking tables of the source"):
        (role,) = one_row(connection, "SELECT current_user::text")
        return _worst_first(_of_tables(connection, tables, publication, role))


def _findings(
    dsn: str,
    connection: Connection,
    tables: Sequence[TableContract],
    publication: str,
    slot: ExpectedSlot,
    slot_wait_seconds: float,
) -> Iterator[Finding]:
    (role,) = one_row(connection, "SELECT current_user::text")
    yield from session_findings(connection)
    yield from server_findings(connection, slot.name)
    rights = list(right_findings(connection))
    # Without the right, the connection is refused too. One finding is enough.
    yield from rights or replication_findings(dsn)
    yield from _of_tables(connection, tables, publication, role)
    yield from slot_findings(connection, slot, slot_wait_seconds)


def _of_tables(
    connection: Connection, tables: Sequence[TableContract], publication: str, role: str
) -> Iterator[Finding]:
    present = {}
    live = read_live_tables(connection, [each.table_name for each in tables])
    of_role = read_tables(connection, tables)
    for contract in tables:
        table = of_role.get(contract.table_name)
        findings = [*table_findings(contract, table, live.get(contract.table_name), role)]
        if table is not None and table.is_logged:
            present[contract] = table
            if table.partitioned:
                findings += partition_findings(connection, contract, table)
        yield from (replace(each, table=contract.name) for each in findings)
    yield from publication_findings(connection, publication, present, role)


def _worst_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda each: list(Severity).index(each.severity)))
