"""Parks tables that capture cannot follow, so that a fault of one table does not stop the others.

A table is parked when its changes no longer fit its contract, may not have been sent, or cannot be read. For
example, its key is no longer in the replica identity, it was out of the publication for a time, or a row is
too large. First the stretch of the log in which changes may be missing is recorded
(``landing/lost_changes``), so the table counts as incomplete from then on. Its further changes land without a
key, like those of a table without a contract, and no layer above raw uses them. When a person requests a
snapshot of a parked table, it is added like a new table.

There are five kinds of fault:

- Its changes do not name their rows as its contract does, or were not sent for a time. The table is parked
  until a snapshot reads it again. The mode ``when_needed`` requests one. (Columns outside of the key that
  are dropped, renamed or retyped are no fault of a table that was captured before.)
- It changed while a snapshot read it. The checks and the read are repeated once; often that is enough.
- A row cannot be read, or is too large. Another read would fail in the same way, so the table is parked in
  every mode until a person has repaired the cause and requests a snapshot.
- Its schema has changed, and its contract requires a decision first (``x-cdc.evolution``: ``block``, or a
  personal column has the name of another one, without its policy). The table is parked in every mode.
- It has no contract for a time, so nothing names the key of its changes. It is parked until a contract names
  it again and a snapshot reads it; the mode ``when_needed`` requests one then.

If no other table is captured, capture stops instead, and nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.schema_changes import SchemaChange, SeenTable, gives_other_keys
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Format, encode
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables, recorded_tables
from omnisupport_ingest.sources.postgres.preflight.findings import (
    Finding,
    Severity,
    blocking,
    require_ready,
)
from omnisupport_ingest.sources.postgres.protocol.row_events import KeyNotSent
from omnisupport_ingest.sources.postgres.session.errors import (
    ColumnsNotSent,
    RowTooLarge,
    SchemaChangeBlocked,
    TableMissedChanges,
    TableUnreadable,
)
from omnisupport_ingest.sources.postgres.session.safe_watermark import read_high
from omnisupport_ingest.sources.postgres.session.server import wal_clock
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest.sources.postgres.slot.slot import flush_wal
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream.captured import CapturedTables
from omnisupport_ingest.storage import storage_of, update

_log = logging.getLogger(__name__)


FORMAT_VERSION = 1

WITHOUT_CONTRACT = "Capture ran while no contract named it: changes of that time name no row."
"""The reason of a table whose contract was away for a time."""


@dataclass(frozen=True, slots=True)
class ParkedTable:
    """A parked table. ``reason``: what is wrong with it. ``since``: when capture left it out."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class ParkedInEpoch:
    """The parked tables of one epoch, by the names of their contracts."""

    epoch: int
    tables: dict[str, ParkedTable]
    format_version: int = FORMAT_VERSION


_FORMAT = Format(ParkedInEpoch, FORMAT_VERSION)


class ParkedTables:
    """The record of the parked tables of one source in one epoch. Only capture writes it.

    A new epoch reads every table, so it begins without a record.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._path, self._epoch = folder / f"parked-e{epoch:06d}.json", epoch

    def all(self) -> dict[str, ParkedTable]:
        """Return the parked tables by name. Raises as reading a manifest does."""
        try:
            return self._tables(content_of(self._path))
        except FileNotFoundError:
            return {}

    def park(self, reasons: Mapping[str, str]) -> None:
        """Park the tables in ``reasons``, durably. A table that is parked already keeps its first reason."""
        now = datetime.now(UTC)
        new = {name: ParkedTable(reason, now) for name, reason in reasons.items()}
        self._change(lambda parked: new | parked)

    def take_back(self, names: Collection[str]) -> None:
        """Unpark the tables ``names``. A snapshot of each must be requested and not planned yet."""
        self._change(lambda parked: {name: table for name, table in parked.items() if name not in names})

    def _change(self, change: Callable[[dict[str, ParkedTable]], dict[str, ParkedTable]]) -> None:
        """Replace the tables by what ``change`` makes of them; it gets those that the storage has now."""

        def changed(content: bytes | None) -> bytes | None:
            parked = self._tables(content)
            tables = change(parked)
            return None if tables == parked else encode(ParkedInEpoch(self._epoch, tables))

        parked = self.all()
        # The copy of an object may be old, so it does not tell whether anything changes.
        if not storage_of(self._path).is_local or change(parked) != parked:
            with failpoint("source.parked"):
                update(self._path, changed)

    def _tables(self, content: bytes | None) -> dict[str, ParkedTable]:
        return {} if content is None else decode(_FORMAT, content, self._path).tables


def unpark_fix(name: str) -> str:
    """Return the fix that unparks the table ``name``."""
    return (
        "Correct the table at the source or its contract, as `omnisupport-ingest preflight` and `omnisupport-"
        "ingest contracts diff` say, or the setting that is named. Then have it read again, and capture "
        f'takes it back: omnisupport-ingest source snapshot {name} --reason "what happened". If a table is '
        "gone for good, take its contract out: omnisupport-ingest contracts withdraw TABLE"
    )


def ready_tables(
    findings: Sequence[Finding], tables: Sequence[TableContract]
) -> tuple[tuple[TableContract, ...], dict[str, str]]:
    """Split ``tables`` into those that can be captured, and the reasons why the others cannot, by name.

    Raises as ``require_ready`` does if a finding prevents the capture of all tables, or if no table is left.
    """
    problems = blocking(findings)
    require_ready([each for each in problems if each.table is None])
    reasons: dict[str, str] = {}
    for each in problems:
        if each.table is not None:
            reasons[each.table] = " ".join(filter(None, (reasons.get(each.table), each.problem)))
    ready = tuple(each for each in tables if each.name not in reasons)
    if not ready:
        require_ready(problems)
    return ready, reasons


def followed_anyway(
    findings: Sequence[Finding], changed: Mapping[str, Collection[str]]
) -> tuple[Finding, ...]:
    """Return ``findings``; a missing or retyped column becomes a warning if a change of the table caused it.

    ``changed``: contract name → columns, from ``changed_columns``. A running capture follows such a table, so
    the next one does too: rows that do not fit the contract are quarantined, and judged again when the
    contract has been changed accordingly. Faults of the contract itself still block.
    """
    return tuple(
        replace(each, severity=Severity.WARNS)
        if each.table is not None and each.column in changed.get(each.table, ())
        else each
        for each in findings
    )


def changed_columns(contract: TableContract, changes: Sequence[SchemaChange]) -> set[str]:
    """Return the columns that ``changes`` of the table concern, if only their values have changed.

    Leaves out key columns whose change of text gives the rows other keys.
    """
    about = {each.column for each in changes if each.column is not None}
    return about - {each.column for each in changes if each.column in contract.key and gives_other_keys(each)}


def left_out(parked: Mapping[str, ParkedTable]) -> TableMissedChanges:
    """Return the error that names the tables that a capture leaves out."""
    names = tuple(sorted(parked))
    listed = "; ".join(
        f"{name}, since {parked[name].since:%Y-%m-%d %H:%M} UTC: {parked[name].reason}" for name in names
    )
    return TableMissedChanges(
        f"Capture leaves out what it cannot follow: {listed}",
        fix=unpark_fix(" ".join(names)),
        reasons={name: parked[name].reason for name in names},
    )


TABLE_FAULTS = (
    TableMissedChanges,
    KeyNotSent,
    RowTooLarge,
    TableUnreadable,
    ColumnsNotSent,
    SchemaChangeBlocked,
)
"""The errors that name the tables they concern."""

TableFault = (
    TableMissedChanges | KeyNotSent | RowTooLarge | TableUnreadable | ColumnsNotSent | SchemaChangeBlocked
)


class TableFaults:
    """Handles the faults of single tables during one capture of one source."""

    def __init__(self, store: LandingStore, mode: SnapshotMode) -> None:
        """``store``: the landing of the source. ``mode``: when snapshots are taken."""
        self.left_out: IngestError | None = None
        """The error about the tables that the last run left out; None if there were none."""
        self._store, self._rereads = store, mode is SnapshotMode.WHEN_NEEDED
        self._requests = SnapshotRequests(store.folder)
        self._retried: set[str] = set()

    def handle(
        self,
        epoch: EpochRecord,
        published: PublishedTables,
        captured: CapturedTables,
        known: Sequence[TableContract],
        fault: TableFault,
    ) -> None:
        """Let capture continue without the tables of ``fault``. Raises ``fault`` if that would not help.

        ``known``: all tables of the source that have contracts.
        """
        reasons = _reasons(fault, known)
        if not reasons:
            raise fault
        if isinstance(fault, SchemaChangeBlocked):
            self.park(epoch, published, reasons)
            return
        if isinstance(fault, TableMissedChanges | KeyNotSent):
            if self._rereads:
                _log.warning("%s It is read again, as the snapshot mode is when_needed.", fault.problem)
                self.request_snapshots(reasons)
            else:
                self.park(epoch, published, reasons)
            return
        if all(each.name in reasons for each in captured.all):
            raise fault
        if not isinstance(fault, RowTooLarge) and not reasons.keys() <= self._retried:
            _log.warning("%s It is looked at, and read, once more.", fault.problem)
            self._retried |= reasons.keys()
            return
        self.park(epoch, published, reasons)
        for request in self._requests.read():
            if request.table in reasons:
                self._requests.clear(request)

    def park(self, epoch: EpochRecord, published: PublishedTables, reasons: Mapping[str, str]) -> None:
        """Leave out the tables in ``reasons`` until a snapshot of them is requested. Durable on return."""
        # Record the stretch of the log first: after a crash in between, the table must still count as
        # incomplete.
        published.leave_out(reasons, end_of_chain(self._store, epoch).end)
        ParkedTables(self._store.folder, epoch.number).park(reasons)

    def park_without_contract(
        self,
        epoch: EpochRecord,
        published: PublishedTables,
        contracted: Sequence[TableContract],
        seen: Mapping[str, SeenTable],
    ) -> None:
        """Park the captured tables that no contract of ``contracted`` names any more.

        ``seen``: the tables as they were last seen, by the names of their contracts.
        """
        captured = recorded_tables(self._store.folder, epoch.number)
        named = {each.full_name for each in contracted}
        away = [name for name, each in seen.items() if each.name in captured - named]
        parked = ParkedTables(self._store.folder, epoch.number).all()
        if new := [name for name in away if name not in parked]:
            self.park(epoch, published, dict.fromkeys(new, WITHOUT_CONTRACT))

    def request_back(self, epoch: EpochRecord, contracted: Sequence[TableContract]) -> None:
        """Request snapshots of the tables that were parked without a contract and have one again, in the mode
        ``when_needed``."""
        if self._rereads:
            parked = ParkedTables(self._store.folder, epoch.number).all()
            reasons = {each.name: parked[each.name].reason for each in contracted if each.name in parked}
            self.request_snapshots({name: each for name, each in reasons.items() if each == WITHOUT_CONTRACT})

    def request_snapshots(self, reasons: Mapping[str, str]) -> None:
        """Request snapshots of the tables in ``reasons``."""
        for name, reason in reasons.items():
            self._requests.write(name, reason)

    def log_left_out(
        self,
        epoch: EpochRecord,
        captured: CapturedTables,
        findings: Sequence[Finding],
        wrong: Mapping[str, str],
    ) -> None:
        """Log the tables that a run leaves out, and set ``left_out``.

        These are the parked tables, and the tables in ``wrong``, which have ``findings``.
        """
        parked = ParkedTables(self._store.folder, epoch.number).all()
        still = {each.name: parked[each.name] for each in captured.left_out if each.name in parked}
        if still:
            self.left_out = left_out(still)
        try:
            require_ready([each for each in findings if each.table in wrong])
        except IngestError as error:
            self.left_out = error
        for name in sorted(still.keys() | wrong.keys()):
            reason = wrong.get(name) or still[name].reason
            _log.warning("%s is left out, the other tables go on: %s Fix: %s", name, reason, unpark_fix(name))


def _reasons(fault: TableFault, known: Sequence[TableContract]) -> dict[str, str]:
    """Return name → problem for those ``known`` tables that ``fault`` concerns."""
    if isinstance(fault, TableMissedChanges):
        names = {each.name for each in known}
        return {name: reason for name, reason in fault.reasons.items() if name in names}
    if isinstance(fault, SchemaChangeBlocked):
        return fault.reasons
    table = ".".join(fault.table) if isinstance(fault, KeyNotSent) else fault.table
    return {each.name: fault.problem for each in known if each.full_name == table}


def highest_read(dsn: str, connection: Connection, epoch: EpochRecord) -> Lsn:
    """Return an LSN above everything that landed chunks of a failed snapshot have read.

    The snapshot itself can no longer name it. A capture with a goal must follow the stream beyond this LSN.
    """
    start = epoch.facts.consistent_point.value if epoch.facts else 0
    # Above the start of the stream: the stream must land something to show that it has passed a chunk.
    high = max(read_high(connection), Lsn(start + 1))
    if wal_clock(connection).flushed < high:
        flush_wal(dsn)
    return high
