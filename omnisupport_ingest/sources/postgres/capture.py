"""Capture: from a configured source to landed batches, started, stopped and killed at any moment.

What has landed says where to go on; nothing else is remembered. So a start is the same after a
clean stop, a crash of this process, or a crash of the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import datetime

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings, SnapshotMode
from omnisupport_ingest.sources.postgres.capture_record import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.changes import EventReader
from omnisupport_ingest.sources.postgres.compared_reading import Lake, Recovered
from omnisupport_ingest.sources.postgres.connection import (
    VALUE_SETTINGS,
    connect,
    connect_replication,
    with_silence,
)
from omnisupport_ingest.sources.postgres.continuity import (
    ResumePoint,
    require_same_server,
    require_unmoved,
    resume_point,
)
from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.errors import (
    AnotherSource,
    HoleInSource,
    SourceUnavailable,
    TableInterrupted,
)
from omnisupport_ingest.sources.postgres.follower import Follower
from omnisupport_ingest.sources.postgres.home_slot import (
    ExpectedSlot,
    Presence,
    SlotIntent,
    end_of_chain,
    expected_slot,
)
from omnisupport_ingest.sources.postgres.in_progress import Doubtful, InProgress
from omnisupport_ingest.sources.postgres.kept_transaction import NotKept
from omnisupport_ingest.sources.postgres.lease import Lease
from omnisupport_ingest.sources.postgres.partitions import is_partitioned
from omnisupport_ingest.sources.postgres.pause import PauseNote, StopOrPause
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, preflight, require_ready
from omnisupport_ingest.sources.postgres.publication import ensure_publication
from omnisupport_ingest.sources.postgres.published import PublishedTables
from omnisupport_ingest.sources.postgres.recovery import require_recovery
from omnisupport_ingest.sources.postgres.restart import RestartNote, StopOrRestart
from omnisupport_ingest.sources.postgres.same_server import require_source
from omnisupport_ingest.sources.postgres.server import (
    identify,
    server_facts,
    slot_facts,
    wait_until_free,
    wal_clock,
)
from omnisupport_ingest.sources.postgres.slot import create_slot, drop_slot, slot_taken
from omnisupport_ingest.sources.postgres.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.snapshot_requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshots_beside import SnapshotsBeside
from omnisupport_ingest.sources.postgres.source_check import NO_PROOF, contracted_tables
from omnisupport_ingest.sources.postgres.stream_batches import StreamBatches
from omnisupport_ingest.sources.postgres.walstream import WalStream

_log = logging.getLogger(__name__)

SLOT_WAIT_SECONDS = 10.0
"""How long a start waits for the server to notice that the slot's last reader has died."""

_PROOF = Lsn(0)
"""As a goal: only see that the stream continues what has landed."""

Landed = Callable[[Manifest], None]
"""Called with each batch once it is durable (and, for a batch of the stream, confirmed)."""


def source_dsn(settings: Settings, home: Home) -> str:
    """The connection string of the source: the configured one, else the embedded server's.

    ``SourceUnavailable`` if that server is not running.
    """
    if settings.source_dsn is not None:
        return with_silence(settings.source_dsn.get_secret_value(), settings.source_silence_seconds)
    server = EmbeddedPostgres(home.postgres)
    if not server.running:
        raise SourceUnavailable(
            f"The embedded PostgreSQL of {home.path} is not running.",
            fix="Start it with the platform: omnisupport-ingest up",
        )
    return with_silence(server.dsn(), settings.source_silence_seconds)


def capture_once(
    settings: Settings, home: Home, contracts: Contracts, until: Lsn, landed: Landed | None = None
) -> None:
    """Capture until everything that committed below ``until`` is durable in landing."""
    Capture(settings, home, contracts, landed).run(until, threading.Event())


class Capture:
    """The capture of one PostgreSQL source into one home."""

    def __init__(
        self, settings: Settings, home: Home, contracts: Contracts, landed: Landed | None = None
    ) -> None:
        """Opens nothing yet. ``IngestError`` if the source has no contract, so nothing to capture."""
        self._settings, self._home = settings, home
        self._landed: Landed = landed or (lambda _batch: None)
        self._tables = contracted_tables(contracts, settings.source)
        self._keys = {(table.schema, table.table): table.key for table in self._tables}
        self._store = LandingStore(home.landing, settings.source)
        self._slot_intent = SlotIntent(self._store.folder)
        self._telling = threading.Lock()

    def run(self, until: Lsn | None, stop: threading.Event) -> None:
        """Capture until all that committed below ``until`` is durable (null: for ever), or ``stop``.

        Prepares what is missing first: publication, slot, epoch, snapshots of tables that have
        none in this epoch. How it ends is recorded (``capture_record``). Raises ``CaptureRunning``,
        ``CapturePaused``, ``CaptureRestarts`` (call it again; only without ``until``),
        ``PreflightFailed``, ``SourceRefused``, ``SlotInUse``, ``HoleInSource``, ``SourceUnavailable``
        (start again later), ``ChainContested``.
        """
        source, folder = self._settings.source, self._store.folder
        pause = StopOrPause(stop, PauseNote(folder))
        pause.raise_if_paused(source)
        restart: StopOrRestart | None = None
        with (
            Lease.take(self._home.run, source),
            recorded(
                CaptureRecords(folder), follows=until is None, last_landed=self._last_landed
            ) as ready_to_capture,
        ):
            stop = pause
            if until is None:
                note = RestartNote(folder)
                note.clear()
                stop = restart = StopOrRestart(pause, note)
            dsn = source_dsn(self._settings, self._home)
            connection = connect(dsn)
            try:
                epoch = self._prepare(dsn, connection)
                ready_to_capture()
                try:
                    self._capture(dsn, connection, epoch, until, stop)
                except HoleInSource as hole:
                    epoch = self._after_hole(dsn, connection, hole)
                    self._capture(dsn, connection, epoch, until, stop)
            finally:
                connection.close()
        pause.raise_if_paused(source)
        if restart is not None:
            restart.raise_if_asked(source)

    def check(self) -> None:
        """Raise what a person must change before capture can begin; changes nothing.

        ``PreflightFailed`` with every finding, ``BadDsn``, ``SourceRefused``, or ``SourceUnavailable``.
        """
        self._require_ready(
            source_dsn(self._settings, self._home), expected_slot(self._store, self._settings.slot)
        )

    def begin_new_epoch(self, reason: str, *, loss_accepted_by: str | None = None) -> EpochRecord:
        """The repair of a hole: a new slot and a new epoch. The next ``run`` takes new snapshots.

        Everything that has landed stays. ``reason`` is recorded with the epoch. ``loss_accepted_by``: who
        has decided that the tables read before are not read again; a note then names what may be missing.
        """
        with Lease.take(self._home.run, self._settings.source):
            before = self._store.current_epoch()
            lost_from = end_of_chain(self._store, before).end if before is not None else None
            epoch = self._new_epoch(source_dsn(self._settings, self._home), reason)
            if loss_accepted_by is not None:
                lost_to = epoch.facts.consistent_point if epoch.facts is not None else None
                parted = lost_from is not None and lost_to is not None and lost_to < lost_from
                AcceptedLosses(self._store.folder).accept(
                    epoch.number,
                    loss_accepted_by,
                    reason,
                    lost_from,
                    lost_to,
                    of_another_history=parted or (before is not None and not _same_history(before, epoch)),
                )
            return epoch

    def recover(
        self, reason: str, lake: Lake, stop: threading.Event, told: Callable[[Recovered], None]
    ) -> tuple[EpochRecord, bool]:
        """The repair of a hole that reads only what the lake has not: a new slot and a new epoch.

        ``told`` hears of each table that is done. Returns the epoch, and whether all were; the others are
        read whole by the next ``run``, also if this raises. Changes nothing before ``lake`` can be held.
        """
        with Lease.take(self._home.run, self._settings.source):
            lake.pin()
            dsn = source_dsn(self._settings, self._home)
            epoch = self._new_epoch(dsn, reason)
            published = self._published(epoch)
            with closing(connect(dsn)) as connection:
                published.begin(connection)
            snapshots = self._snapshots(dsn, epoch, published)
            for table in self._tables:
                with lake.rows(table) as rows:
                    recovered = snapshots.recover(table, rows, reason, stop)
                if recovered is None:
                    return epoch, False
                told(recovered)
            return epoch, True

    def _new_epoch(self, dsn: str, reason: str) -> EpochRecord:
        slot = self._slot_of_new_epoch(dsn)
        self._require_ready(dsn, slot)
        connection = connect(dsn)
        try:
            ensure_publication(connection, self._settings.publication, self._tables)
            if slot.presence is Presence.EITHER:
                wait_until_free(connection, slot.name, SLOT_WAIT_SECONDS)
                drop_slot(connection, slot.name)
            return self._begin_epoch(dsn, connection, reason)
        finally:
            connection.close()

    def _last_landed(self) -> datetime | None:
        epoch = self._store.current_epoch()
        last = self._store.last_stream(epoch.number) if epoch is not None else None
        return last.arrival.landed_at if last is not None else None

    def _slot_of_new_epoch(self, dsn: str) -> ExpectedSlot:
        """The configured slot. It is made anew; one that this home has not made is not its to drop."""
        slot, server = self._settings.slot, server_facts(dsn).system_identifier
        ours = self._slot_intent.covers(slot) or any(
            each.facts is not None and (each.facts.slot, each.facts.system_identifier) == (slot, server)
            for each in self._store.epochs()
        )
        return ExpectedSlot(slot, Presence.EITHER if ours else Presence.FREE)

    def _prepare(self, dsn: str, connection: Connection) -> EpochRecord:
        try:
            return self._prepared(dsn, connection)
        except HoleInSource as hole:
            return self._after_hole(dsn, connection, hole)

    def _after_hole(self, dsn: str, connection: Connection, hole: HoleInSource) -> EpochRecord:
        """The epoch to go on in after ``hole``, where the settings leave that to us; else ``hole`` is raised.

        A new one, but after a hole in single tables: those are read again.
        """
        by_itself = self._settings.snapshot_mode is SnapshotMode.WHEN_NEEDED
        if not by_itself or isinstance(hole, AnotherSource):
            raise hole
        if isinstance(hole, TableInterrupted):
            self._ask_to_read(hole)
            return self._prepared(dsn, connection)
        _log.warning("%s A new epoch begins, as the snapshot mode is when_needed.", hole.problem)
        self._new_epoch(dsn, hole.problem)
        return self._prepared(dsn, connection)

    def _prepared(self, dsn: str, connection: Connection) -> EpochRecord:
        found = self._findings(dsn, expected_slot(self._store, self._settings.slot))
        epoch = self._store.current_epoch()
        if epoch is not None and not {each.check for each in found} & NO_PROOF:
            # A slot that is gone or not ours is found now: before anything changes at the source, and
            # before it is told what another server lacks.
            self._resume_point(dsn, connection, epoch)
            self._published(epoch).require_publication(connection)
        require_ready(found)
        self._store.clear_garbage()
        # Before any slot of a snapshot: what commits above its point must be published already.
        ensure_publication(connection, self._settings.publication, self._tables)
        if epoch is None:
            if self._slot_intent.covers(self._settings.slot):
                # A first start died between making the slot and recording its epoch.
                drop_slot(connection, self._settings.slot)
            epoch = self._begin_epoch(dsn, connection, "first start")
        self._require_published(connection, self._published(epoch))
        return epoch

    def _require_published(self, connection: Connection, published: PublishedTables) -> None:
        try:
            published.begin(connection)
        except TableInterrupted as interrupted:
            if self._settings.snapshot_mode is not SnapshotMode.WHEN_NEEDED:
                raise
            self._ask_to_read(interrupted)
            published.begin(connection)

    def _ask_to_read(self, interrupted: TableInterrupted) -> None:
        _log.warning("%s It is read again, as the snapshot mode is when_needed.", interrupted.problem)
        requests = SnapshotRequests(self._store.folder)
        for name in interrupted.tables:
            requests.write(name, interrupted.problem)

    def _require_ready(self, dsn: str, slot: ExpectedSlot) -> None:
        require_ready(self._findings(dsn, slot))

    def _findings(self, dsn: str, slot: ExpectedSlot) -> tuple[Finding, ...]:
        found = preflight(
            dsn,
            self._tables,
            publication=self._settings.publication,
            slot=slot,
            slot_wait_seconds=SLOT_WAIT_SECONDS,
        )
        for each in found:
            if each.severity is Severity.WARNS:
                _log.warning("%s Fix: %s", each.problem, each.fix)
        return found

    def _begin_epoch(self, dsn: str, connection: Connection, reason: str) -> EpochRecord:
        slot = self._settings.slot
        if slot_facts(connection, slot) is not None:
            raise slot_taken(slot)
        self._slot_intent.record(slot)
        point = create_slot(dsn, slot)
        server = server_facts(dsn)
        facts = EpochFacts(
            server.system_identifier,
            server.timeline,
            slot,
            point,
            server.database,
            server.version,
            dict(VALUE_SETTINGS),
        )
        epoch = self._store.begin_epoch(reason, facts)
        self._slot_intent.clear()
        return epoch

    def _published(self, epoch: EpochRecord) -> PublishedTables:
        requests = SnapshotRequests(self._store.folder)
        return PublishedTables(
            self._store.folder,
            epoch.number,
            self._settings.publication,
            self._tables,
            lambda: requests.whole_tables().keys(),
        )

    def _capture(
        self, dsn: str, connection: Connection, epoch: EpochRecord, until: Lsn | None, stop: threading.Event
    ) -> None:
        published = self._published(epoch)
        snapshots = self._snapshots(dsn, epoch, published)
        if self._settings.snapshot_mode is SnapshotMode.SCHEMA_ONLY:
            snapshots.land_schemas(connection)
        proved = threading.Event()
        if until is not None:
            self._follow(dsn, connection, epoch, _PROOF, stop, proved, published)
            if not proved.is_set():
                return
            snapshots.look_at_partitions(stop)
            # The tables are whole once the stream has passed all that their chunks saw.
            goal: Lsn | None = max(until, snapshots.take(stop) or until)
            while goal is not None and not stop.is_set():
                self._follow(dsn, connection, epoch, goal, stop, proved, published)
                goal = snapshots.read_moved(stop)
                if goal is None and snapshots.watches_partitions:
                    goal = snapshots.look_at_partitions(stop) or snapshots.take(stop)
            published.require_same(connection)
            return
        with SnapshotsBeside(snapshots, stop, proved) as beside:
            self._follow(dsn, connection, epoch, None, beside.stop, proved, published)
        beside.raise_failure()

    def _snapshots(self, dsn: str, epoch: EpochRecord, published: PublishedTables) -> Snapshots:
        return Snapshots(
            dsn, self._store, self._home.grid, epoch, self._tables, self._settings, published, self._tell
        )

    def _tell(self, batch: Manifest) -> None:
        """Snapshots and stream land on threads of their own; who is told is told of one batch at a time."""
        with self._telling:
            self._landed(batch)

    def _follow(
        self,
        dsn: str,
        connection: Connection,
        epoch: EpochRecord,
        until: Lsn | None,
        stop: threading.Event,
        proved: threading.Event,
        published: PublishedTables,
    ) -> None:
        # Older servers send nothing of a transaction before it has committed.
        if self._settings.stream_transactions and connection.server_version >= 140000:
            try:
                return self._stream(dsn, connection, epoch, until, stop, proved, published, in_progress=True)
            except (Doubtful, NotKept) as reason:
                _log.warning("%s Until the next start, transactions are read after their commit.", reason)
                wait_until_free(connection, epoch.facts.slot if epoch.facts else "", SLOT_WAIT_SECONDS)
        return self._stream(dsn, connection, epoch, until, stop, proved, published, in_progress=False)

    def _stream(
        self,
        dsn: str,
        connection: Connection,
        epoch: EpochRecord,
        until: Lsn | None,
        stop: threading.Event,
        proved: threading.Event,
        published: PublishedTables,
        *,
        in_progress: bool,
    ) -> None:
        resume = self._resume_point(dsn, connection, epoch)
        batches = StreamBatches(
            self._store, self._home.grid, epoch.number, resume.end_of_chain, self._settings
        )
        batches.recovered_from = resume.recovered_from
        if resume.proved:
            proved.set()
        if until is not None and batches.end >= until and resume.proved:
            return
        if resume.recovered_from is not None:
            require_recovery(self._settings, resume.recovered_from, resume.end_of_chain)
        if resume.resent is not None:
            _log.info("continuing at %s: the last landed transaction must be sent again", resume.start)
        else:
            _log.info(
                "continuing at %s by the weaker proof: the slot stands where a batch ends; nothing may be "
                "sent below %s, the end of the chain",
                resume.start,
                resume.end_of_chain,
            )
        slot, publication = epoch.facts.slot if epoch.facts else "", self._settings.publication
        events = EventReader(
            epoch.number,
            lambda schema, table: self._keys.get((schema, table)),
            lambda relation: is_partitioned(connection, relation.oid),
        )
        wait_until_free(connection, slot, SLOT_WAIT_SECONDS)
        decoding_memory = self._settings.stream_above_bytes if in_progress else None
        replication = connect_replication(dsn, decoding_memory=decoding_memory)
        if epoch.facts is not None:
            here = identify(replication)
            require_same_server(epoch.facts, here.system_identifier, here.timeline, here.database)
        stream = WalStream(replication, slot, publication, resume.start, in_progress=in_progress)
        messages = InProgress(stream.read, self._home.run)
        try:
            # Nobody else can move the slot from here on, but somebody may have since it was looked at.
            if (held := slot_facts(connection, slot)) is not None:
                require_unmoved(held, resume.end_of_chain)
            told = self._tell, proved.set
            follower = Follower(stream, messages, connection, batches, events, resume, published, *told)
            follower.run(until, stop)
        finally:
            messages.close()
            stream.close()

    def _resume_point(self, dsn: str, connection: Connection, epoch: EpochRecord) -> ResumePoint:
        server, chain = server_facts(dsn), end_of_chain(self._store, epoch)
        slot = slot_facts(connection, epoch.facts.slot) if epoch.facts else None
        resume = resume_point(epoch, chain, server, wal_clock(connection).flushed, slot)
        # What was asked here was asked of the same server.
        require_source(connection, epoch)
        return resume


def _same_history(one: EpochRecord, other: EpochRecord) -> bool:
    """Whether two epochs are of one server and timeline, so that their LSNs can be compared."""
    if one.facts is None or other.facts is None:
        return False
    return (one.facts.system_identifier, one.facts.timeline, one.facts.database) == (
        other.facts.system_identifier,
        other.facts.timeline,
        other.facts.database,
    )
