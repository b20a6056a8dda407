"""Ends runs that Dagster still records as started although their process is gone.

Dagster's default launcher has no health check, and the code server that would have reported the end may have
died with the run. Such a run would block the sensor and never free the pools of its tables. To end a live run
by mistake is worse: its pools would be freed while it still writes. So before its first step a run records
its process by an identity that does not depend on the clock (``processes``).

Records in a PostgreSQL may include runs of other machines, whose processes are not visible here. Only the
daemon may treat such runs as lost: there is one daemon (``runtime/records_lease.py``), and it launches every
run, so a run of another machine belongs to a daemon that is gone. Sensors may not: "Test sensor" in the UI of
a machine that stands by evaluates them there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, cast

import dagster as dg

from omnisupport_ingest import tracing
from omnisupport_ingest.defs.keys import PROCESS_TAG
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.settings import STORAGE_URL

_STARTED = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_PROCESS = re.compile(r"\(pid: (\d+)\)")
"""How Dagster's engine events name the process of a run."""


class _NamesItsProcess(dg.Executor):
    """An executor in the run's own process that records this process before the first step."""

    def __init__(self, executor: dg.Executor) -> None:
        self._executor = executor

    # The types are private names of Dagster's.
    @property
    def retries(self) -> Any:
        return self._executor.retries

    @property
    def step_dependency_config(self) -> Any:
        return self._executor.step_dependency_config

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[dg.DagsterEvent]:
        _record(plan_context.instance, plan_context.run_id, ProcessIdentity.current())
        with tracing.run(plan_context.run_id, plan_context.job_name):
            # No failpoint: the steps of a run, which pass failpoints of their own.
            yield from self._executor.execute(plan_context, execution_plan)


def _executor(context: dg.InitExecutorContext) -> dg.Executor:
    create = dg.in_process_executor.executor_creation_fn
    assert create is not None, "Dagster's own executor says how it is made"
    return _NamesItsProcess(create(context))


run_executor = dg.ExecutorDefinition(
    name="in_process",
    config_schema=cast(Any, dg.in_process_executor.config_schema),
    executor_creation_fn=_executor,
    description="Every step in the process of the run, which the run's tags name.",
)
"""The executor of every job: one process per run, so that a run opens Spark once."""


def is_elsewhere(process: ProcessIdentity) -> bool:
    """Return whether ``process`` may belong to another machine that has its records in the same
    PostgreSQL."""
    return STORAGE_URL in os.environ and not process.is_of_this_boot()


def end_lost_runs(instance: dg.DagsterInstance, *, elsewhere: bool = False) -> list[str]:
    """Mark the runs whose process has ended as failed, and free their pools; return their ids.

    ``elsewhere``: include runs that may be on another machine; only for a caller that knows that no other
    daemon works with them. A run without a recorded process is not touched: it is just being started. If only
    a process number is recorded (by an earlier version, or by Dagster before the run's first step), the
    process that has the number at the first call counts as the run's and is recorded; a later process with
    that number does not count.
    """
    ended = []
    for record in instance.get_run_records(dg.RunsFilter(statuses=_STARTED)):
        run = record.dagster_run
        process = _process_of(instance, run)
        if process is None or (is_elsewhere(process) and not elsewhere):
            continue
        found = ProcessIdentity.of(process.pid) if process.started is None else None
        if found is not None and found.started is not None:
            _record(instance, run.run_id, found)
        if process.lives() or _has_ended(instance, run.run_id):
            continue
        # The pools first: a run that is marked as failed is not visited again.
        with failpoint("dagster.pool", run.run_id):
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        with failpoint("dagster.run_failed", run.run_id):
            instance.report_run_failed(
                run, f"Its process ({process.pid}) is gone, and nobody had reported its end."
            )
        ended.append(run.run_id)
    return ended


def _has_ended(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether the run has recorded its end, or is no longer recorded, since the runs were listed.

    Ask it once the process is gone: a run records its end before its process ends.
    """
    run = instance.get_run_by_id(run_id)
    return run is None or run.is_finished


def _record(instance: dg.DagsterInstance, run_id: str, process: ProcessIdentity) -> None:
    # No failpoint: the name of a living process: without it, as with it, a run that was killed is a lost one.
    instance.add_run_tags(run_id, {PROCESS_TAG: process.text})


def _process_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> ProcessIdentity | None:
    """Return the process of this machine that executes ``run``; None if it is not recorded."""
    if own := ProcessIdentity.parse(run.tags.get(PROCESS_TAG, "")):
        return own
    found = None
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        if named := _PROCESS.search(entry.message or ""):
            found = ProcessIdentity(int(named.group(1)))
    return found
