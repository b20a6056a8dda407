"""The warm Spark Connect server of a home, as a service under the supervisor.

A Dagster run is a new process. With this server it has a Spark session in about two seconds; with
a JVM of its own it would take fifteen.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
from pathlib import Path

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.home import Home
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.runtime.connect_address import ConnectAddress
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.ports import LOOPBACK, answers, free_port
from omnisupport_ingest.runtime.spark import spark_conf, workers_environment
from omnisupport_ingest.runtime.supervisor import Backoff, Service, ServiceFailed, Supervisor
from omnisupport_ingest.settings import Settings

NAME = "spark-connect"

_SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_READY_SECONDS = 90.0
_FIRST_JOB = """
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
assert session(Settings()).range(1).count() == 1
"""


def start_spark_connect(supervisor: Supervisor, settings: Settings, home: Home) -> ConnectAddress:
    """Start the server on a free port of loopback and return once it has done a first job.

    The address is recorded in ``home.run``, from where ``runtime.spark.session`` takes it in every
    process. Raises ``JavaMissing``, or ``ServiceFailed`` if the server does not become ready.
    """
    address = ConnectAddress(free_port(), secrets.token_urlsafe(24), ProcessIdentity.current())
    supervisor.start(_service(settings, home, address))
    supervisor.wait(lambda: answers(address.port), what="The Spark Connect server", seconds=_READY_SECONDS)
    _do_first_job(settings, address)
    address.write(home.run)
    return address


def stop_spark_connect(supervisor: Supervisor, home: Home) -> None:
    """Withdraw the address, then stop the server."""
    ConnectAddress.forget(home.run)
    supervisor.stop(NAME)


def _service(settings: Settings, home: Home, address: ConnectAddress) -> Service:
    conf = spark_conf(settings) | {
        "spark.app.name": "omnisupport-ingest-connect",
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": str(address.port),
    }
    properties = home.run / "spark-connect.properties"
    lines = "".join(f"{key} {_escaped(value)}\n" for key, value in sorted(conf.items()))
    with gate("runtime.file"):
        replace(properties, lines.encode())
    spark_home = _spark_home()
    return Service(
        NAME,
        # The script ends in `exec java`: the process that is supervised is the JVM itself.
        (
            str(spark_home / "bin" / "spark-submit"),
            "--class",
            _SERVER_CLASS,
            "--properties-file",
            str(properties),
        ),
        environment=workers_environment()
        | {
            "SPARK_HOME": str(spark_home),
            "JAVA_HOME": str(find_java(home.run).path),
            # Not on the command line, which every user of the machine can read.
            "SPARK_CONNECT_AUTHENTICATE_TOKEN": address.token,
        },
        restart=Backoff(),
    )


def _escaped(value: str) -> str:
    """``value`` as Java's ``Properties.load`` reads it back."""
    return value.replace("\\", "\\\\")


def _spark_home() -> Path:
    # Without importing pyspark: the supervisor lives as long as the platform, and stays small.
    package = importlib.util.find_spec("pyspark")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent


def _do_first_job(settings: Settings, address: ConnectAddress) -> None:
    """Run a job in a process of its own: this one may want a classic session later."""
    client = settings.model_copy(update={"spark_remote": address.url})
    done = subprocess.run(
        [sys.executable, "-c", _FIRST_JOB],
        env={**os.environ, **settings_environment(client)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_READY_SECONDS,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ServiceFailed(
            f"The Spark Connect server does not do a first job: {reason}",
            fix=f"Look at the log of {NAME}, then run the same command again.",
        )
