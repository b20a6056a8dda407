"""Checks the configured source together with its home: its slot, chain, landed keys and identity.

``continuity_findings`` requires the same proof as a start of capture does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.names import chunk_prefix, first_chunk_of, is_snapshot_end
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
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests


def landed_key_findings(store: LandingStore, tables: Sequence[TableContract]) -> tuple[Finding, ...]:
    """Return a finding for each table whose contract and landed events differ in key columns or their order.

    An event contains only the values of its key. Read with another key, they would belong to other rows.
    """
    landed: dict[TableName, tuple[str, ...]] = {}
    unseen = {each.table_name for each in tables}
    for batch in _describing_batches(store):
        for relation in batch.relations:
            if relation.key_columns:
                landed.setdefault((relation.schema, relation.table), relation.key_columns)
        # Older batches would add nothing.
        if unseen <= landed.keys():
            break
    return tuple(
        _other_key(table, landed[table.schema, table.table])
        for table in tables
        if landed.get(table.table_name, table.key) != table.key
    )


def _describing_batches(store: LandingStore) -> Iterator[Manifest]:
    """Yield batches that describe tables, newest first: the last batch of the stream, then the first chunk of
    each finished snapshot."""
    epoch = store.current_epoch()
    last = store.last_stream_until(epoch.number) if epoch is not None else None
    if last is not None:
        yield last
    chunks = [name for each in store.epoch_standings() for name in store.batch_ids(chunk_prefix(each.epoch))]
    for end_id in reversed([name for name in chunks if is_snapshot_end(name)]):
        first = first_chunk_of(end_id)
        if store.exists(first):
            yield store.read(first)


def _other_key(table: TableContract, landed: tuple[str, ...]) -> Finding:
    return Finding(
        "landed_key",
        f"The contract {table.path} gives {table.full_name} the key ({', '.join(table.key)}), and what has "
        f"landed of it has the key ({', '.join(landed)}).",
        f"Give the contract the key ({', '.join(landed)}) again. To capture the table under another key, "
        "begin with a home of its own (OMNISUPPORT_HOME): the events that have landed do not carry it.",
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
    """Return the contracts of ``source``. Raises ``IngestError`` if there are none."""
    tables = contracts.of_source(source)
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
