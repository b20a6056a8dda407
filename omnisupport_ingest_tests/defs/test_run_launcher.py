"""Runs are forks of what stands ready: they are named, ended and looked after as any other run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import dagster as dg
import psutil
import pytest
from dagster._core.remote_origin import GrpcServerCodeLocationOrigin, RemoteRepositoryOrigin
from dagster._core.run_coordinator.base import SubmitRunContext
from dagster._core.storage.tags import GRPC_INFO_TAG

from omnisupport_ingest.defs.keys import PROCESS_TAG, TAKE_NEW_TAG
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.defs.run_launcher import PromptRunCoordinator, ReadyRunLauncher
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.dagster_home import BESIDE, BESIDE_TAG, TARGET
from omnisupport_ingest.settings import STORAGE_URL
from omnisupport_ingest_tests.defs import waiting_job
from omnisupport_ingest_tests.waiting import PATIENCE, until

READY = "omnisupport_ingest_tests.defs.ready_run"
Status = dg.DagsterRunStatus


@dataclass(frozen=True)
class Launching:
    """An instance whose runs are launched by ours, in ``folder``."""

    folder: Path
    instance: dg.DagsterInstance

    @property
    def socket(self) -> Path:
        return self.folder / "ready.sock"

    @property
    def reached(self) -> bool:
        return (self.folder / "reached").exists()

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DAGSTER_HOME": str(self.folder),
            waiting_job.REACHED: str(self.folder / "reached"),
            "PYTHONWARNINGS": "ignore",
        }

    def made(self, tags: dict[str, str] | None = None) -> dg.DagsterRun:
        """A run that nobody has launched."""
        job = dg.reconstructable(waiting_job.waits)
        location = GrpcServerCodeLocationOrigin(host="localhost", socket="nobody.sock", location_name="tests")
        return self.instance.create_run_for_job(
            waiting_job.waits,
            job_code_origin=job.get_python_origin(),
            remote_job_origin=RemoteRepositoryOrigin(location, "tests").get_job_origin("waits"),
            tags=tags,
        )

    def run(self, run_id: str) -> dg.DagsterRun:
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def process(self, run_id: str) -> ProcessIdentity:
        found = ProcessIdentity.parse(self.run(run_id).tags[PROCESS_TAG])
        assert found is not None
        return found

    @property
    def pool_is_free(self) -> bool:
        return not self.instance.event_log_storage.get_concurrency_info("table").claimed_slots

    @contextmanager
    def standing(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [sys.executable, "-m", READY, "serve", str(self.socket)]
        process = subprocess.Popen(command, env=self.environment())
        try:
            until(lambda: self.socket.exists() or process.poll() is not None)
            yield process
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait(PATIENCE)


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    ours = {"module": ReadyRunLauncher.__module__}
    config = {
        "telemetry": {"enabled": False},
        "concurrency": {
            "pools": {"granularity": "op", "default_limit": 1},
            "runs": {
                "max_concurrent_runs": 3,
                "tag_concurrency_limits": [{"key": BESIDE_TAG, "value": BESIDE, "limit": 2}],
            },
        },
        "run_launcher": {
            **ours,
            "class": "ReadyRunLauncher",
            "config": {"socket": str(tmp_path / "ready.sock")},
        },
        "run_coordinator": {**ours, "class": "PromptRunCoordinator"},
    }
    (tmp_path / "dagster.yaml").write_text(json.dumps(config))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        yield Launching(tmp_path, instance)


@pytest.fixture
def in_daemon(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Runs are submitted by the daemon."""
    monkeypatch.setattr(PromptRunCoordinator, "in_daemon", True)
    return monkeypatch


def test_a_run_is_a_fork_that_is_named_before_its_first_step_and_ended_as_an_interrupt_of_it(
    launching: Launching,
) -> None:
    run = launching.made()
    with launching.standing() as ready:
        launching.instance.launch_run(run.run_id, None)
        process = launching.process(run.run_id)
        assert psutil.Process(process.pid).ppid() == ready.pid
        until(lambda: launching.reached)
        assert launching.process(run.run_id) == process
        launcher = launching.instance.run_launcher
        assert launcher.supports_check_run_worker_health
        assert launcher.check_run_worker_health(launching.run(run.run_id)).status.value == "RUNNING"
        assert end_lost_runs(launching.instance) == []
        assert launcher.terminate(run.run_id)
        until(lambda: launching.run(run.run_id).is_finished)
        assert launching.run(run.run_id).status is Status.CANCELED
        until(lambda: launching.pool_is_free and not process.lives())
        assert ready.poll() is None
        told = [entry.message for entry in launching.instance.all_logs(run.run_id)]
        assert f"Started process for run (pid: {process.pid})." in told


def test_a_run_in_progress_as_the_platform_stops_is_cancelled_and_says_so(launching: Launching) -> None:
    run = launching.made()
    with launching.standing() as ready:
        launching.instance.launch_run(run.run_id, None)
        until(lambda: launching.reached)
        ready.send_signal(signal.SIGTERM)
        assert ready.wait(PATIENCE) == 0
        assert launching.run(run.run_id).status is Status.CANCELED and launching.pool_is_free
        assert "The platform is being stopped." in [
            entry.message for entry in launching.instance.all_logs(run.run_id)
        ]


def test_a_run_whose_process_is_killed_is_marked_failed_and_its_pool_is_free(launching: Launching) -> None:
    """By what stands ready, which is told of the end: no daemon and no sensor looks here."""
    run = launching.made()
    with launching.standing():
        launching.instance.launch_run(run.run_id, None)
        until(lambda: launching.reached)
        os.kill(launching.process(run.run_id).pid, signal.SIGKILL)
        until(lambda: launching.run(run.run_id).status is Status.FAILURE)
        assert launching.pool_is_free


def test_where_what_stood_ready_was_killed_with_its_run_the_monitor_and_the_sensor_see_it_gone(
    launching: Launching,
) -> None:
    run = launching.made()
    with launching.standing() as ready:
        launching.instance.launch_run(run.run_id, None)
        until(lambda: launching.reached)
        process = launching.process(run.run_id)
        ready.kill()
        ready.wait(PATIENCE)
        # Its guard would end it now; until then it goes on, and counts as what it is.
        assert process.lives()
        assert end_lost_runs(launching.instance) == []
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not process.lives())
        health = launching.instance.run_launcher.check_run_worker_health(launching.run(run.run_id))
        assert health.status.value == "FAILED"
        assert not launching.instance.run_launcher.terminate(run.run_id)
        assert launching.run(run.run_id).status is Status.FAILURE
        assert launching.pool_is_free


def test_a_run_of_another_machine_is_not_ended_here(
    launching: Launching, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody here sees its process: a UI there ends it, or the daemon finds it lost."""
    run = launching.made()
    with launching.standing():
        launching.instance.launch_run(run.run_id, None)
        until(lambda: launching.reached)
        elsewhere = replace(launching.process(run.run_id), boot="another")
        launching.instance.add_run_tags(run.run_id, {PROCESS_TAG: elsewhere.text})
        monkeypatch.setenv(STORAGE_URL, "postgresql://records.example/dagster")
        assert not launching.instance.run_launcher.terminate(run.run_id)
        assert launching.run(run.run_id).status is Status.STARTED
        assert not launching.pool_is_free


def test_a_run_that_a_person_requests_waits_for_the_daemon(
    launching: Launching, in_daemon: pytest.MonkeyPatch
) -> None:
    """The webserver that is asked may be on another machine than the daemon. Tags do not tell the runs apart:
    histories and ingest runs may be launched by hand."""
    coordinator = launching.instance.run_coordinator
    with launching.standing():
        first = launching.made({TAKE_NEW_TAG: "true", BESIDE_TAG: BESIDE})
        assert coordinator.submit_run(SubmitRunContext(first, None)).status is Status.STARTING
        in_daemon.undo()
        for tags in ({TAKE_NEW_TAG: "true"}, {TAKE_NEW_TAG: "true", BESIDE_TAG: BESIDE}):
            run = launching.made(tags)
            assert coordinator.submit_run(SubmitRunContext(run, None)).status is Status.QUEUED


def test_a_run_that_is_requested_again_is_not_the_process_of_its_parent(launching: Launching) -> None:
    """It has all of its tags, those of Dagster's own launcher among them."""
    gone = ProcessIdentity(2**22 - 3, 1, ProcessIdentity.current().boot)
    server = {"host": "localhost", "socket": str(launching.folder / "gone.sock")}
    again = launching.made({PROCESS_TAG: gone.text, GRPC_INFO_TAG: json.dumps(server)})
    with launching.standing():
        launching.instance.run_coordinator.submit_run(SubmitRunContext(again, None))
        assert not launching.instance.run_launcher.terminate(again.run_id)
        launching.instance.report_dagster_event(
            dg.DagsterEvent(event_type_value="PIPELINE_STARTING", job_name=again.job_name), again.run_id
        )
        assert end_lost_runs(launching.instance) == []
        launching.instance.launch_run(again.run_id, None)
        until(lambda: launching.reached)
        assert launching.instance.run_launcher.terminate(again.run_id)
        until(lambda: launching.run(again.run_id).status is Status.CANCELED)


def test_where_nothing_stands_ready_dagsters_own_launcher_is_asked(launching: Launching) -> None:
    run = launching.made()
    # It needs the code server, which is not here.
    with pytest.raises(Exception, match="requires a workspace"):
        launching.instance.launch_run(run.run_id, None)
    assert ProcessIdentity.parse(launching.run(run.run_id).tags.get(PROCESS_TAG, "")) is None


@pytest.mark.parametrize(("at", "lost"), [("before", False), ("after", True)])
def test_a_daemon_that_is_killed_while_it_launches_a_run_leaves_nothing_that_began(
    launching: Launching, at: str, lost: bool
) -> None:
    """Named already, the run is seen to be lost at the next look; else Dagster gives it up when it is due."""
    run = launching.made()
    with launching.standing() as ready:
        done = subprocess.run(
            [sys.executable, "-m", READY, "launch", run.run_id],
            env={**launching.environment(), VARIABLE: f"dagster.process.{at}"},
            timeout=PATIENCE,
        )
        assert done.returncode == -signal.SIGKILL
        until(lambda: not psutil.Process(ready.pid).children())
        assert not launching.reached
        assert launching.run(run.run_id).status is Status.STARTING
        assert end_lost_runs(launching.instance) == ([run.run_id] if lost else [])


@pytest.mark.usefixtures("in_daemon")
def test_an_ingest_run_is_launched_at_once_beside_others_and_queued_behind_any_other_run(
    launching: Launching,
) -> None:
    take_new = {TAKE_NEW_TAG: "true"}
    coordinator = launching.instance.run_coordinator
    assert isinstance(coordinator, PromptRunCoordinator)

    def submitted(tags: dict[str, str]) -> dg.DagsterRunStatus:
        run = launching.made(tags)
        return coordinator.submit_run(SubmitRunContext(run, None)).status

    with launching.standing():
        assert submitted({}) is Status.QUEUED
        # An audit that the queue has let go, and a history: as many of these as there may be.
        launching.instance.launch_run(launching.made({BESIDE_TAG: BESIDE}).run_id, None)
        until(lambda: launching.reached)
        assert submitted(take_new | {BESIDE_TAG: BESIDE}) is Status.STARTING
        # One more history: those that many sources begin at the same minute are not all launched.
        assert submitted(take_new | {BESIDE_TAG: BESIDE}) is Status.QUEUED
        # A sync of a target may wait for a warehouse for hours; no ingest run waits for it.
        launching.instance.launch_run(launching.made({BESIDE_TAG: TARGET}).run_id, None)
        for _ in range(3):
            assert submitted(take_new) is Status.STARTING
        # Three are in progress, which is as many as there may be.
        assert submitted(take_new) is Status.QUEUED
    for run in launching.instance.get_runs():
        if not run.is_finished:
            launching.instance.report_run_failed(run)
    replay = launching.made()
    launching.instance.report_dagster_event(
        dg.DagsterEvent(event_type_value="PIPELINE_STARTING", job_name=replay.job_name), replay.run_id
    )
    assert submitted(take_new) is Status.QUEUED
