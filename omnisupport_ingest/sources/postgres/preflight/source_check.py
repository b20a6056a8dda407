"""Checks the configured source together with its home: its slot, chain, landed keys and identity.

``continuity_findings`` requires the same proof as a start of capture does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables
from omnisupport_ingest.sources.postgres.preflight import Severity, preflight
from omnisupport_ingest.sources.postgres.preflight.findings import Finding
from omnisupport_ingest.sources.postgres.preflight.shared_database import shared_database_findings
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, SourceRefused, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.lease import is_captured
from omnisupport_ingest.sources.postgres.session.server import server_facts, slot_facts, wal_clock
from omnisupport_ingest.sources.postgres.slot.continuity import resume_point
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeCopied, HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import (
    ExpectedSlot,
    Presence,
    end_of_chain,
    expected_slot,
)
from omnisupport_ingest.sources.postgres.snapshot.landed_key import other_landed_keys, tables_without_read
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests


def landed_key_findings(store: LandingStore, tables: Sequence[TableContract]) -> tuple[Finding, ...]:
    """Return a finding for each table whose contract and landed events differ in key columns or their order,
    unless a snapshot of it is requested, with which the contract's key begins.

    An event contains only the values of its key. Read with another key, they would belong to other rows.
    """
    requested = SnapshotRequests(store.folder).whole_tables()
    landed, waiting = other_landed_keys(store, tables), tables_without_read(store, tables)
    return (
        *(
            _other_key(each, landed[each.name])
            for each in tables
            if each.name in landed and each.name not in requested
        ),
        *(
            _not_read(each)
            for each in tables
            if each.name in waiting and each.name not in {*landed, *requested}
        ),
    )


def _not_read(table: TableContract) -> Finding:
    return Finding(
        "landed_key",
        f"{table.full_name} lands with the key ({', '.join(table.key)}), and nothing is to read it by that: "
        "the lake goes on to show it by the former key.",
        f'omnisupport-ingest source snapshot {table.name} --reason "another key"',
        Severity.WARNS,
        table=table.name,
    )


def _other_key(table: TableContract, landed: tuple[str, ...]) -> Finding:
    return Finding(
        "landed_key",
        f"The contract {table.path} gives {table.full_name} the key ({', '.join(table.key)}), and what has "
        f"landed of it has the key ({', '.join(landed)}).",
        "If the contract is right, have the table read by its new key: omnisupport-ingest source snapshot "
        f'{table.name} --reason "another key". Dimension and history show it by the former key until then, '
        f"and begin anew with that read. Else give the contract the key ({', '.join(landed)}) again.",
        table=table.name,
    )


def published_findings(
    connection: Connection, store: LandingStore, publication: str, tables: Sequence[TableContract]
) -> Iterator[Finding]:
    """Yield a finding if a start of capture would fail because changes may not have been sent."""
    epoch = store.current_epoch()
    if epoch is None:
        return
    requests = SnapshotRequests(store.folder)
    published = PublishedTables(
        store.folder, epoch.number, publication, tables, lambda: requests.whole_tables().keys()
    )
    try:
        published.look(connection)
    except GapInSource as gap:
        yield Finding("published", gap.problem, gap.fix, raises=type(gap))


def continuity_findings(dsn: str, store: LandingStore) -> Iterator[Finding]:
    """Yield the gap, if there is one; nothing for a home without an epoch from a server.

    Also correct while a capture is running. Raises ``SourceRefused`` or ``SourceUnavailable``.
    """
    epoch = store.current_epoch()
    if epoch is None or epoch.facts is None:
        return
    server = server_facts(dsn)
    connection = connect(dsn)
    try:
        # The order matters: a running capture first lands and then confirms, and the WAL is ahead of both.
        slot = slot_facts(connection, epoch.facts.slot)
        chain = end_of_chain(store, epoch)
        flushed = wal_clock(connection).flushed
        resume_point(epoch, chain, server, flushed, slot)
    except GapInSource as gap:
        yield Finding("continuity", gap.problem, gap.fix, raises=GapInSource)
    finally:
        connection.close()


NO_PROOF = {"standby", "replication_right", "replication_connection", "server_version"}
"""Findings that must be repaired before the server can give the proof of continuity."""


def contracted_tables(contracts: Contracts, source: str) -> tuple[TableContract, ...]:
    """Return the contracts of ``source``, with the keys of their files. Raises ``IngestError`` if there are
    none."""
    tables = tuple(each.as_captured for each in contracts.of_source(source))
    if not tables:
        known = ", ".join(contracts.sources()) or "none"
        raise IngestError(
            f"No contract names the source {source!r}.",
            fix=f"Make them: omnisupport-ingest contracts new --all --source {source} (`status` says where "
            f"the home has its contracts). Sources that have some: {known}.",
        )
    return tables


def check_source(
    dsn: str, settings: Settings, home: Home | None, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Return every finding about the source at ``dsn``, the worst first. ``home``: None if there is none.

    If the source cannot be reached, or refuses the connection, that is the only finding. Raises ``BadDsn`` if
    ``dsn`` cannot be read.
    """
    store = LandingStore(home.landing, settings.source) if home is not None else None
    if home is not None:
        try:
            HomeIdentity(home).look()
        except HomeCopied as copied:
            return (Finding("home_copied", copied.problem, copied.fix, raises=HomeCopied),)
    slot = ExpectedSlot(settings.slot, Presence.FREE)
    if home is not None and store is not None:
        running = is_captured(home.run, settings.source)
        slot = replace(expected_slot(store, settings.slot), read_by_us=running)
    try:
        findings = preflight(dsn, tables, publication=settings.publication, slot=slot)
        if store is not None and not {each.check for each in findings} & NO_PROOF:
            proof = list(continuity_findings(dsn, store))
            if not proof:
                with closing(connect(dsn)) as connection:
                    proof += published_findings(connection, store, settings.publication, tables)
            findings = (*proof, *findings)
        if store is not None:
            findings = (*landed_key_findings(store, tables), *findings)
        findings = (*shared_database_findings(dsn, settings), *findings)
    except (SourceRefused, SourceUnavailable) as error:
        return (Finding("connection", error.problem, error.fix, Severity.BLOCKS),)
    return findings
