"""Runs, the daemon and the code server are killed; what they had not finished is asked for again."""

from __future__ import annotations

import itertools
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

import dagster as dg
import pytest
from dagster._core.scheduler.instigation import TickStatus

from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.runtime.dagster_home import write_workspace
from omnisupport_ingest.runtime.dagster_services import code_server_command, code_server_socket
from omnisupport_ingest.runtime.private_folders import socket_answers
from omnisupport_ingest_tests.recovery.crash import KILLED, CrashDesk, Point, died, finished
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE
from omnisupport_ingest_tests.waiting import until

pytestmark = pytest.mark.crash

MOMENTS = ("before", "after")
TIMES = (1, 3)

SECONDS = 300
"""Enough for the daemon's waits between attempts, on a machine that is busy with other cases."""

COVERED = {"dagster.run", "dagster.pool", "dagster.run_failed", "sensor.answer"}

UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]


def runs(desk: CrashDesk, statuses: list[dg.DagsterRunStatus] | None = None) -> list[dg.DagsterRun]:
    with dg.DagsterInstance.from_config(str(desk.workspace.home.dagster)) as instance:
        # Of this job alone: the platform's schedules may fall due meanwhile.
        return list(instance.get_runs(dg.RunsFilter(job_name=f"ingest_{SOURCE}", statuses=statuses)))


@pytest.mark.parametrize(("moment", "times"), itertools.product(MOMENTS, TIMES))
def test_runs_killed_around_and_within_are_ended_by_the_next_one(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk = crash_desk

    def news() -> None:
        desk.change()
        finished(desk.capture())

    inside = Point("lake.commit", moment, "deduped_events")
    for name in ("dagster.run", "dagster.pool", "dagster.run_failed"):
        point = Point(name, moment)
        for _ in range(times):
            news()
            if name != "dagster.run":
                # The run that the next one finds lost.
                died(desk.ingest_run(at=inside), inside)
            died(desk.ingest_run(at=point), point)
    news()
    finished(desk.ingest_run())
    assert runs(desk, UNFINISHED) == []
    with dg.DagsterInstance.from_config(str(desk.workspace.home.dagster)) as instance:
        storage = instance.event_log_storage
        for key in storage.get_concurrency_keys():
            assert storage.get_concurrency_info(key).active_slot_count == 0, key
    desk.ends_well()


@contextmanager
def code_server(desk: CrashDesk, at: object = "") -> Iterator[subprocess.Popen[str]]:
    """The process that evaluates sensors and starts runs; its runs inherit the failpoint ``at``."""
    socket = code_server_socket(desk.workspace.home)
    write_workspace(desk.workspace.home, socket)
    with quiet(desk, "-m", *code_server_command(socket), at=at, log="code-server") as process:
        until(lambda: socket_answers(socket) or process.poll() is not None)
        yield process


def daemon(desk: CrashDesk, at: object = ""):  # type: ignore[no-untyped-def]
    workspace = str(desk.workspace.home.dagster / "workspace.yaml")
    return quiet(desk, "-m", "dagster._daemon", "run", "-w", workspace, at=at, log="daemon")


@contextmanager
def quiet(desk: CrashDesk, *arguments: str, at: object, log: str) -> Iterator[subprocess.Popen[str]]:
    """A process that goes on until it dies or is told to end; what it prints goes to a log."""
    with (desk.folder / f"{log}.log").open("a") as file:
        process = desk.start(*arguments, at=at, log=file)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdin is not None:
            process.stdin.close()


def dies_of_news(desk: CrashDesk, process: subprocess.Popen[str]) -> None:
    """Let news land until ``process`` is killed: a run that was recorded before takes what is there when it
    begins, and only what lands after that is asked for by another one."""
    give_up = time.monotonic() + SECONDS
    while process.poll() is None:
        assert time.monotonic() < give_up, "the daemon has not come by the failpoint"
        desk.change()
        finished(desk.capture())
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    assert process.returncode == KILLED


def all_taken(desk: CrashDesk) -> bool:
    return not pending_windows(desk.workspace, SOURCE).windows and not runs(desk, UNFINISHED)


def each_request_ran_once(desk: CrashDesk) -> None:
    keys = Counter(run.tags.get("dagster/run_key") for run in runs(desk))
    assert keys and set(keys.values()) == {1}, keys


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["dagster.launch", "dagster.cursor"])
def test_daemon_killed_between_tick_and_launch_and_cursor_asks_once_for_each_run(
    crash_desk: CrashDesk, name: str, moment: str, times: int
) -> None:
    desk = crash_desk
    desk.failpoints_in_storage = True
    desk.change()
    finished(desk.capture())
    of = f"ingest_{SOURCE}" if name == "dagster.launch" else f"wal_batches_{SOURCE}"
    point = Point(name, moment, of)
    with code_server(desk):
        for _ in range(times):
            with daemon(desk, at=point) as process:
                dies_of_news(desk, process)
        with daemon(desk):
            until(lambda: all_taken(desk), SECONDS)
    each_request_ran_once(desk)
    desk.ends_well()


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(
    "point",
    [Point("lake.commit", "before", "deduped_events"), Point("lake.commit", "after", "deduped_events")],
    ids=str,
)
def test_run_of_dagster_killed_within_is_asked_for_again_also_after_its_code_server_died(
    crash_desk: CrashDesk, point: Point, times: int
) -> None:
    desk = crash_desk
    desk.change()
    finished(desk.capture())
    with code_server(desk, at=point) as server:
        with daemon(desk):
            for deaths in range(1, times + 1):
                if deaths > 1 and point.moment == "after":
                    # The window holds its events then, so the next run does not come by the failpoint.
                    desk.change()
                    finished(desk.capture())
                until(partial(ended_by_failure, desk, deaths), SECONDS)
            if point.moment == "before":
                assert {run.status for run in runs(desk)} == {dg.DagsterRunStatus.FAILURE}
        server.kill()
        server.wait()
    with code_server(desk), daemon(desk):
        until(lambda: all_taken(desk), SECONDS)
    each_request_ran_once(desk)
    desk.ends_well()


@pytest.mark.parametrize(("moment", "times"), itertools.product(MOMENTS, TIMES))
def test_code_server_killed_while_a_sensor_answers_is_asked_again(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    desk = crash_desk
    desk.change()
    finished(desk.capture())
    point = Point("sensor.answer", moment)
    for _ in range(times):
        with code_server(desk, at=point), daemon(desk):
            # The server that listens starts the one that answers, which is the one that dies.
            until(lambda: failed_ticks(desk) > 0, SECONDS)
        assert runs(desk) == []
    with code_server(desk), daemon(desk):
        until(lambda: bool(runs(desk)) and all_taken(desk), SECONDS)
    each_request_ran_once(desk)
    desk.ends_well()


def ended_by_failure(desk: CrashDesk, deaths: int) -> bool:
    """Whether so many runs have failed and none goes on."""
    return len(runs(desk, [dg.DagsterRunStatus.FAILURE])) >= deaths and not runs(desk, UNFINISHED)


def failed_ticks(desk: CrashDesk) -> int:
    """How many ticks of the sensor have ended in an error."""
    with dg.DagsterInstance.from_config(str(desk.workspace.home.dagster)) as instance:
        states = instance.all_instigator_state()
        return sum(
            tick.status is TickStatus.FAILURE
            for state in states
            for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id)
        )
