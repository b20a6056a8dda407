"""Runs whose process died without a word: the next look ends them, and nothing waits for them for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg

from omnisupport_ingest.defs.keys import PROCESS_TAG
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest_tests.waiting import until

_WAITS = """
import os, pathlib, sys, time
import dagster as dg

@dg.op(pool="table")
def wait():
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(120)

@dg.job(executor_def=dg.in_process_executor)
def waits():
    wait()

tags = {sys.argv[2]: str(os.getpid())} if len(sys.argv) > 2 else {}
with dg.DagsterInstance.get() as instance:
    waits.execute_in_process(instance=instance, tags=tags)
"""


def started(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own, in the middle of a step that holds a pool."""
    reached = home / "reached"
    process = subprocess.Popen(
        [sys.executable, "-c", _WAITS, str(reached), *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        stderr=subprocess.DEVNULL,
    )
    until(lambda: reached.exists() or process.poll() is not None)
    assert process.poll() is None, "the run ended before its step began"
    reached.unlink()
    return process


def test_a_killed_run_is_ended_and_its_pool_is_free_again_and_a_living_one_is_left_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "dagster.yaml").write_text("concurrency: {pools: {granularity: op, default_limit: 1}}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        process = started(tmp_path, PROCESS_TAG)
        try:
            assert end_lost_runs(instance) == []
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        (run,) = instance.get_runs()
        assert run.status is dg.DagsterRunStatus.STARTED
        assert instance.event_log_storage.get_concurrency_info("table").claimed_slots
        assert end_lost_runs(instance) == [run.run_id]
        assert instance.get_run_by_id(run.run_id).status is dg.DagsterRunStatus.FAILURE
        assert not instance.event_log_storage.get_concurrency_info("table").claimed_slots
        assert end_lost_runs(instance) == []


def test_the_process_is_known_from_dagsters_own_record_too(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        process = started(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (run,) = instance.get_runs()
        assert end_lost_runs(instance) == [run.run_id]
