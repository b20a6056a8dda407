"""Tables of new contracts, taken up while the stream and the snapshots of the others go on.

A person asks for the snapshot of a table that capture has no contract of; the contracts are read again then.
The order is what makes it exact. The table is published before its changes are told by its contract, and that
before the watermark of any chunk is read: what commits above one is sent, with the contract's key. What was
written before and commits after the chunk has waited for is seen by the chunk, as it waits for all that was
under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing

from omnisupport_ingest.contracts.model import Contracts, TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.captured_tables import CapturedTables
from omnisupport_ingest.sources.postgres.errors import PreflightFailed
from omnisupport_ingest.sources.postgres.joining import joining_findings
from omnisupport_ingest.sources.postgres.preflight import Severity, require_ready
from omnisupport_ingest.sources.postgres.publication import ensure_publication
from omnisupport_ingest.sources.postgres.published import PublishedTables
from omnisupport_ingest.sources.postgres.row_events import KeyNotSent
from omnisupport_ingest.sources.postgres.same_server import connect_to_source
from omnisupport_ingest.sources.postgres.snapshot import Snapshots
from omnisupport_ingest.sources.postgres.snapshot_requests import SnapshotRequests

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 10.0
"""How long after tables could not be taken up that is tried again."""


class NewTables:
    """Those of one source, for one run of its capture; looked for by the thread that reads snapshots."""

    def __init__(
        self,
        dsn: str,
        epoch: EpochRecord,
        store: LandingStore,
        settings: Settings,
        contracts: Callable[[], Contracts],
        captured: CapturedTables,
        published: PublishedTables,
        snapshots: Snapshots,
    ) -> None:
        """``contracts`` reads them anew."""
        self._dsn, self._epoch, self._store, self._settings = dsn, epoch, store, settings
        self._contracts, self._captured = contracts, captured
        self._published, self._snapshots = published, snapshots
        self._requests = SnapshotRequests(store.folder)
        self._tried, self._next_try = set[str](), 0.0
        self._told = dict[str, str]()

    def look(self, stop: threading.Event) -> None:
        """Take up the tables that are asked for and not captured. What stands in the way is told in the log,
        and the others go on; it is tried again until it works. ``SourceUnavailable``, and what
        ``PublishedTables.begin`` raises.
        """
        asked = {each.table for each in self._requests.read()} - {each.name for each in self._captured.all}
        if not asked or (asked == self._tried and time.monotonic() < self._next_try):
            return
        self._tried, self._next_try = asked, time.monotonic() + _AGAIN_SECONDS
        for name in sorted(asked):
            try:
                self._take_up(self._contract(name), stop)
            except (PreflightFailed, KeyNotSent, _NotContracted) as error:
                self._tell(name, error)

    def _contract(self, name: str) -> TableContract:
        try:
            contracts = self._contracts()
        except IngestError as error:
            raise _NotContracted(error.problem, fix=error.fix) from error
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

    def _take_up(self, table: TableContract, stop: threading.Event) -> None:
        with closing(connect_to_source(self._dsn, self._epoch)) as connection:
            found = joining_findings(connection, self._store, self._settings.publication, [table])
            require_ready(found)
            for each in found:
                if each.severity is Severity.WARNS:
                    _log.warning("%s Fix: %s", each.problem, each.fix)
            ensure_publication(connection, self._settings.publication, [table])
            if not self._captured.hand_over([table], stop):
                return
            self._published.take_up(connection, [table])
        self._snapshots.take_up([table])
        _log.info("%s has joined the tables that are captured", table.full_name)

    def _tell(self, name: str, error: IngestError) -> None:
        told = f"{error.problem} Fix: {error.fix}"
        if told != self._told.get(name):
            self._told[name] = told
            _log.warning("%s is not captured yet: %s", name, told)


class _NotContracted(IngestError):
    """What is asked for has no contract that it could be taken up by."""
