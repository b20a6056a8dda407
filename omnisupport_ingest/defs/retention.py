"""Jobs that remove what is old, with their schedules.

``sweep`` deletes replaced files of the lake once they are older than a contract keeps them. It runs every
hour, as a table of which many rows change replaces its own size within minutes.

``retention`` does what ``retention apply --yes`` does, and removes Dagster's old runs. Its schedule is off
until a person turns it on. Runs are removed only if a setting gives their age in days; then the checkpoints
in the tables' own logs are reported again, so no partition loses its checkpoint.
"""

from datetime import UTC, datetime, timedelta

import dagster as dg

from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.lost_runs import run_executor
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.layers.removed import HISTORY
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.old_files import sweep_old_files
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out

JOB = "retention"
SWEEP = "sweep"

_FINISHED = [dg.DagsterRunStatus.SUCCESS, dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED]
_AT_ONCE = 100


def build_retention() -> dg.Definitions:
    """Return the jobs of the home and their schedules; that of ``retention`` is off by default."""

    @dg.op(
        name="remove_what_is_old",
        description="Removes what contracts give up by age, refuses what a window may still need, sweeps old "
        "files, and removes old runs where OMNISUPPORT_RUNS_KEPT_DAYS says so.",
        out=dg.Out(dg.Nothing),
    )
    def remove_what_is_old(context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]) -> None:
        metadata: dict[str, dg.MetadataValue] = {}
        for source in workspace.contracts.sources():
            planned = plan_retention(workspace, source)
            for each in carry_out(workspace, planned, removed_by=f"run {context.run_id}"):
                of = "tables" if each.layer == HISTORY else "windows"
                metadata[f"{source}_{each.layer}_{of}"] = dg.MetadataValue.int(each.windows)
                metadata[f"{source}_{each.layer}_bytes"] = dg.MetadataValue.int(each.bytes)
            metadata[f"{source}_refused"] = dg.MetadataValue.int(len(planned.refused))
            metadata[f"{source}_old_files"] = dg.MetadataValue.int(sweep_old_files(workspace, source))
            for refused in planned.refused[:_AT_ONCE]:
                context.log.info(f"{refused.layer} keeps window {refused.window} of {source}: {refused.why}.")
        kept = workspace.settings.runs_kept_days
        if kept is not None:
            runs = remove_old_runs(context.instance, workspace, datetime.now(UTC) - timedelta(days=kept))
            metadata["runs"] = dg.MetadataValue.int(runs)
        context.add_output_metadata(metadata)

    @dg.job(
        name=JOB,
        description="Removes what contracts give up by age (x-cdc.retention): data files of landing, events "
        "of raw, old versions of histories, old files of the lake. `omnisupport-ingest retention plan` shows "
        "what that is.",
        executor_def=run_executor,
    )
    def retention() -> None:
        remove_what_is_old()

    nightly = dg.ScheduleDefinition(
        name="nightly_retention",
        job=retention,
        cron_schedule="17 3 * * *",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Removes what contracts give up by age, every night at 03:17 UTC. Off until somebody "
        "turns it on.",
    )
    sweeping, hourly = _sweep()
    return dg.Definitions(jobs=[retention, sweeping], schedules=[nightly, hourly])


def _sweep() -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    @dg.op(
        name="sweep_old_files",
        description="Deletes files that no version of a table has held for as long as its contract keeps "
        "them, and what a crash left.",
        out=dg.Out(dg.Nothing),
    )
    def sweep_files(context: dg.OpExecutionContext, workspace: dg.ResourceParam[Workspace]) -> None:
        swept = {
            f"{source}_old_files": dg.MetadataValue.int(sweep_old_files(workspace, source))
            for source in workspace.contracts.sources()
        }
        context.add_output_metadata(swept)

    @dg.job(
        name=SWEEP,
        description="Deletes replaced files of the lake that are older than x-cdc.retention.old_files (a day "
        "by default), as `omnisupport-ingest sweep` does. No row and no event goes.",
        executor_def=run_executor,
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
        _context: dg.ScheduleEvaluationContext, workspace: dg.ResourceParam[Workspace]
    ) -> dg.RunRequest | dg.SkipReason:
        if any(workspace.landing(source).landed().count for source in workspace.contracts.sources()):
            return dg.RunRequest()
        return dg.SkipReason("Nothing has landed yet.")

    return sweep_job, hourly_sweep


def remove_old_runs(instance: dg.DagsterInstance, workspace: Workspace, before: datetime) -> int:
    """Delete finished runs that were created before ``before``, with their events; return how many.

    Their materializations are deleted with them, so the checkpoints of the lake are reported again. This
    happens even if there was nothing to delete: an earlier call may have been killed before it.
    """
    removed = 0
    wanted = dg.RunsFilter(statuses=_FINISHED, created_before=before)
    while runs := instance.get_run_ids(wanted, limit=_AT_ONCE):
        for run_id in runs:
            with failpoint("dagster.old_run", run_id):
                instance.delete_run(run_id)
            removed += 1
    rebuild_materializations(instance, workspace)
    return removed
