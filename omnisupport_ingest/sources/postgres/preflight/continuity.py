"""Does the slot continue what this home has landed? The same proof that a start of capture asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables
from omnisupport_ingest.sources.postgres.preflight.findings import Finding
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import HoleInSource
from omnisupport_ingest.sources.postgres.session.server import server_facts, slot_facts, wal_clock
from omnisupport_ingest.sources.postgres.slot.continuity import resume_point
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests


def published_findings(
    connection: Connection, store: LandingStore, publication: str, tables: Sequence[TableContract]
) -> Iterator[Finding]:
    """What a start of capture would refuse because changes may not have been sent, if there is such."""
    epoch = store.current_epoch()
    if epoch is None:
        return
    requests = SnapshotRequests(store.folder)
    published = PublishedTables(
        store.folder, epoch.number, publication, tables, lambda: requests.whole_tables().keys()
    )
    try:
        published.look(connection)
    except HoleInSource as hole:
        yield Finding("published", hole.problem, hole.fix, raises=type(hole))


def continuity_findings(dsn: str, store: LandingStore) -> Iterator[Finding]:
    """The hole, if there is one; nothing for a home that has no epoch from a server yet.

    True while a capture runs as well. Raises ``SourceRefused`` or ``SourceUnavailable``.
    """
    epoch = store.current_epoch()
    if epoch is None or epoch.facts is None:
        return
    server = server_facts(dsn)
    connection = connect(dsn)
    try:
        # In this order: a capture that runs lands first and confirms after, and the WAL is ahead of both.
        slot = slot_facts(connection, epoch.facts.slot)
        chain = end_of_chain(store, epoch)
        flushed = wal_clock(connection).flushed
        resume_point(epoch, chain, server, flushed, slot)
    except HoleInSource as hole:
        yield Finding("continuity", hole.problem, hole.fix, raises=HoleInSource)
    finally:
        connection.close()
