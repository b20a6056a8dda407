"""How runs are launched: by a fork of the process that stands ready, and without a wait in the queue.

``ReadyRunLauncher`` asks the process that stands ready (``cli/run_starter.py``) for a fork. Where that is
missing, dead, or has imported what is no longer current, Dagster's own launcher starts the run. A run names
its process before it begins, so it can be ended and looked after whoever launched it.

``PromptRunCoordinator`` launches the sensors' ingest runs when they are asked for. Dagster's daemon looks
into its queue every few seconds alone, which is fine for whatever else there is.

The imports below are private names of Dagster's; ``dagster.yaml`` names both classes, so every process that
opens the instance fails loudly should one have moved.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import dagster as dg
from dagster._cli.api import _execute_run_command_body
from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, WorkerStatus
from dagster._core.run_coordinator.base import SubmitRunContext
from dagster._core.run_coordinator.queued_run_coordinator import QueuedRunCoordinator
from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES
from dagster._core.storage.tags import GRPC_INFO_TAG
from dagster._serdes import ConfigurableClassData
from dagster._utils.interrupts import capture_interrupts

from omnisupport_ingest.defs.keys import PROCESS_TAG, TAKE_NEW_TAG
from omnisupport_ingest.defs.lost_runs import end_lost_runs
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.fork_server import ask

_SOCKET = "socket"


class ReadyRunLauncher(dg.DefaultRunLauncher):
    """Dagster's own launcher, with a fork of the process that stands ready before it."""

    def __init__(self, socket: Path, inst_data: ConfigurableClassData | None = None) -> None:
        """``socket``: where the process that stands ready listens."""
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
        # A child that was named and never began is not the run's process.
        self._name(run.run_id, None)
        # No failpoint: what Dagster does there itself, in its own words: a run asked for, launched or to be
        # ended.
        super().launch_run(context)

    def terminate(self, run_id: str) -> bool:
        run = self._instance.get_run_by_id(run_id)
        process = ProcessIdentity.parse(run.tags.get(PROCESS_TAG, "")) if run is not None else None
        if run is None or run.is_finished or process is None or GRPC_INFO_TAG in run.tags:
            return bool(super().terminate(run_id))  # type: ignore[no-untyped-call]
        # No failpoint: what Dagster does there itself, in its own words: a run asked for, launched or to be
        # ended.
        self._instance.report_run_canceling(run)
        if not process.lives():
            end_lost_runs(self._instance)
            return False
        # As Dagster's own launcher has it done: the run takes it as an interrupt of its step.
        os.kill(process.pid, signal.SIGINT)
        return True

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: dg.DagsterRun) -> CheckRunHealthResult:
        """Whether the process lives that the run names; one that names none is only just being started."""
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
    """Dagster's queue, past which an ingest run goes as long as only such runs are in progress.

    Any other run may hold the pools of its tables, and the queue keeps it back until they are free.
    """

    def submit_run(self, context: SubmitRunContext) -> dg.DagsterRun:
        run = context.dagster_run
        if run.status is not dg.DagsterRunStatus.NOT_STARTED or TAKE_NEW_TAG not in run.tags:
            # No failpoint: what Dagster does there itself, in its own words: a run asked for, launched or to
            # be ended.
            return super().submit_run(context)
        running = self._instance.get_runs(dg.RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES))
        queue = self._instance.get_concurrency_config().run_queue_config
        most = queue.max_concurrent_runs if queue is not None else -1
        full = 0 <= most <= len(running)
        if full or not all(TAKE_NEW_TAG in each.tags for each in running):
            return super().submit_run(context)
        launched: dg.DagsterRun = self._instance.launch_run(run.run_id, context.workspace)
        return launched


def execute_run(run_id: str) -> int:
    """Execute a run that was launched, in this process, as `dagster api execute_run` does; its exit code."""
    with capture_interrupts(), dg.DagsterInstance.get() as instance:
        return _execute_run_command_body(run_id, instance, lambda _: None, set_exit_code_on_failure=False)


def end_lost() -> None:
    """End the runs whose process is gone, on the instance of this process."""
    with dg.DagsterInstance.get() as instance:
        end_lost_runs(instance)
