"""The process of the Spark Connect service: it starts the server, and connects clients to that server only.

The server itself listens on a loopback port. Between its end and its next start, any user of the machine
could listen there, and would receive the token and the plans of clients that connect again. So every start
uses a new port and a new token, and clients come over a Unix socket in a private folder. A connection is
passed on only if the server's own process listens on the port before the connection is made, and still does
afterwards. The process listens once in its life, so no other process can have accepted in between.

Run as a service; the settings come from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.cluster import properties_text, spark_home_folder
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.environment import without_secrets
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.ports import LOOPBACK, free_port
from omnisupport_ingest.runtime.private_folders import Scratch, socket_folder
from omnisupport_ingest.runtime.spark import spark_conf, workers_environment
from omnisupport_ingest.settings import Settings

_SOCKET = "spark-connect-{}.sock"
_SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_POLL_SECONDS = 0.2
_CHUNK = 256 * 1024
_PR_SET_PDEATHSIG = 1
"""``prctl`` option (Linux ``prctl(2)``)."""


@dataclass(frozen=True)
class Backend:
    """A process that listens on the loopback ``port``, once in its life."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def listens(self) -> bool:
        """Whether this process, and no other, listens on the port now."""
        if self.process.poll() is not None:
            return False
        try:
            connections = psutil.Process(self.process.pid).net_connections(kind="tcp")
        except psutil.Error:
            return False
        return any(
            each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == self.port
            for each in connections
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the process. Raises ``ConnectionError`` if another one listens."""
        if not await asyncio.to_thread(lambda: self.listens):
            raise ConnectionError("the server does not listen")
        reader, writer = await asyncio.open_connection(LOOPBACK, self.port)
        # Nothing has been sent yet, so another process that accepted has learned nothing.
        if not await asyncio.to_thread(lambda: self.listens):
            writer.close()
            raise ConnectionError("the server has ended")
        return reader, writer


async def hand_on(backend: Backend, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
    """Pass the bytes of one client's connection to ``backend`` and back, until either side ends it."""
    try:
        server, to_server = await backend.connect()
    except OSError:
        to_client.close()
        return
    pumps = [asyncio.create_task(_pump(*each)) for each in ((client, to_server), (server, to_client))]
    await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
    for pump in pumps:
        pump.cancel()
    for writer in (to_server, to_client):
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()


async def serve(settings: Settings, home: Home, scratch: Scratch) -> int:
    """Start the server and connect clients to it until it ends. Returns its exit code, as a shell does."""
    ConnectAddress.forget(home.run)
    folder = socket_folder(home.run)
    for socket_file in folder.glob(_SOCKET.format("*")):
        # No failpoint: tells what runs now; nothing in it outlives a restart.
        socket_file.unlink()
    # A new name as well: a client of the previous server finds no socket, and cannot bring its old token
    # here.
    path = folder / _SOCKET.format(secrets.token_hex(3))
    token, port = secrets.token_urlsafe(24), free_port()
    backend = Backend(_start(settings, home, scratch, token, port), port)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, backend.process.terminate)
    try:
        while not backend.listens:
            if backend.process.poll() is not None:
                return _exit_code(backend.process)
            await asyncio.sleep(_POLL_SECONDS)
        listening = await asyncio.start_unix_server(
            lambda reader, writer: hand_on(backend, reader, writer), path, limit=_CHUNK
        )
        ConnectAddress(str(path), token).write(home.run)
        async with listening:
            while backend.process.poll() is None:
                await asyncio.sleep(_POLL_SECONDS)
        return _exit_code(backend.process)
    finally:
        ConnectAddress.forget(home.run)
        backend.process.kill()
        path.unlink(missing_ok=True)


def _start(
    settings: Settings, home: Home, scratch: Scratch, token: str, port: int
) -> subprocess.Popen[bytes]:
    conf = spark_conf(settings, scratch) | {
        "spark.app.name": "omnisupport-ingest-connect",
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(port),
        # The session that all processes share must not expire, however long nothing happens.
        "spark.connect.session.manager.defaultSessionTimeout": "-1",
        # If another process takes the port meanwhile, the next start chooses another port.
        "spark.connect.grpc.port.maxRetries": "0",
    }
    properties = home.run / "spark-connect.properties"
    with failpoint("runtime.file"):
        replace(properties, properties_text(conf))
    spark_home = spark_home_folder()
    submit = str(spark_home / "bin" / "spark-submit")
    return subprocess.Popen(
        # The script ends with `exec java`, so the started process becomes the JVM.
        [submit, "--class", _SERVER_CLASS, "--properties-file", str(properties)],
        env={
            # Spark does not connect to any database of ours.
            **without_secrets(os.environ),
            **workers_environment(settings),
            # Where Spark spills, whatever the machine's environment says.
            "SPARK_LOCAL_DIRS": str(scratch.path),
            "TMPDIR": str(scratch.tmp),
            "SPARK_HOME": str(spark_home),
            "JAVA_HOME": str(find_java(home.run).path),
            # Not on the command line, which every user of the machine can read.
            "SPARK_CONNECT_AUTHENTICATE_TOKEN": token,
        },
        stdin=subprocess.DEVNULL,
        preexec_fn=_die_with_parent(),
    )


def _die_with_parent() -> Callable[[], None] | None:
    """Return a function, to run first in the server, by which the kernel ends it if this process dies
    (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return die_with_parent


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def main() -> int:
    # Only the owner can read what the server and its workers write, wherever they write it.
    os.umask(0o077)
    settings = Settings()
    home = Home.open(settings.home, settings.window_size)
    scratch = Scratch.take(settings)
    try:
        return asyncio.run(serve(settings, home, scratch))
    finally:
        scratch.remove()


if __name__ == "__main__":
    sys.exit(main())
