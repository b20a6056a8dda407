"""Requests for a new snapshot of a table or a key range, and the snapshots that are due.

A request is a file in the home; capture fulfils it once. Plans, requests and landing determine which
snapshots are due, without the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.durable import create_exclusively, sync_folder
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan, SnapshotPlans, plans_in_force
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.records import encode, read_note

_FOLDER = "snapshot_requests"


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """A request to read ``table`` (a contract's name), or only its key range ``scope``. ``name``: name of the
    file without its suffix."""

    table: str
    scope: KeyRange | None
    reason: str
    name: str

    def __str__(self) -> str:
        return self.table if self.scope is None else f"{self.table}, keys {self.scope}"


@dataclass(frozen=True, slots=True)
class _Content:
    reason: str
    scope: str | None = None
    table: str = ""
    at: datetime | None = None


class SnapshotRequests:
    """The requests of one source, in its landing folder: one file per table or key range."""

    def __init__(self, folder: Path) -> None:
        """``folder``: the landing folder of the source."""
        self._folder = folder / _FOLDER

    def write(self, table: str, reason: str, scope: KeyRange | None = None) -> bool:
        """Request a snapshot of ``table`` (a contract's name), or only of its key range ``scope``.

        The request is durable on return. Returns False if the same request exists already.
        """
        # No failpoint: a folder that exists already serves as well.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        content = _Content(reason, None if scope is None else scope.text, table, datetime.now(UTC))
        with failpoint("source.snapshot_request", table):
            return create_exclusively(self._folder / f"{_name(table, scope)}.json", encode(content))

    def read(self) -> list[SnapshotRequest]:
        """Return the requests. A file that cannot be read requests its whole table, with an empty reason.

        Anything but files is ignored.
        """
        if not self._folder.is_dir():
            return []
        files = (file for file in sorted(self._folder.glob("[!.]*.json")) if file.is_file())
        return [_request(file) for file in files]

    def whole_tables(self) -> dict[str, str]:
        """Return the tables that are requested as a whole, each with its reason."""
        return {each.table: each.reason for each in self.read() if each.scope is None}

    def file(self, table: str) -> Path:
        """Return the path of the file that requests all of ``table``."""
        return self._folder / f"{_name(table, None)}.json"

    def clear(self, request: SnapshotRequest) -> None:
        """Remove the request. Call it when a snapshot that covers it has been planned."""
        file = self._folder / f"{request.name}.json"
        if file.exists():
            with failpoint("source.snapshot_request_clear", request.table):
                file.unlink(missing_ok=True)
                sync_folder(file.parent)


def _name(table: str, scope: KeyRange | None) -> str:
    # A contract's name has no dot, so neither form can belong to another table.
    return table if scope is None else f"{table}.{sha256(scope.text.encode()).hexdigest()[:16]}"


def _request(file: Path) -> SnapshotRequest:
    table = file.stem.partition(".")[0]
    try:
        content = read_note(_Content, file)
        scope = None if content.scope is None else KeyRange.parse(content.scope)
        return SnapshotRequest(table, scope, content.reason, file.stem)
    except (OSError, ValueError):
        return SnapshotRequest(table, None, "", file.stem)


FIRST_READ = "first read in this epoch"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A snapshot that is due: by the unfinished ``plan``; if that is None, by a new plan for ``reason``.

    ``scope``: its key range; None for the whole table. ``answers``: the requests that a new plan fulfils.
    """

    table: TableContract
    plan: SnapshotPlan | None
    reason: str
    scope: KeyRange | None = None
    answers: tuple[SnapshotRequest, ...] = ()


class DueSnapshots:
    """The snapshots that are due for one source in one epoch."""

    def __init__(
        self, store: LandingStore, epoch: int, tables: Sequence[TableContract], *, first_reads: bool
    ) -> None:
        """``first_reads``: whether a table that was not read in the epoch is due."""
        self._store, self._epoch, self._first_reads = store, epoch, first_reads
        self._tables = tuple(tables)
        self._plans, self._requests = SnapshotPlans(store.folder), SnapshotRequests(store.folder)

    def add_tables(self, tables: Sequence[TableContract]) -> None:
        """Consider ``tables`` too from now on."""
        self._tables += tuple(tables)

    def now(self) -> list[Wanted]:
        """Return the snapshots that are due: unfinished ones, requested ones, and first reads of tables."""
        plans = plans_in_force(self._plans.all(self._epoch))
        begun = [plan for plan in plans if not self._store.exists(plan.boundary_id)]
        requests = self._requests.read()
        read = self._read_before()
        due = []
        for table in self._tables:
            of_table = [plan for plan in begun if plan.table == table.name]
            requested = tuple(request for request in requests if request.table == table.name)
            whole = self._whole(table, of_table, requested, read)
            if whole is not None:
                due.append(whole)
            if whole is None or whole.plan is not None:
                due += [Wanted(table, plan, plan.reason, plan.scope) for plan in of_table if plan.scope]
                due += [Wanted(table, None, each.reason, each.scope, (each,)) for each in requested]
        return due

    def _whole(
        self,
        table: TableContract,
        begun: Sequence[SnapshotPlan],
        requested: tuple[SnapshotRequest, ...],
        read: set[str],
    ) -> Wanted | None:
        """Return the due snapshot of the whole table, or None. A new plan also fulfils key range requests."""
        reasons = [request.reason for request in requested if request.scope is None]
        if reasons:
            return Wanted(table, None, reasons[0], answers=requested)
        plan = next((plan for plan in begun if plan.scope is None), None)
        if plan is not None and plan.compared:
            # Equal chunks have landed without rows. That is valid only if the comparison was finished.
            return Wanted(table, None, plan.reason, answers=requested)
        if plan is not None:
            return Wanted(table, plan, plan.reason)
        if self._first_reads and table.name not in read:
            return Wanted(table, None, FIRST_READ, answers=requested)
        return None

    def _read_before(self) -> set[str]:
        """Return the tables that need no first read: read in this epoch, or earlier with an accepted loss."""
        accepted = AcceptedLosses(self._store.folder).of(self._epoch) is not None
        epochs = [
            each.epoch for each in self._store.epoch_standings() if accepted or each.epoch == self._epoch
        ]
        names = (name for epoch in epochs for name in self._store.batch_ids(chunk_prefix(epoch)))
        chunks = (self._store.read(name).chunk for name in names if name.endswith("-boundary"))
        return {chunk.table for chunk in chunks if chunk is not None and chunk.scope is None}
