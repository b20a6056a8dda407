"""Sensor ``wal_batches_<source>``: requests runs of the windows that have landed and are not yet committed.

Every tick finds these windows from landing and the tables' logs. The cursor only remembers the newest batch
seen, so a lost or rewound cursor skips nothing. A run that failed or was lost leaves its windows pending, and
they are requested again with a new run key.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import dagster as dg

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.jobs import JobContent
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.defs.run_history import InARow, RunHistory
from omnisupport_ingest.defs.tick_cursor import TickCursor
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.scheduling.pending import GAP_FOUND, Pending, pending_soon, pending_windows
from omnisupport_ingest.layers.scheduling.run_requests import RunPlan, plan_runs, retry_at
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_services import DAEMON
from omnisupport_ingest.runtime.running import is_stopping
from omnisupport_ingest.sources.postgres.slot.home_slot import FOUND
from omnisupport_ingest.windows import WindowRange
from omnisupport_ingest.wording import agreeing, counted

BATCHES_PER_TICK = 500
"""Most batches that a tick requests, in landing order."""

INTERVAL_SECONDS = 1
"""Interval for a captured source: a tick may follow at once, because it waits for new batches itself."""

FILES_INTERVAL_SECONDS = 15
"""The same for a source of files: a tick has a cost even if nothing ever lands."""

PATIENCE_SECONDS = 30.0
"""How long a tick without work waits for a batch to land, or for the run in progress to end."""

FILES_PATIENCE_SECONDS = 4.0
"""The same for a source of files."""

_POLL_SECONDS = 0.1
"""How often a tick checks whether a run has ended; each time costs a query of Dagster's storage."""


@dataclass(frozen=True, slots=True)
class SensorCursor(TickCursor):
    """The newest landed batch that a tick has seen, the LSN of its end, and the attempt that requested it."""

    last_batch_id: str | None = None
    lsn: str | None = None
    attempt: int = 0


def wal_batches_sensor(
    *, partitions: dg.TimeWindowPartitionsDefinition, captured: bool, job: JobContent
) -> dg.SensorDefinition:
    """Return the sensor of one source; it runs unless a person stops it.

    ``captured``: its batches come from the WAL of the captured source, not from files. ``job``: the content
    of the ingest job when it visits every table.
    """
    source = job.source

    @dg.sensor(
        name=f"wal_batches_{source}",
        job_name=keys.ingest_job_name(source),
        minimum_interval_seconds=INTERVAL_SECONDS if captured else FILES_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Requests a run over the windows of {source} that have landed and are not committed; "
        "windows that received late events are left to late_arrivals.",
    )
    def wal_batches(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        seen = SensorCursor.from_text(context.cursor)
        patience = PATIENCE_SECONDS if captured else FILES_PATIENCE_SECONDS
        give_up = time.monotonic() + patience
        workspace = workspace.current()
        if not workspace.contracts.of_source(source):
            return dg.SensorResult(skip_reason=f"{source} has no contract any more.", cursor=context.cursor)
        stopping = partial(is_stopping, workspace.home.run, DAEMON)
        pending = pending_soon(workspace, source, limit=BATCHES_PER_TICK, patience=patience, ended=stopping)
        history = RunHistory(context.instance, source)
        if pending.windows and _wait_for_run(history, give_up, ended=stopping):
            pending = pending_windows(workspace, source, limit=BATCHES_PER_TICK)
        now = datetime.now(UTC)
        observations = (
            [] if pending.last_batch_id == seen.last_batch_id else [_observed(source, pending, now)]
        )
        if not pending.windows:
            cursor = SensorCursor(pending.last_batch_id, pending.last_lsn)
            return _nothing(_all_committed(pending), cursor, observations)

        end_lost_runs(context.instance)
        failed = history.failures_in_a_row()
        if (again := _again_at(failed, now)) is not None:
            # Nothing is requested, so the attempt stays the same.
            cursor = SensorCursor(pending.last_batch_id, pending.last_lsn, seen.attempt)
            runs = counted(failed.count, "run")
            reason = f"{runs} failed in a row; the next attempt is at {again:%H:%M:%S} UTC."
            return _nothing(reason, cursor, observations)

        if history.ingesting():
            # Most of the cost of a run is fixed, so two runs at a time would only slow each other down.
            cursor = SensorCursor(pending.last_batch_id, pending.last_lsn, seen.attempt)
            reason = f"A run is in progress; the next one takes {counted(pending.batches, 'more batch')}."
            return _nothing(reason, cursor, observations)

        newest = partitions.get_last_partition_key()
        plan = plan_runs(
            workspace.grid,
            pending.windows,
            in_progress=history.in_progress(),
            newest=newest or pending.windows[0],
        )
        requests, waiting = [], []
        for each in plan.ranges:
            tried = history.tried(pending.last_batch_id, each, pending.digest)
            if (again := _again_at(tried.in_vain, now)) is not None:
                waiting.append(again)
            else:
                requests.append(_request(job, pending, tried.attempt + 1, each))
        attempt = max((int(each.tags[keys.ATTEMPT_TAG]) for each in requests), default=seen.attempt)
        cursor = SensorCursor(pending.last_batch_id, pending.last_lsn, attempt)
        if not requests:
            return _nothing(_why_waiting(plan, waiting), cursor, observations)
        with failpoint("sensor.answer"):
            return dg.SensorResult(run_requests=requests, cursor=cursor.to_text(), asset_events=observations)

    return wal_batches


def _wait_for_run(history: RunHistory, give_up: float, *, ended: Callable[[], bool]) -> bool:
    """Wait for a run in progress to end, until ``give_up`` of the monotonic clock or ``ended()``; return
    whether it waited."""
    waited = False
    while time.monotonic() < give_up and not ended() and history.ingesting():
        waited = True
        time.sleep(_POLL_SECONDS)
    return waited


def _again_at(runs: InARow, now: datetime) -> datetime | None:
    """Return when to try again after ``runs`` that failed or settled nothing; None if now."""
    if runs.ended is None:
        return None
    again = retry_at(runs.count, runs.ended)
    return again if now < again else None


def _request(job: JobContent, pending: Pending, attempt: int, windows: WindowRange) -> dg.RunRequest:
    first, last = windows.first, windows.last
    content = job.visiting(pending.tables)
    whole = content == job
    return dg.RunRequest(
        # Dagster remembers run keys without end, even those of failed runs.
        run_key=f"{job.source}/{first}/{last}/{pending.last_batch_id}/a{attempt}",
        tags={
            "dagster/asset_partition_range_start": first,
            "dagster/asset_partition_range_end": last,
            keys.CURSOR_TAG: pending.last_batch_id or "",
            keys.ATTEMPT_TAG: str(attempt),
            keys.PENDING_TAG: pending.digest,
        },
        # A table without new events costs nothing. Without named checks, Dagster runs only those of the
        # assets.
        asset_selection=None if whole else sorted(content.assets),
        asset_check_keys=None if whole else sorted(content.checks, key=lambda key: key.to_user_string()),
    )


def _nothing(reason: str, cursor: SensorCursor, observations: list[dg.AssetObservation]) -> dg.SensorResult:
    return dg.SensorResult(skip_reason=reason, cursor=cursor.to_text(), asset_events=observations)


def _all_committed(pending: Pending) -> str:
    if pending.gap is not None and not pending.gap.is_repaired:
        return f"{_before(pending)} {pending.gap} Fix: {pending.gap.fix}"
    if pending.last_batch_id is None:
        return "Nothing has landed yet."
    if pending.late_windows:
        late = counted(len(pending.late_windows), "window")
        return f"{late} received late events: the replay is a backfill."
    landed = counted(pending.landed, "batch")
    return f"All that has landed is committed: {landed}, up to {pending.last_batch_id}."


def _before(pending: Pending) -> str:
    """Say what of the source is committed although a gap holds later batches back."""
    if pending.batches:
        batches, wait = counted(pending.batches, "batch"), agreeing(pending.batches, "waits", "wait")
        return f"Nothing is taken in until the gap is repaired: {batches} {wait}."
    return "Everything before the gap is committed."


def _why_waiting(plan: RunPlan, in_vain: Sequence[datetime]) -> str:
    reasons = []
    if in_vain:
        reasons.append(
            f"runs that succeeded left {counted(len(in_vain), 'range')} of windows pending; the next attempt "
            f"is at {min(in_vain):%H:%M:%S} UTC"
        )
    if plan.running:
        reasons.append(f"a run in progress covers {counted(len(plan.running), 'window')}")
    if plan.ahead:
        reasons.append(f"{counted(len(plan.ahead), 'window')} ahead of the clock, from {plan.ahead[0]}")
    return "Waiting: " + "; ".join(reasons) + "."


def _observed(source: str, pending: Pending, now: datetime) -> dg.AssetObservation:
    entries: dict[str, dg.MetadataValue] = {
        "batches_landed": dg.MetadataValue.int(pending.landed),
        "scenario_crash_after_emit": dg.MetadataValue.int(pending.recoveries),
        "scenario_stream_gap": dg.MetadataValue.int(0 if pending.gap is None else 1),
        "batches_pending": dg.MetadataValue.int(pending.batches),
        "windows_pending": dg.MetadataValue.int(len(pending.windows)),
        "last_batch_id": dg.MetadataValue.text(pending.last_batch_id or "–"),
        "lsn": dg.MetadataValue.text(pending.last_lsn or "–"),
        "chain": dg.MetadataValue.text(str(pending.gap or "unbroken")),
    }
    found = [FOUND] * (pending.recoveries > 0) + [GAP_FOUND] * (pending.gap is not None)
    if found:
        by = ", ".join(f"{each.scenario}: {each.detector}" for each in found)
        entries["detected_by"] = dg.MetadataValue.text(by)
    if pending.watermark is not None:
        entries["watermark"] = dg.MetadataValue.timestamp(pending.watermark)
        lag = (now - pending.watermark).total_seconds()
        entries["lag_seconds"] = dg.MetadataValue.float(round(lag, 3))
    return dg.AssetObservation(keys.landing_key(source), metadata=entries)
