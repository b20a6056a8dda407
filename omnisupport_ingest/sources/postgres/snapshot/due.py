"""Which snapshots are to be taken now, by what was planned, asked for and has landed. No server is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.names import chunk_prefix
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan, SnapshotPlans, that_count
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequest, SnapshotRequests

FIRST_READ = "first read in this epoch"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A table to read: by ``plan`` if it has one that is not finished, else by a new one, for ``reason``.

    ``scope``: the range of its keys that is meant, null: all. ``answers``: the requests that a new plan is
    the answer to.
    """

    table: TableContract
    plan: SnapshotPlan | None
    reason: str
    scope: KeyRange | None = None
    answers: tuple[SnapshotRequest, ...] = ()


class DueSnapshots:
    """Those of one source in one epoch."""

    def __init__(
        self, store: LandingStore, epoch: int, tables: Sequence[TableContract], *, first_reads: bool
    ) -> None:
        """``first_reads``: whether a table that the epoch has not read is due for that."""
        self._store, self._epoch, self._first_reads = store, epoch, first_reads
        self._tables = tuple(tables)
        self._plans, self._requests = SnapshotPlans(store.folder), SnapshotRequests(store.folder)

    def take_up(self, tables: Sequence[TableContract]) -> None:
        """From now on ``tables`` are of the source too."""
        self._tables += tuple(tables)

    def now(self) -> list[Wanted]:
        """The tables, and ranges of keys, that were begun and not finished, asked for, or never read."""
        plans = that_count(self._plans.all(self._epoch))
        begun = [plan for plan in plans if not self._store.exists(plan.boundary_id)]
        requests = self._requests.read()
        read = self._read_before()
        found = []
        for table in self._tables:
            of_table = [plan for plan in begun if plan.table == table.name]
            asked = tuple(request for request in requests if request.table == table.name)
            whole = self._whole(table, of_table, asked, read)
            if whole is not None:
                found.append(whole)
            if whole is None or whole.plan is not None:
                found += [Wanted(table, plan, plan.reason, plan.scope) for plan in of_table if plan.scope]
                found += [Wanted(table, None, each.reason, each.scope, (each,)) for each in asked]
        return found

    def _whole(
        self,
        table: TableContract,
        begun: Sequence[SnapshotPlan],
        asked: tuple[SnapshotRequest, ...],
        read: set[str],
    ) -> Wanted | None:
        """What is due of all of a table. A new plan of that is the answer to requests for ranges too."""
        reasons = [request.reason for request in asked if request.scope is None]
        if reasons:
            return Wanted(table, None, reasons[0], answers=asked)
        plan = next((plan for plan in begun if plan.scope is None), None)
        if plan is not None and plan.compared:
            # Its chunks that were the same hold no rows: they are for a comparison that was finished.
            return Wanted(table, None, plan.reason, answers=asked)
        if plan is not None:
            return Wanted(table, plan, plan.reason)
        if self._first_reads and table.name not in read:
            return Wanted(table, None, FIRST_READ, answers=asked)
        return None

    def _read_before(self) -> set[str]:
        """Tables that need no first read: read in this epoch, or before it where that has to do."""
        accepted = AcceptedLosses(self._store.folder).of(self._epoch) is not None
        epochs = [
            each.epoch for each in self._store.epoch_standings() if accepted or each.epoch == self._epoch
        ]
        names = (name for epoch in epochs for name in self._store.batch_ids(chunk_prefix(epoch)))
        chunks = (self._store.read(name).chunk for name in names if name.endswith("-boundary"))
        return {chunk.table for chunk in chunks if chunk is not None and chunk.scope is None}
