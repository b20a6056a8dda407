"""``deduped_events`` and ``quarantine`` → ``dim_<table>``: the fold of each window, one row per key touched.

New events are folded and merged with what the window holds, so a run costs what is new plus the
window's net change. Quarantined events are holes in the fold, never stepped over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.fold import fold_events, merge_rows, partitions_for
from omnisupport_ingest.cdc.folded import folded_type
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.idempotency import idempotency_key, unit_key
from omnisupport_ingest.stages.plan import Upstream, WindowPlan, Work, plan_window, repeats_writes
from omnisupport_ingest.stages.progress import BatchFacts, facts_of
from omnisupport_ingest.stages.versions import of_contract
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "dimension"


@dataclass(frozen=True)
class _Job:
    """One window's work: its plan, the files of accepted and quarantined events to fold, and the files
    of folded rows to merge them with."""

    plan: WindowPlan
    upstream: Upstream
    accepted: tuple[LakeFile, ...]
    holes: tuple[LakeFile, ...]
    held: tuple[LakeFile, ...]
    counts: Counts
    batches: tuple[str, ...]

    @property
    def files(self) -> tuple[LakeFile, ...]:
        return self.accepted + self.holes


def materialize(
    workspace: Workspace,
    spark: SparkSession,
    contract: TableContract,
    windows: Sequence[str],
    run_id: str,
    *,
    replay: bool = False,
) -> list[Checkpoint]:
    """Fold the events of ``windows`` that the dimension has not folded yet.

    With ``replay`` the windows are folded again from all their events. A second call changes
    nothing. Returns one checkpoint per window asked for, in order.
    """
    table, remake = workspace.dimension(contract), repeats_writes(workspace.decisions)

    def attempt(snapshot: TableSnapshot) -> None:
        deduped = workspace.deduped(contract.source).open()
        quarantine = workspace.quarantine(contract.source).open()
        asked = list(dict.fromkeys(windows))
        if deduped.state(OUT_OF_RANGE) is not None:
            # Events whose time cannot be right are holes in the fold like any other.
            asked.append(OUT_OF_RANGE)
        jobs = [_job(snapshot, deduped, quarantine, contract, window, replay or remake) for window in asked]
        jobs = [job for job in jobs if job.plan.work is not Work.NOTHING]
        if not jobs:
            return
        keys = {job.plan.window: _key(contract, job) for job in jobs}
        staged = _stage(
            spark,
            contract,
            snapshot,
            deduped,
            quarantine,
            jobs,
            unit_key((keys[job.plan.window], job.plan) for job in jobs),
        )
        landing = workspace.landing(contract.source)
        snapshot.commit(
            [
                change_for(
                    snapshot,
                    job.plan,
                    job.upstream,
                    Outcome(
                        idempotency_key=keys[job.plan.window],
                        batches=job.batches,
                        facts=_facts(landing, job),
                        counts=job.counts,
                        upstream_version=deduped.version,
                    ),
                    Identity(LAYER, contract.source, run_id),
                    staged,
                    "_cdc_row_hash",
                )
                for job in jobs
            ]
        )

    retrying(attempt, table)
    return report(table, windows)


def _job(
    snapshot: TableSnapshot,
    deduped: TableSnapshot,
    quarantine: TableSnapshot,
    contract: TableContract,
    window: str,
    replay: bool,
) -> _Job:
    above = deduped.state(window)
    accepted = tuple(
        file for file in deduped.files(window) if ("source_table", contract.table) in file.partition
    )
    companions = above.companions if above else ()
    holes = tuple(file for file in quarantine.files(window) if file.path in companions)
    upstream = Upstream(
        frozenset(file.path for file in accepted) | frozenset(f"quarantine/{file.path}" for file in holes),
        deduped.table_id,
        of_contract(contract),
    )
    plan = plan_window(snapshot, window, upstream, replay=replay)
    state = snapshot.state(window)
    batches = above.batches if above else ()
    held = snapshot.files(window) if plan.work is Work.APPEND else ()
    if held and plan.read:
        # The window is written anew, one row per key, from what it holds and what is new.
        plan = WindowPlan(window, Work.REPLACE, plan.read, snapshot.version + 1)
    if plan.work is Work.NOTHING and state is not None and set(state.batches) != set(batches):
        # Nothing for this table, but the checkpoint moves on with its source.
        plan = WindowPlan(window, Work.APPEND, frozenset(), state.generation)
    return _Job(
        plan=plan,
        upstream=upstream,
        accepted=tuple(file for file in accepted if file.path in plan.read),
        holes=tuple(file for file in holes if f"quarantine/{file.path}" in plan.read),
        held=held,
        counts=Counts(
            raw=sum(file.rows for file in accepted),
            deduped=sum(file.rows for file in accepted),
        ),
        batches=batches,
    )


def _key(contract: TableContract, job: _Job) -> str:
    return idempotency_key(
        layer=LAYER,
        table=contract.full_name,
        window=job.plan.window,
        inputs=job.upstream.units,
        versions=job.upstream.versions,
    )


def _facts(landing: LandingStore, job: _Job) -> BatchFacts:
    return facts_of((landing.read(name) for name in job.batches if landing.exists(name)), job.plan.window)


def _stage(
    spark: SparkSession,
    contract: TableContract,
    snapshot: TableSnapshot,
    deduped: TableSnapshot,
    quarantine: TableSnapshot,
    jobs: Sequence[_Job],
    unit: str,
) -> StagedFiles:
    """Write the fold of the jobs' new events, merged with the rows their windows hold."""
    working = [job for job in jobs if job.files]
    if not working:
        return StagedFiles(())
    events = [file for job in working for file in job.files]
    rows = fold_events(
        _events(spark, contract, deduped, quarantine, working), contract, partitions=_parts(events)
    )
    held = [file for job in working for file in job.held]
    if held:
        rows = rows.unionByName(snapshot.read(spark, held))
        rows = merge_rows(rows, contract, partitions=_parts([*events, *held]))
    generation = {job.plan.window: job.plan.generation for job in working}
    return stage_frame(
        snapshot.table, rows.select(*folded_type(contract).names), unit=unit, generation=generation
    )


def _parts(files: Sequence[LakeFile]) -> int:
    return partitions_for(sum(file.rows for file in files), sum(file.bytes for file in files))


def _events(
    spark: SparkSession,
    contract: TableContract,
    deduped: TableSnapshot,
    quarantine: TableSnapshot,
    jobs: Sequence[_Job],
) -> DataFrame:
    """The jobs' events of the table; ``hole`` tells the quarantined ones."""
    accepted = deduped.read(spark, [file for job in jobs for file in job.accepted])
    frames = [accepted.withColumn("hole", F.lit(False))]
    files = [file for job in jobs for file in job.holes]
    if files:
        holes = quarantine.read(spark, files).select(*accepted.columns)
        frames.append(holes.withColumn("hole", F.lit(True)))
    of_table = (F.col("source_schema") == contract.schema) & (F.col("source_table") == contract.table)
    return reduce(DataFrame.unionByName, frames).where(of_table)
