"""Launches runs fast: by a fork of the run starter, and without a wait in the queue.

``ReadyRunLauncher`` requests a fork from the run starter (``cli/run_starter.py``), a process that has
everything imported. If that process is missing, dead, or has imported outdated code, Dagster's own launcher
starts the run. A run records its process before it begins, so it can be ended and monitored whoever launched
it.

``PromptRunCoordinator`` launches the sensors' ingest runs as soon as the daemon requests them. All other runs
go through Dagster's queue, which the daemon reads every few seconds.

The imports below are private names of Dagster. ``dagster.yaml`` names both classes, so every process that
opens the instance fails with an error if one has moved.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import dagster as dg
from dagster._cli.api import _execute_run_command_body
from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.run_coordinator.base import SubmitRunContext
from dagster._core.run_coordinator.queued_run_coordinator import QueuedRunCoordinator
from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._serdes import ConfigurableClassData
from dagster._utils.interrupts import capture_interrupts
from dagster._utils.tags import TagConcurrencyLimitsCounter

from omnisupport_ingest.defs.keys import PROCESS_TAG, TAKE_NEW_TAG
from omnisupport_ingest.defs.lost_runs import end_lost_runs, is_elsewhere
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.dagster_home import BESIDE_TAG
from omnisupport_ingest.runtime.fork_server import ask

_SOCKET = "socket"


class ReadyRunLauncher(dg.DefaultRunLauncher):
    """Launches a run by a fork of the run starter, or else as Dagster's own launcher does."""

    def __init__(self, socket: Path, inst_data: ConfigurableClassData | None = None) -> None:
        """``socket``: where the run starter listens."""
        self._socket = socket
        super().__init__(inst_data)

    @classmethod
    def config_type(cls) -> Any:
        return {_SOCKET: str}

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]) -> Self:
        return cls(Path(config_value[_SOCKET]), inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        if run.job_code_origin is not None and ask(
            self._socket, run.run_id, lambda process: self._name(run.run_id, process)
        ):
            return
        # The fork was recorded and never began, so it is not the process of the run.
        self._name(run.run_id, None)
        # No failpoint: Dagster's own call, which requests, launches or ends a run.
        super().launch_run(context)

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        process = ProcessIdentity.parse(run.tags.get(PROCESS_TAG, "")) if run is not None else None
        if run is None or run.is_finished or run.tags.get(GRPC_INFO_TAG):
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        if process is None or is_elsewhere(process):
            # Nothing has begun. Or the machine that runs it can end it; if it is gone, the daemon notices.
            return False
        _interrupt(self._instance, run, process)
        if not process.lives():
            end_lost_runs(self._instance)
            return False
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Return whether the run's process lives; a run without a recorded process is just being started."""
        process = ProcessIdentity.parse(run.tags.get(PROCESS_TAG, ""))
        if process is None or process.lives():
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(WorkerStatus.FAILED, f"Its process ({process.pid}) is gone.")

    def _name(self, run_id: str, process: ProcessIdentity | None) -> None:
        text = process.text if process is not None else ""
        run = self._instance.get_run_by_id(run_id)
        if run is not None and run.tags.get(PROCESS_TAG, "") != text:
            with failpoint("dagster.process", run_id):
                self._instance.add_run_tags(run_id, {PROCESS_TAG: text})


class PromptRunCoordinator(QueuedRunCoordinator[Any]):
    """Dagster's queue, which an ingest run skips while no run in progress can hold the pools of its tables.

    Ingest runs and runs tagged ``BESIDE_TAG`` cannot; behind any other run, an ingest run waits in the queue.
    Tagged runs take no slots from ingest runs: several of them begin at the same minute, and the queue is
    read only every few seconds. They share slots among themselves: a history skips the queue only if one is
    free, and no more of them run than ``dagster.yaml`` allows for their tag.
    """

    in_daemon: ClassVar[bool] = False
    """Whether this process is the daemon, which alone may launch runs. A run that a person requests in the UI
    is submitted by a webserver, perhaps of another machine, and waits in the queue for the daemon."""

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        run = context.dagster_run
        at_once = self.in_daemon and TAKE_NEW_TAG in run.tags
        # A run that a person requests again has all the tags of its parent.
        if inherited := {each: "" for each in (PROCESS_TAG, GRPC_INFO_TAG) if each in run.tags}:
            self._instance.add_run_tags(run.run_id, inherited)
        if run.status is not dg.DagsterRunStatus.NOT_STARTED or not at_once:
            # No failpoint: Dagster's own calls, before a run has begun.
            return super().submit_run(context)
        running = self._instance.get_runs(dg.RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES))
        queue = self._instance.get_concurrency_config().run_queue_config
        most = queue.max_concurrent_runs if queue is not None else -1
        limits = TagConcurrencyLimitsCounter(
            queue.tag_concurrency_limits if queue is not None else [], running
        )
        others = [each for each in running if BESIDE_TAG not in each.tags]
        full = 0 <= most <= len(running if BESIDE_TAG in run.tags else others)
        if full or limits.is_blocked(run) or not all(TAKE_NEW_TAG in each.tags for each in others):
            return super().submit_run(context)
        launched: dg.DagsterRun = self._instance.launch_run(run.run_id, context.workspace)
        return launched


def execute_run(run_id: str) -> int:
    """Execute a launched run in this process, as `dagster api execute_run` does; return its exit code."""
    with capture_interrupts(), dg.DagsterInstance.get() as instance:
        return _execute_run_command_body(run_id, instance, lambda _: None, set_exit_code_on_failure=False)


def interrupt_runs() -> None:
    """Cancel the runs in progress on this machine, on the instance of this process."""
    with dg.DagsterInstance.get() as instance:
        for run in instance.get_runs(dg.RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES)):
            process = ProcessIdentity.parse(run.tags.get(PROCESS_TAG, ""))
            if process is not None and not is_elsewhere(process) and process.lives():
                _interrupt(instance, run, process, "The platform is being stopped.")


def _interrupt(
    instance: dg.DagsterInstance, run: dg.DagsterRun, process: ProcessIdentity, reason: str | None = None
) -> None:
    # No failpoint: Dagster's own call, which requests, launches or ends a run.
    instance.report_run_canceling(run, message=reason)
    if process.lives():
        # As Dagster's own launcher does: the run treats the signal as an interrupt of its step.
        os.kill(process.pid, signal.SIGINT)


def end_lost() -> None:
    """End the runs whose process is gone, on the instance of this process."""
    with dg.DagsterInstance.get() as instance:
        end_lost_runs(instance)
