"""A connection is handed on to the process that was started, and to nothing else that listens on its port."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from omnisupport_ingest.runtime import spark
from omnisupport_ingest.runtime.connect_address import ConnectAddress, by_socket, socket_channel
from omnisupport_ingest.runtime.connect_server import Backend, hand_on
from omnisupport_ingest.runtime.environment import without_secrets
from omnisupport_ingest.runtime.ports import LOOPBACK, free_port
from omnisupport_ingest.runtime.spark import shared_session_id

pytestmark = pytest.mark.full

_ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
while True:
    client, _ = server.accept()
    while data := client.recv(65536):
        client.sendall(data)
"""


@contextmanager
def echo() -> Iterator[Backend]:
    """A process that listens on a port and says again what it is told."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", _ECHO, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"
        yield Backend(process, port)
    finally:
        process.kill()
        process.communicate()


def through(backend: Backend, data: bytes) -> bytes:
    """What a client of the socket gets back for ``data``, until it has as much or the connection ends."""

    async def talk() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/socket"
            listening = await asyncio.start_unix_server(lambda *pair: hand_on(backend, *pair), path)
            reader, writer = await asyncio.open_unix_connection(path)
            got = b""
            try:
                writer.write(data)
                while len(got) < len(data) and (more := await reader.read(65536)):
                    got += more
            except ConnectionError:
                pass
            writer.close()
            listening.close()
            return got

    return asyncio.run(asyncio.wait_for(talk(), 60))


def test_what_a_client_sends_reaches_the_process_and_its_answer_the_client() -> None:
    said = os.urandom(3_000_000)
    with echo() as backend:
        assert through(backend, said) == said


def test_another_process_that_took_the_port_is_sent_nothing() -> None:
    """As after a stop: the port is free, and whoever is quick listens there."""
    with echo() as backend:
        assert backend.listens
        backend.process.kill()
        backend.process.wait()
        with socket.create_server((LOOPBACK, backend.port)) as thief:
            assert not backend.listens
            assert through(backend, b"Bearer hunter2") == b""
            thief.setblocking(False)
            with pytest.raises(BlockingIOError):
                thief.accept()


def test_a_process_that_lives_but_does_not_listen_there_is_not_mistaken_for_one_that_does() -> None:
    with echo() as backend, socket.create_server((LOOPBACK, 0)) as thief:
        stolen = Backend(backend.process, thief.getsockname()[1])
        assert not stolen.listens
        assert through(stolen, b"Bearer hunter2") == b""


def test_who_took_the_port_between_the_look_and_the_connection_is_sent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server ends after it was seen to listen: the second look finds that, before a byte was sent."""
    with echo() as backend:
        seen = iter((True, False))
        monkeypatch.setattr(Backend, "listens", property(lambda self: next(seen)))
        backend.process.kill()
        backend.process.wait()
        with socket.create_server((LOOPBACK, backend.port)) as thief:
            assert through(backend, b"Bearer hunter2") == b""
            taken, _ = thief.accept()
            with taken:
                taken.settimeout(10)
                assert taken.recv(100) == b""


def test_the_address_of_a_server_names_its_socket_and_other_addresses_none() -> None:
    url = ConnectAddress("/home/a b/run/spark=connect.sock", "hunter2").url
    assert by_socket(url)
    assert not by_socket("sc://spark.example:15002/;token=hunter2")
    assert not by_socket("sc://spark.example:15002")
    session = shared_session_id(url)
    channel = socket_channel(url, session)
    assert channel.token == "hunter2"
    assert channel.session_id == session
    assert list(channel.metadata()) == [], "nothing of the address is sent with every call"


def test_processes_share_a_session_that_is_of_their_code_and_of_their_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = shared_session_id("sc://localhost/;token=hunter2")
    assert shared_session_id("sc://localhost/;token=hunter2") == first
    assert shared_session_id("sc://localhost/;token=hunter3") != first
    monkeypatch.setattr(spark, "_code", lambda: "other code")
    assert shared_session_id("sc://localhost/;token=hunter2") != first


def test_spark_is_not_given_the_passwords_of_the_settings() -> None:
    given = {
        "OMNISUPPORT_SOURCE_DSN": "password=x",
        "OMNISUPPORT_DAGSTER_PG_URL": "y",
        "OMNISUPPORT_SPARK_REMOTE": "sc://spark.example/;token=z",
        "OMNISUPPORT_HOME": "/h",
    }
    assert without_secrets({**given, "PATH": "/bin"}) == {"OMNISUPPORT_HOME": "/h", "PATH": "/bin"}
