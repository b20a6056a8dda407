"""Runs that Dagster still takes for started although their process is gone.

Dagster's default launcher cannot tell (it has no health check), and the code server that would have
told may have died with the run. Left alone, such a run would keep the sensor waiting and the pools
of its tables taken for good.
"""

from __future__ import annotations

import re

import dagster as dg
import psutil

from omnisupport_ingest.defs.keys import PROCESS_TAG
from omnisupport_ingest.failpoints import gate

_STARTED = [
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
_PROCESS = re.compile(r"\(pid: (\d+)\)")
"""How Dagster's engine events name the process that a run was given."""


def end_lost_runs(instance: dg.DagsterInstance) -> list[str]:
    """Mark runs failed whose process has ended, and free their pools; returns their ids.

    A run whose process nobody recorded yet is left alone: it is only just being started.
    """
    ended = []
    for record in instance.get_run_records(dg.RunsFilter(statuses=_STARTED)):
        run = record.dagster_run
        process = _process_of(instance, run)
        if process is None or _lives(process, since=record.start_time):
            continue
        # The pools first: a run that is marked failed is not looked at again.
        with gate("dagster.pool", run.run_id):
            instance.event_log_storage.free_concurrency_slots_for_run(run.run_id)
        with gate("dagster.run_failed", run.run_id):
            instance.report_run_failed(
                run, f"Its process ({process}) is gone, and nobody had told of its end."
            )
        ended.append(run.run_id)
    return ended


def _process_of(instance: dg.DagsterInstance, run: dg.DagsterRun) -> int | None:
    """The process of this machine that ``run`` was executed by; none if nothing names it."""
    if own := run.tags.get(PROCESS_TAG):
        return int(own)
    found = None
    for entry in instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT):
        if named := _PROCESS.search(entry.message or ""):
            found = int(named.group(1))
    return found


def _lives(process: int, *, since: float | None) -> bool:
    """Whether ``process`` runs and is not a younger one that was given the same number."""
    try:
        born = psutil.Process(process)
        # A second of grace: the two clocks are read in different ways.
        return born.status() != psutil.STATUS_ZOMBIE and (since is None or born.create_time() <= since + 1)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
