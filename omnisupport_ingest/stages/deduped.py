"""``raw_cdc_staging`` → ``deduped_events`` and ``quarantine``: each distinct event once, or a reason why not.

New events whose positions provably lie above everything judged before are judged alone and
appended. Anything else (an overlap, a replaced window, another contract) judges the whole window
again from raw. The quarantine of a window is committed first and named in the state of the deduped
window, so both always belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc import dedupe
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, QUARANTINED
from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.table import TableSnapshot, retrying
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Position
from omnisupport_ingest.stages import quarantine
from omnisupport_ingest.stages.checkpoints import Counts, Identity, Outcome, change_for, report
from omnisupport_ingest.stages.idempotency import LOGIC_VERSION, idempotency_key, unit_key
from omnisupport_ingest.stages.plan import Upstream, WindowPlan, Work, plan_window
from omnisupport_ingest.stages.progress import facts_of, rise_from
from omnisupport_ingest.stages.workspace import Workspace
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "deduped_events"


class CountsDisagree(IngestError):
    """``raw = deduped + duplicates + quarantined`` does not hold; nothing was committed."""


@dataclass(frozen=True)
class _Job:
    """One window's work with all it needs: plan, upstream, and the raw files to judge."""

    plan: WindowPlan
    upstream: Upstream
    files: tuple[LakeFile, ...]
    batches: tuple[str, ...]
    outcome_key: str
    distinct: bool


def materialize(
    workspace: Workspace,
    spark: SparkSession,
    source: str,
    windows: Sequence[str],
    run_id: str,
    *,
    replay: bool = False,
) -> list[Checkpoint]:
    """Judge the events of ``windows`` that raw holds and this layer has not judged yet.

    With ``replay`` every event of the windows is judged again. A second call changes nothing.
    Returns one checkpoint per window asked for, in order.
    """
    table, contracts = workspace.deduped(source), workspace.contracts.of_source(source)
    versions = versions_of(contracts)
    store = workspace.landing(source)

    def attempt(snapshot: TableSnapshot) -> None:
        raw = workspace.raw(source).open()
        targets = [*dict.fromkeys(windows), *([OUT_OF_RANGE] if raw.files(OUT_OF_RANGE) else [])]
        jobs = [
            job
            for window in targets
            if (job := _job(snapshot, raw, store, window, versions, replay)).plan.work is not Work.NOTHING
        ]
        if jobs:
            _commit(workspace, spark, source, contracts, snapshot, raw, jobs, run_id)

    retrying(attempt, table)
    return report(table, windows)


def versions_of(contracts: Sequence[TableContract]) -> tuple[str, ...]:
    """What makes a window of this layer stale when it changes: the logic, or any contract of the source."""
    prints = (f"contract:{contract.name}:{contract.fingerprint}" for contract in contracts)
    return (f"logic:{LOGIC_VERSION}", *prints)


def _job(
    snapshot: TableSnapshot,
    raw: TableSnapshot,
    store: LandingStore,
    window: str,
    versions: tuple[str, ...],
    replay: bool,
) -> _Job:
    files = raw.files(window)
    upstream = Upstream(frozenset(file.path for file in files), raw.table_id, versions)
    plan = plan_window(snapshot, window, upstream, replay=replay)
    raw_state, state = raw.state(window), snapshot.state(window)
    batches = raw_state.batches if raw_state else ()
    judged = frozenset(state.batches) if state and plan.work is Work.APPEND else frozenset()
    new = [name for name in batches if name not in judged]
    last = Position.parse(state.checkpoint.cursor) if state and judged and state.checkpoint.cursor else None
    distinct = _rises(store, new, window, last)
    if plan.work is Work.APPEND and judged and not distinct:
        plan = WindowPlan(window, Work.REPLACE, upstream.units, snapshot.version + 1)
        distinct = _rises(store, batches, window, None)
    return _Job(
        plan=plan,
        upstream=upstream,
        files=tuple(file for file in files if file.path in plan.read),
        batches=batches,
        outcome_key=idempotency_key(
            layer=LAYER, table=LAYER, window=window, inputs=upstream.units, versions=versions
        ),
        distinct=distinct,
    )


def _rises(store: LandingStore, names: Sequence[str], window: str, last: Position | None) -> bool:
    if not all(store.exists(name) for name in names):
        return False
    manifests = [store.read(name) for name in names]
    return rise_from(last, [file for each in manifests for file in each.files if file.window == window])


def _commit(
    workspace: Workspace,
    spark: SparkSession,
    source: str,
    contracts: Sequence[TableContract],
    snapshot: TableSnapshot,
    raw: TableSnapshot,
    jobs: Sequence[_Job],
    run_id: str,
) -> None:
    unit = unit_key((job.outcome_key, job.plan) for job in jobs)
    judged = dedupe.judge(_marked(spark, raw, jobs), contracts)
    refused = Observation()
    accepted = stage_frame(
        snapshot.table,
        judged.observe(refused, F.count_if(F.col("verdict") != ACCEPTED).alias("rows"))
        .where(F.col("verdict") == ACCEPTED)
        .select(*RAW_TYPE.names),
        unit=unit,
        generation={job.plan.window: job.plan.generation for job in jobs},
    )
    # Most often every event is accepted; then the events are read once, and nothing is left to do.
    others = judged.where(F.col("verdict") != ACCEPTED) if refused.get["rows"] else None
    counts = _counts(snapshot, jobs, accepted, others)
    companions = quarantine.commit(
        workspace.quarantine(source),
        others,
        {job.plan.window: _earlier_companions(snapshot, job) for job in jobs},
        unit=unit,
        identity=Identity(quarantine.LAYER, source, run_id),
    )
    landing = workspace.landing(source)
    snapshot.commit(
        [
            change_for(
                snapshot,
                job.plan,
                job.upstream,
                Outcome(
                    idempotency_key=job.outcome_key,
                    batches=job.batches,
                    facts=facts_of(_known(landing, job.batches), job.plan.window),
                    counts=counts[job.plan.window],
                    companions=companions[job.plan.window],
                    upstream_version=raw.version,
                ),
                Identity(LAYER, source, run_id),
                accepted,
                "event_hash",
            )
            for job in jobs
        ]
    )


def _known(landing: LandingStore, names: Sequence[str]) -> list[Manifest]:
    return [landing.read(name) for name in names if landing.exists(name)]


def _earlier_companions(snapshot: TableSnapshot, job: _Job) -> tuple[str, ...]:
    state = snapshot.state(job.plan.window)
    return state.companions if state and job.plan.work is Work.APPEND else ()


def _marked(spark: SparkSession, raw: TableSnapshot, jobs: Sequence[_Job]) -> DataFrame:
    alone = [file for job in jobs if job.distinct for file in job.files]
    together = [file for job in jobs if not job.distinct for file in job.files]
    frames = []
    if alone or not together:
        frames.append(dedupe.mark_distinct(raw.read(spark, alone)))
    if together:
        frames.append(dedupe.mark_copies(raw.read(spark, together)))
    return reduce(DataFrame.unionByName, frames)


def _counts(
    snapshot: TableSnapshot, jobs: Sequence[_Job], accepted: StagedFiles, others: DataFrame | None
) -> dict[str, Counts]:
    """Counts per window, each taken where it arises; ``CountsDisagree`` if they do not add up."""
    found: dict[tuple[str, str], int] = {}
    if others is not None:
        for row in others.groupBy("window", "verdict").count().collect():
            found[row["window"], row["verdict"]] = row["count"]
    counts = {}
    for job in jobs:
        window, state = job.plan.window, snapshot.state(job.plan.window)
        now = Counts(
            raw=sum(file.rows for file in job.files),
            deduped=sum(file.rows for file in accepted.of(window)),
            duplicates=found.get((window, DUPLICATE), 0),
            quarantined=found.get((window, QUARANTINED), 0),
        )
        if now.raw != now.deduped + now.duplicates + now.quarantined:
            raise CountsDisagree(
                f"Window {window} of {snapshot.table.spec.path}: {now.raw} raw events became "
                f"{now.deduped} deduped, {now.duplicates} duplicates and {now.quarantined} quarantined.",
                fix="Nothing was committed. Run the window again; if it fails again, report it with the log.",
            )
        before = Counts.of(state.checkpoint) if state and job.plan.work is Work.APPEND else Counts()
        counts[window] = before + now
    return counts
