"""Runs whose process died without a word: the next look ends them, and nothing waits for them for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import psutil
import pytest

from omnisupport_ingest.defs import daemon
from omnisupport_ingest.defs.keys import PROCESS_TAG
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.settings import STORAGE_URL
from omnisupport_ingest_tests.defs.waiting_job import REACHED
from omnisupport_ingest_tests.waiting import until


def started(home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A run in a process of its own, in the middle of a step that holds a pool."""
    reached = home / "reached"
    process = subprocess.Popen(
        [sys.executable, "-m", "omnisupport_ingest_tests.defs.waiting_job", *arguments],
        env={**os.environ, "DAGSTER_HOME": str(home), REACHED: str(reached)},
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
        process = started(tmp_path, "launched")
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


def test_a_run_that_ends_between_the_list_and_the_look_at_its_process_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dg.DagsterInstance.ephemeral() as instance:
        process = subprocess.Popen(["sleep", "60"])
        tags = {PROCESS_TAG: ProcessIdentity.of(process.pid).text}
        run = dg.DagsterRun("ingest", "the-run", status=dg.DagsterRunStatus.STARTED, tags=tags)
        instance.add_run(run)
        listed = instance.get_run_records

        def then_it_ends(*arguments: Any, **named: Any) -> Any:
            found = listed(*arguments, **named)
            instance.report_dagster_event(dg.DagsterEvent("PIPELINE_SUCCESS", "ingest"), "the-run")
            process.kill()
            process.wait()
            return found

        monkeypatch.setattr(instance, "get_run_records", then_it_ends)
        assert end_lost_runs(instance) == []
        assert instance.get_run_by_id("the-run").status is dg.DagsterRunStatus.SUCCESS


def test_a_run_names_its_process_by_what_no_clock_moves_and_another_of_its_number_is_not_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "dagster.yaml").write_text("concurrency: {pools: {granularity: op, default_limit: 1}}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        process = started(tmp_path, "launched")
        try:
            (run,) = instance.get_runs()
            named = ProcessIdentity.parse(run.tags[PROCESS_TAG])
            assert named == ProcessIdentity.of(process.pid)
            assert named is not None
            assert end_lost_runs(instance) == []
            # As after the end of the run, when its number was given to a process that began later.
            instance.add_run_tags(run.run_id, {PROCESS_TAG: replace(named, started=1).text})
            assert end_lost_runs(instance) == [run.run_id]
        finally:
            process.kill()
            process.wait()


def test_where_records_are_shared_a_run_of_another_machine_is_lost_for_the_daemon_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        process = started(tmp_path, "launched")
        process.kill()
        process.wait()
        (run,) = instance.get_runs()
        named = ProcessIdentity.parse(run.tags[PROCESS_TAG])
        assert named is not None
        monkeypatch.setenv(STORAGE_URL, "postgresql://records.example/dagster")
        instance.add_run_tags(run.run_id, {PROCESS_TAG: replace(named, boot="of another machine").text})
        assert end_lost_runs(instance) == []
        # A daemon ends them when it takes over: before that, the other machine may still work.
        lease = SimpleNamespace(keep=lambda _lost: None)
        monkeypatch.setattr(daemon.RecordsLease, "wait_for", lambda *_: lease)
        monkeypatch.setattr(dg.DagsterInstance, "get", lambda: nullcontext(instance))
        daemon.wait_until_alone()
        ended = instance.get_run_by_id(run.run_id)
        assert ended is not None and ended.status is dg.DagsterRunStatus.FAILURE


def test_of_a_bare_number_the_process_that_has_it_at_the_first_look_counts_and_no_later_one(
    tmp_path: Path,
) -> None:
    """As Dagster records it before the first step, and as an earlier version did."""
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        process = started(tmp_path, "in process")
        (run,) = instance.get_runs()
        instance.add_run_tags(run.run_id, {PROCESS_TAG: str(process.pid)})
        try:
            assert end_lost_runs(instance) == []
            (run,) = instance.get_runs()
            named = ProcessIdentity.parse(run.tags[PROCESS_TAG])
            assert named == ProcessIdentity.of(process.pid) and named is not None
            assert end_lost_runs(instance) == []
            # As after its end, when its number was given to a process that began later.
            instance.add_run_tags(run.run_id, {PROCESS_TAG: replace(named, started=1).text})
            assert end_lost_runs(instance) == [run.run_id]
        finally:
            process.kill()
            process.wait()


def test_of_a_bare_number_that_no_process_has_the_run_is_over(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        process = started(tmp_path, "in process")
        process.kill()
        process.wait()
        (run,) = instance.get_runs()
        instance.add_run_tags(run.run_id, {PROCESS_TAG: str(process.pid)})
        assert end_lost_runs(instance) == [run.run_id]


def test_the_process_is_known_from_dagsters_own_record_too(tmp_path: Path) -> None:
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        process = started(tmp_path, "in process")
        process.send_signal(signal.SIGKILL)
        process.wait()
        (run,) = instance.get_runs()
        assert end_lost_runs(instance) == [run.run_id]


def clock_steps(proc: Path, seconds: int) -> Path:
    """A folder that is ``/proc`` after the clock of the machine has stepped forward by ``seconds``.

    The kernel works the time of boot out from the clock whenever it is asked, so a step moves that time, and
    with it every start time that is told as a time of day.
    """
    proc.mkdir()
    for entry in Path("/proc").iterdir():
        if entry.name != "stat":
            (proc / entry.name).symlink_to(entry)
    told = [
        f"btime {int(line.split()[1]) + seconds}" if line.startswith("btime ") else line
        for line in Path("/proc/stat").read_text().splitlines()
    ]
    (proc / "stat").write_text("\n".join(told) + "\n")
    return proc


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the time of boot is read from /proc")
def test_a_clock_that_steps_forward_leaves_a_live_run_and_its_pool_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text("concurrency: {pools: {granularity: op, default_limit: 1}}\n")
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        process = started(tmp_path, "in process")
        before = psutil.Process(process.pid).create_time()
        monkeypatch.setattr(psutil, "PROCFS_PATH", str(clock_steps(tmp_path / "proc", 3600)))
        try:
            assert psutil.Process(process.pid).create_time() == before + 3600
            assert end_lost_runs(instance) == []
            assert instance.event_log_storage.get_concurrency_info("table").claimed_slots
        finally:
            process.kill()
            process.wait()
        assert len(end_lost_runs(instance)) == 1
