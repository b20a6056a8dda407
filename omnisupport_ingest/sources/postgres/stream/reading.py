"""Reads the stream of one epoch into batches, from the end of landing on, again as often as necessary.

If it is unclear what of a transaction in progress was rolled back, the stream is started again without
transactions in progress. Then the server sends each transaction whole, after its commit.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.partition_roots import PartitionRoots
from omnisupport_ingest.sources.postgres.catalog.partitions import PartitionedTables
from omnisupport_ingest.sources.postgres.protocol.changes import ChangeCollector
from omnisupport_ingest.sources.postgres.protocol.text_columns import keep_freed_memory
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.connection import connect_replication
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.session.server import (
    SLOT_WAIT_SECONDS,
    identify,
    server_facts,
    slot_facts,
    wait_until_free,
    wal_clock,
)
from omnisupport_ingest.sources.postgres.slot.continuity import (
    ResumePoint,
    require_same_server,
    require_source,
    require_unmoved,
    resume_point,
)
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain, require_recovery
from omnisupport_ingest.sources.postgres.stream.batches import StreamBatches
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch, CapturedTables
from omnisupport_ingest.sources.postgres.stream.follower import FollowedTables, Follower, OpenStream
from omnisupport_ingest.sources.postgres.stream.in_progress import InProgress, RollbackUnclear, SpoolFailed

_log = logging.getLogger(__name__)

_STREAMS_IN_PROGRESS = 140000
"""The first server version that sends transactions in progress."""


def prove_continuity(
    dsn: str, connection: Connection, store: LandingStore, epoch: EpochRecord
) -> ResumePoint:
    """Prove that the server is the one that landing comes from; return where the stream continues.

    Raises ``GapInSource`` if it is another server, or has lost what comes next.
    """
    server, chain = server_facts(dsn), end_of_chain(store, epoch)
    slot = slot_facts(connection, epoch.facts.slot) if epoch.facts else None
    resume = resume_point(epoch, chain, server, wal_clock(connection).flushed, slot)
    # Check that ``connection``, which was used above, leads to the same server.
    require_source(connection, epoch)
    return resume


@dataclass(frozen=True)
class StreamReading:
    """Reads the stream of ``epoch``. ``epoch.landed`` is called with each batch when it is durable.

    Each batch is then also confirmed, unless the source has gone away. Tables that are handed over to
    ``tables`` meanwhile are added. ``connection``: for SQL. ``scratch``: a folder with room for transactions
    in progress. ``proved``: set as soon as the stream is known to continue what has landed.
    """

    epoch: CapturedEpoch
    tables: CapturedTables
    connection: Connection
    scratch: Path
    proved: threading.Event = field(default_factory=threading.Event)

    def follow(self, until: Lsn | None, stop: threading.Event) -> None:
        """Read until all that committed below ``until`` is durable (None: no end), or ``stop`` is set.

        Raises as ``Follower.run`` does, but not ``RollbackUnclear`` or ``SpoolFailed``.
        """
        keep_freed_memory()
        if self.epoch.settings.stream_transactions and self.connection.server_version >= _STREAMS_IN_PROGRESS:
            try:
                return self._follow(until, stop, in_progress=True)
            except (RollbackUnclear, SpoolFailed) as reason:
                _log.warning("%s Until the next start, transactions are read after their commit.", reason)
                wait_until_free(self.connection, self.epoch.slot, SLOT_WAIT_SECONDS)
        return self._follow(until, stop, in_progress=False)

    def _follow(self, until: Lsn | None, stop: threading.Event, *, in_progress: bool) -> None:
        epoch, tables = self.epoch, self.tables
        resume = prove_continuity(epoch.dsn, self.connection, epoch.store, epoch.record)
        batches = StreamBatches(epoch.store, epoch.grid, epoch.number, resume.end_of_chain, epoch.settings)
        batches.recovered_from = resume.recovered_from
        if resume.proved:
            self.proved.set()
        if until is not None and batches.end >= until and resume.proved:
            return
        if resume.recovered_from is not None:
            require_recovery(epoch.settings, resume.recovered_from, resume.end_of_chain)
        _log_start(resume)
        keys = tables.keys
        partitioned = PartitionedTables(self.connection, keys)
        changes = ChangeCollector(epoch.number, keys, lambda relation: partitioned.has(relation.oid))
        stream = self._open(resume, in_progress=in_progress)
        messages = InProgress(stream.read, self.scratch, stream.rows, stream.transactions)
        try:
            # From now on nobody else can move the slot. Check that nobody has moved it since the proof.
            if (slot := slot_facts(self.connection, epoch.slot)) is not None:
                require_unmoved(slot, resume.end_of_chain)
            roots = PartitionRoots(
                self.connection, epoch.store.folder, epoch.number, tables.all, epoch.published.lost
            )
            follower = Follower(
                OpenStream(stream, messages, self.connection, resume),
                FollowedTables(tables, epoch.published, epoch.schemas, roots),
                changes,
                batches,
                epoch.landed,
                self.proved.set,
            )
            try:
                follower.run(until, stop)
            except (RollbackUnclear, SpoolFailed, GapInSource):
                # The connection is intact. End it in order, so that the next stream can start at once.
                stream.end()
                raise
            stream.end()
        finally:
            messages.close()
            stream.close()

    def _open(self, resume: ResumePoint, *, in_progress: bool) -> WalStream:
        epoch, settings = self.epoch, self.epoch.settings
        wait_until_free(self.connection, epoch.slot, SLOT_WAIT_SECONDS)
        decoding_memory = settings.stream_above_bytes if in_progress else None
        replication = connect_replication(epoch.dsn, decoding_memory=decoding_memory)
        if epoch.record.facts is not None:
            server = identify(replication)
            require_same_server(
                epoch.record.facts, server.system_identifier, server.timeline, server.database
            )
        return WalStream(
            replication,
            epoch.slot,
            settings.publication,
            resume.start,
            in_progress=in_progress,
            max_row_bytes=settings.max_row_bytes,
        )


def _log_start(resume: ResumePoint) -> None:
    if resume.resent is not None:
        _log.info("continuing at %s: the last landed transaction must be sent again", resume.start)
    else:
        _log.info(
            "continuing at %s by the weaker proof: the slot stands where a batch ends; nothing may be "
            "sent below %s, the end of the chain",
            resume.start,
            resume.end_of_chain,
        )
