"""The running platform as another user of the machine meets it: every port, socket and file is tried."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.dagster_home import run_starter_socket
from omnisupport_ingest.runtime.dagster_services import (
    CODE_SERVER,
    DAEMON,
    RUN_STARTER,
    start_dagster_without_ui,
)
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.ports import LOOPBACK
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.spark_connect import NAME, start_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.other_user import as_another_user, open_folder
from omnisupport_ingest_tests.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

_CLIENT = """
import sys
from pyspark.errors import PySparkException
from pyspark.sql.connect.client.retries import DefaultPolicy
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings

spark = session(Settings())
spark.client.set_retry_policies([DefaultPolicy(max_retries=3, initial_backoff=500, max_backoff=1000)])
rows = spark.range(100_000).repartition(4).cache()
rows.count()
print("ready", flush=True)
sys.stdin.readline()
try:
    spark.range(1).count()
    print("answered", flush=True)
except Exception as error:
    print(f"no answer: {type(error).__name__}", flush=True)
"""


@dataclass(frozen=True)
class Platform:
    home: Home
    client: subprocess.Popen[str]
    """A client of Spark that has rows in a shuffle and in a cache, and runs a job at a line of its input."""

    def processes(self, name: str) -> list[psutil.Process]:
        """The service ``name``, once it is there, and everything below it."""
        until(lambda: name in running_services(self.home.run))
        service = psutil.Process(running_services(self.home.run)[name])
        return [service, *service.children(recursive=True)]

    def ports(self, name: str) -> set[int]:
        return {
            each.laddr.port
            for process in self.processes(name)
            for each in process.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN
        }


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    if os.geteuid() != 0:
        pytest.skip("only root can try something as another user")
    # A home where many are: in a folder that every user may enter.
    with open_folder() as folder:
        settings = Settings(home=folder / "home", spark_driver_memory="1g", _env_file=None)
        home = Home.open(settings.home, settings.window_size)
        with Supervisor(home) as supervisor:
            start_dagster_without_ui(supervisor, settings, home)
            start_spark_connect(supervisor, settings, home)
            client = subprocess.Popen(
                [sys.executable, "-c", _CLIENT],
                env={**os.environ, **settings_environment(settings)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == "ready\n"
                yield Platform(home, client)
            finally:
                client.kill()
                client.communicate()


def test_nothing_of_the_home_can_be_read(platform: Platform) -> None:
    home = platform.home.path
    files = [each for each in home.rglob("*") if each.is_file()]
    assert {"spark-connect.json", "spark-connect.properties", "workspace.yaml"} <= {
        each.name for each in files
    }

    def tried() -> list[str]:
        read = []
        for file in files:
            with contextlib.suppress(PermissionError):
                read.append(str(file) if file.read_bytes() is not None else "")
        return read

    assert as_another_user(tried) == []
    assert as_another_user(lambda: [each.name for each in home.iterdir()]) == "PermissionError"


def test_dagster_listens_on_no_port_and_its_sockets_let_nobody_in(platform: Platform) -> None:
    assert platform.ports(CODE_SERVER) | platform.ports(DAEMON) | platform.ports(RUN_STARTER) == set()
    until(lambda: run_starter_socket(platform.home).exists())
    sockets = {
        each.laddr
        for process in platform.processes(CODE_SERVER) + platform.processes(RUN_STARTER)
        for each in process.net_connections("unix")
        if each.laddr
    }
    assert len(sockets) >= 3, "the code server's, its child's and the run starter's"
    for path in sockets:
        assert _connects(path), path
        assert as_another_user(lambda path=path: _connects(path)) == "PermissionError"  # type: ignore[misc]
        assert Path(path).parent.stat().st_mode & 0o077 == 0


def test_the_driver_and_the_block_manager_refuse_who_has_not_the_secret(platform: Platform) -> None:
    """Without it, the driver reads Java objects, and the block manager hands out blocks, for whoever asks."""
    blocks = _request(_text("app") + _text("driver") + struct.pack(">I", 1) + _text("rdd_0_0"))
    ports = platform.ports(NAME)
    said = {port: str(as_another_user(lambda port=port: _answer(port, blocks))) for port in ports}  # type: ignore[misc]
    spoke = {port: answer for port, answer in said.items() if "Exception" in answer}
    assert len(spoke) >= 2, said
    assert all("AuthRpcHandler" in answer for answer in spoke.values()), spoke


def test_what_is_shuffled_and_spilled_lies_in_the_home_and_nowhere_else(platform: Platform) -> None:
    shuffled = [each for each in platform.home.path.rglob("shuffle_*") if each.is_file()]
    assert shuffled
    assert {each.stat().st_mode & 0o777 for each in shuffled} == {0o600}
    ours = (str(platform.home.path), sys.prefix)
    opened = {
        each.path
        for process in platform.processes(NAME)
        for each in process.open_files()
        if each.path.startswith("/tmp/") and not each.path.startswith(ours)
    }
    assert opened == set()


def test_the_token_is_on_no_command_line_and_in_no_log(platform: Platform) -> None:
    token = next(
        value
        for process in platform.processes(NAME)
        if (value := process.environ().get("SPARK_CONNECT_AUTHENTICATE_TOKEN"))
    )
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert not any(token in word for word in process.cmdline())
    for log in platform.home.logs.rglob("*.log*"):
        assert token not in log.read_text(errors="replace")


def test_who_takes_the_ports_after_a_stop_is_sent_nothing(platform: Platform) -> None:
    """The last test here: the server is killed, and its client asks again."""
    ports = platform.ports(NAME)
    processes = platform.processes(NAME)
    processes[0].send_signal(signal.SIGKILL)
    _, left = psutil.wait_procs(processes, timeout=PATIENCE)
    assert left == [], "the server ends with what started it"
    reading, writing = os.pipe()
    ready_reading, ready_writing = os.pipe()

    def steal() -> list[str]:
        with contextlib.ExitStack() as stack:
            servers = []
            for port in ports:
                # Servers of Java take ports in TIME_WAIT, so a thief does.
                servers.append(stack.enter_context(socket.create_server((LOOPBACK, port))))
                servers[-1].setblocking(False)
            os.write(ready_writing, b"listens")
            got = []
            os.set_blocking(reading, False)
            while True:
                for server in servers:
                    with contextlib.suppress(BlockingIOError):
                        taken, _ = server.accept()
                        taken.settimeout(2)
                        got.append(taken.recv(1000).decode("latin-1"))
                with contextlib.suppress(BlockingIOError):
                    os.read(reading, 1)
                    return got
                time.sleep(0.05)

    said: list[str] = []

    def ask() -> None:
        assert platform.client.stdin is not None
        assert platform.client.stdout is not None
        os.read(ready_reading, 7)
        platform.client.stdin.write("\n")
        platform.client.stdin.flush()
        said.append(platform.client.stdout.readline())
        os.write(writing, b"x")

    asking = threading.Thread(target=ask)
    asking.start()
    got = as_another_user(steal)
    asking.join()
    assert said[0].startswith("no answer: "), said
    assert got == []


def _connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(path)
    return True


# Spark's own protocol (`org.apache.spark.network.protocol`): a frame is its length, its kind, the number of
# the request, the body's length, the body. OPEN_BLOCKS names an application, an executor and blocks.
_RPC_REQUEST, _OPEN_BLOCKS = 3, b"\0"


def _request(blocks: bytes) -> bytes:
    body = _OPEN_BLOCKS + blocks
    message = struct.pack(">QI", 7, len(body)) + body
    return struct.pack(">QB", 9 + len(message), _RPC_REQUEST) + message


def _text(text: str) -> bytes:
    return struct.pack(">I", len(text)) + text.encode()


def _answer(port: int, data: bytes) -> str:
    """What comes back on ``port`` for ``data``: a frame, or what comes before the end or in 5 seconds."""
    got = b""
    with socket.create_connection((LOOPBACK, port), timeout=5) as client, contextlib.suppress(OSError):
        client.sendall(data)
        while more := client.recv(65536):
            got += more
            if len(got) >= 8 and len(got) >= struct.unpack(">Q", got[:8])[0]:
                break
    return got.decode("latin-1")
