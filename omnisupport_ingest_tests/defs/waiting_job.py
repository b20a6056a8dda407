"""A job in the middle of a step that holds a pool, for tests that end its process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import dagster as dg

from omnisupport_ingest.defs.lost_runs import run_executor

REACHED = "WAITING_JOB_REACHED"
"""Variable with the file that says that the step has begun."""


@dg.op(pool="table")
def wait() -> None:
    Path(os.environ[REACHED]).touch()
    time.sleep(120)


@dg.job(executor_def=run_executor)
def waits() -> None:
    wait()


if __name__ == "__main__":
    from omnisupport_ingest_tests.defs import waiting_job

    tags = dict(each.split("=", 1) for each in sys.argv[2:])
    with dg.DagsterInstance.get() as instance:
        if sys.argv[1] == "launched":
            # As in the process that the code server gives a run.
            dg.execute_job(dg.reconstructable(waiting_job.waits), instance=instance)
        else:
            waits.execute_in_process(instance=instance, tags=tags)
