"""``deduped_events`` and ``quarantine`` → net changes: the fold of each window, in parts.

A run folds its own events and adds the result to the window as a part, so it costs what is new, whatever the
window holds. Readers of the window fold the parts (``cdc.fold``). Closing leaves one row per key. Quarantined
events are folded as withheld ones, never skipped.

The content hash of a window is that of the events folded into it, however many parts it has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.fold import fold_events, merge_rows, partitions_for
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.cdc.ordinary import Taken
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.contenthash import ContentHash, hash_of_rows
from omnisupport_ingest.lake.file_tasks import made_by_tasks
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staged_frames import stage_frame
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.layers.batch_facts import facts_of_parts
from omnisupport_ingest.layers.checkpoints import Counts, Outcome
from omnisupport_ingest.layers.closing import Compaction
from omnisupport_ingest.layers.dimension.fold_tasks import (
    SHARES,
    FoldReport,
    fold,
    in_key_shares,
    of_block,
    parts_agree,
)
from omnisupport_ingest.layers.dimension.replay_changes import ReplayChanges
from omnisupport_ingest.layers.dimension.tied_keys import holds_ended_lives
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.events.quarantine_files import WITHHELD, named_by, withheld_of
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.plan import (
    InputFiles,
    RequestedWork,
    Upstream,
    WindowPlan,
    Work,
    idempotency_key,
    plan_of_files,
)
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.replay_reasons import Replaced, reasons
from omnisupport_ingest.layers.type_changes import require_types
from omnisupport_ingest.layers.versions import RULES, of_contract, of_table
from omnisupport_ingest.layers.window_update import (
    LayerRun,
    Produced,
    WindowJob,
    WindowUpdate,
    update_windows,
)
from omnisupport_ingest.layers.workspace import Workspace, order_of
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "net_changes"

THINNED = "thinned"
"""Carried text in the state of a window without its superseded rows (``retention.superseded_rows``)."""


@dataclass(frozen=True)
class _Job(WindowJob):
    """The work of one window, and the files of accepted and quarantined events to fold."""

    accepted: tuple[LakeFile, ...]
    withheld: tuple[LakeFile, ...]
    counts: Counts
    batches: tuple[str, ...]

    @property
    def files(self) -> tuple[LakeFile, ...]:
        return self.accepted + self.withheld


def materialize(
    workspace: Workspace,
    spark: SparkSession,
    contract: TableContract,
    windows: Sequence[str],
    run_id: str,
    *,
    replay: bool = False,
) -> list[Checkpoint]:
    """Fold the events of ``windows`` that are not in the net changes yet.

    With ``replay`` the windows are folded again from all their events. A second call changes
    nothing. Windows that are closed in the layer above are closed here too: their parts are folded into one
    row per key. Returns one checkpoint per requested window, in order.
    """
    return update_windows(
        workspace.net_changes(contract),
        windows,
        LayerRun.of(workspace, spark, contract.source, run_id, replay=replay),
        partial(_Update, contract=contract),
        Compaction(spark, None, partial(_once, contract)),
    )


class _Update(WindowUpdate[_Job]):
    """An update of one table's net changes from what the deduped events hold by now."""

    layer = LAYER

    def __init__(self, snapshot: TableSnapshot, run: LayerRun, *, contract: TableContract) -> None:
        super().__init__(snapshot, run)
        self._contract = contract
        self._files = EventFiles.opened(run.workspace, contract.source)
        self._deduped = self._files.deduped
        self._landing = run.workspace.landing(run.source)
        self._lateness = Lateness.of(run.workspace, run.source)
        require_types(run.workspace, contract, snapshot)

    def targets(self, windows: Sequence[str]) -> list[str]:
        targets = list(dict.fromkeys(windows))
        if self.snapshot.retyped:
            # Take all windows in one commit: no reader may find files of both types, or part of the table.
            targets = sorted({*targets, *self.snapshot.windows(), *self._deduped.windows()})
        if self._deduped.state(OUT_OF_RANGE) is not None and OUT_OF_RANGE not in targets:
            # The sentinel's events have impossible times; the fold withholds them like others in quarantine.
            targets.append(OUT_OF_RANGE)
        return targets

    def is_past(self, window: str) -> bool:
        # The layer above has closed it. That is sufficient, and cheap to look up.
        state = self._deduped.state(window)
        return state is not None and state.closed

    def job(self, window: str) -> _Job:
        asked = self.run.asked
        if self.snapshot.retyped:
            asked = replace(asked, replay=True)
        job = _job(self.snapshot, self._files, self._contract, window, asked)
        if self._lacks_rows(job) or (self._may_hide(job) and window in self._sealed):
            return _job(self.snapshot, self._files, self._contract, window, replace(asked, replay=True))
        on_request = asked.replay or job.plan.repeated
        return job if on_request or not job.replays else self._noting(job) or job

    def _noting(self, job: _Job) -> _Job | None:
        """Return the work of noting the files that hold the events of ``job`` now. None if the window is not
        the fold of exactly these events, as it is after the layer above judged those of other tables again.
        """
        state = self.snapshot.state(job.window)
        if state is None or (state.versions, state.upstream_table_id) != (
            job.upstream.versions,
            job.upstream.table_id,
        ):
            return None
        if not state.made_from or state.made_from != _digest(self._deduped.state(job.window), self._contract):
            return None
        withheld = withheld_of(job.withheld, self._contract)
        if str(content_of(self._contract, job.accepted, withheld)) != state.checkpoint.content_hash:
            return None
        plan = WindowPlan(job.window, Work.APPEND, frozenset(), state.generation)
        return replace(job, plan=plan, accepted=(), withheld=())

    @cached_property
    def _sealed(self) -> frozenset[str]:
        """The sealed windows. Read after the deduped events: if these withhold events because a window is
        sealed, its sealing is on record by then."""
        return Removed.open(self.run.workspace, self.run.source).sealed

    def _lacks_rows(self, job: _Job) -> bool:
        """Whether events are to be appended to a window without its superseded rows. Beside new events these
        rows may matter again, so the window must be folded again from all of its events."""
        news = bool(job.accepted or withheld_of(job.withheld, self._contract))
        return job.plan.work is Work.APPEND and news and self._is_thinned(job.window)

    def _is_thinned(self, window: str) -> bool:
        state = self.snapshot.state(window)
        return state is not None and state.carried == THINNED

    def _may_hide(self, job: _Job) -> bool:
        """Whether an append to a sealed window may hide events of a life that a key change ended.

        Withheld events of a sealed window may lie anywhere in its log order. In other windows, appended
        events lie above all others.
        """
        return (
            job.plan.work is Work.APPEND
            and bool(withheld_of(job.withheld, self._contract))
            and holds_ended_lives(self.snapshot.files(job.window))
        )

    def produce(self, jobs: Sequence[_Job], unit: str) -> Produced[_Job]:
        run, contract = self.run, self._contract
        files, exact_share = _stage(run.spark, contract, self.snapshot, self._files, jobs, unit)
        replayed = [job for job in jobs if job.replays]
        windows = [job.window for job in replayed]
        changed = ReplayChanges(run.spark, self.snapshot, contract, windows, files)
        return Produced(files, partial(self._outcome, exact_share, changed))

    def closes_now(self, job: _Job, files: StagedFiles) -> bool:
        # A table without news takes in the batches of the other tables when its window closes, in this
        # commit.
        return job.plan.work is Work.APPEND and self.is_past(job.window) and not files.of(job.window)

    def _outcome(self, exact_share: float | None, changed: ReplayChanges, job: _Job) -> Outcome:
        parts = self._landed_parts(job)
        return Outcome(
            idempotency_key=job.key,
            batches=job.batches,
            facts=facts_of_parts(parts),
            counts=job.counts,
            upstream_version=self._deduped.version,
            past_closing=self.is_past(job.window),
            exact_share=exact_share,
            content=content_of(self._contract, job.accepted, job.withheld),
            replaced=self._replaced(job, parts, changed),
            made_from=_digest(self._deduped.state(job.window), self._contract),
        )

    def _landed_parts(self, job: _Job) -> list[LandedPart]:
        """Return the landed files of the job's window that belong to the batches it holds."""
        held = frozenset(job.batches)
        return [part for part in self._landing.parts(job.window) if part.batch_id in held]

    def _replaced(self, job: _Job, parts: Sequence[LandedPart], changed: ReplayChanges) -> Replaced | None:
        before = self.snapshot.state(job.window)
        if before is None or not job.replays or self.snapshot.retyped:
            # With other column types every row differs, so nothing can be compared.
            return None
        late = self._lateness.late_batches(parts)
        why = reasons(before, job.upstream, job.batches, late, self._deduped.state(job.window))
        rules = tuple(each for each in why if each in RULES)
        # A rebuild restores superseded rows, and then their keys have the same state as before.
        keys = None if self._is_thinned(job.window) else partial(changed.of, job.window)
        return Replaced(before.checkpoint.content_hash, why, keys, unseen=rules)


def _job(
    snapshot: TableSnapshot, files: EventFiles, contract: TableContract, window: str, asked: RequestedWork
) -> _Job:
    deduped = files.deduped
    above = deduped.state(window)
    accepted, withheld = files.accepted(contract, window), files.withheld_in(window)
    inputs = InputFiles.of((file.path for file in accepted), above)
    upstream = Upstream(units_above(inputs.paths, above), deduped.table_id, of_contract(contract))
    plan = plan_of_files(snapshot, window, upstream, asked, inputs)
    state = snapshot.state(window)
    batches = above.batches if above else ()
    if plan.work is Work.NOTHING and state is not None and set(state.batches) != set(batches):
        # There is nothing for this table, but its checkpoint advances with its source.
        plan = WindowPlan(window, Work.APPEND, frozenset(), state.generation)
    read = inputs.holding(plan.read) or ()
    return _Job(
        plan=plan,
        upstream=upstream,
        key=idempotency_key(
            layer=LAYER,
            table=contract.full_name,
            window=window,
            inputs=upstream.units,
            versions=upstream.versions,
        ),
        accepted=tuple(file for file in accepted if file.path in read),
        withheld=tuple(file for file in withheld if f"{WITHHELD}{file.path}" in plan.read),
        counts=Counts(
            raw=sum(file.rows for file in accepted),
            deduped=sum(file.rows for file in accepted),
        ),
        batches=batches,
    )


def units_above(accepted: Iterable[str], above: WindowState | None) -> frozenset[str]:
    """Return the inputs of a window: its ``accepted`` files, and the quarantine files that ``above``
    names."""
    return InputFiles.of(accepted, above).units | frozenset(f"{WITHHELD}{path}" for path in named_by(above))


def _digest(above: WindowState | None, contract: TableContract) -> str:
    """Return a digest of the batches of a window in the layer above, and of the rules by which it judged the
    table's events in them."""
    if above is None:
        return ""
    made_of = [of_table(above.versions, contract.name), sorted(above.batches)]
    return hashlib.sha256(json.dumps(made_of).encode()).hexdigest()


def content_of(
    contract: TableContract, accepted: Iterable[LakeFile], withheld: Iterable[LakeFile]
) -> ContentHash:
    """Return the content hash of a window, from the table's events in its accepted and withheld files."""
    of_table = {"source_schema": contract.schema}
    known = hash_of_rows((file.uri for file in accepted), of_table)
    of_table |= {"source_table": contract.table}
    return known + hash_of_rows((file.uri for file in withheld), of_table, withheld=True)


def _once(contract: TableContract, rows: DataFrame, count: int) -> DataFrame:
    """Return the folded rows of windows being closed, one per group."""
    return merge_rows(rows, contract, partitions=partitions_for(count, 0))


def _stage(
    spark: SparkSession,
    contract: TableContract,
    snapshot: TableSnapshot,
    files: EventFiles,
    jobs: Sequence[_Job],
    unit: str,
) -> tuple[StagedFiles, float | None]:
    """Write the fold of the jobs' new events; return its files, and the share folded one by one, if known."""
    # A window has the withheld events of all tables of the source. Read only the files with this table's.
    of_table = [replace(job, withheld=withheld_of(job.withheld, contract)) for job in jobs]
    working = [job for job in of_table if job.files]
    if not working:
        return StagedFiles(()), None
    events = [file for job in working for file in job.files]
    generation = {job.window: job.plan.generation for job in working}
    withheld = [file for job in working for file in job.withheld]
    apart = {file.uri for file in withheld}
    events.sort(key=lambda file: (file.window, file.uri in apart, file.path))
    for count in SHARES:
        blocks = in_key_shares(events, count, withheld)
        shares = [share for block in blocks for share in block]
        works = [partial(fold, share=share, contract=contract, order=order_of(contract)) for share in shares]
        with made_by_tasks(spark, snapshot.table, works, unit=unit, generation=generation) as made:
            if made is None:
                continue
            reports = [FoldReport.parse(each) for each in made.results]
            in_order = iter(reports)
            of_blocks = [of_block(next(in_order).stretches for _ in block) for block in blocks]
            if parts_agree(of_blocks):
                return made.place(), sum((each.taken for each in reports), Taken()).share
            break
    rows = fold_events(_events(spark, contract, files, working), contract, partitions=_parts(events))
    staged = stage_frame(
        snapshot.table,
        rows.select(*folded_type(contract).names),
        unit=unit,
        generation=generation,
        rows=sum(file.rows for file in events),
    )
    return staged, None


def _parts(files: Sequence[LakeFile]) -> int:
    return partitions_for(sum(file.rows for file in files), sum(file.bytes for file in files))


def _events(
    spark: SparkSession,
    contract: TableContract,
    files: EventFiles,
    jobs: Sequence[_Job],
) -> DataFrame:
    """Return the jobs' events of the table; the column ``withheld`` marks the quarantined ones."""
    accepted = files.deduped.read(spark, [file for job in jobs for file in job.accepted])
    frames = [accepted.withColumn("withheld", F.lit(False))]
    withheld = [file for job in jobs for file in job.withheld]
    if withheld:
        quarantined = files.quarantine.read(spark, withheld).select(*accepted.columns)
        frames.append(quarantined.withColumn("withheld", F.lit(True)))
    of_table = (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
    return reduce(DataFrame.unionByName, frames).where(of_table)
