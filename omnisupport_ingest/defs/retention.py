"""Jobs that remove what is old, with their schedules.

``sweep`` deletes replaced files of the lake once they are older than the contract allows, and in a bucket
the data of batches that never landed. It runs every hour, because a table with many changing rows replaces
its own size within minutes.

``retention`` counts every night what contracts no longer keep, and removes it only if a setting says so,
because removal is final. Runs of Dagster are removed only if a setting gives their age in days; then the
checkpoints in the tables' own logs are reported again, so no partition loses its checkpoint.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.dagster_storage import remove_old_checks
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.defs.run_history import unfinished
from omnisupport_ingest.defs.step_errors import unquoted
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.removed import HISTORY
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import given_up
from omnisupport_ingest.retention.old_files import sweep_old_files, swept_sources
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out, to_remove
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG, remove_old_run_logs
from omnisupport_ingest.settings import NightlyRetention
from omnisupport_ingest.storage import has_landed

JOB = "retention"
SWEEP = "sweep"

_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_AT_ONCE = 100

_LANDING_KEPT = timedelta(days=1)
"""Age below which the data of a batch that has not landed may be a running writer's."""


def build_retention() -> dg.Definitions:
    """Return the jobs of the home and their schedules."""

    @dg.op(
        name="remove_what_is_old",
        description="Counts what contracts give up by age, and removes it if OMNISUPPORT_RETENTION is apply: "
        "refuses what a window may still need, sweeps old files, and removes old runs where "
        "OMNISUPPORT_RUNS_KEPT_DAYS says so.",
        config_schema={
            "apply": dg.Field(
                dg.Noneable(bool),
                default_value=None,
                is_required=False,
                description="Whether to remove it. Without a word OMNISUPPORT_RETENTION decides.",
            )
        },
        out=dg.Out(dg.Nothing),
    )
    @unquoted
    def remove_what_is_old(context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]) -> None:
        asked: bool | None = context.op_config["apply"]
        applies = workspace.settings.retention is NightlyRetention.APPLY if asked is None else asked
        metadata: dict[str, dg.MetadataValue] = {"applied": dg.MetadataValue.bool(applies)}
        for source in workspace.contracts.sources():
            planned = plan_retention(workspace, source)
            removed_by = f"run {context.run_id}"
            found = carry_out(workspace, planned, removed_by=removed_by) if applies else to_remove(planned)
            ending = "" if applies else "_to_go"
            for each in found:
                of = "tables" if each.layer == HISTORY else "windows"
                metadata[f"{source}_{each.layer}_{of}{ending}"] = dg.MetadataValue.int(each.windows)
                metadata[f"{source}_{each.layer}_bytes{ending}"] = dg.MetadataValue.int(each.bytes)
            metadata[f"{source}_refused"] = dg.MetadataValue.int(len(planned.refused))
            if applies:
                metadata[f"{source}_old_files"] = dg.MetadataValue.int(sweep_old_files(workspace, source))
            for refused in planned.refused[:_AT_ONCE]:
                context.log.info(f"{refused.layer} keeps window {refused.window} of {source}: {refused.why}.")
        kept = workspace.settings.runs_kept_days
        if kept is not None:
            before = datetime.now(UTC) - timedelta(days=kept)
            if applies:
                runs = remove_old_runs(context.instance, workspace, before)
                metadata["runs"] = dg.MetadataValue.int(runs)
            else:
                metadata["runs_to_go"] = dg.MetadataValue.int(context.instance.get_runs_count(_old(before)))
        if not applies:
            context.log.info("Nothing was removed: OMNISUPPORT_RETENTION is plan.")
        context.add_output_metadata(metadata)

    @dg.job(
        name=JOB,
        description="What contracts give up by age (x-cdc.retention): data files of landing, events of raw, "
        "old versions of histories and others. Counts it, and removes it where OMNISUPPORT_RETENTION is "
        "apply. `omnisupport-ingest retention plan` shows what it is.",
        executor_def=run_executor,
        tags={BESIDE_TAG: BESIDE},
    )
    def retention() -> None:
        remove_what_is_old()

    @dg.schedule(
        name="nightly_retention",
        job_name=JOB,
        cron_schedule="17 3 * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Every night at 03:17 UTC: counts what contracts give up by age, and removes it where "
        "OMNISUPPORT_RETENTION is apply.",
    )
    def nightly_retention(
        _context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.RunRequest | dg.SkipReason:
        workspace = workspace.current()
        sources = workspace.contracts.sources()
        given = any(given_up(workspace.contracts.of_source(source)) for source in sources)
        if given or workspace.settings.runs_kept_days is not None:
            return dg.RunRequest()
        return dg.SkipReason("No contract gives anything up, and OMNISUPPORT_RUNS_KEPT_DAYS is not set.")

    sweeping, hourly = _sweep()
    return dg.Definitions(jobs=[retention, sweeping], schedules=[nightly_retention, hourly])


def _sweep() -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    @dg.op(
        name="sweep_old_files",
        description="Deletes files that no version of a table has held for as long as its contract keeps "
        "them, and what a crash left, in a bucket the data of batches that never landed too. Deletes what "
        "runs printed more than 30 days ago.",
        out=dg.Out(dg.Nothing),
    )
    @unquoted
    def sweep_files(context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]) -> None:
        sources = list(swept_sources(workspace))
        swept = {
            f"{source}_old_files": dg.MetadataValue.int(sweep_old_files(workspace, source))
            for source in sources
        } | {
            f"{source}_batches_that_never_landed": dg.MetadataValue.int(
                len(workspace.landing(source).sweep(_LANDING_KEPT))
            )
            for source in sources
            # Opening landing makes its folder, and a source with that folder counts as landed.
            if has_landed(workspace.home.path, source)
        }
        context.add_output_metadata(
            swept | {"logs_of_runs": dg.MetadataValue.int(remove_old_run_logs(workspace.home))}
        )

    @dg.job(
        name=SWEEP,
        description="Deletes replaced files of the lake that are older than x-cdc.retention.old_files (a day "
        "by default), as `omnisupport-ingest sweep` does. No row and no event goes.",
        executor_def=run_executor,
        tags={BESIDE_TAG: BESIDE},
    )
    def sweep_job() -> None:
        sweep_files()

    @dg.schedule(
        name="hourly_sweep",
        job_name=SWEEP,
        cron_schedule="50 * * * *",
        default_status=dg.DefaultScheduleStatus.RUNNING,
        description="Deletes replaced files of the lake at minute 50 of every hour, once they are older than "
        "their contract keeps them.",
    )
    def hourly_sweep(
        context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.RunRequest | dg.SkipReason:
        if unfinished(context.instance, SWEEP):
            return dg.SkipReason("The sweep before waits or goes on.")
        home, sources = workspace.home.path, workspace.current().contracts.sources()
        landed = (workspace.landing(source).landed() for source in sources if has_landed(home, source))
        if any(each.count for each in landed):
            return dg.RunRequest()
        return dg.SkipReason("Nothing has landed yet.")

    return sweep_job, hourly_sweep


def remove_old_runs(instance: dg.DagsterInstance, workspace: Workspace, before: datetime) -> int:
    """Delete finished runs that were created before ``before``, with their events; return how many.

    Their materializations are deleted with them, so the checkpoints of the lake are reported again. This
    happens even if there was nothing to delete, because an earlier call may have been killed before
    reporting.
    """
    removed = 0
    while runs := instance.get_run_ids(_old(before), limit=_AT_ONCE):
        for run_id in runs:
            with failpoint("dagster.old_run", run_id):
                # First, as nobody finds the events of a run that is gone.
                instance.event_log_storage.delete_events(run_id)
                instance.delete_run(run_id)
            removed += 1
    remove_old_checks(instance, before)
    rebuild_materializations(instance, workspace)
    return removed


def _old(before: datetime) -> dg.RunsFilter:
    """Return a filter for the finished runs that were created before ``before``."""
    return dg.RunsFilter(statuses=_FINISHED, created_before=before)
