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

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings, SnapshotMode
from omnisupport_ingest.sources.postgres.capture_record import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.captured_tables import CapturedTables
from omnisupport_ingest.sources.postgres.compared_reading import Lake, Recovered
from omnisupport_ingest.sources.postgres.connection import connect
from omnisupport_ingest.sources.postgres.epoch_start import EpochStart
from omnisupport_ingest.sources.postgres.errors import AnotherSource, HoleInSource, TableInterrupted
from omnisupport_ingest.sources.postgres.lease import Lease
from omnisupport_ingest.sources.postgres.new_tables import NewTables
from omnisupport_ingest.sources.postgres.pause import PauseNote, StopOrPause
from omnisupport_ingest.sources.postgres.preflight import require_ready
from omnisupport_ingest.sources.postgres.publication import ensure_publication
from omnisupport_ingest.sources.postgres.published import PublishedTables
from omnisupport_ingest.sources.postgres.restart import RestartNote, StopOrRestart
from omnisupport_ingest.sources.postgres.slot_making import SlotNotMade
from omnisupport_ingest.sources.postgres.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.snapshot_requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshots_beside import SnapshotsBeside
from omnisupport_ingest.sources.postgres.source_check import NO_PROOF, contracted_tables
from omnisupport_ingest.sources.postgres.source_dsn import source_dsn
from omnisupport_ingest.sources.postgres.stream_reading import StreamReading, prove_source

_log = logging.getLogger(__name__)

_PROOF = Lsn(0)
"""As a goal: only see that the stream continues what has landed."""

_REMEMBERED = 1000
"""Manifests that are kept in memory. Capture reads every one that it has landed once more, for months."""

Landed = Callable[[Manifest], None]
"""Called with each batch once it is durable (and, for a batch of the stream, confirmed)."""


def capture_once(
    settings: Settings, home: Home, contracts: Contracts, until: Lsn, landed: Landed | None = None
) -> None:
    """Capture until everything that committed below ``until`` is durable in landing."""
    Capture(settings, home, contracts, landed).run(until, threading.Event())


class Capture:
    """The capture of one PostgreSQL source into one home."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        contracts: Contracts,
        landed: Landed | None = None,
        contracts_again: Callable[[], Contracts] | None = None,
    ) -> None:
        """Opens nothing yet. ``IngestError`` if the source has no contract, so nothing to capture.

        ``contracts_again`` reads them anew, where a table without one is asked for while this runs; null:
        they stay as they are.
        """
        self._settings, self._home = settings, home
        self._landed: Landed = landed or (lambda _batch: None)
        self._captured = CapturedTables(contracted_tables(contracts, settings.source))
        self._contracts_again = contracts_again or (lambda: contracts)
        self._store = LandingStore(home.landing, settings.source, remembered=_REMEMBERED)
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
            self._store.make_names_durable()
            dsn = source_dsn(self._settings, self._home)
            connection = connect(dsn)
            try:
                epoch = self._prepare(dsn, connection, stop)
                ready_to_capture()
                try:
                    self._capture(dsn, connection, epoch, until, stop)
                except HoleInSource as hole:
                    epoch = self._after_hole(dsn, connection, hole, stop)
                    self._capture(dsn, connection, epoch, until, stop)
            except SlotNotMade:
                _log.info("stopped before the replication slot was made")
            finally:
                connection.close()
        pause.raise_if_paused(source)
        if restart is not None:
            restart.raise_if_asked(source)

    def check(self) -> None:
        """Raise what a person must change before capture can begin; changes nothing.

        ``PreflightFailed`` with every finding, ``BadDsn``, ``SourceRefused``, or ``SourceUnavailable``.
        """
        require_ready(self._epochs().findings(source_dsn(self._settings, self._home)))

    def begin_new_epoch(
        self, reason: str, *, loss_accepted_by: str | None = None, stop: threading.Event | None = None
    ) -> EpochRecord:
        """The repair of a hole: a new slot and a new epoch. The next ``run`` takes new snapshots.

        Everything that has landed stays. ``reason`` is recorded with the epoch. ``loss_accepted_by``: who
        has decided that the tables read before are not read again; a note then names what may be missing.
        ``SlotNotMade`` if ``stop`` came first.
        """
        with Lease.take(self._home.run, self._settings.source):
            dsn = source_dsn(self._settings, self._home)
            return self._epochs(stop).next(dsn, reason, loss_accepted_by=loss_accepted_by)

    def recover(
        self, reason: str, lake: Lake, stop: threading.Event, told: Callable[[Recovered], None]
    ) -> tuple[EpochRecord, bool]:
        """The repair of a hole that reads only what the lake has not: a new slot and a new epoch.

        ``told`` hears of each table that is done. Returns the epoch, and whether all were; the others are
        read whole by the next ``run``, also if this raises. Changes nothing before ``lake`` can be held.
        ``SlotNotMade`` if ``stop`` came before the epoch began.
        """
        with Lease.take(self._home.run, self._settings.source):
            lake.pin()
            dsn = source_dsn(self._settings, self._home)
            epoch = self._epochs(stop).next(dsn, reason)
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

    @property
    def _tables(self) -> tuple[TableContract, ...]:
        return self._captured.all

    def _epochs(self, stop: threading.Event | None = None) -> EpochStart:
        return EpochStart(self._settings, self._store, self._tables, stop)

    def _last_landed(self) -> datetime | None:
        epoch = self._store.current_epoch()
        last = self._store.last_stream(epoch.number) if epoch is not None else None
        return last.arrival.landed_at if last is not None else None

    def _prepare(self, dsn: str, connection: Connection, stop: threading.Event) -> EpochRecord:
        try:
            return self._prepared(dsn, connection, stop)
        except HoleInSource as hole:
            return self._after_hole(dsn, connection, hole, stop)

    def _after_hole(
        self, dsn: str, connection: Connection, hole: HoleInSource, stop: threading.Event
    ) -> EpochRecord:
        """The epoch to go on in after ``hole``, where the settings leave that to us; else ``hole`` is raised.

        A new one, but after a hole in single tables: those are read again.
        """
        by_itself = self._settings.snapshot_mode is SnapshotMode.WHEN_NEEDED
        if not by_itself or isinstance(hole, AnotherSource):
            raise hole
        if isinstance(hole, TableInterrupted):
            self._ask_to_read(hole)
            return self._prepared(dsn, connection, stop)
        _log.warning("%s A new epoch begins, as the snapshot mode is when_needed.", hole.problem)
        self._epochs(stop).next(dsn, hole.problem)
        return self._prepared(dsn, connection, stop)

    def _prepared(self, dsn: str, connection: Connection, stop: threading.Event) -> EpochRecord:
        found = self._epochs().findings(dsn)
        epoch = self._store.current_epoch()
        if epoch is not None and not {each.check for each in found} & NO_PROOF:
            # A slot that is gone or not ours is found now: before anything changes at the source, and
            # before it is told what another server lacks.
            prove_source(dsn, connection, self._store, epoch)
            self._published(epoch).require_publication(connection)
        require_ready(found)
        self._store.clear_garbage()
        # Before any slot of a snapshot: what commits above its point must be published already.
        ensure_publication(connection, self._settings.publication, self._tables)
        if epoch is None:
            epoch = self._epochs(stop).first(dsn, connection)
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
        stream = StreamReading(
            self._settings,
            self._home,
            self._store,
            epoch,
            self._captured,
            published,
            dsn,
            connection,
            self._tell,
        )
        if until is not None:
            stream.follow(_PROOF, stop)
            if not stream.proved.is_set():
                return
            snapshots.look_at_partitions(stop)
            # The tables are whole once the stream has passed all that their chunks saw.
            goal: Lsn | None = max(until, snapshots.take(stop) or until)
            while goal is not None and not stop.is_set():
                stream.follow(goal, stop)
                goal = snapshots.read_moved(stop)
                if goal is None and snapshots.watches_partitions:
                    goal = snapshots.look_at_partitions(stop) or snapshots.take(stop)
            published.require_same(connection, last=True)
            return
        new = NewTables(
            dsn,
            epoch,
            self._store,
            self._settings,
            self._contracts_again,
            self._captured,
            published,
            snapshots,
        )
        with SnapshotsBeside(snapshots, new, stop, stream.proved) as beside:
            stream.follow(None, beside.stop)
        beside.raise_failure()

    def _snapshots(self, dsn: str, epoch: EpochRecord, published: PublishedTables) -> Snapshots:
        return Snapshots(
            dsn, self._store, self._home.grid, epoch, self._tables, self._settings, published, self._tell
        )

    def _tell(self, batch: Manifest) -> None:
        """Snapshots and stream land on threads of their own; who is told is told of one batch at a time."""
        with self._telling:
            self._landed(batch)
