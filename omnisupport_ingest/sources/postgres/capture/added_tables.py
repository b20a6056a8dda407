"""Adding tables of new contracts while the stream and the snapshots of the others go on.

A person asks for the snapshot of a table that capture has no contract of; the contracts are read again
then. The order is what makes it exact. The table is published before its changes are told by its contract,
and that before the watermark of any chunk is read: what commits above one is sent, with the contract's key.
What was written before and commits after the chunk has waited for is seen by the chunk, as it waits for all
that was under way.

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
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords
from omnisupport_ingest.sources.postgres.catalog.publication import ensure_publication
from omnisupport_ingest.sources.postgres.catalog.published import recorded_tables
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity, preflight_tables, require_ready
from omnisupport_ingest.sources.postgres.preflight.server import minor_findings
from omnisupport_ingest.sources.postgres.preflight.source_check import landed_key_findings
from omnisupport_ingest.sources.postgres.session.connect_errors import first_line
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.snapshot.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.stream.captured import CapturedEpoch, CapturedTables

_log = logging.getLogger(__name__)


def not_captured(store: LandingStore, tables: Sequence[TableContract]) -> tuple[TableContract, ...]:
    """Those of ``tables`` that no capture of the current epoch has known; none before its first start."""
    epoch = store.current_epoch()
    known = set() if epoch is None else recorded_tables(store.folder, epoch.number)
    return tuple(each for each in tables if known and each.full_name not in known)


def adds_tables(store: LandingStore) -> bool:
    """Whether the last capture that began takes up new tables, if it still runs: it is one that follows."""
    record = CaptureRecords(store.folder).read()
    return record is not None and record.follows and record.ended is None


def added_table_findings(
    connection: Connection, store: LandingStore, publication: str, tables: Sequence[TableContract]
) -> tuple[Finding, ...]:
    """Every finding about ``tables``, which are to join a capture that runs. ``SourceUnavailable``."""
    found = preflight_tables(connection, tables, publication=publication)
    return (*landed_key_findings(store, tables), *minor_findings(connection.server_version), *found)


_AGAIN_SECONDS = 10.0
"""How long after tables could not be taken up that is tried again."""


class AddedTables:
    """Those of one source, for one run of its capture; looked for by the thread that reads snapshots."""

    def __init__(
        self,
        epoch: CapturedEpoch,
        contracts: Callable[[], Contracts],
        captured: CapturedTables,
        snapshots: Snapshots,
    ) -> None:
        """``contracts`` reads them anew."""
        self._epoch, self._store, self._settings = epoch, epoch.store, epoch.settings
        self._contracts, self._captured, self._snapshots = contracts, captured, snapshots
        self._requests = SnapshotRequests(epoch.store.folder)
        self._tried, self._next_try = set[str](), 0.0
        self._told = dict[str, str]()
        self._handed: list[TableContract] = []
        # What a run before has handed over and nobody took is begun with again.
        captured.hand_over(())

    def look(self, stop: threading.Event) -> None:
        """Take up the tables that are asked for and not captured. What stands in the way is told in the log,
        and the others go on; it is tried again until it works. Raises what ``PublishedTables.begin`` does.
        """
        if self._captured.any_waiting:
            # The stream is within a transaction.
            return
        if self._handed:
            self._join(self._handed)
            self._handed = []
        asked = self._requests.whole_tables().keys() - {each.name for each in self._captured.all}
        if not asked or (asked == self._tried and time.monotonic() < self._next_try):
            return
        published: list[TableContract] = []
        for name in sorted(asked):
            if stop.is_set():
                return
            try:
                table = self._contract(name)
                self._publish(table)
            except (IngestError, psycopg2.Error) as error:
                if isinstance(error, GapInSource):
                    raise
                # Also if the server is away: whoever reads the stream says that.
                self._tell(name, error)
            else:
                published.append(table)
        # Not one by one: what is noted as handed over joins as soon as nothing waits to be taken.
        self._captured.hand_over(published)
        self._handed = published
        self._tried, self._next_try = asked, time.monotonic() + _AGAIN_SECONDS

    def _contract(self, name: str) -> TableContract:
        contracts = self._contracts()
        new = next((each for each in contracts.of_source(self._settings.source) if each.name == name), None)
        if new is None:
            raise _NotContracted(
                f"{self._settings.source} has no contract of that name.",
                fix=f"Add its file, or remove the note that asks: {self._requests.file(name)}",
            )
        for known in self._captured.all:
            if (known.schema, known.table) == (new.schema, new.table):
                raise _NotContracted(
                    f"{new.full_name} is captured by the contract {known.name}, whose name has changed.",
                    fix="A contract that was changed is taken in by: omnisupport-ingest source restart",
                )
        return new

    def _publish(self, table: TableContract) -> None:
        with closing(self._epoch.connect()) as connection:
            found = added_table_findings(connection, self._store, self._settings.publication, [table])
            require_ready(found)
            ensure_publication(connection, self._settings.publication, [table])
        for each in found:
            if each.severity is Severity.WARNS:
                _log.warning("%s Fix: %s", each.problem, each.fix)

    def _join(self, tables: Sequence[TableContract]) -> None:
        with closing(self._epoch.connect()) as connection:
            self._epoch.published.add_tables(connection, tables)
        ParkedTables(self._store.folder, self._epoch.number).take_back([each.name for each in tables])
        self._snapshots.add_tables(tables)
        _log.info("%s joined the tables that are captured", ", ".join(each.full_name for each in tables))

    def _tell(self, name: str, error: IngestError | psycopg2.Error) -> None:
        told = (
            f"{error.problem} Fix: {error.fix}"
            if isinstance(error, IngestError)
            else f"The source says: {first_line(error)}."
        )
        if told != self._told.get(name):
            self._told[name] = told
            _log.warning("%s is not captured yet: %s", name, told)


class _NotContracted(IngestError):
    """What is asked for has no contract that it could be taken up by."""


_LOOK_SECONDS = 0.5
"""How often a request for a snapshot is looked for: a look into a folder, empty as a rule."""

PARTITION_SECONDS = 10.0
"""How often partitions that came or left are looked for, where a table has some: a query on the catalog."""


class SnapshotsBeside:
    """As a context: reads what is due until the context ends, which waits for the chunks in hand to stop.

    ``stop`` is for what runs in the context: set when the caller's stop is, or when a snapshot failed.
    Nothing is read before ``proved`` is set: the server may be one that was put back to an earlier state.
    """

    def __init__(
        self, snapshots: Snapshots, new: AddedTables, stop: threading.Event, proved: threading.Event
    ) -> None:
        """``new``: looked for between two snapshots."""
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
        """Raise what a snapshot failed with, if one did."""
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
                if snapshots.asked:
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
    """Set while one of two events is. Only the thread that follows asks, as the first may look at files."""

    def __init__(self, first: threading.Event, second: threading.Event) -> None:
        super().__init__()
        self._first, self._second = first, second

    def is_set(self) -> bool:
        return self._first.is_set() or self._second.is_set()
