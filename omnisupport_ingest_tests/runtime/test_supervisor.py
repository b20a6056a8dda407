"""Services are started, watched, started again and ended; nothing of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.rotating_log import RotatingLog
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.supervisor import Backoff, Service, ServiceFailed, Supervisor
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.waiting import PATIENCE, until

pytestmark = pytest.mark.full

SLEEP = ("sleep", "600")

WITH_A_DAEMON = (
    "sh",
    "-c",
    # A grandchild in a session of its own, whose parent is gone: what Dagster's runs are like.
    'setsid sh -c \'(sleep 600 & echo $! > "$0/orphan") &\' "$0"; echo $$ > "$0/main"; exec sleep 600',
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home", WindowSize.parse("hourly"))


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pids(folder: Path) -> list[int]:
    until(
        lambda: all((folder / name).exists() and (folder / name).read_text() for name in ("main", "orphan"))
    )
    return [int((folder / name).read_text()) for name in ("main", "orphan")]


def test_stop_ends_a_service_and_everything_it_started(home: Home, tmp_path: Path) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", (*WITH_A_DAEMON, str(tmp_path))))
        started = pids(tmp_path)
        assert all(map(running, started))
        until(lambda: running_services(home.run) == {"one": started[0]})
    assert not any(map(running, started))
    assert not (home.run / "one.pid").exists()


def test_sigkill_of_the_supervisor_leaves_no_process_behind(home: Home, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from omnisupport_ingest.home import Home\n"
        "from omnisupport_ingest.runtime.supervisor import Service, Supervisor\n"
        "from omnisupport_ingest.windows import WindowSize\n"
        "supervisor = Supervisor(Home.open(Path(sys.argv[1]), WindowSize.parse('hourly')))\n"
        "supervisor.start(Service('one', tuple(sys.argv[2:])))\n"
        "supervisor.run()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program, str(home.path), *WITH_A_DAEMON, str(tmp_path)])
    started = pids(tmp_path)
    guard = psutil.Process(started[0]).ppid()
    parent.kill()
    parent.wait()
    until(lambda: not any(map(running, [*started, guard])))


def test_sigkill_of_the_guard_ends_the_service(home: Home, tmp_path: Path) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", SLEEP))
        until(lambda: "one" in running_services(home.run))
        service = running_services(home.run)["one"]
        os.kill(psutil.Process(service).ppid(), signal.SIGKILL)
        until(lambda: not running(service))
        with pytest.raises(ServiceFailed):
            supervisor.run()


@pytest.mark.slow
def test_a_service_that_ignores_the_stop_signal_is_killed_after_its_grace(home: Home) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(
            Service("one", ("sh", "-c", "trap '' TERM; echo ready; sleep 600 & wait; wait"), grace=0.3)
        )
        until(lambda: supervisor.log_of("one").exists() and supervisor.log_of("one").read_text() == "ready\n")
        began = time.monotonic()
    # It would sleep for 600 seconds.
    assert time.monotonic() - began < PATIENCE


def test_services_are_stopped_in_reverse_order_of_start(home: Home, tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = "trap 'echo $0 >> $1; exit' TERM; echo ready; sleep 600 & wait"
    with Supervisor(home) as supervisor:
        for name in ("first", "second"):
            supervisor.start(Service(name, ("sh", "-c", script, name, str(order))))
            until(
                lambda name=name: (
                    supervisor.log_of(name).exists() and "ready" in supervisor.log_of(name).read_text()
                )
            )
    assert order.read_text().split() == ["second", "first"]


def test_an_unexpected_end_without_restart_fails_and_names_the_log(home: Home) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", ("sh", "-c", "echo broken; exit 3")))
        with pytest.raises(ServiceFailed) as told:
            supervisor.run()
        assert "one ended with exit code 3" in told.value.problem
        assert str(supervisor.log_of("one")) in told.value.fix
        assert supervisor.log_of("one").read_text() == "broken\n"


def test_a_command_that_does_not_exist_is_said_in_the_log(home: Home) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", ("no-such-program-here",)))
        with pytest.raises(ServiceFailed):
            supervisor.run()
        assert "no-such-program-here does not start" in supervisor.log_of("one").read_text()


def test_an_unexpected_end_with_restart_starts_again_after_the_backoff(home: Home, tmp_path: Path) -> None:
    starts, said = tmp_path / "starts", list[str]()
    service = Service(
        "one", ("sh", "-c", 'echo x >> "$0"; exit 1', str(starts)), restart=Backoff(first=0.1, longest=0.2)
    )
    with Supervisor(home, report=said.append) as supervisor:
        supervisor.start(service)
        supervisor.run(until=lambda: starts.exists() and len(starts.read_text().split()) >= 3)
    assert any("starts again" in line for line in said)


def test_the_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(first=1, longest=10)
    assert [backoff.delay(failures) for failures in (1, 2, 3, 4, 5, 100)] == [1, 2, 4, 8, 10, 10]


def test_a_service_inherits_no_open_file_of_the_supervisor(home: Home, tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "secret", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(descriptor, True)
    try:
        with Supervisor(home) as supervisor:
            supervisor.start(Service("one", ("sh", "-c", "ls -l /proc/self/fd; echo done; exec sleep 600")))
            until(
                lambda: supervisor.log_of("one").exists() and "done" in supervisor.log_of("one").read_text()
            )
            assert "secret" not in supervisor.log_of("one").read_text()
    finally:
        os.close(descriptor)


def test_waiting_ends_with_an_error_when_time_is_up(home: Home) -> None:
    with Supervisor(home) as supervisor, pytest.raises(ServiceFailed, match="Spark did not become ready"):
        supervisor.start(Service("one", SLEEP))
        supervisor.wait(lambda: False, service="Spark", seconds=0.3)


def test_a_log_rotates_by_size_and_keeps_so_many(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = RotatingLog(path, limit=10, kept=2)
    for number in range(5):
        log.write(b"%08d" % number)
    assert [each.read_bytes() for each in (path, tmp_path / "a.log.1", tmp_path / "a.log.2")] == [
        b"00000004",
        b"00000003",
        b"00000002",
    ]
    assert not (tmp_path / "a.log.3").exists()
    assert path.stat().st_mode & 0o777 == 0o600
