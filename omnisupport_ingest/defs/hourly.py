"""The hourly jobs of a source, its audit and its histories, once something of it has landed.

The first run of each does not wait for its minute: a sensor requests it as soon as every table of the source
is complete and the UI is running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from omnisupport_ingest.checks.lake_checks import tables_complete
from omnisupport_ingest.defs.run_history import unfinished
from omnisupport_ingest.defs.tick_cursor import TickCursor
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.dagster_services import WEBSERVER
from omnisupport_ingest.runtime.running import running_services

FIRST = "first_checks"

_HOURLY = "hourly_"
_INTERVAL_SECONDS = 30


def hourly_schedule(source: str, job_name: str, minute: int, description: str) -> dg.ScheduleDefinition:
    """Return the schedule of a job at ``minute`` of every hour; it runs unless a person stops it.

    It requests nothing while nothing of ``source`` has landed: a run would have no table to look at. Nor does
    it while an earlier run is not over: two would do the same work at once.
    """

    @dg.schedule(
        name=f"{_HOURLY}{job_name}",
        job_name=job_name,
        cron_schedule=f"{minute} * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description=description,
    )
    def hourly(
        context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.RunRequest | dg.SkipReason:
        return one_run(context, workspace, source, job_name)

    return hourly


def one_run(
    context: dg.ScheduleEvaluationContext, workspace: Workspace, source: str, job_name: str
) -> dg.RunRequest | dg.SkipReason:
    """Request a run of the job, unless nothing of ``source`` has landed or an earlier run is not over."""
    if not workspace.landing(source).landed().count:
        return dg.SkipReason(f"Nothing of {source} has landed.")
    if unfinished(context.instance, job_name):
        return dg.SkipReason("The run before waits or goes on.")
    return dg.RunRequest()


def hourly_jobs(*made: dg.Definitions) -> list[Any]:
    """Return the jobs in ``made`` for which it also has a schedule. Dagster does not export their type."""
    return [
        job
        for each in made
        for job in each.jobs or ()
        if f"{_HOURLY}{job.name}" in {schedule.name for schedule in each.schedules or ()}
    ]


@dataclass(frozen=True, slots=True)
class FirstCursor(TickCursor):
    """The sources whose first checks were requested."""

    requested: tuple[str, ...] = ()


def first_checks_sensor(jobs: Mapping[str, Sequence[Any]]) -> dg.SensorDefinition:
    """Return the sensor of the home, which requests the ``jobs`` of each source (``hourly_jobs``) once."""

    @dg.sensor(
        name=FIRST,
        jobs=[job for of_source in jobs.values() for job in of_source],
        minimum_interval_seconds=_INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Requests the first audit and the first histories of a source once its tables are "
        "complete, so that no check waits for the next hour. Its schedules go on from there.",
    )
    def first_checks(
        context: dg.SensorEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.SensorResult:
        seen = FirstCursor.from_text(context.cursor)
        if WEBSERVER not in running_services(workspace.home.run):
            # A demo or a pass ends soon, and would take the runs with it.
            return seen.skipping("The UI does not run.")
        workspace = workspace.current()
        due = [each for each in jobs if each not in seen.requested and _complete(workspace, each)]
        cursor = FirstCursor(tuple(sorted({*seen.requested, *due})))
        if not due:
            waiting = len(jobs.keys() - set(seen.requested))
            return cursor.skipping(
                f"{waiting} of {len(jobs)} sources have no complete tables yet."
                if waiting
                else "Every source has had its first checks."
            )
        requests = [
            dg.RunRequest(run_key=f"{FIRST}/{job.name}", job_name=job.name)
            for source in due
            for job in jobs[source]
        ]
        return dg.SensorResult(run_requests=requests, cursor=cursor.to_text())

    return first_checks


def _complete(workspace: Workspace, source: str) -> bool:
    """Return whether every table of ``source`` is complete in the lake."""
    if not workspace.landing(source).landed().count:
        return False
    contracts = workspace.contracts.of_source(source)
    if all(workspace.dimension(each).look() is None for each in contracts):
        return False
    return all(found.passed for found in tables_complete(workspace, source).values())
