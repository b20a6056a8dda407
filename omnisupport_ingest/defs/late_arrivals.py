"""Sensor ``late_arrivals_<source>``: replays closed windows that received events, by a partition backfill.

The backfill's id depends on the late batches and their windows, and it is launched before the tick answers.
So a daemon that dies in between requests the same backfill again, which Dagster already has.
"""

from datetime import UTC, datetime

import dagster as dg

from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.backfills import (
    CANCELLED,
    Backfill,
    ended_late_backfills,
    find_backfill,
    launch_backfill,
    windows_in_backfills,
)
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.defs.run_history import RunHistory
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.scheduling.late_replay import (
    AFTER_CANCEL,
    Attempt,
    LateReplay,
    next_attempt,
    waiting_windows,
    without_running,
)
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.wording import counted

INTERVAL_SECONDS = 30
"""Seconds between ticks. A replay takes about as long; a tick has a cost, and late events are rare."""


def late_arrivals_sensor(*, source: str) -> dg.SensorDefinition:
    """Return the sensor of one source; it runs unless a person stops it."""

    @dg.sensor(
        name=f"late_arrivals_{source}",
        job_name=keys.replay_job_name(source),
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=f"Launches a partition backfill of the windows of {source} in which events landed after "
        "they had closed: exactly those, through every layer, once.",
    )
    def late_arrivals(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        workspace = workspace.current()
        if not workspace.contracts.of_source(source):
            return dg.SensorResult(skip_reason=f"{source} has no contract any more.", cursor=context.cursor)
        found = pending_windows(workspace, source).late
        if not found:
            return dg.SensorResult(skip_reason="No event waits in a closed window.", cursor=context.cursor)
        end_lost_runs(context.instance)
        running = RunHistory(context.instance, source).in_progress()
        replayed = windows_in_backfills(context.instance, source)
        due = without_running(
            found,
            lambda window: window in replayed or any(each.first <= window <= each.last for each in running),
        )
        if not due:
            windows = len({each.window for each in found})
            late = counted(windows, "window")
            reason = f"{late} received late events, which a backfill or a run in progress takes."
            return dg.SensorResult(skip_reason=reason, cursor=context.cursor)

        now = datetime.now(UTC)
        waiting = waiting_windows(ended_late_backfills(context.instance, source, now - AFTER_CANCEL), now)
        due = tuple(each for each in due if each.window not in waiting)
        if not due:
            many, again = counted(len(waiting), "window"), min(waiting.values())
            reason = f"The replay of {many} ended early; the next is at {again:%H:%M:%S} UTC."
            return dg.SensorResult(skip_reason=reason, cursor=context.cursor)

        def find(backfill_id: str) -> Attempt | None:
            known = find_backfill(context.instance, backfill_id)
            return None if known is None else Attempt(known.ended_at, known.status == CANCELLED)

        replay = LateReplay(source, due)
        # A replay of the same events that succeeded and left them waiting counts as failed too.
        attempt, reason = next_attempt(replay, find, now)
        if attempt is None:
            return dg.SensorResult(skip_reason=reason, cursor=context.cursor)
        repository = context.repository_def
        assert repository is not None, "a sensor that Dagster evaluates has a repository"
        backfill_id = launch_backfill(
            context.instance,
            repository.asset_graph,
            Backfill(
                source,
                replay.windows,
                replay.reason,
                description=f"Windows {', '.join(replay.windows[:5])}"
                + (" …" if len(replay.windows) > 5 else "")
                + f"; batches {replay.named_batches}.",
                tags={
                    # Dagster's tag for runs that a sensor requested: with it, the backfills page names the
                    # sensor.
                    "dagster/sensor_name": f"late_arrivals_{source}",
                    keys.LATE_TAG: str(replay.events),
                    keys.LATE_BATCHES_TAG: replay.named_batches,
                },
            ),
            backfill_id=replay.name(attempt),
        )
        with failpoint("sensor.answer", source):
            return dg.SensorResult(
                skip_reason=f"Asked for backfill {backfill_id}: {replay.reason}.", cursor=backfill_id
            )

    return late_arrivals
