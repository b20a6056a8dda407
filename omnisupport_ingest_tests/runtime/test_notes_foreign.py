"""What stands in the folder of running processes is read or counts as nothing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest import locks
from omnisupport_ingest.contracts.in_force import settings_of_home
from omnisupport_ingest.durable import LockUnusable
from omnisupport_ingest.home import Home, HomeMismatch
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime import dagster_services, home_lock
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.home_lock import HomeInUse, HomeLock
from omnisupport_ingest.runtime.running import running_services, ui_port
from omnisupport_ingest.runtime.sensors_seen import sensors_seen
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated, odd_texts
from omnisupport_ingest_tests.waiting import PATIENCE

HOURLY = WindowSize(60)
same_folder = settings(max_examples=examples(80), suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("number", [0, -1, -(2**31), 2**31, 2**63, 10**30])
def test_a_number_that_is_no_process_is_not_alive(number: int) -> None:
    assert ProcessIdentity.of(number) is None
    assert not ProcessIdentity(number).lives()


@same_folder
@given(text=odd_texts | st.integers(-5, 2**40).map(str))
def test_any_pid_file_and_port_file_is_read(tmp_path: Path, text: str) -> None:
    own = tmp_path / "dagster-webserver.pid"
    own.write_text(str(os.getpid()))
    (tmp_path / "other.pid").write_bytes(text.encode())
    (tmp_path / "dagster-webserver.port").write_bytes(text.encode())
    with in_time():
        found = running_services(tmp_path)
        assert found["dagster-webserver"] == os.getpid()
        assert all(1 <= pid < 2**31 for pid in found.values())
        ui_port(tmp_path)


@same_folder
@given(content=mutated([asdict(ConnectAddress("/run/x.sock", "token"))]))
def test_any_address_of_spark_is_read_and_none_is_a_server(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "spark-connect.json").write_bytes(content)
    with in_time():
        assert ConnectAddress.read(tmp_path) is None, "no server answers at any address"


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_stands_in_the_place_of_a_file_of_a_process_is_not_waited_for(tmp_path: Path, what: str) -> None:
    for name in ("spark-connect.json", "odd.pid", "dagster-webserver.port"):
        IN_THE_PLACE[what](tmp_path / name)
    (tmp_path / "dagster-webserver.pid").write_text(str(os.getpid()))
    with in_time():
        assert ConnectAddress.read(tmp_path) is None
        assert set(running_services(tmp_path)) == {"dagster-webserver"}
        assert ui_port(tmp_path) is None


MARKER = {
    "format_version": 1,
    "window": "hourly",
    "first_window": "2026-03-01T00:00:00+00:00",
    "created": "x",
}


@same_folder
@given(content=mutated([MARKER]))
def test_any_marker_of_a_home_is_one_or_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "home.json").write_bytes(content)
    with in_time():
        settings_of_home(Settings(home=tmp_path, _env_file=None))
        try:
            Home.open(tmp_path, HOURLY)
        except HomeMismatch as refused:
            assert str(tmp_path) in refused.problem and refused.fix and len(refused.problem) < 1000


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_stands_in_the_place_of_the_marker_or_the_lock_is_named(tmp_path: Path, what: str) -> None:
    IN_THE_PLACE[what](tmp_path / "home.json")
    with in_time(), pytest.raises(HomeMismatch, match=r"home\.json cannot be read"):
        Home.open(tmp_path, HOURLY)
    home = Home.open(tmp_path / "other", HOURLY)
    IN_THE_PLACE[what](home.run / "supervisor.lock")
    with in_time():
        if (home.run / "supervisor.lock").is_file() or what == "a link to nothing":
            assert not home_lock.in_use(home)
        else:
            with pytest.raises(LockUnusable, match=r"supervisor\.lock should be a lock file"):
                home_lock.in_use(home)


@same_folder
@given(content=mutated([{"pid": 5, "command": "up", "since": "2026-11-20T12:00:00+00:00"}]))
def test_a_holder_of_the_home_that_cannot_be_told_holds_it_all_the_same(
    tmp_path: Path, content: bytes
) -> None:
    home = Home.open(tmp_path, HOURLY)
    # Nobody looks who holds it, so there is nothing to try again for.
    with HomeLock(home, "up"), mock.patch.object(locks, "LOOK_SECONDS", 0.0):
        (home.run / "supervisor.lock").write_bytes(content)
        with in_time(), pytest.raises(HomeInUse, match="is in use by "), HomeLock(home, "other"):
            pass


SENSOR = {"name": "s", "sensorState": {"status": "RUNNING", "ticks": [{"timestamp": 5.0}]}}
ANSWER = {"data": {"repositoriesOrError": {"nodes": [{"sensors": [SENSOR]}]}}}


class Answering(BaseHTTPRequestHandler):
    """Gives ``content`` as the answer to any question."""

    content = b""

    def do_POST(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@same_folder
@given(content=mutated([ANSWER]))
def test_any_answer_at_the_port_of_the_ui_is_read(port: int, content: bytes) -> None:
    Answering.content = content
    with in_time():
        found = sensors_seen(port, seconds=5)
        assert found is None or isinstance(found, tuple)
        assert dagster_services._shows_location(port) in (True, False)


def test_the_answer_that_the_others_are_made_of_is_read(port: int) -> None:
    Answering.content = json.dumps(ANSWER).encode()
    (seen,) = sensors_seen(port, seconds=PATIENCE) or ()
    assert seen.running
