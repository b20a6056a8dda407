"""The warm Spark Connect server of a home, as a service under the supervisor.

A Dagster run is a new process. With this server it gets a Spark session in about two seconds; a JVM of its
own would take fifteen.
"""

from __future__ import annotations

import os
import subprocess
import sys

from pydantic import SecretStr

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.private_folders import Scratch
from omnisupport_ingest.runtime.supervisor import Backoff, Service, ServiceFailed, Supervisor
from omnisupport_ingest.settings import Settings

NAME = "spark-connect"

_SERVER = "omnisupport_ingest.runtime.connect_server"
_READY_SECONDS = 300.0
_FIRST_JOB = """
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
assert session(Settings()).range(1).count() == 1
"""


def launch_spark_connect(supervisor: Supervisor, settings: Settings, home: Home) -> None:
    """Launch the server without waiting for it: other services can start in the seconds that it takes.

    Raises ``JavaMissing`` or ``NoScratch``.
    """
    # Checked here, so that a person sees the error; otherwise it would only be in the log of a service.
    find_java(home.run)
    Scratch.take(settings).remove()
    ConnectAddress.forget(home.run)
    supervisor.start(connect_service(settings))


def start_spark_connect(supervisor: Supervisor, settings: Settings, home: Home) -> ConnectAddress:
    """Launch the server if it is not running, and return its address once it has done a first job.

    The address is recorded in ``home.run``, where ``runtime.spark.session`` of every process finds it. Raises
    the errors of ``launch_spark_connect``, and ``ServiceFailed`` if the server does not become ready.
    """
    if NAME not in supervisor.names:
        launch_spark_connect(supervisor, settings, home)
    recorded: list[ConnectAddress] = []

    def ready() -> bool:
        address = ConnectAddress.read(home.run)
        recorded.extend([address] if address else [])
        return address is not None

    supervisor.wait(ready, service="The Spark Connect server", seconds=_READY_SECONDS)
    _do_first_job(settings, recorded[0])
    return recorded[0]


def connect_service(settings: Settings) -> Service:
    """Return the server as a service."""
    command = (sys.executable, "-m", _SERVER)
    return Service(NAME, command, environment=settings_environment(settings), restart=Backoff())


def stop_spark_connect(supervisor: Supervisor, home: Home) -> None:
    """Remove the recorded address, then stop the server."""
    ConnectAddress.forget(home.run)
    supervisor.stop(NAME)


def _do_first_job(settings: Settings, address: ConnectAddress) -> None:
    """Run a job in a separate process, because this process may want a classic session later."""
    client = settings.model_copy(update={"spark_remote": SecretStr(address.url)})
    fix = f"Look at the log of {NAME}, then run the same command again."
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST_JOB],
            env={**os.environ, **settings_environment(client)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_READY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ServiceFailed(
            f"The Spark Connect server has not done a first job within {_READY_SECONDS:g} seconds.", fix=fix
        ) from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServiceFailed(f"The Spark Connect server does not do a first job: {reason}", fix=fix)
