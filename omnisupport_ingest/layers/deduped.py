"""``raw_cdc_staging`` → ``deduped_events`` and ``quarantine``: each distinct event once, or a reason why not.

New events whose positions provably lie above everything judged before are judged alone and
appended. Anything else (an overlap, a replaced window, another contract) judges the whole window
again from raw. The quarantine files of a window are committed first and named in the state of the
deduped window, which alone says what is withheld; afterwards those of the judgement before leave the
table of quarantine (``quarantine``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import count

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc import dedupe
from omnisupport_ingest.cdc.envelope import RAW_TYPE
from omnisupport_ingest.cdc.judging import ACCEPTED, DUPLICATE, QUARANTINED, JudgingRules
from omnisupport_ingest.contracts.decision_table import JUDGED, Finding
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.file_tasks import Made, in_shares, made_by_tasks
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.staging import StagedFiles, stage_frame
from omnisupport_ingest.lake.table import LakeTable, TableSnapshot, retrying
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers import closing, quarantine, scenarios
from omnisupport_ingest.layers.checkpoints import (
    Counts,
    Identity,
    Outcome,
    change_for,
    found_before,
    report,
)
from omnisupport_ingest.layers.erasures import refuse_lost
from omnisupport_ingest.layers.event_copies import Copies, mark_copies
from omnisupport_ingest.layers.event_tasks import Judged, judge
from omnisupport_ingest.layers.explained import Replaced, reasons
from omnisupport_ingest.layers.idempotency import idempotency_key, unit_key
from omnisupport_ingest.layers.lateness import Lateness
from omnisupport_ingest.layers.plan import Asked, Upstream, WindowPlan, Work, plan_window, repeats_writes
from omnisupport_ingest.layers.progress import facts_of_parts, rise_from
from omnisupport_ingest.layers.quarantine_files import gone_from_disk, named_by
from omnisupport_ingest.layers.removed import Removed, lasting, refuse_less, refuse_remake
from omnisupport_ingest.layers.rules_asked import broken_in, rules_asked, with_rejected
from omnisupport_ingest.layers.scenarios import Tallies
from omnisupport_ingest.layers.upstream_files import files_to_read, units_of
from omnisupport_ingest.layers.versions import DESTROYED_KEY, ERASURE, RulesVersions, found_in
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Position
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "deduped_events"


class CountsDisagree(IngestError):
    """``raw = deduped + duplicates + quarantined`` does not hold; nothing was committed."""


@dataclass(frozen=True)
class _Job:
    """One window's work with all it needs: plan, upstream, and the raw files to judge.

    ``landed``: what landing has of its ``batches``.
    """

    plan: WindowPlan
    upstream: Upstream
    files: tuple[LakeFile, ...]
    batches: tuple[str, ...]
    landed: tuple[LandedPart, ...]
    outcome_key: str
    distinct: bool


_Verdicts = tuple[StagedFiles, Tallies, StagedFiles, Judged]
"""The accepted events that were written, what was found, the quarantined events that were written, and what
judging says of all."""


@dataclass(frozen=True)
class _Judging:
    """What a run judges events of ``source`` with.

    ``passed`` tells whether the watermark has closed a window; events go to quarantine in ``sealed`` ones.
    """

    workspace: Workspace
    spark: SparkSession
    source: str
    run_id: str
    versions: RulesVersions
    lateness: Lateness
    passed: Callable[[str], bool]
    sealed: frozenset[str]


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

    With ``replay`` every event of the windows is judged again. A second call changes nothing. Windows
    that the watermark has closed, and in which nothing is left to judge, are closed.
    Returns one checkpoint per window asked for, in order.
    """
    table, withheld = workspace.deduped(source), workspace.quarantine(source)
    store, asked = workspace.landing(source), Asked(replay, repeats_writes(workspace.decisions))
    repeated: list[str] = []
    lateness = Lateness.of(workspace, source)
    landed = store.landed()
    sealed: set[str] = set()
    passed = closing.passed_by_watermark(lateness, landed.watermark, sealed)

    def attempt(snapshot: TableSnapshot) -> list[str]:
        raw = workspace.raw(source).open()
        # After raw: what raw has lost by retention is on record by then, and must not be judged as if it
        # had never been.
        sealed.update(Removed.open(workspace, source).sealed)
        # Before its version is asked for: the map of tokens is made here.
        workspace.secrets(workspace.contracts.of_source(source))
        # In this order: who has something erased looks at what has landed after it is recorded, so every
        # event that a run judges without knowing of it is seen there.
        versions = RulesVersions(workspace, source)
        targets = [*dict.fromkeys(windows), *([OUT_OF_RANGE] if raw.files(OUT_OF_RANGE) else [])]
        for window in targets:
            state = snapshot.state(window)
            held = state.versions if state is not None else ()
            refuse_lost(workspace, source, window, held, versions.of(window))
        every = [
            _job(
                snapshot,
                raw,
                store,
                window,
                versions.of_held(window, snapshot.state(window), partial(store.parts, window)),
                None if window in sealed else _asked(asked, withheld, snapshot, window),
            )
            for window in targets
        ]
        jobs = [job for job in every if job.plan.work is not Work.NOTHING]
        if jobs:
            judging = _Judging(
                workspace, spark, source, run_id, versions, lateness, passed, frozenset(sealed)
            )
            _commit(judging, snapshot, raw, jobs)
        idle = closing.due(snapshot, set(targets) - {job.plan.window for job in jobs}, passed)
        done = (job.plan.window for job in every if job.plan.repeated)
        repeated[:] = [window for window in done if window not in idle]
        return idle

    due = retrying(attempt, table)
    quarantine.settle(table, withheld, [*windows, OUT_OF_RANGE], Identity(quarantine.LAYER, source, run_id))
    closing.close(table, due, run_id, closing.Fold(spark, "event_hash"))
    return report(table, windows, repeated)


def _asked(asked: Asked, withheld: LakeTable, snapshot: TableSnapshot, window: str) -> Asked:
    """``asked``, as a replay where a quarantine file of ``window`` is gone from disk: it is judged anew."""
    gone = gone_from_disk(withheld, snapshot.state(window))
    return replace(asked, replay=asked.replay or gone)


def _job(
    snapshot: TableSnapshot,
    raw: TableSnapshot,
    landing: LandingStore,
    window: str,
    versions: tuple[str, ...],
    asked: Asked | None,
) -> _Job:
    """``asked``: null of a sealed window, which takes in what is new and is never judged again."""
    files = raw.files(window)
    raw_state, state = raw.state(window), snapshot.state(window)
    paths, stands_for = [file.path for file in files], raw_state.compacted_units if raw_state else {}
    upstream, table = Upstream(units_of(paths, stands_for), raw.table_id, versions), snapshot.table.spec.path
    if asked is None:
        upstream = lasting(upstream, state, window=window, table=table)
    plan = plan_window(snapshot, window, upstream, asked or Asked(replay=False))
    if files_to_read(paths, stands_for, plan.read) is None:
        plan = WindowPlan(window, Work.REPLACE, upstream.units, snapshot.version + 1)
    batches = raw_state.batches if raw_state else ()
    parts = [part for part in landing.parts(window) if part.batch_id in frozenset(batches)]
    judged = frozenset(state.batches) if state and plan.work is Work.APPEND else frozenset()
    new = [name for name in batches if name not in judged]
    last = Position.parse(state.checkpoint.cursor) if state and judged and state.checkpoint.cursor else None
    distinct = _rises(parts, new, last)
    if plan.work is Work.APPEND and judged and not distinct and asked is not None:
        plan = WindowPlan(window, Work.REPLACE, upstream.units, snapshot.version + 1)
        distinct = _rises(parts, batches, None)
    if asked is None:
        refuse_remake(plan, table)
    elif plan.work is Work.REPLACE:
        refuse_less(window, sum(file.rows for file in files), sum(part.rows for part in parts))
    read = files_to_read(paths, stands_for, plan.read) or ()
    return _Job(
        plan=plan,
        upstream=upstream,
        files=tuple(file for file in files if file.path in read),
        batches=batches,
        landed=tuple(parts),
        outcome_key=idempotency_key(
            layer=LAYER, table=LAYER, window=window, inputs=upstream.units, versions=upstream.versions
        ),
        distinct=distinct,
    )


def _rises(parts: Sequence[LandedPart], names: Sequence[str], last: Position | None) -> bool:
    wanted = frozenset(names)
    if not wanted <= {part.batch_id for part in parts}:
        # Landing has forgotten a batch.
        return False
    return rise_from(last, [part for part in parts if part.batch_id in wanted])


def _commit(judging: _Judging, snapshot: TableSnapshot, raw: TableSnapshot, jobs: Sequence[_Job]) -> None:
    workspace, source = judging.workspace, judging.source
    identity = Identity(LAYER, source, judging.run_id)
    unit = unit_key((job.outcome_key, job.plan) for job in jobs)
    judging_rules = _judging_rules(workspace, source, judging.versions, [job.plan.window for job in jobs])
    judging_rules = replace(judging_rules, sealed=judging.sealed)
    if judging_rules.erasures:
        marked = _marked(judging.spark, raw, jobs)
        judged = dedupe.judge(marked, with_rejected(marked, judging_rules))
        accepted, tallies, staged, told = _judged(judging, snapshot, judged, jobs, unit)
    else:
        accepted, tallies, staged, told = _judged_by_tasks(judging, snapshot, jobs, judging_rules, unit)
    counts = _counts(snapshot, jobs, accepted, tallies)
    quarantine.add(workspace.quarantine(source), staged, replace(identity, layer=quarantine.LAYER))
    companions = {job.plan.window: _companions(snapshot, job, staged) for job in jobs}
    snapshot.commit(
        [
            change_for(
                snapshot,
                job.plan,
                job.upstream,
                Outcome(
                    idempotency_key=job.outcome_key,
                    batches=job.batches,
                    facts=facts_of_parts(job.landed),
                    counts=counts[job.plan.window],
                    companions=companions[job.plan.window],
                    upstream_version=raw.version,
                    found=_found(snapshot, job, tallies),
                    past_closing=job.plan.window in judging.sealed or judging.passed(job.plan.window),
                    exact_share=told.taken.share,
                    rules=rules_asked(workspace, source, told, job.plan, snapshot.state(job.plan.window)),
                    replaced=_replaced(
                        snapshot,
                        raw,
                        job,
                        frozenset(each.batch_id for each in judging.lateness.late_parts(job.landed)),
                        companions[job.plan.window],
                    ),
                ),
                identity,
                accepted,
            )
            for job in jobs
        ]
    )


def _judged_by_tasks(
    judging: _Judging, snapshot: TableSnapshot, jobs: Sequence[_Job], judging_rules: JudgingRules, unit: str
) -> _Verdicts:
    """The verdicts of events, each task's on files of its own; where positions may not be distinct, by marks
    that a task for each window made."""
    files = [file for job in jobs for file in job.files]
    generation = {job.plan.window: job.plan.generation for job in jobs}
    make = partial(made_by_tasks, judging.spark, snapshot.table, unit=unit, generation=generation)
    number = count()
    together = [
        [(next(number), file) for file in job.files] for job in jobs if job.files and not job.distinct
    ]
    with ExitStack() as drafts:
        copies = Copies()
        if together:
            found = drafts.enter_context(make([partial(mark_copies, files=each) for each in together]))
            assert found is not None, "copies are always found"
            copies = Copies(found.aside, {file.uri: number for each in together for number, file in each})

        def made(by: JudgingRules) -> Made | None:
            works = [
                partial(judge, files=share, judging_rules=by, copies=copies) for share in in_shares(files)
            ]
            return drafts.enter_context(make(works))

        first = made(judging_rules)
        told = _told(first)
        if told.broken.rejected:
            # Who judges a batch must have seen all of it; that is another task's work, and seldom to be done.
            first = made(replace(judging_rules, rejected=told.broken.rejected))
        return _placed(judging, snapshot, jobs, first, unit)


def _placed(
    judging: _Judging, snapshot: TableSnapshot, jobs: Sequence[_Job], made: Made | None, unit: str
) -> _Verdicts:
    """What tasks made of the jobs, with its counts."""
    assert made is not None, "an event is always judged"
    told = _told(made)
    tallies = scenarios.tally(told.groups)
    scenarios.refuse_stopped(tallies, judging.workspace.decisions, judging.source)
    withheld = quarantine.stage_written(
        judging.workspace.quarantine(judging.source),
        made.beside if tallies.withheld else (),
        [job.plan.window for job in jobs],
        unit=unit,
        version=snapshot.version + 1,
    )
    return made.place(), tallies, withheld, told


def _told(made: Made | None) -> Judged:
    return sum(map(Judged.read, made.results if made is not None else ()), Judged())


def _judged(
    judging: _Judging, snapshot: TableSnapshot, judged: DataFrame, jobs: Sequence[_Job], unit: str
) -> _Verdicts:
    """The verdicts of events of a source of which rows were erased, by a shuffle of whole rows."""
    seen = Observation()
    accepted = stage_frame(
        snapshot.table,
        judged.observe(
            seen,
            F.count_if(F.col("verdict") != ACCEPTED).alias("refused"),
            F.count_if("late").alias("late"),
            F.count_if(F.size("rules") > 0).alias("broken"),
        )
        .where(F.col("verdict") == ACCEPTED)
        .select(*RAW_TYPE.names),
        unit=unit,
        generation={job.plan.window: job.plan.generation for job in jobs},
        rows=sum(file.rows for job in jobs for file in job.files),
    )
    with _kept(judged, seen) as others:
        contracts = judging.workspace.contracts.of_source(judging.source)
        told = Judged(broken=broken_in(others, contracts))
        tallies = scenarios.tally(scenarios.groups_of(others) if others is not None else {})
        scenarios.refuse_stopped(tallies, judging.workspace.decisions, judging.source)
        withheld = quarantine.stage(
            judging.workspace.quarantine(judging.source),
            others if tallies.withheld else None,
            [job.plan.window for job in jobs],
            unit=unit,
            version=snapshot.version + 1,
        )
        return accepted, tallies, withheld, told


@contextmanager
def _kept(judged: DataFrame, seen: Observation) -> Iterator[DataFrame | None]:
    """The events that were refused or late or break a rule, kept by Spark meanwhile, so that they are judged
    once.

    None if every event was accepted in time, which is the rule: then the events are read once.
    """
    if not seen.get["refused"] and not seen.get["late"] and not seen.get["broken"]:
        yield None
        return
    odd = (F.col("verdict") != ACCEPTED) | F.col("late") | (F.size("rules") > 0)
    others = judged.where(odd).persist()
    try:
        yield others
    finally:
        others.unpersist()


def judging_rules_of(workspace: Workspace, source: str, windows: Iterable[str]) -> JudgingRules:
    """What the events of ``windows`` are judged by now."""
    return _judging_rules(workspace, source, RulesVersions(workspace, source), windows)


def _judging_rules(
    workspace: Workspace, source: str, versions: RulesVersions, windows: Iterable[str]
) -> JudgingRules:
    reviews = versions.reviews
    return JudgingRules(
        contracts=workspace.contracts.of_source(source),
        decisions=workspace.decisions,
        window_length=workspace.grid.size.length,
        reviews={
            event: decided for window in windows for event, decided in reviews.of_window(window).items()
        },
        erasures=versions.erasures.in_force(),
        secrets=workspace.secrets(workspace.contracts.of_source(source)),
    )


def _found(snapshot: TableSnapshot, job: _Job, tallies: Tallies) -> Counter[Finding]:
    """What was found of the job's window: of its events, those it held before included, and how often it
    was made again for what it is judged by."""
    found = Counter(tallies.found.get(job.plan.window, {}))
    state = snapshot.state(job.plan.window)
    if state is None:
        return found
    before = found_before(state.checkpoint)
    if job.plan.work is Work.APPEND:
        return found + before
    again = found_in(state.versions, job.upstream.versions)
    # Its events are counted anew.
    return found + Counter(again) + Counter({f: n for f, n in before.items() if f.scenario not in JUDGED})


def _replaced(
    snapshot: TableSnapshot,
    raw: TableSnapshot,
    job: _Job,
    late: frozenset[str],
    companions: tuple[str, ...],
) -> Replaced | None:
    before = snapshot.state(job.plan.window)
    if before is None or job.plan.work is not Work.REPLACE:
        return None
    why = reasons(before, job.upstream, job.batches, late, raw.state(job.plan.window))
    emptied = tuple(each for each in why if each in (ERASURE, DESTROYED_KEY))
    in_quarantine = companions != before.companions
    return Replaced(before.checkpoint.content_hash, why, unseen=emptied if in_quarantine else ())


def _companions(snapshot: TableSnapshot, job: _Job, staged: StagedFiles) -> tuple[str, ...]:
    """The quarantine files of the job's window: the new ones, beside those before where it appends."""
    window = job.plan.window
    kept = named_by(snapshot.state(window)) if job.plan.work is Work.APPEND else ()
    return tuple(sorted({*kept, *(file.path for file in staged.of(window))}))


def _marked(spark: SparkSession, raw: TableSnapshot, jobs: Sequence[_Job]) -> DataFrame:
    alone = [file for job in jobs if job.distinct for file in job.files]
    together = [file for job in jobs if not job.distinct for file in job.files]
    frames = []
    if alone or not together:
        frames.append(dedupe.mark_distinct(to_judge(raw.read(spark, alone))))
    if together:
        frames.append(dedupe.mark_copies(to_judge(raw.read(spark, together))))
    return reduce(DataFrame.unionByName, frames)


def to_judge(raw: DataFrame) -> DataFrame:
    """Raw events with the identity that they would land with today: one of an earlier version, which held
    a hash of the content, is the same event's all the same."""
    return raw.withColumn("identity", F.regexp_replace("identity", EARLIER_IDENTITY, "$1]"))


def _counts(
    snapshot: TableSnapshot, jobs: Sequence[_Job], accepted: StagedFiles, tallies: Tallies
) -> dict[str, Counts]:
    """Counts per window, each taken where it arises; ``CountsDisagree`` if they do not add up."""
    counts = {}
    for job in jobs:
        window, state = job.plan.window, snapshot.state(job.plan.window)
        now = Counts(
            raw=sum(file.rows for file in job.files),
            deduped=sum(file.rows for file in accepted.of(window)),
            duplicates=tallies.verdicts.get((window, DUPLICATE), 0),
            quarantined=tallies.verdicts.get((window, QUARANTINED), 0),
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
