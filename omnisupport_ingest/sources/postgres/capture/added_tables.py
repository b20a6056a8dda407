"""Adds tables of new contracts while the stream and the snapshots of the other tables continue.

A person requests a snapshot of a table for which the running capture has no contract. Capture then reads the
contracts again. The order of the steps makes the result complete: first the table is published, then its
changes land with the key of its contract, and only then the watermark of its first chunk is read. So every
change above a watermark lands with the contract's key. A chunk waits for all transactions in progress, so it
sees every earlier change.

A separate thread (``SnapshotThread``) reads the snapshots, and checks for requests between two of them.
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
from omnisupport_ingest.sources.postgres.snapshot.landed_key import (
    begin_keys,
    behind_their_snapshots,
    other_landed_keys,
)
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch, CapturedTables

_log = logging.getLogger(__name__)


def not_captured(store: LandingStore, tables: Sequence[TableContract]) -> tuple[TableContract, ...]:
    """Return the ``tables`` that no capture of the current epoch recorded; none before its first start."""
    epoch = store.current_epoch()
    known = set() if epoch is None else recorded_tables(store.folder, epoch.number)
    return tuple(each for each in tables if known and each.full_name not in known)


def adds_tables(store: LandingStore) -> bool:
    """Return whether a capture is running that can add tables, that is, one that follows the stream."""
    record = CaptureRecords(store.folder).read()
    return record is not None and record.follows and record.ended is None


def added_table_findings(
    connection: Connection, store: LandingStore, settings: Settings, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Return every finding about ``tables`` to add to a running capture. Raises ``SourceUnavailable``."""
    shared = shared_table_findings(connection, settings, tables)
    findings = preflight_tables(connection, tables, publication=settings.publication)
    return (
        *shared,
        *landed_key_findings(store, tables),
        *minor_findings(connection.server_version),
        *findings,
    )


_RETRY_SECONDS = 10.0
"""Seconds between a failed attempt to add tables and the next attempt."""


class AddedTables:
    """Adds requested tables to one run of a capture. The thread that reads snapshots uses it."""

    def __init__(
        self,
        epoch: CapturedEpoch,
        contracts: Callable[[], Contracts],
        captured: CapturedTables,
        snapshots: Snapshots,
    ) -> None:
        """``contracts``: reads the contracts again."""
        self._epoch, self._store, self._settings = epoch, epoch.store, epoch.settings
        self._contracts, self._captured, self._snapshots = contracts, captured, snapshots
        self._requests = SnapshotRequests(epoch.store.folder)
        self._last_requested, self._next_attempt = set[str](), 0.0
        self._logged_problems = dict[str, str]()
        self._handed_over: list[TableContract] = []
        # An earlier run may have handed over tables that nobody took. Start again with them.
        captured.hand_over(())

    def add_requested(self, stop: threading.Event) -> None:
        """Add the tables that are requested but not captured.

        If a table cannot be added, the reason is logged, and it is tried again later. Raises as
        ``PublishedTables.begin`` does.
        """
        if self._captured.any_waiting:
            # The stream takes them at the end of the current transaction.
            return
        if self._handed_over:
            self._start_capturing(self._handed_over)
            self._handed_over = []
        requested = self._requests.whole_tables().keys() - {each.name for each in self._captured.all}
        if not requested or (requested == self._last_requested and time.monotonic() < self._next_attempt):
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
                # If the server is gone, the thread that reads the stream reports it.
                self._log_problem(name, error)
            else:
                published.append(table)
        begin_keys(self._store, self._epoch.record, published)
        # All at once, because ``_handed_over`` is added as soon as the stream has taken everything.
        self._captured.hand_over(published)
        self._handed_over = published
        self._last_requested, self._next_attempt = requested, time.monotonic() + _RETRY_SECONDS

    def _contract(self, name: str) -> TableContract:
        contracts = self._contracts()
        tables = (each.as_captured for each in contracts.of_source(self._settings.source))
        new = next((each for each in tables if each.name == name), None)
        if new is None:
            raise NotContracted(
                f"{self._settings.source} has no contract of that name.",
                fix=f"Add its file, or remove the request: {self._requests.file(name)}",
            )
        for known in self._captured.all:
            if known.table_name == new.table_name:
                raise NotContracted(
                    f"{new.full_name} is captured by the contract {known.name}, whose name has changed.",
                    fix="A contract that was changed is taken in by: omnisupport-ingest source restart",
                )
        return new

    def _publish(self, table: TableContract) -> None:
        with closing(self._epoch.connect()) as connection:
            findings = added_table_findings(connection, self._store, self._settings, [table])
            require_ready(findings)
            self._require_passed(table)
            self._epoch.schemas.require_covered(table)
            ensure_publication(connection, self._settings.publication, [table])
        for each in findings:
            if each.severity is Severity.WARNS:
                _log.warning("%s Fix: %s", each.problem, each.fix)

    def _require_passed(self, table: TableContract) -> None:
        """Raise ``NotContracted`` if the key of ``table`` has changed and must wait for the stream."""
        if other_landed_keys(self._store, [table]):
            waiting = behind_their_snapshots(self._store, self._epoch.record, [table.name])
            if table.name in waiting:
                raise NotContracted(waiting[table.name], fix="Wait: it is looked at again by itself.")

    def _start_capturing(self, tables: Sequence[TableContract]) -> None:
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
        if problem != self._logged_problems.get(name):
            self._logged_problems[name] = problem
            _log.warning("%s is not captured yet: %s", name, problem)


class NotContracted(IngestError):
    """A running capture is asked to read a table that has no contract, or whose contract has another name
    now.

    Fix: Write its contract; restart capture where a contract was renamed (``omnisupport-ingest source
    restart``).
    """


_POLL_SECONDS = 0.5
"""Seconds between two checks for requests. Each lists a folder, which is usually empty."""

PARTITION_SECONDS = 10.0
"""Seconds between two catalog queries for attached and detached partitions, if any table has partitions."""


class SnapshotThread:
    """A context in which a thread reads the snapshots that are due. Its end waits for chunks in progress.

    ``stop`` is for the code inside the context: it is set with the caller's stop, or when a snapshot fails.
    The thread reads nothing before ``proved`` is set, because the server may have been restored to an earlier
    state.
    """

    def __init__(
        self, snapshots: Snapshots, added: AddedTables, stop: threading.Event, proved: threading.Event
    ) -> None:
        """``added``: adds requested tables between two snapshots."""
        self._snapshots, self._added = snapshots, added
        self._ended, self._proved = threading.Event(), proved
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="snapshots")
        self.stop: threading.Event = _EitherEvent(stop, self._ended)

    def __enter__(self) -> SnapshotThread:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the error of the snapshot that failed, if one did."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._proved.wait(_POLL_SECONDS):
                if self._ended.is_set():
                    return
            snapshots, next_partitions = self._snapshots, time.monotonic()
            snapshots.look_at_partitions(self._ended)
            snapshots.take(self._ended)
            while not self._ended.is_set():
                self._added.add_requested(self._ended)
                if snapshots.requested:
                    snapshots.take(self._ended)
                if not snapshots.settled:
                    snapshots.read_moved(self._ended)
                if snapshots.watches_partitions and time.monotonic() >= next_partitions:
                    snapshots.look_at_partitions(self._ended)
                    next_partitions = time.monotonic() + PARTITION_SECONDS
                self._ended.wait(_POLL_SECONDS)
        except BaseException as error:
            self._failure = error
            self._ended.set()


class _EitherEvent(threading.Event):
    """Set while one of two events is. Only the stream's thread may call ``is_set``: the first reads files."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._first, self._second = first, second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()
