"""Carries out a plan of retention: it records the removal, removes, and records that the removal is done.

If it dies in between, the record says what was begun, and the next call finishes it. No file is missing
without a record that names it.

- Landing deletes exactly the data files that raw has taken. Manifests stay, and with them the chain, the
  arrival facts of every batch, and the index. Of batches that are not captured from a log, the positions of
  the events stay too: what lands later is compared with them.
- Raw loses its files by one commit. The state of the window stays and still says what raw has taken.
- A history loses its old versions by one commit.
- Net changes lose their superseded rows by one commit too. Nothing is recorded before it, because these rows
  can be folded again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from omnisupport_ingest.contracts.durations import duration_text
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.contenthash import hash_of_files
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.ledger import SEQUENCE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.sweep import freed_by
from omnisupport_ingest.lake.table import retrying
from omnisupport_ingest.landing.kept_positions import keep_positions
from omnisupport_ingest.layers.events.sealed_policies import note_policies
from omnisupport_ingest.layers.ledgers import RETENTION_TYPE, retention_ledger
from omnisupport_ingest.layers.plan import InputFiles
from omnisupport_ingest.layers.removed import (
    BEGUN,
    DONE,
    GIVEN_UP,
    HISTORY,
    LANDING,
    QUARANTINE,
    RAW,
    Place,
    Removal,
    Removed,
)
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import NET_CHANGES
from omnisupport_ingest.retention.old_versions import OldVersions, remove_versions
from omnisupport_ingest.retention.plan import Judged, RetentionPlan
from omnisupport_ingest.retention.superseded_rows import NeverJudgedAgain, SupersededRows, remove_superseded
from omnisupport_ingest.retention.withheld_values import WithheldValues, remove_values
from omnisupport_ingest.storage import storage_of

_LAYERS = (LANDING, RAW, QUARANTINE, HISTORY)

_AT_ONCE = 200
"""Windows that one commit of the ledger records; a crash leaves at most so many half done."""


@dataclass(frozen=True, slots=True)
class Carried:
    """What left a layer, or would leave it: ``files`` of ``windows`` (for histories: the number of tables).

    ``bytes``: the disk space that only these files take. Files of raw, net changes and histories stay on disk
    until they are swept.
    """

    layer: str
    windows: int
    files: int
    bytes: int


def carry_out(workspace: Workspace, plan: RetentionPlan, *, removed_by: str) -> list[Carried]:
    """Remove what ``plan`` says, and finish what an earlier call has begun. A second call changes nothing.

    ``removed_by``: recorded in the ledger beside the time and the policy.
    """
    remover = _Remover(workspace, plan.source)
    carried = [remover.finish(layer, plan.unfinished) for layer in _LAYERS]
    for layer in (LANDING, RAW):
        doomed, keep = plan.of(layer), plan.keep[layer]
        now = datetime.now(UTC)
        removals = [
            Removal(
                each.layer,
                each.window,
                each.landed_until,
                each.files,
                each.events,
                each.bytes,
                why=f"{layer} is kept for {duration_text(keep)}",
                removed_by=removed_by,
                removed_at=now,
            )
            for each in doomed
        ]
        for start in range(0, len(removals), _AT_ONCE):
            begun = remover.begin(removals[start : start + _AT_ONCE])
            carried.append(remover.finish(layer, begun))
    carried += [remover.thin(each, plan.settled, removed_by) for each in plan.rows]
    begun = remover.begin([_of_values(each, removed_by) for each in plan.values])
    carried.append(remover.finish(QUARANTINE, begun))
    begun = remover.begin([_of_versions(each, removed_by) for each in plan.versions])
    carried.append(remover.finish(HISTORY, begun))
    return [each for each in _summed(carried) if each.windows]


def to_remove(plan: RetentionPlan) -> list[Carried]:
    """Return what ``carry_out`` would remove by ``plan``. Changes nothing."""
    found = [Carried(each.layer, 1, each.files, each.bytes) for each in plan.unfinished]
    found += [Carried(each.layer, 1, each.files, each.bytes) for each in plan.doomed]
    found += [Carried(NET_CHANGES, len(each.windows), each.files, each.bytes) for each in plan.rows]
    found += [Carried(QUARANTINE, 1, each.files, 0) for each in plan.values]
    found += [Carried(HISTORY, 1, each.files, each.bytes) for each in plan.versions]
    return [each for each in _summed(found) if each.windows]


def _of_values(each: WithheldValues, removed_by: str) -> Removal:
    return Removal(
        QUARANTINE,
        each.window,
        each.landed_until,
        each.files,
        each.events,
        0,
        why=f"values of its quarantine are kept for {duration_text(each.keep)}",
        removed_by=removed_by,
        removed_at=datetime.now(UTC),
        table=each.table,
    )


def _of_versions(each: OldVersions, removed_by: str) -> Removal:
    return Removal(
        HISTORY,
        WHOLE_TABLE,
        None,
        each.files,
        each.versions,
        each.bytes,
        why=f"its history is kept for {duration_text(each.keep)}",
        removed_by=removed_by,
        removed_at=datetime.now(UTC),
        table=each.table,
        ended_before=each.ended_before,
    )


@dataclass(frozen=True)
class _Remover:
    workspace: Workspace
    source: str

    def begin(self, removals: Sequence[Removal]) -> tuple[Removal, ...]:
        """Record that ``removals`` begin; return these, without those that another process has begun, and
        those whose window the plan does not fit any more."""
        of_windows = [each for each in removals if each.layer in (LANDING, RAW)]

        def decide(entries: pa.Table) -> pa.Table:
            known = _places(entries)
            if of_windows:
                judged = Judged(self.workspace, self.source)
                # By these contracts the windows were judged.
                note_policies(judged.workspace, self.source)
                known |= {each.place for each in of_windows if not judged.may_leave(each.layer, each.window)}
            return _rows([each for each in removals if each.place not in known], BEGUN)

        written = self.workspace.removals(self.source).append(decide)
        return Removed.of_entries(written).removals

    def finish(self, layer: str, removals: Sequence[Removal]) -> Carried:
        """Carry out the ``removals`` from ``layer`` that were begun, and record that they are done."""
        mine = [each for each in removals if each.layer == layer]
        if layer == RAW:
            mine = self._without_reopened(mine)
        if not mine:
            return Carried(layer, 0, 0, 0)
        leave = {
            LANDING: self._leave_landing,
            QUARANTINE: self._leave_quarantine,
            HISTORY: self._leave_history,
        }
        if layer == RAW:
            mine, files, size = self._leave_raw(mine)
        else:
            files, size = leave[layer](mine)
        self.workspace.removals(self.source).append(lambda entries: _done(entries, mine))
        return Carried(layer, len(mine), files, size)

    def thin(self, rows: SupersededRows, settled: NeverJudgedAgain, removed_by: str) -> Carried:
        """Remove superseded rows from the net changes of a table, in one commit."""
        if rows.table not in self._contracts:
            return Carried(NET_CHANGES, 0, 0, 0)
        contract = self._contracts[rows.table]
        files, size = remove_superseded(self.workspace, contract, settled, rows, removed_by)
        return Carried(NET_CHANGES, len(rows.windows) if files else 0, files, size)

    def _leave_landing(self, removals: Sequence[Removal]) -> tuple[int, int]:
        raw, store = self.workspace.raw(self.source).open(), self.workspace.landing(self.source)
        files, size = 0, 0
        for removal in removals:
            state = raw.state(removal.window)
            taken = frozenset(state.inputs) if state is not None else frozenset()
            for part in store.parts(removal.window):
                # Spare what landed after the record was written, and what raw has not taken.
                assert removal.landed_until is not None, "the ledger refuses such a row"
                if part.batch_id not in taken or part.landed_at > removal.landed_until:
                    continue
                if part.is_of_files:
                    keep_positions(store.folder, part)
                freed = _delete(store.folder / part.path)
                if freed is not None:
                    files, size = files + 1, size + freed
        return files, size

    def _without_reopened(self, removals: Sequence[Removal]) -> list[Removal]:
        """Give up those ``removals`` from raw whose window is to be judged again since they began, and return
        the others. Their windows are sealed no more."""
        if not removals:
            return []
        judged = Judged(self.workspace, self.source)
        reopened = [each for each in removals if judged.is_reopened(each.window)]
        if reopened:
            self.workspace.removals(self.source).append(lambda _: _rows(reopened, GIVEN_UP))
        return [each for each in removals if each not in reopened]

    def _leave_raw(self, removals: Sequence[Removal]) -> tuple[list[Removal], int, int]:
        """Remove the events of ``removals``, except of those that another process has given up since. Return
        the removals that were carried out, and how many files and bytes left."""
        left: list[tuple[int, int]] = []
        carried: list[Removal] = []

        def attempt(snapshot: TableSnapshot) -> None:
            judged = self.workspace.deduped(self.source).look()
            assert judged is not None, "a window that is not judged is not sealed"
            changes = []
            left.clear()
            begun = _places(retention_ledger(self.workspace.home.lake, self.source).entries())
            carried[:] = [each for each in removals if each.place in begun]
            for removal in carried:
                change = _emptied(snapshot, judged, removal.window)
                if change is not None:
                    changes.append(change)
                    sizes = (freed_by(Path(file.full_path)) for file in change.remove)
                    left.append((len(change.remove), sum(sizes)))
            snapshot.commit(changes)

        retrying(attempt, self.workspace.raw(self.source))
        return carried, sum(files for files, _ in left), sum(size for _, size in left)

    def _leave_quarantine(self, removals: Sequence[Removal]) -> tuple[int, int]:
        wanted: dict[str, list[TableContract]] = {}
        for removal in removals:
            # If the table was withdrawn since, its files stay as they are.
            if removal.table in self._contracts:
                wanted.setdefault(removal.window, []).append(self._contracts[removal.table])
        return remove_values(self.workspace, self.source, wanted, removals[0].removed_by), 0

    @property
    def _contracts(self) -> dict[str | None, TableContract]:
        return {each.name: each for each in self.workspace.contracts.of_source(self.source)}

    def _leave_history(self, removals: Sequence[Removal]) -> tuple[int, int]:
        contracts = self._contracts
        files, size = 0, 0
        for removal in removals:
            assert removal.ended_before is not None, "the ledger refuses such a row"
            if removal.table in contracts:
                left = remove_versions(self.workspace, contracts[removal.table], removal.ended_before)
                files, size = files + left[0], size + left[1]
        return files, size


def _emptied(snapshot: TableSnapshot, judged: TableSnapshot, window: str) -> WindowChange | None:
    """Return the change that removes from raw what ``judged`` has taken of ``window``; None if nothing is
    left.

    The state still says all that raw took, and how many rows are left: those that landed since.
    """
    state, below = snapshot.state(window), judged.state(window)
    if state is None or below is None:
        return None
    taken = frozenset(below.inputs)
    files = snapshot.files(window)
    held = InputFiles.of((each.path for each in files), state)
    leaving = tuple(each for each in files if held.names([each.path]) <= taken)
    if not leaving:
        return None
    staying = [each for each in files if each not in leaving]
    content = hash_of_files((Path(each.uri) for each in staying), "event_hash")
    checkpoint = replace(state.checkpoint, rows=content.count, content_hash=str(content))
    names = {each.path for each in staying}
    stands_for = {path: of for path, of in state.compacted_units.items() if path in names}
    return WindowChange(
        window, (), leaving, replace(state, checkpoint=checkpoint, compacted_units=stands_for), replaces=False
    )


def _delete(path: Path) -> int | None:
    """Delete a data file, and the folder of its batch once that is empty; None if it was gone already."""
    storage = storage_of(path)
    size = storage.size(path)
    # A call that died in between may have left a local copy of a deleted object.
    if size is None and not path.exists():
        return None
    with failpoint("retention.landing", path):
        storage.unlink(path)
    with contextlib.suppress(OSError), failpoint("retention.landing", path.parent):
        path.parent.rmdir()
    return size


def _places(entries: pa.Table) -> set[Place]:
    """Return the places of the removals in ``entries`` of the ledger that were begun and not given up."""
    return {each.place for each in Removed.of_entries(entries).removals}


def _done(entries: pa.Table, removals: Sequence[Removal]) -> pa.Table:
    """Return the rows that record ``removals`` as done. If another process has given one up in the last
    moment, it begins again: what it removed is gone, and a record must name it."""
    begun = _places(entries)
    again = [each for each in removals if each.place not in begun]
    return pa.concat_tables([_rows(again, BEGUN), _rows(removals, DONE)])


def _rows(removals: Iterable[Removal], step: str) -> pa.Table:
    rows = [
        {
            "layer": each.layer,
            "window": each.window,
            "step": step,
            "landed_until": each.landed_until,
            "files": each.files,
            "events": each.events,
            "bytes": each.bytes,
            "why": each.why,
            "removed_by": each.removed_by,
            "removed_at": each.removed_at,
            "table": each.table,
            "ended_before": each.ended_before,
        }
        for each in removals
    ]
    return pa.Table.from_pylist(rows, schema=arrow_schema(RETENTION_TYPE, without=(SEQUENCE,)))


def _summed(carried: Iterable[Carried]) -> list[Carried]:
    sums = {layer: Carried(layer, 0, 0, 0) for layer in (*_LAYERS, NET_CHANGES)}
    for each in carried:
        of = sums[each.layer]
        sums[each.layer] = Carried(
            each.layer, of.windows + each.windows, of.files + each.files, of.bytes + each.bytes
        )
    return list(sums.values())
