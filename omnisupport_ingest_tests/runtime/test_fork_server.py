"""What stands ready is asked for forks, and it or they are killed: nothing is begun twice, or unknown."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.fork_server import ask, threads_in_the_way
from omnisupport_ingest_tests.waiting import PATIENCE, until

pytestmark = pytest.mark.full


@contextmanager
def standing(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    module = "omnisupport_ingest_tests.runtime.fork_server_process"
    process = subprocess.Popen([sys.executable, "-m", module, str(folder)])
    try:
        # The name of a socket is there before it listens.
        until(lambda: _listens(folder) or process.poll() is not None)
        yield process
    finally:
        (folder / "go").touch()
        process.kill()
        process.wait(PATIENCE)


def _listens(folder: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(folder / "server.sock")) == 0


def asked(folder: Path, request: str, begin: Callable[[ProcessIdentity], None] = lambda _: None) -> bool:
    return ask(folder / "server.sock", request, begin)


def told(folder: Path) -> list[str]:
    file = folder / "told"
    return file.read_text().splitlines() if file.exists() else []


def test_a_request_is_done_by_a_child_in_a_session_of_its_own_which_the_client_knew_before(
    tmp_path: Path,
) -> None:
    named: list[ProcessIdentity] = []
    with standing(tmp_path) as server:
        assert asked(tmp_path, "one", named.append)
        assert asked(tmp_path, "two", named.append)
        until(lambda: len(told(tmp_path)) == 2)
        assert sorted(told(tmp_path)) == sorted(
            f"{request} {child.pid} {server.pid} {child.pid}"
            for request, child in zip(("one", "two"), named, strict=True)
        )
        until(lambda: not any(child.lives() for child in named))
        assert server.poll() is None


def test_nothing_is_begun_where_nothing_stands_or_what_stood_there_was_killed(tmp_path: Path) -> None:
    assert not asked(tmp_path, "one")
    with standing(tmp_path) as server:
        server.send_signal(signal.SIGKILL)
        server.wait(PATIENCE)
        assert (tmp_path / "server.sock").exists(), "as a killed process leaves it"
        assert not asked(tmp_path, "two")
    with standing(tmp_path):
        until(lambda: asked(tmp_path, "three"))
        until(lambda: [each.split()[0] for each in told(tmp_path)] == ["three"])


def test_a_client_that_dies_or_gives_up_before_it_has_answered_has_begun_nothing(tmp_path: Path) -> None:
    child: list[ProcessIdentity] = []

    def give_up(process: ProcessIdentity) -> None:
        child.append(process)
        raise RuntimeError

    with standing(tmp_path):
        with pytest.raises(RuntimeError):
            asked(tmp_path, "given up", give_up)
        until(lambda: not child[0].lives())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "server.sock"))
            client.sendall(b"cut off")
        assert asked(tmp_path, "next")
        until(lambda: [each.split()[0] for each in told(tmp_path)] == ["next"])


def test_a_child_that_is_killed_before_it_begins_leaves_the_client_free_to_go_another_way(
    tmp_path: Path,
) -> None:
    def kill(process: ProcessIdentity) -> None:
        os.kill(process.pid, signal.SIGKILL)
        until(lambda: not process.lives())
        # Its end of the connection went with it.
        until(lambda: "cleaned" in told(tmp_path))

    with standing(tmp_path):
        assert not asked(tmp_path, "one", kill)
        assert told(tmp_path) == ["cleaned"]


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_after_a_child_that_has_failed_another_one_cleans_up_and_the_server_goes_on(
    tmp_path: Path, how: str
) -> None:
    child: list[ProcessIdentity] = []
    with standing(tmp_path):
        assert asked(tmp_path, "wait" if how == "killed" else "fail", child.append)
        if how == "killed":
            until(lambda: told(tmp_path))
            os.kill(child[0].pid, signal.SIGKILL)
        until(lambda: told(tmp_path)[1:] == ["cleaned"])
        assert asked(tmp_path, "next")
        until(lambda: len(told(tmp_path)) == 3)


def test_what_is_no_longer_current_forks_nothing_and_ends_while_its_children_go_on(tmp_path: Path) -> None:
    with standing(tmp_path) as server:
        assert asked(tmp_path, "wait")
        until(lambda: told(tmp_path))
        (tmp_path / "stale").touch()
        assert not asked(tmp_path, "one")
        assert server.wait(PATIENCE) == 3
        assert not asked(tmp_path, "two")
        (tmp_path / "go").touch()
        until(lambda: told(tmp_path)[1:] == ["waited"])


def test_told_to_stop_it_takes_no_request_and_waits_for_its_children(tmp_path: Path) -> None:
    with standing(tmp_path) as server:
        assert asked(tmp_path, "wait")
        until(lambda: told(tmp_path))
        server.send_signal(signal.SIGTERM)
        until(lambda: not (tmp_path / "server.sock").exists())
        assert not asked(tmp_path, "one")
        assert server.poll() is None
        (tmp_path / "go").touch()
        assert server.wait(PATIENCE) == 0
        assert told(tmp_path)[1:] == ["waited"]


def test_told_to_stop_it_interrupts_children_that_run_on(tmp_path: Path) -> None:
    (tmp_path / "hurry").touch()
    with standing(tmp_path) as server:
        assert asked(tmp_path, "wait")
        until(lambda: told(tmp_path))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert told(tmp_path)[1:] == ["interrupted", "waited"]


def test_told_to_stop_it_interrupts_children_from_before_it_began_anew(tmp_path: Path) -> None:
    (tmp_path / "hurry").touch()
    (tmp_path / "anew").touch()
    with standing(tmp_path) as server:
        assert asked(tmp_path, "wait")
        until(lambda: told(tmp_path))
        begun_anew(tmp_path)
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0
        assert told(tmp_path)[1:] == ["interrupted", "waited"]


def test_a_child_that_ends_while_it_begins_anew_is_waited_for_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "anew").touch()
    with standing(tmp_path) as server:
        children: list[ProcessIdentity] = []
        assert asked(tmp_path, "wait", children.append)
        until(lambda: told(tmp_path))
        (tmp_path / "stale").touch()
        assert not asked(tmp_path, "one")
        os.kill(children[0].pid, signal.SIGKILL)
        until(lambda: not (tmp_path / "stale").exists() and _listens(tmp_path))
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE) == 0


def begun_anew(folder: Path) -> None:
    (folder / "stale").touch()
    assert not asked(folder, "one")
    until(lambda: not (folder / "stale").exists() and _listens(folder))


def test_a_thread_that_a_fork_would_lose_is_named() -> None:
    before = threads_in_the_way()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="in the way")
    thread.start()
    try:
        assert len(threads_in_the_way()) == len(before) + 1
        assert "in the way" in threads_in_the_way()
    finally:
        done.set()
        thread.join()
