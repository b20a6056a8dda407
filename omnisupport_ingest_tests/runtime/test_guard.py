"""A guard whose log cannot be written ends nothing; one that is killed takes everything with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime import guard
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.supervisor import Backoff, Service, Supervisor
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.other_user import NOBODY
from omnisupport_ingest_tests.small_disk import Disk, small_disk

pytestmark = pytest.mark.full

CHATTY = (
    "sh",
    "-c",
    # A line of 8 KB at a time, 80 KB more than a pipe holds, then a word that all of it was taken.
    'line=$(head -c 8191 /dev/zero | tr "\\0" x); echo first; '
    'until [ -e "$0/talk" ]; do sleep 0.05; done; '
    'for each in $(seq 18); do echo "$line"; done; touch "$0/said"; '
    'until [ -e "$0/again" ]; do sleep 0.05; done; echo last; exec sleep 600',
)

TREE = (
    "sh",
    "-c",
    # A child in the same session, and a daemon: in a session of its own, its parents gone.
    "sleep 600 & echo $! > $0/child; "
    "setsid sh -c 'setsid sleep 600 & echo $! > $0/daemon' $0; echo $$ > $0/main; trap '' TERM; wait",
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home", WindowSize.parse("hourly"))


@pytest.fixture
def log_disk(home: Home, tmp_path: Path) -> Iterator[Disk]:
    """A disk of its own for the logs and the process ids of ``home``."""
    with small_disk(tmp_path / "disk", 1) as disk:
        for folder in (home.logs, home.run):
            folder.rmdir()
            (disk.path / folder.name).mkdir()
            folder.symlink_to(disk.path / folder.name)
        yield disk


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for: {what}"
        time.sleep(0.05)


def living(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_service_whose_log_disk_is_full_lives_on_and_what_was_not_written_is_counted(
    home: Home, log_disk: Disk, tmp_path: Path
) -> None:
    with Supervisor(home) as supervisor:
        log = supervisor.log_of("one")
        supervisor.start(Service("one", (*CHATTY, str(tmp_path))))
        until(lambda: log.exists() and log.read_text() == "first\n", "the first line in the log")
        until(lambda: "one" in running_services(home.run), "the service in the list of what runs")
        service = running_services(home.run)["one"]
        with log_disk.full(but=4096):
            (tmp_path / "talk").touch()
            # More than the pipe holds: it is taken out of it although nothing of it can be written.
            until((tmp_path / "said").exists, "the service to have said all it had to say")
            supervisor.check()
            assert living(service)
        until(lambda: "were not written here" in log.read_text(), "the note of what is missing")
        (tmp_path / "again").touch()
        until(lambda: log.read_text().endswith("last\n"), "the next line after the disk had room")
        supervisor.check()
        assert living(service)
        lines = log.read_text().splitlines()
    (note,) = [line for line in lines if "were not written here" in line]
    missing = int(note.split(" bytes ")[0].rsplit(" ", 1)[1].replace(",", ""))
    assert missing + sum(len(line) for line in lines if set(line) == {"x"}) + _ends(lines) == 18 * 8192
    assert "No space left on device" in note


def _ends(lines: list[str]) -> int:
    """How many whole lines of the service stand there: each has an end of its own."""
    return sum(len(line) == 8191 and set(line) == {"x"} for line in lines)


def test_a_service_starts_while_the_disk_is_full_and_is_listed_as_soon_as_there_is_room(
    home: Home, log_disk: Disk, tmp_path: Path
) -> None:
    with Supervisor(home) as supervisor:
        with log_disk.full():
            supervisor.start(
                Service("one", ("sh", "-c", 'echo hello; touch "$0/runs"; exec sleep 600', str(tmp_path)))
            )
            until((tmp_path / "runs").exists, "the service to run")
            time.sleep(1.5)
            supervisor.check()
            assert running_services(home.run) == {}
        until(lambda: "one" in running_services(home.run), "the service in the list of what runs")
        until(
            lambda: " 6 bytes " in supervisor.log_of("one").read_text(),
            "the note of what could not be logged",
        )


def test_a_log_that_takes_nothing_ever_stops_nobody(home: Home, tmp_path: Path) -> None:
    (home.logs / "one.log").symlink_to("/dev/full")
    with Supervisor(home) as supervisor:
        for name in ("talk", "again"):
            (tmp_path / name).touch()
        supervisor.start(Service("one", (*CHATTY, str(tmp_path))))
        until((tmp_path / "said").exists, "the service to have said all it had to say")
        until(lambda: "one" in running_services(home.run), "the service in the list of what runs")
        supervisor.check()


def test_a_supervisor_that_cannot_tell_anybody_still_starts_its_service_again(home: Home) -> None:
    def tell(line: str) -> None:
        raise OSError(28, "No space left on device")

    starts = home.path / "starts"
    service = Service("one", ("sh", "-c", 'echo x >> "$0"', str(starts)), restart=Backoff(first=0.1))
    with Supervisor(home, report=tell) as supervisor:
        supervisor.start(service)
        supervisor.run(until=lambda: starts.exists() and len(starts.read_text().split()) >= 2)


@pytest.mark.parametrize("which", ["guard", "its keeper"])
def test_sigkill_of_a_guard_takes_the_service_and_its_whole_tree_with_it(
    home: Home, tmp_path: Path, which: str
) -> None:
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", (*TREE, str(tmp_path)), grace=600))
        names = [tmp_path / name for name in ("child", "daemon", "main")]
        until(lambda: all(each.exists() and each.read_text() for each in names), "the tree of the service")
        tree = [int(each.read_text()) for each in names]
        assert all(map(living, tree))
        guard = psutil.Process(tree[-1]).parent()
        assert guard is not None
        keeper = guard.parent()
        assert keeper is not None
        os.kill(guard.pid if which == "guard" else keeper.pid, signal.SIGKILL)
        until(lambda: not any(map(living, tree)), "the end of service, child and daemon")
        until(lambda: not living(guard.pid) and not living(keeper.pid), "the end of guard and keeper")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans go to the nearest subreaper on Linux alone")
def test_orphans_of_a_service_that_have_ended_are_not_kept_as_zombies(home: Home, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    orphans = f"for each in 1 2 3; do (sh -c 'echo $$ >> {pids}; exec sleep 0.1' &); done; exec sleep 600"
    with Supervisor(home) as supervisor:
        supervisor.start(Service("one", ("sh", "-c", orphans)))
        until(lambda: pids.exists() and len(pids.read_text().splitlines()) == 3, "three orphans")
        started = [int(line) for line in pids.read_text().splitlines()]
        until(lambda: not any(map(psutil.pid_exists, started)), "the orphans gone from the list of processes")
        assert "one" in running_services(home.run)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can have a process that another user cannot kill")
def test_what_cannot_be_killed_is_given_up_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that became another user's, as below sudo."""
    monkeypatch.setattr(guard, "_GIVE_UP_SECONDS", 1.0)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        own = subprocess.Popen(["sleep", "600"])
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        mortal = subprocess.Popen(["sleep", "600"])
        left = guard.end_descendants(grace=0.0)
        told = [
            own.pid,
            [process.pid for process in left],
            guard._survivors_line(left),
            psutil.pid_exists(mortal.pid),
        ]
        os.write(writing, json.dumps(told).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        pid, left, told, other_left = json.loads(pipe.read())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(child, 0)
    assert left == [pid] and not other_left
    assert f"could not be ended in 1 s and are left: {pid} (sleep, user 0, sleeping)" in told
