"""``raw_cdc_staging`` → ``deduped_events`` and ``quarantine``: each distinct event once, or a reason why not.

New events whose positions provably lie above all judged ones are judged alone and appended. In every other
case (an overlap, a replaced window, another contract) the whole window is judged again from raw. Where only
contracts changed, the files of the other tables stay (``kept_files``).

The new quarantine files of a window are committed first. The state of the deduped window then names them, and
it alone decides what is withheld. Last, the files of the previous judgement leave the table of quarantine
(``quarantine``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import count

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from omnisupport_ingest.cdc.judging import DUPLICATE, QUARANTINED, JudgingRules
from omnisupport_ingest.contracts.decision_table import JUDGED, DetectedScenario
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.file_tasks import Made, in_shares, made_by_tasks
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.landing.rows import EARLIER_IDENTITY
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.batch_facts import facts_of_parts, rise_from
from omnisupport_ingest.layers.checkpoints import (
    Counts,
    Identity,
    Outcome,
    found_before,
)
from omnisupport_ingest.layers.closing import Compaction
from omnisupport_ingest.layers.erasures import refuse_lost
from omnisupport_ingest.layers.events import quarantine, scenarios
from omnisupport_ingest.layers.events.event_copies import Copies, Together, mark_windows
from omnisupport_ingest.layers.events.event_tasks import Judged, judge
from omnisupport_ingest.layers.events.judging_rules import (
    contents_of,
    contracts_needed,
    for_spark,
    rule_results,
    rules_in_force,
)
from omnisupport_ingest.layers.events.kept_files import NONE_KEPT, JudgedAgain, KeptFiles, kept_files
from omnisupport_ingest.layers.events.quarantine_files import gone_from_disk, named_by
from omnisupport_ingest.layers.events.scenarios import Tallies
from omnisupport_ingest.layers.events.sealed_policies import (
    PoliciesChanged,
    SealedPolicies,
    apply_policies,
)
from omnisupport_ingest.layers.plan import (
    InputFiles,
    RequestedWork,
    Upstream,
    Work,
    idempotency_key,
    plan_of_files,
    replace_all,
)
from omnisupport_ingest.layers.removed import Removed, lasting, refuse_less, refuse_remake
from omnisupport_ingest.layers.replay_reasons import Replaced, reasons
from omnisupport_ingest.layers.versions import DESTROYED_KEY, ERASURE, RulesVersions, found_in
from omnisupport_ingest.layers.window_update import (
    EventsUpdate,
    LayerRun,
    Produced,
    WindowJob,
    update_windows,
)
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Position
from omnisupport_ingest.windows import OUT_OF_RANGE

LAYER = "deduped_events"


class CountsDisagree(IngestError):
    """The raw events of a window are not as many as its deduped, duplicate and quarantined ones. Nothing was
    committed.

    Fix: Run the window again. If it fails again, report it with the log of the run.
    """


@dataclass(frozen=True)
class _Job(WindowJob):
    """The work of one window, and the raw files to judge.

    ``batches``: the batches that raw holds of the window; ``landed``: the data files that landing has of
    them. ``distinct``: whether all events certainly have distinct positions. ``tables``: the tables of the
    events, by full name; None if landing has forgotten a batch. ``kept``: files that stay though the window
    is judged again.
    """

    files: tuple[LakeFile, ...]
    batches: tuple[str, ...]
    landed: tuple[LandedPart, ...]
    distinct: bool
    tables: frozenset[str] | None
    kept: KeptFiles = NONE_KEPT


@dataclass(frozen=True)
class _Verdicts:
    """The result of judging: files of accepted and of quarantined events, counts, and the tasks' reports."""

    accepted: StagedFiles
    quarantined: StagedFiles
    tallies: Tallies
    judged: Judged


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
    Returns one checkpoint per requested window, in order.
    """
    apply_policies(workspace, source, windows, run_id)
    table, quarantined = workspace.deduped(source), workspace.quarantine(source)
    run = LayerRun.of(workspace, spark, source, run_id, replay=replay)
    settle = partial(
        quarantine.settle,
        table,
        quarantined,
        [*windows, OUT_OF_RANGE],
        Identity(quarantine.LAYER, source, run_id),
    )
    return update_windows(
        table,
        windows,
        run,
        partial(_Update, watermark=workspace.closing_watermark(source)),
        Compaction(spark, "event_hash"),
        before_closing=settle,
    )


class _Update(EventsUpdate[_Job]):
    """An update of the deduped events from what raw holds by now."""

    layer = LAYER

    def __init__(self, snapshot: TableSnapshot, run: LayerRun, *, watermark: datetime | None) -> None:
        super().__init__(snapshot, run, watermark=watermark)
        workspace, source = run.workspace, run.source
        self._landing = workspace.landing(source)
        self._quarantine = workspace.quarantine(source)
        self._raw = workspace.raw(source).open()
        # Read after raw: by then it is on record what retention removed from raw, so it is not judged as if
        # it had never been.
        self._sealed = frozenset(Removed.open(workspace, source).sealed)
        # Before the versions are read: this creates the map of tokens, which they depend on.
        workspace.secrets(workspace.contracts.of_source(source))
        # Read the versions after raw. A command first records its erasure, then looks at what has landed, so
        # it finds every event that this run judges without knowing of the erasure.
        self._versions = RulesVersions(workspace, source)

    def targets(self, windows: Sequence[str]) -> list[str]:
        return [*dict.fromkeys(windows), *([OUT_OF_RANGE] if self._raw.files(OUT_OF_RANGE) else [])]

    def job(self, window: str) -> _Job:
        state = self.snapshot.state(window)
        held = state.versions if state is not None else ()
        refuse_lost(self.run.workspace, self.run.source, window, held, self._versions.of(window))
        versions = self._versions.of_held(window, state, partial(self._landing.parts, window))
        asked = self._asked(window)
        job = _job(self.snapshot, self._raw, self._landing, window, versions, asked)
        if asked is None and state is not None and job.plan.work is not Work.NOTHING:
            self._refuse_other_policies(state)
        return self._with_kept(job, asked)

    def _refuse_other_policies(self, state: WindowState) -> None:
        """Raise ``PoliciesChanged`` if a sealed window does not have the policies of this run, which began by
        applying them."""
        if SealedPolicies(self.run.workspace, self.run.source, self._versions).is_behind(state):
            raise PoliciesChanged(
                f"A sealed window of {self.run.source} does not have the policies for personal data of the "
                "contracts of this run: they have changed since it began, or a file of the window is gone.",
                fix="Nothing was committed. Run again; if that fails too, the log of the run names the "
                "window of which a file is gone: restore that from a backup of the lake.",
            )

    def _with_kept(self, job: _Job, asked: RequestedWork | None) -> _Job:
        """Return ``job`` with the files that stay; none do where the window is replayed on request."""
        on_request = asked is None or asked.replay or job.plan.repeated
        if not job.replays or on_request or job.tables is None:
            return job
        files = self._raw.files(job.window)
        again = JudgedAgain(
            window=job.window,
            upstream=job.upstream,
            raw=files,
            inputs=InputFiles.of((file.path for file in files), self._raw.state(job.window)),
            tables=job.tables,
            distinct=job.distinct,
        )
        contracts = self.run.workspace.contracts.of_source(self.run.source)
        kept = kept_files(self.snapshot, self._quarantine, again, contracts)
        paths = frozenset(file.path for file in kept.accepted)
        return replace(job, kept=kept, plan=replace(job.plan, kept=paths))

    def _asked(self, window: str) -> RequestedWork | None:
        """How ``window`` is requested. None if it is sealed: then new events are added, but it is never
        judged again. A window with a quarantine file missing on disk is judged again."""
        if window in self._sealed:
            return None
        asked = self.run.asked
        gone = gone_from_disk(self._quarantine, self.snapshot.state(window))
        return replace(asked, replay=asked.replay or gone)

    def produce(self, jobs: Sequence[_Job], unit: str) -> Produced[_Job]:
        workspace, source = self.run.workspace, self.run.source
        windows = [job.window for job in jobs]
        rules = rules_in_force(workspace, source, self._versions, self._raw, windows)
        rules = for_spark(workspace, self.run.spark, rules)
        needed = contracts_needed(rules.contracts, [job.tables for job in jobs])
        rules = replace(rules, contracts=needed, sealed=self._sealed)
        verdicts = _judged(self.run, self.snapshot, jobs, rules, unit)
        counts = _counts(self.snapshot, jobs, verdicts)
        quarantine.add(
            self._quarantine, verdicts.quarantined, Identity(quarantine.LAYER, source, self.run.run_id)
        )
        return Produced(verdicts.accepted, partial(self._outcome, verdicts, counts))

    def _outcome(self, verdicts: _Verdicts, counts: Mapping[str, Counts], job: _Job) -> Outcome:
        before = self.snapshot.state(job.window)
        quarantine_files = _quarantine_files(before, job, verdicts.quarantined)
        judged = verdicts.judged
        return Outcome(
            idempotency_key=job.key,
            batches=job.batches,
            facts=facts_of_parts(job.landed),
            counts=counts[job.window],
            companions=quarantine_files,
            upstream_version=self._raw.version,
            found=_found(before, job, verdicts.tallies),
            past_closing=job.window in self._sealed or self.is_past(job.window),
            exact_share=judged.taken.share,
            rules=rule_results(self.run.workspace, self.run.source, judged, job.plan, before),
            replaced=self._replaced(before, job, quarantine_files),
            made_again=job.kept.made_again,
        )

    def _replaced(
        self, before: WindowState | None, job: _Job, quarantine_files: tuple[str, ...]
    ) -> Replaced | None:
        if before is None or not job.replays:
            return None
        late = self._lateness.late_batches(job.landed)
        why = reasons(before, job.upstream, job.batches, late, self._raw.state(job.window))
        emptied = tuple(each for each in why if each in (ERASURE, DESTROYED_KEY))
        in_quarantine = quarantine_files != before.companions
        return Replaced(before.checkpoint.content_hash, why, unseen=emptied if in_quarantine else ())


def _job(
    snapshot: TableSnapshot,
    raw: TableSnapshot,
    landing: LandingStore,
    window: str,
    versions: tuple[str, ...],
    asked: RequestedWork | None,
) -> _Job:
    """``asked``: as ``_Update._asked`` returns it."""
    files = raw.files(window)
    raw_state, state = raw.state(window), snapshot.state(window)
    inputs = InputFiles.of((file.path for file in files), raw_state)
    upstream, table = Upstream(inputs.units, raw.table_id, versions), snapshot.table.spec.path
    if asked is None:
        upstream = lasting(upstream, state, window=window, table=table)
    plan = plan_of_files(snapshot, window, upstream, asked or RequestedWork(replay=False), inputs)
    batches = raw_state.batches if raw_state else ()
    held = frozenset(batches)
    parts = [part for part in landing.parts(window) if part.batch_id in held]
    judged = frozenset(state.batches) if state and plan.work is Work.APPEND else frozenset()
    new = [name for name in batches if name not in judged]
    last = Position.parse(state.checkpoint.cursor) if state and judged and state.checkpoint.cursor else None
    distinct = _rises(parts, new, last)
    if plan.work is Work.APPEND and judged and not distinct and asked is not None:
        plan = replace_all(snapshot, window, upstream)
        distinct = _rises(parts, batches, None)
    if asked is None:
        refuse_remake(plan, table)
    elif plan.work is Work.REPLACE:
        refuse_less(window, sum(file.rows for file in files), sum(part.rows for part in parts))
    read = inputs.holding(plan.read) or ()
    to_judge = new if plan.work is Work.APPEND else batches
    return _Job(
        plan=plan,
        upstream=upstream,
        files=tuple(file for file in files if file.path in read),
        batches=batches,
        landed=tuple(parts),
        key=idempotency_key(
            layer=LAYER, table=LAYER, window=window, inputs=upstream.units, versions=upstream.versions
        ),
        distinct=distinct,
        tables=_tables_in(parts, to_judge),
    )


def _tables_in(parts: Sequence[LandedPart], names: Collection[str]) -> frozenset[str] | None:
    """Return the tables of the events in the batches ``names``; None if landing has forgotten a batch."""
    wanted = frozenset(names)
    if not wanted <= {part.batch_id for part in parts}:
        return None
    return frozenset(table for part in parts if part.batch_id in wanted for table in part.rows_per_table)


def _rises(parts: Sequence[LandedPart], names: Sequence[str], last: Position | None) -> bool:
    wanted = frozenset(names)
    if not wanted <= {part.batch_id for part in parts}:
        # Landing has forgotten a batch, so nothing is proved.
        return False
    return rise_from(last, [part for part in parts if part.batch_id in wanted])


def _judged(
    run: LayerRun, snapshot: TableSnapshot, jobs: Sequence[_Job], judging_rules: JudgingRules, unit: str
) -> _Verdicts:
    """Return the verdicts of tasks, each on its own files. If positions may not be distinct, tasks first mark
    the copies and collisions in whole windows."""
    files = [file for job in jobs for file in job.files]
    generation = {job.window: job.plan.generation for job in jobs}
    staying = {path: tables for job in jobs for path, tables in job.kept.staying.items()}
    make = partial(made_by_tasks, run.spark, snapshot.table, unit=unit, generation=generation)
    number = count()
    together = [
        part
        for job in jobs
        if job.files and not job.distinct
        for part in Together.of(tuple((next(number), file) for file in job.files))
    ]
    with ExitStack() as drafts:
        copies = Copies()
        if together:
            contents = contents_of(judging_rules)
            works = [partial(mark_windows, windows=share, contents=contents) for share in in_shares(together)]
            found = drafts.enter_context(make(works))
            assert found is not None, "copies are always found"
            numbers = {file.full_path: number for each in together for number, file in each.files}
            copies = Copies(found.aside, numbers)

        def made(by: JudgingRules) -> Made | None:
            works = [
                partial(
                    judge,
                    files=share,
                    judging_rules=by,
                    copies=copies,
                    staying={path: staying[path] for file in share if (path := file.full_path) in staying},
                )
                for share in in_shares(files)
            ]
            return drafts.enter_context(make(works))

        first = made(judging_rules)
        judged = _reported(first)
        if judged.broken.rejected:
            # Only now is it known which batches the rules reject, so all is judged once more. This is rare.
            first = made(replace(judging_rules, rejected=judged.broken.rejected))
        return _placed(run, snapshot, jobs, first, unit)


def _placed(
    run: LayerRun, snapshot: TableSnapshot, jobs: Sequence[_Job], made: Made | None, unit: str
) -> _Verdicts:
    """The verdicts that tasks made, with their files in place."""
    assert made is not None, "an event is always judged"
    judged = _reported(made)
    tallies = scenarios.tally(judged.groups)
    scenarios.refuse_stopped(tallies, run.workspace.decisions, run.source)
    quarantined = quarantine.stage(
        run.workspace.quarantine(run.source),
        made.beside if tallies.withheld else (),
        [job.window for job in jobs],
        unit=unit,
        version=snapshot.version + 1,
    )
    return _Verdicts(made.place(), quarantined, tallies, judged)


def _reported(made: Made | None) -> Judged:
    """What all tasks report together."""
    return sum(map(Judged.parse, made.results if made is not None else ()), Judged())


def _found(before: WindowState | None, job: _Job, tallies: Tallies) -> Counter[DetectedScenario]:
    """Return the findings in the job's window: about its events, including those it held before, and how
    often it was rebuilt because its rules changed."""
    found = Counter(tallies.found.get(job.window, {}))
    if before is None:
        return found
    held = found_before(before.checkpoint)
    if job.plan.work is Work.APPEND:
        return found + held
    again = found_in(before.versions, job.upstream.versions)
    # All its events are judged again, so findings about events are counted anew.
    return found + Counter(again) + Counter({f: n for f, n in held.items() if f.scenario not in JUDGED})


def _quarantine_files(before: WindowState | None, job: _Job, staged: StagedFiles) -> tuple[str, ...]:
    """Return the quarantine files of the job's window: the new ones, and those that stay; after an append all
    earlier ones stay."""
    kept = named_by(before) if job.plan.work is Work.APPEND else job.kept.withheld
    return tuple(sorted({*kept, *(file.path for file in staged.of(job.window))}))


def to_judge(raw: DataFrame) -> DataFrame:
    """Return raw events with the identity that they would land with today. An earlier version put a hash of
    the content into it; without that, copies of one event have one identity again."""
    return raw.withColumn("identity", F.regexp_replace("identity", EARLIER_IDENTITY, "$1]"))


def _counts(snapshot: TableSnapshot, jobs: Sequence[_Job], verdicts: _Verdicts) -> dict[str, Counts]:
    """Return counts per window, each counted where it arises. Raises ``CountsDisagree`` if they do not add
    up."""
    counts, tallied = {}, verdicts.tallies.verdicts
    for job in jobs:
        window, state = job.window, snapshot.state(job.window)
        now = Counts(
            raw=sum(file.rows for file in job.files),
            deduped=sum(file.rows for file in verdicts.accepted.of(window))
            + sum(file.rows for file in job.kept.accepted),
            duplicates=tallied.get((window, DUPLICATE), 0),
            quarantined=tallied.get((window, QUARANTINED), 0),
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
