"""Captures a configured source into landed batches. It may be stopped or killed at any moment.

Capture continues where landing ends; that is all it needs to know. So a start is the same after a clean stop,
a crash of this process, or a crash of the server.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.contracts.subject_keys import FILE as SUBJECT_KEYS
from omnisupport_ingest.contracts.subject_keys import SubjectKeys
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.schema_changes import SchemaChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings, SnapshotMode
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest.sources.postgres.capture.added_tables import AddedTables, SnapshotThread
from omnisupport_ingest.sources.postgres.capture.epoch_start import EpochStart
from omnisupport_ingest.sources.postgres.capture.outdated import contracts_at_start, definition_at_start
from omnisupport_ingest.sources.postgres.capture.parked import (
    TABLE_FAULTS,
    ParkedTable,
    ParkedTables,
    TableFault,
    TableFaults,
    changed_columns,
    followed_anyway,
    highest_read,
    left_out,
    ready_tables,
)
from omnisupport_ingest.sources.postgres.capture.requests import (
    PauseRequest,
    RestartRequest,
    StopOrPause,
    StopOrRestart,
)
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.catalog.publication import ensure_publication
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables, recorded_tables
from omnisupport_ingest.sources.postgres.catalog.schema_watch import SchemaWatch
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.sources.postgres.preflight import Finding
from omnisupport_ingest.sources.postgres.preflight.source_check import NO_PROOF, contracted_tables
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import (
    AnotherSource,
    GapInSource,
    NotOurSlot,
    SlotMoved,
    SourceRefused,
    TableDropped,
    TableMissedChanges,
)
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.sources.postgres.session.server import wal_clock
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeIdentity
from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Lake, Recovered
from omnisupport_ingest.sources.postgres.snapshot.landed_key import (
    begin_keys,
    behind_their_snapshots,
    other_landed_keys,
    settle_keys,
    waiting_tables,
)
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch, CapturedTables
from omnisupport_ingest.sources.postgres.stream.reading import StreamReading, prove_continuity

_log = logging.getLogger(__name__)

_MAX_PREPARATIONS = 5
"""How many times, at most, a start begins again because a table was dropped meanwhile."""

_PROOF = Lsn(0)
"""A goal that is reached as soon as the stream has proved that it continues what has landed."""

_MANIFESTS_IN_MEMORY = 1000
"""Largest number of manifests kept in memory, because a capture may run for months; and two for each table: a
start asks several times for the first chunk and the end of its snapshot."""

OnLanded = Callable[[Manifest], None]
"""Called with each batch when it is durable. A batch of the stream is then also confirmed, unless the source
has gone away."""


def capture_once(
    settings: Settings, home: Home, contracts: Contracts, until: Lsn, landed: OnLanded | None = None
) -> IngestError | None:
    """Capture until everything that committed below ``until`` is durable in landing.

    Returns the error about tables that were left out, as ``Capture.left_out`` does. Raises as ``Capture.run``
    does.
    """
    once = Capture(settings, home, contracts, landed)
    once.run(until, threading.Event())
    return once.left_out


@dataclass(frozen=True, slots=True)
class _Session:
    """What one run works with: the source's DSN, a connection for SQL, and the event that stops the run."""

    dsn: str
    connection: Connection
    stop: threading.Event


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which tables a start captures. ``wrong``: those with blocking ``findings``, name → problem."""

    ready: tuple[TableContract, ...]
    wrong: Mapping[str, str]
    findings: Sequence[Finding]


class Capture:
    """The capture of one PostgreSQL source into one home."""

    def __init__(
        self,
        settings: Settings,
        home: Home,
        contracts: Contracts,
        landed: OnLanded | None = None,
        contracts_again: Callable[[], Contracts] | None = None,
    ) -> None:
        """Prepare the capture; connect to nothing yet. Raises ``IngestError`` if the source has no contract.

        ``landed``: called with each batch when it is durable. ``contracts_again``: reads the contracts again
        when a table without one is requested; None: use ``contracts``.
        """
        self._settings, self._home = settings, home
        self._landed: OnLanded = landed or (lambda _batch: None)
        self._contracted = contracted_tables(contracts, settings.source)
        self._definition = definition_at_start(settings)
        self._contracts = contracts_at_start(self._contracted)
        self._captured = CapturedTables(self._contracted)
        self._contracts_again = contracts_again or (lambda: contracts)
        self._reread_contracts: tuple[TableContract, ...] = ()
        self._encrypting = encrypting = EncryptedLanding(
            settings.source,
            SubjectKeys(home.path / SUBJECT_KEYS),
            lambda: (*self._reread_contracts, *self._contracted, *self._captured.all),
        )
        self._store = LandingStore(
            home.landing,
            settings.source,
            remembered=_MANIFESTS_IN_MEMORY + 2 * len(self._contracted),
            as_landed=encrypting,
            divisions_as_landed=encrypting.divisions,
        )
        self._faults = TableFaults(self._store, settings.snapshot_mode)
        self._identity = HomeIdentity(home)
        self._schema_changes = SchemaChanges(self._store.folder)
        self._landed_lock = threading.Lock()
        self._tables_checked_from = Lsn(0)

    def run(self, until: Lsn | None, stop: threading.Event) -> None:
        """Capture until all that committed below ``until`` is durable (None: no end), or ``stop`` is set.

        First creates what is missing: publication, slot, epoch, and snapshots of tables without one in this
        epoch. Leaves out tables that cannot be followed (see ``raise_left_out``). The record of the capture
        keeps how the run ended. Raises ``CaptureRunning``, ``CapturePaused``, ``CaptureRestarts`` (call it
        again; only without ``until``), ``PreflightFailed``, ``SourceRefused``, ``SlotInUse``,
        ``GapInSource``, ``SourceUnavailable`` (start again later), ``ChainContested``.
        """
        source, folder = self._settings.source, self._store.folder
        pause = StopOrPause(stop, PauseRequest(folder))
        pause.raise_if_paused(source)
        restart: StopOrRestart | None = None
        with (
            closing(self._encrypting),
            take_lease(self._home.run, source),
            recorded(
                CaptureRecords(folder),
                follows=until is None,
                last_landed=self._last_landed,
                definition=self._definition,
                contracts=self._contracts,
            ) as ready_to_capture,
        ):
            stop = pause
            if until is None:
                request = RestartRequest(folder)
                request.clear()
                stop = restart = StopOrRestart(pause, request)
            self._identity.require_original()
            self._store.make_names_durable()
            dsn = source_dsn(self._settings, self._home)
            with closing(connect(dsn)) as connection:
                session = _Session(dsn, connection, stop)
                try:
                    epoch = self._prepare(session)
                    ready_to_capture()
                    self._follow(session, epoch, until)
                except SlotNotMade:
                    _log.info("stopped before the replication slot was made")
        pause.raise_if_paused(source)
        if restart is not None:
            restart.raise_if_requested(source)

    def check(self) -> None:
        """Raise the error about what a person must change before capture can begin. Changes nothing.

        Raises ``PreflightFailed`` with every finding that prevents the capture of all tables, ``BadDsn``,
        ``SourceRefused``, ``SourceUnavailable`` or ``HomeCopied``.
        """
        self._identity.look()
        ready_tables(self._epoch_start().findings(source_dsn(self._settings, self._home)), self._tables)

    @property
    def left_out(self) -> IngestError | None:
        """The error about tables that the last ``run`` or new epoch left out; None if there were none.

        ``PreflightFailed`` if the start found the fault, else ``TableMissedChanges``. The other tables have
        landed as far as possible.
        """
        return self._faults.left_out

    def raise_left_out(self) -> None:
        """Raise ``left_out`` if it is not None."""
        if self.left_out is not None:
            raise self.left_out

    def begin_new_epoch(
        self, reason: str, *, loss_accepted_by: str | None = None, stop: threading.Event | None = None
    ) -> EpochRecord:
        """Repair a gap with a new slot and a new epoch; the next ``run`` takes new snapshots.

        Everything that has landed stays. The epoch records ``reason``. ``loss_accepted_by``: the person who
        decided that tables read before are not read again; a record then names what may be missing.
        ``left_out`` names the tables that the next ``run`` will leave out. Raises ``SlotNotMade`` if ``stop``
        is set first.
        """
        stop = stop or threading.Event()
        with take_lease(self._home.run, self._settings.source):
            self._identity.require_original()
            dsn = source_dsn(self._settings, self._home)
            epoch = self._epoch_start(stop).next(dsn, reason, loss_accepted_by=loss_accepted_by)
            with closing(connect(dsn)) as connection:
                self._choose_in_new(epoch, _Session(dsn, connection, stop))
            return epoch

    def recover(
        self, reason: str, lake: Lake, stop: threading.Event, report: Callable[[Recovered], None]
    ) -> tuple[EpochRecord, bool]:
        """Repair a gap with a new slot and a new epoch, and read only the rows that the lake lacks.

        ``report``: called with each table that is done. Returns the epoch, and whether all tables were done
        but those that ``left_out`` names. The next ``run`` reads the other tables whole, also if this raises.
        Changes nothing before ``lake`` is pinned. Raises ``SlotNotMade`` if ``stop`` is set before the epoch
        begins.
        """
        with closing(self._encrypting), take_lease(self._home.run, self._settings.source):
            self._identity.require_original()
            lake.pin()
            dsn = source_dsn(self._settings, self._home)
            epoch = self._epoch_start(stop).next(dsn, reason)
            with closing(connect(dsn)) as connection:
                self._choose_in_new(epoch, _Session(dsn, connection, stop))
                captured = self._epoch(dsn, epoch)
                captured.published.begin(connection)
            snapshots = Snapshots(captured, self._tables)
            settle_keys(self._store, self._tables)
            other_keys = {*other_landed_keys(self._store, self._tables)}
            other_keys |= waiting_tables(self._store, self._tables)
            for table in self._tables:
                if table.name in other_keys:
                    # The lake has its rows by the former key. The next run reads it whole if its reading by
                    # the new one had begun, else leaves it out until somebody requests that.
                    continue
                with lake.rows(table) as rows:
                    recovered = snapshots.recover(table, rows, reason, stop)
                if recovered is None:
                    return epoch, False
                report(recovered)
            return epoch, True

    @property
    def _tables(self) -> tuple[TableContract, ...]:
        return self._captured.all

    def _epoch_start(self, stop: threading.Event | None = None) -> EpochStart:
        return EpochStart(self._settings, self._store, self._tables, stop, self._identity)

    def _last_landed(self) -> datetime | None:
        epoch = self._store.current_epoch()
        last = self._store.last_stream(epoch.number) if epoch is not None else None
        return last.arrival.landed_at if last is not None else None

    def _prepare(self, session: _Session) -> EpochRecord:
        try:
            for _ in range(_MAX_PREPARATIONS):
                with suppress(TableDropped):
                    return self._prepare_once(session)
            return self._prepare_once(session)
        except GapInSource as gap:
            return self._after_gap(session, gap)

    def _follow(self, session: _Session, epoch: EpochRecord, until: Lsn | None) -> None:
        """Run ``_capture``; run it again without tables that cannot be followed, and once after a gap."""
        repaired = False
        while True:
            try:
                return self._capture(session, epoch, until)
            except TABLE_FAULTS as fault:
                self._handle_fault(epoch, fault)
                if until is not None:
                    until = max(until, highest_read(session.dsn, session.connection, epoch))
            except GapInSource as gap:
                if repaired:
                    raise
                epoch, repaired = self._after_gap(session, gap), True
                continue
            epoch = self._prepare(session)

    def _handle_fault(self, epoch: EpochRecord, fault: TableFault) -> None:
        # Include tables that were added during this run.
        known = (*self._contracted, *self._captured.all)
        self._faults.handle(epoch, self._published(epoch), self._captured, known, fault)

    def _after_gap(self, session: _Session, gap: GapInSource) -> EpochRecord:
        """Begin a new epoch after ``gap`` if the snapshot mode allows it, else raise ``gap``."""
        by_itself = self._settings.snapshot_mode is SnapshotMode.WHEN_NEEDED
        for_a_person = AnotherSource | NotOurSlot | SlotMoved | TableMissedChanges
        if not by_itself or isinstance(gap, for_a_person):
            raise gap
        _log.warning("%s A new epoch begins, as the snapshot mode is when_needed.", gap.problem)
        self._epoch_start(session.stop).next(session.dsn, gap.problem)
        return self._prepare_once(session)

    def _prepare_once(self, session: _Session) -> EpochRecord:
        """Choose the tables that can be captured, and create what is missing for them at the source."""
        epoch, self._faults.left_out = self._store.current_epoch(), None
        chosen = self._choose_tables(session, epoch)
        self._store.clear_garbage()
        # Before the slot is created, because tables must be published when its consistent point is reached.
        ensure_publication(session.connection, self._settings.publication, chosen.ready)
        if epoch is None:
            epoch = self._epoch_start(session.stop).first(session.dsn, session.connection)
            self._schemas(epoch).look(session.connection)
        try:
            self._published(epoch).begin(session.connection)
        except TableMissedChanges as missed:
            self._handle_fault(epoch, missed)
            return self._prepare_once(session)
        # Before the first event of this run: from here on the changes of these tables name no row.
        seen = self._schema_changes.tables()
        self._faults.park_without_contract(epoch, self._published(epoch), self._contracted, seen)
        settle_keys(self._store, self._contracted)
        begin_keys(self._store, epoch, chosen.ready)
        ParkedTables(self._store.folder, epoch.number).take_back([each.name for each in chosen.ready])
        self._faults.log_left_out(epoch, self._captured, chosen.findings, chosen.wrong)
        return epoch

    def _choose_in_new(self, epoch: EpochRecord, session: _Session) -> None:
        """Choose the tables that can be captured in the new ``epoch``; ``left_out`` names the others."""
        try:
            chosen = self._choose_tables(session, epoch)
        except TableMissedChanges as all_of_them:
            self._faults.left_out = all_of_them
        else:
            self._faults.log_left_out(epoch, self._captured, chosen.findings, chosen.wrong)

    def _choose_tables(self, session: _Session, epoch: EpochRecord | None) -> _Choice:
        """Choose the tables that can be captured, and park those of ``epoch`` that cannot.

        ``_captured`` has them then. Raises an error if no table can be captured.
        """
        # Read once for this start: another process may have landed since the last one.
        self._schema_changes = SchemaChanges(self._store.folder)
        # Including tables that an earlier run added.
        self._contracted = tuple({each.name: each for each in (*self._contracted, *self._tables)}.values())
        if epoch is not None:
            self._faults.request_back(epoch, self._contracted)
        requested = SnapshotRequests(self._store.folder).whole_tables().keys()
        parked = ParkedTables(self._store.folder, epoch.number).all() if epoch is not None else {}
        if back := parked.keys() & requested:
            self._follow_contracts(back)
        wanted = tuple(each for each in self._contracted if each.name not in parked or each.name in requested)
        with suppress(SourceRefused):  # A standby, which the preflight below reports.
            # Read this before the tables are checked.
            self._tables_checked_from = wal_clock(session.connection).flushed
        findings = self._findings(session, epoch, wanted)
        blocked, behind = dict[str, str](), dict[str, str]()
        if epoch is not None:
            with suppress(SourceRefused):  # As above.
                blocked = self._blocked_by_schema(epoch, session.connection, wanted, requested)
            findings = followed_anyway(findings, self._changed_while_captured(epoch, requested))
            other_keys = other_landed_keys(self._store, wanted).keys()
            behind = behind_their_snapshots(self._store, epoch, other_keys & requested)
            blocked |= behind
        ready, wrong = ready_tables(findings, wanted)
        ready = tuple(each for each in ready if each.name not in blocked)
        names = {each.name for each in ready}
        others = tuple(each for each in self._contracted if each.name not in names)
        self._captured = CapturedTables(ready, others)
        if epoch is not None and blocked:
            # Park these first, because a person decides about the schema that is recorded here.
            self._faults.park(epoch, self._published(epoch), blocked)
        # A table that is behind needs the stream to go on, even if it is alone.
        if not ready and not behind:
            now = datetime.now(UTC)
            parked = {name: ParkedTable(reason, now) for name, reason in wrong.items()}
            if epoch is not None:
                # What is only wrong is not parked: nothing is captured, so nothing is missed.
                parked |= ParkedTables(self._store.folder, epoch.number).all()
            raise left_out({each.name: parked[each.name] for each in others if each.name in parked})
        if epoch is not None:
            self._park_wrong(epoch, wanted, wrong)
        return _Choice(ready, wrong, findings)

    def _findings(
        self, session: _Session, epoch: EpochRecord | None, wanted: Sequence[TableContract]
    ) -> Sequence[Finding]:
        """Return the findings about the source and the ``wanted`` tables. Raises ``GapInSource`` if the slot
        does not continue what has landed."""
        if epoch is not None and not self._identity.owns(self._settings.source, epoch.number):
            raise _slot_of_original(epoch)
        start = EpochStart(self._settings, self._store, wanted, session.stop, self._identity)
        findings = start.findings(session.dsn)
        if epoch is not None and not {each.check for each in findings} & NO_PROOF:
            # Find out now if the slot is gone or not ours: before anything changes at the source, and before
            # the findings list what another server lacks.
            prove_continuity(session.dsn, session.connection, self._store, epoch)
            self._published(epoch).require_publication(session.connection)
        return findings

    def _park_wrong(
        self, epoch: EpochRecord, wanted: Sequence[TableContract], wrong: Mapping[str, str]
    ) -> None:
        if not wrong:
            return
        # A table that was never captured here has missed nothing. The next start checks it again.
        recorded_here = recorded_tables(self._store.folder, epoch.number)
        captured = {each.name for each in wanted if each.full_name in recorded_here}
        to_park = {name: reason for name, reason in wrong.items() if name in captured}
        self._faults.park(epoch, self._published(epoch), to_park)
        if self._settings.snapshot_mode is SnapshotMode.WHEN_NEEDED:
            self._faults.request_snapshots(wrong)

    def _blocked_by_schema(
        self,
        epoch: EpochRecord,
        connection: Connection,
        wanted: Sequence[TableContract],
        requested: Collection[str],
    ) -> dict[str, str]:
        """Record schema changes; return name → reason for the ``wanted`` tables that need a decision."""
        schemas = self._schemas(epoch)
        schemas.look(connection)
        # By requesting a snapshot of a table, a person accepts its schema changes.
        schemas.accept([each.name for each in wanted if each.name in requested])
        return schemas.blocked(wanted)

    def _changed_while_captured(self, epoch: EpochRecord, requested: Collection[str]) -> dict[str, set[str]]:
        """Return the changed columns of the captured tables, except for the ``requested`` tables."""
        known, changes = recorded_tables(self._store.folder, epoch.number), self._schemas(epoch).changes
        return {
            each.name: changed_columns(each, changes.open_changes(each.name))
            for each in self._contracted
            if each.full_name in known and each.name not in requested
        }

    def _schemas(self, epoch: EpochRecord) -> SchemaWatch:
        home, source, changes = self._home.path, self._settings.source, self._schema_changes
        publication = self._settings.publication
        return SchemaWatch.of(home, source, changes, epoch.number, self._contracted, publication)

    def _published(self, epoch: EpochRecord) -> PublishedTables:
        requests = SnapshotRequests(self._store.folder)
        published = PublishedTables(
            self._store.folder,
            epoch.number,
            self._settings.publication,
            self._tables,
            lambda: requests.whole_tables().keys(),
        )
        published.will_be_read(requests.whole_tables().keys(), self._tables_checked_from)
        return published

    def _capture(self, session: _Session, epoch: EpochRecord, until: Lsn | None) -> None:
        connection, stop = session.connection, session.stop
        captured = self._epoch(session.dsn, epoch)
        snapshots = Snapshots(captured, self._tables)
        if self._settings.snapshot_mode is SnapshotMode.SCHEMA_ONLY:
            snapshots.land_schemas(connection)
        stream = StreamReading(captured, self._captured, connection, self._home.run)
        if until is not None:
            stream.follow(_PROOF, stop)
            if not stream.proved.is_set():
                return
            snapshots.look_at_partitions(stop)
            # The tables are complete when the stream has passed everything that their chunks have read.
            goal: Lsn | None = max(until, snapshots.take(stop) or until)
            while goal is not None and not stop.is_set():
                stream.follow(goal, stop)
                goal = snapshots.read_moved(stop)
                if goal is None and snapshots.watches_partitions:
                    goal = snapshots.look_at_partitions(stop) or snapshots.take(stop)
            captured.schemas.look(connection)
            captured.schemas.require(self._captured.all)
            captured.published.require_same(connection, last=True)
            return
        added = AddedTables(captured, self._contracts_now, self._captured, snapshots)
        with SnapshotThread(snapshots, added, stop, stream.proved) as thread:
            stream.follow(None, thread.stop)
        thread.raise_failure()

    def _follow_contracts(self, names: Collection[str]) -> None:
        """Take the tables called ``names`` by their present contracts: somebody has them read by these."""
        with suppress(IngestError):
            tables = self._contracts_now().of_source(self._settings.source)
            now = {each.name: each.as_captured for each in tables if each.name in names}
            self._contracted = tuple(now.get(each.name, each) for each in self._contracted)

    def _contracts_now(self) -> Contracts:
        """Read the contracts again. Their values are encrypted from now on, so before a table is added."""
        contracts = self._contracts_again()
        self._reread_contracts = tuple(
            each.as_captured for each in contracts.of_source(self._settings.source)
        )
        return contracts

    def _epoch(self, dsn: str, epoch: EpochRecord) -> CapturedEpoch:
        return CapturedEpoch(
            dsn,
            self._settings,
            self._store,
            self._home.grid,
            epoch,
            self._published(epoch),
            self._schemas(epoch),
            self._call_landed,
        )

    def _call_landed(self, batch: Manifest) -> None:
        """Call ``landed`` with one batch at a time: snapshots and stream land on different threads."""
        with self._landed_lock:
            self._landed(batch)


def _slot_of_original(epoch: EpochRecord) -> NotOurSlot:
    slot = epoch.facts.slot if epoch.facts is not None else ""
    return NotOurSlot(
        f"The slot {slot} of epoch {epoch.number} belongs to the home that this one is a copy of.",
        fix="Give this home a slot of its own, another name in OMNISUPPORT_SLOT, and begin a new epoch: "
        'omnisupport-ingest capture --new-epoch "a copy of another home"',
    )
