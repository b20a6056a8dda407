"""Adding tables of new contracts while the stream and the snapshots of the other tables go on.

A person requests the snapshot of a table that capture has no contract of; the contracts are then read again.
The order of steps makes it exact: the table is published first, then its changes land under the key of its
contract, and only then the watermark of its first chunk is read. So whatever commits above a watermark is
sent with the contract's key. A chunk waits for all transactions under way, so it sees what was written
before.

Snapshots are read on a thread of their own (``SnapshotsBeside``), which looks for requests between two of
them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import psycopg2
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords
from omnisupport_ingest.sources.postgres.catalog.publication import ensure_publication
from omnisupport_ingest.sources.postgres.catalog.published import recorded_tables
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, preflight_tables, require_ready
from omnisupport_ingest.sources.postgres.preflight.server import minor_findings
from omnisupport_ingest.sources.postgres.preflight.shared_database import shared_table_findings
from omnisupport_ingest.sources.postgres.preflight.source_check import landed_key_findings
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch, CapturedTables

_log = logging.getLogger(__name__)


def not_captured(store: LandingStore, tables: Sequence[TableContract]) -> tuple[TableContract, ...]:
    """Return those of ``tables`` that no capture of the current epoch knew; none before its first start."""
    epoch = store.current_epoch()
    known = set() if epoch is None else recorded_tables(store.folder, epoch.number)
    return tuple(each for each in tables if known and each.full_name not in known)


def adds_tables(store: LandingStore) -> bool:
    """Return whether a capture runs that adds tables of new contracts: the last one that began follows the
    stream.
    """
    record = CaptureRecords(store.folder).read()
    return record is not None and record.follows and record.ended is None


def added_table_findings(
    connection: Connection, store: LandingStore, settings: Settings, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Return every finding about ``tables``, which are to be added to a running capture.
    ``SourceUnavailable``.
    """
    shared = shared_table_findings(connection, settings, tables)
    findings = preflight_tables(connection, tables, publication=settings.publication)
    return (
        *shared,
        *landed_key_findings(store, tables),
        *minor_findings(connection.server_version),
        *findings,
    )


_AGAIN_SECONDS = 10.0
"""How long after a failed attempt to add tables the next one is made."""


class AddedTables:
    """Adds requested tables to one run of a capture. Used by the thread that reads snapshots."""

    def __init__(
        self,
        epoch: CapturedEpoch,
        contracts: Callable[[], Contracts],
        captured: CapturedTables,
        snapshots: Snapshots,
    ) -> None:
        """``contracts`` reads the contracts again."""
        self._epoch, self._store, self._settings = epoch, epoch.store, epoch.settings
        self._contracts, self._captured, self._snapshots = contracts, captured, snapshots
        self._requests = SnapshotRequests(epoch.store.folder)
        self._tried, self._next_try = set[str](), 0.0
        self._logged = dict[str, str]()
        self._handed: list[TableContract] = []
        # An earlier run may have handed over tables that nobody took: begin with them again.
        captured.hand_over(())

    def look(self, stop: threading.Event) -> None:
        """Add the tables that are requested and not captured.

        What prevents a table is logged, and the others are added; the next look tries again. Raises what
        ``PublishedTables.begin`` does.
        """
        if self._captured.any_waiting:
            # The stream is within a transaction, and takes them after it.
            return
        if self._handed:
            self._finish(self._handed)
            self._handed = []
        requested = self._requests.whole_tables().keys() - {each.name for each in self._captured.all}
        if not requested or (requested == self._tried and time.monotonic() < self._next_try):
            return
        published: list[TableContract] = []
        for name in sorted(requested):
            if stop.is_set():
                return
            try:
                table = self._contract(name)
                self._publish(table)
            except (IngestError, psycopg2.Error) as error:
                if isinstance(error, GapInSource):
                    raise
                # Also if the server is away: the thread that reads the stream reports that.
                self._log_problem(name, error)
            else:
                published.append(table)
        # All at once: tables in ``_handed`` are added as soon as the stream has taken everything.
        self._captured.hand_over(published)
        self._handed = published
        self._tried, self._next_try = requested, time.monotonic() + _AGAIN_SECONDS

    def _contract(self, name: str) -> TableContract:
        contracts = self._contracts()
        new = next((each for each in contracts.of_source(self._settings.source) if each.name == name), None)
        if new is None:
            raise _NotContracted(
                f"{self._settings.source} has no contract of that name.",
                fix=f"Add its file, or remove the request: {self._requests.file(name)}",
            )
        for known in self._captured.all:
            if known.table_name == new.table_name:
                raise _NotContracted(
                    f"{new.full_name} is captured by the contract {known.name}, whose name has changed.",
                    fix="A contract that was changed is taken in by: omnisupport-ingest source restart",
                )
        return new

    def _publish(self, table: TableContract) -> None:
        with closing(self._epoch.connect()) as connection:
            findings = added_table_findings(connection, self._store, self._settings, [table])
            require_ready(findings)
            ensure_publication(connection, self._settings.publication, [table])
        for each in findings:
            if each.severity is Severity.WARNS:
                _log.warning("%s Fix: %s", each.problem, each.fix)

    def _finish(self, tables: Sequence[TableContract]) -> None:
        with closing(self._epoch.connect()) as connection:
            self._epoch.schemas.add_tables(tables)
            self._epoch.schemas.look(connection)
            self._epoch.schemas.accept([each.name for each in tables])
            self._epoch.published.add_tables(connection, tables)
        ParkedTables(self._store.folder, self._epoch.number).take_back([each.name for each in tables])
        self._snapshots.add_tables(tables)
        _log.info("%s is captured from now on", ", ".join(each.full_name for each in tables))

    def _log_problem(self, name: str, error: IngestError | psycopg2.Error) -> None:
        problem = (
            f"{error.problem} Fix: {error.fix}"
            if isinstance(error, IngestError)
            else f"The source says: {first_line(error)}."
        )
        if problem != self._logged.get(name):
            self._logged[name] = problem
            _log.warning("%s is not captured yet: %s", name, problem)


class _NotContracted(IngestError):
    """Raised when a snapshot is requested for a table without a contract."""


_LOOK_SECONDS = 0.5
"""Seconds between two looks for requests: each lists a folder, which is empty as a rule."""

PARTITION_SECONDS = 10.0
"""Seconds between two looks for attached or detached partitions, where a table has any: a catalog query."""


class SnapshotsBeside:
    """A context in which due snapshots are read on a thread; its end waits for the chunks in hand to stop.

    ``stop`` is for the code inside the context: it is set when the caller's stop is, or when a snapshot has
    failed. Nothing is read before ``proved`` is set, because the server may have been put back to an earlier
    state.
    """

    def __init__(
        self, snapshots: Snapshots, new: AddedTables, stop: threading.Event, proved: threading.Event
    ) -> None:
        """``new``: looked at between two snapshots."""
        self._snapshots, self._new = snapshots, new
        self._over, self._proved = threading.Event(), proved
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="snapshots")
        self.stop: threading.Event = _Either(stop, self._over)

    def __enter__(self) -> SnapshotsBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the error that a snapshot failed with, if one did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._proved.wait(_LOOK_SECONDS):
                if self._over.is_set():
                    return
            snapshots, next_partitions = self._snapshots, time.monotonic()
            snapshots.look_at_partitions(self._over)
            snapshots.take(self._over)
            while not self._over.is_set():
                self._new.look(self._over)
                if snapshots.requested:
                    snapshots.take(self._over)
                if not snapshots.settled:
                    snapshots.read_moved(self._over)
                if snapshots.watches_partitions and time.monotonic() >= next_partitions:
                    snapshots.look_at_partitions(self._over)
                    next_partitions = time.monotonic() + PARTITION_SECONDS
                self._over.wait(_LOOK_SECONDS)
        except BaseException as error:
            self._failure = error
            self._over.set()


class _Either(threading.Event):
    """Set while one of two events is. Only the following thread asks, because the first may read files."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._first, self._second = first, second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()
