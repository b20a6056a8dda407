"""Landed batches → ``raw_cdc_staging``: every event, payload untouched, duplicates included.

The unit of work is the set of batches of a window that raw does not hold yet. A batch file is checked against
its manifest before it is read, so a damaged file stops the run and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial, reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.file_tasks import in_shares, made_by_tasks
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.batch_facts import facts_of_parts
from omnisupport_ingest.layers.checkpoints import Counts, Outcome
from omnisupport_ingest.layers.closing import Compaction
from omnisupport_ingest.layers.events.event_tasks import LandedFile, landed_rows, take_in
from omnisupport_ingest.layers.plan import (
    LOGIC_VERSION,
    RequestedWork,
    Upstream,
    WindowPlan,
    idempotency_key,
    plan_window,
)
from omnisupport_ingest.layers.removed import Present, Removed, lasting, refuse_remake
from omnisupport_ingest.layers.replay_reasons import Replaced, reasons
from omnisupport_ingest.layers.window_update import (
    EventsUpdate,
    LayerRun,
    Produced,
    WindowJob,
    update_windows,
)
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.storage import put_back, take_away
from omnisupport_ingest.visiting import Visit, visiting
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "raw_cdc_staging"

VERSIONS = (f"logic:{LOGIC_VERSION}",)
"""Versions that make a window of this layer stale when they change."""


class LandingDisagrees(IngestError):
    """The files of the batches of a window hold another number of events than their manifests say.

    Fix: Restore the batch from a backup of the landing folder.
    """


def materialize(
    workspace: Workspace,
    spark: SparkSession,
    source: str,
    windows: Sequence[str],
    run_id: str,
    *,
    replay: bool = False,
) -> list[Checkpoint]:
    """Take in the batches of ``windows`` that raw does not hold yet; a second call changes nothing.

    With ``replay`` the windows are written again from all their batches. If landing has forgotten a batch
    that raw holds, raw is the record: only new batches are added. Every call also takes in the sentinel
    window. Windows that the watermark has closed, and that have nothing to take in, are closed. Returns one
    checkpoint per requested window, in order. Raises ``DamagedBatch`` or ``LandingDisagrees``, naming a file
    that is not what its manifest says.
    """
    run = LayerRun.of(workspace, spark, source, run_id, replay=replay)
    # Read the watermark before what has landed: a batch that lands in between must not close its own window.
    watermark = workspace.closing_watermark(source)
    return update_windows(
        workspace.raw(source),
        windows,
        run,
        partial(_Update, watermark=watermark),
        Compaction(spark, "event_hash"),
    )


class _Update(EventsUpdate[WindowJob]):
    """An update of raw from what has landed by now."""

    layer = LAYER

    def __init__(self, snapshot: TableSnapshot, run: LayerRun, *, watermark: datetime | None) -> None:
        super().__init__(snapshot, run, watermark=watermark)
        self._store = run.workspace.landing(run.source)
        # Read after raw was opened: by then it is on record what retention removed from raw.
        removed = Removed.open(run.workspace, run.source)
        self._sealed = frozenset(removed.sealed)
        self._landed = _Landing(self._store, removed)

    def targets(self, windows: Sequence[str]) -> list[str]:
        return [*dict.fromkeys(windows), *self._landed.sentinel()]

    def job(self, window: str) -> WindowJob:
        upstream = _upstream(self.snapshot, window, self._landed)
        key = idempotency_key(
            layer=LAYER, table=LAYER, window=window, inputs=upstream.units, versions=upstream.versions
        )
        plan = _planned(self.snapshot, upstream, window, self._landed, self.run.asked)
        return WindowJob(plan, upstream, key)

    def produce(self, jobs: Sequence[WindowJob], unit: str) -> Produced[WindowJob]:
        plans = [job.plan for job in jobs]
        files = _stage(self.run.spark, self._store, self.snapshot, plans, self._landed, unit)
        _refuse_other_counts(self._store, plans, self._landed, files)
        return Produced(files, self._outcome)

    def _outcome(self, job: WindowJob) -> Outcome:
        parts = self._landed.parts(job.window, job.upstream.units)
        return Outcome(
            idempotency_key=job.key,
            batches=tuple(job.upstream.units),
            facts=facts_of_parts(parts),
            counts=Counts(raw=sum(part.rows for part in parts)),
            past_closing=self.is_past(job.window),
            replaced=self._replaced(job, parts),
        )

    def _replaced(self, job: WindowJob, parts: Sequence[LandedPart]) -> Replaced | None:
        before = self.snapshot.state(job.window)
        if before is None or not job.replays:
            return None
        late = self._lateness.late_batches(parts)
        why = reasons(before, job.upstream, job.upstream.units, late)
        return Replaced(before.checkpoint.content_hash, why)


class _Landing:
    """What has landed, read on demand: only for the windows of the run, and only for new batches."""

    def __init__(self, store: LandingStore, removed: Removed) -> None:
        self._store, self._landed = store, store.landed()
        self._known: dict[str, dict[str, list[LandedPart]]] = {}
        self._gone: dict[str, frozenset[str]] = {}
        self._batches: dict[str, tuple[Manifest, dict[str, list[DataFile]]]] = {}
        self._present = Present(store, removed)
        self.trimmed = removed.trimmed

    def sentinel(self) -> list[str]:
        return [OUT_OF_RANGE] if any(each.out_of_range for each in self._landed.epochs) else []

    def of(self, window: str) -> Mapping[str, Sequence[LandedPart]]:
        """Return the data files in ``window``, by batch, without those that retention removed."""
        known = self._of_manifests(window)
        if window not in self._gone:
            parts = (part for held in known.values() for part in held)
            self._gone[window] = frozenset(p.batch_id for p in parts if not self._present.has(p))
        return {name: held for name, held in known.items() if name not in self._gone[window]}

    def _of_manifests(self, window: str) -> Mapping[str, Sequence[LandedPart]]:
        if window not in self._known:
            found = self._known[window] = {}
            for part in self._landed.parts(window):
                found.setdefault(part.batch_id, []).append(part)
        return self._known[window]

    def parts(self, window: str, batches: Iterable[str]) -> list[LandedPart]:
        """Return the files of ``batches`` in ``window`` by their manifests, except for batches that landing
        has forgotten. The data may be gone."""
        here = self._of_manifests(window)
        return [part for name in sorted(batches) for part in here.get(name, ())]

    def files(self, window: str, batches: Iterable[str]) -> list[tuple[Manifest, DataFile]]:
        """Return the same files, each with its manifest."""
        here = self.of(window)
        held = [self._batch(name) for name in sorted(batches) if name in here]
        return [(batch, file) for batch, by_window in held for file in by_window.get(window, ())]

    def _batch(self, name: str) -> tuple[Manifest, Mapping[str, Sequence[DataFile]]]:
        """Return the manifest of a batch, read once, and its data files by window. Called for each window of
        a run, and windows and batches may be thousands."""
        if name not in self._batches:
            batch, found = self._store.read(name), dict[str, list[DataFile]]()
            for file in batch.files:
                found.setdefault(file.window, []).append(file)
            self._batches[name] = batch, found
        return self._batches[name]


def _held(snapshot: TableSnapshot, window: str) -> frozenset[str]:
    state = snapshot.state(window)
    return frozenset(state.inputs) if state else frozenset()


def _all_landed(snapshot: TableSnapshot, window: str, landed: _Landing) -> bool:
    """Whether landing still has every batch that raw holds. If not, raw is the record."""
    return _held(snapshot, window) <= landed.of(window).keys()


def _planned(
    snapshot: TableSnapshot, upstream: Upstream, window: str, landed: _Landing, asked: RequestedWork
) -> WindowPlan:
    if _all_landed(snapshot, window, landed) and window not in landed.trimmed:
        return plan_window(snapshot, window, upstream, asked)
    # Raw is the record: it takes in new batches, and what it holds is never written again.
    table = snapshot.table.spec.path
    plan = plan_window(
        snapshot,
        window,
        lasting(upstream, snapshot.state(window), window=window, table=table),
        RequestedWork(replay=False),
    )
    refuse_remake(plan, table)
    return plan


def _upstream(snapshot: TableSnapshot, window: str, landed: _Landing) -> Upstream:
    # Batches that raw holds and landing lacks were forgotten by landing.
    return Upstream(_held(snapshot, window) | landed.of(window).keys(), None, VERSIONS)


def _stage(
    spark: SparkSession,
    store: LandingStore,
    snapshot: TableSnapshot,
    plans: Sequence[WindowPlan],
    landed: _Landing,
    unit: str,
) -> StagedFiles:
    files = [
        (plan.window, batch, file) for plan in plans for batch, file in landed.files(plan.window, plan.read)
    ]
    if not files:
        return StagedFiles(())
    works = [partial(take_in, files=share) for share in in_shares(_landed_files(store, files))]
    generation = {plan.window: plan.generation for plan in plans}
    with made_by_tasks(spark, snapshot.table, works, unit=unit, generation=generation) as made:
        if made is None:
            # A task only finds that a file is damaged; this names the file and the fix.
            for *_, file in files:
                store.verify_file(file)
        assert made is not None, "a batch of which every file is whole is always taken in"
        return made.place()


def all_events(workspace: Workspace, spark: SparkSession, source: str, windows: Sequence[str]) -> DataFrame:
    """Return what raw would hold of ``windows`` after a replay, as ``RAW_TYPE`` rows; nothing is committed.

    These are all landed events. For a window of which landing has forgotten a batch, they are the events that
    raw holds, and those of batches that raw lacks.
    """
    store = workspace.landing(source)
    landed = _Landing(store, Removed.open(workspace, source))
    snapshot = workspace.raw(source).open() if workspace.raw(source).exists else None
    frames, files = [], []
    for window in windows:
        names = set(landed.of(window))
        if snapshot is not None and not _all_landed(snapshot, window, landed):
            frames.append(snapshot.read(spark, snapshot.files(window)))
            names -= _held(snapshot, window)
        files += [(window, batch, file) for batch, file in landed.files(window, names)]
    if files:
        frames.append(_events(spark, store, files))
    return reduce(DataFrame.unionByName, frames, spark.createDataFrame([], RAW_TYPE))


def _events(
    spark: SparkSession, store: LandingStore, files: Sequence[tuple[str, Manifest, DataFile]]
) -> DataFrame:
    """Return the events of ``files`` (window, batch, file; at least one) as raw has them; files are
    checked."""
    for _, _, file in files:
        store.verify_file(file)
    shares = in_shares(_landed_files(store, files))
    visit = Visit.of(spark, store.folder / files[0][2].path)
    read = visiting(visit, partial(_landed_rows, shares=shares))
    return spark.range(0, len(shares), 1, len(shares)).mapInArrow(read, RAW_TYPE)


def _landed_rows(
    batches: Iterable[pa.RecordBatch], shares: Sequence[Sequence[LandedFile]]
) -> Iterator[pa.RecordBatch]:
    for number in (each for batch in batches for each in batch.column(0).to_pylist()):
        for file in shares[number]:
            for rows in landed_rows(file):
                yield from rows.to_batches()


def _landed_files(store: LandingStore, files: Iterable[tuple[str, Manifest, DataFile]]) -> list[LandedFile]:
    # The window of an event is that of its data file: by its commit time, unless its position had landed in
    # another window before (landing/first_windows.py).
    return [LandedFile(store.folder, file, _arrived(window, batch)) for window, batch, file in files]


def _arrived(window: str, batch: Manifest) -> dict[str, Any]:
    """Return the facts of the arrival of ``batch`` in ``window`` as columns of raw."""
    facts = batch.arrival
    return {
        "batch_id": batch.batch_id,
        "window": window,
        "landed_at": facts.landed_at,
        "watermark_before": facts.watermark_before,
        "newest_epoch_before": facts.newest_epoch_before,
        "file_name": _file_name(batch),
    }


def _file_name(batch: Manifest) -> str | None:
    return batch.file.name if batch.file is not None else None


def _refuse_other_counts(
    store: LandingStore, plans: Sequence[WindowPlan], landed: _Landing, staged: StagedFiles
) -> None:
    for plan in plans:
        files = landed.parts(plan.window, plan.read)
        expected = sum(file.rows for file in files)
        written = sum(file.rows for file in staged.of(plan.window))
        if written != expected:
            names = ", ".join(str(store.path_of(file)) for file in files[:3])
            manifest = f"{files[0].batch_id}.json" if files else ""
            away = take_away(store.folder / "manifests" / manifest, "move its manifest away")
            raise LandingDisagrees(
                f"The manifests count {expected} events for window {plan.window}, the batch files hold "
                f"{written} (first files: {names}).",
                fix=put_back(
                    store.folder / files[0].path if files else store.folder,
                    "Restore the batch from a backup of the landing folder.",
                )
                + f" If there is none, {away}, and begin a new epoch: "
                'omnisupport-ingest capture --new-epoch "what happened"',
            )
