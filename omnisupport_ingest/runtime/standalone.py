"""A Spark cluster on this machine: a standalone master and workers, each a service under the supervisor.

It is Spark's own cluster from the jars of ``pyspark``: separate processes for master, workers and executors,
a secret between them, and nothing shared except the home. It proves that the program runs on a cluster, and
lets an operator try settings before there is a real one. It does not add cores or memory to the machine.
"""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

from omnisupport_ingest.durable import replace
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import parse_json
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.cluster import properties_text, spark_home_folder, spark_properties
from omnisupport_ingest.runtime.environment import secret_variables
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.ports import LOOPBACK, free_port
from omnisupport_ingest.runtime.supervisor import Service, Supervisor
from omnisupport_ingest.settings import Settings

MASTER = "spark-master"
WORKER = "spark-worker-{}"

_CLASS = "org.apache.spark.deploy.{0}.{1}"
_READY_SECONDS = 120.0
_ANSWER_BYTES = 4 * 1024 * 1024
_DAEMON_MEMORY = "256m"


@dataclass(frozen=True)
class WorkerSize:
    """What each worker offers, and what its one executor takes. ``memory``: of the executor's JVM, in Spark's
    notation."""

    cores: int = 1
    memory: str = "1g"


def start_standalone(
    supervisor: Supervisor, settings: Settings, home: Home, workers: int, size: WorkerSize | None = None
) -> Settings:
    """Start a master and ``workers`` on loopback; return ``settings`` with which Spark runs on them.

    ``spark_properties`` of the result is a file of the home with the cluster's secret and the content of the
    file of ``settings``. Raises ``JavaMissing``, or ``ServiceFailed`` if a worker does not register.
    """
    size = size or WorkerSize()
    folder = home.run / "spark-cluster"
    properties = folder / "spark.properties"
    conf = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_urlsafe(24),
        # Loopback needs no encryption, and only the driver submits an application.
        "spark.network.crypto.enabled": "false",
        "spark.master.rest.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.killEnabled": "false",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.executor.cores": str(size.cores),
        "spark.executor.memory": size.memory,
        # Spark's default of 200 is for clusters larger than this machine.
        "spark.sql.shuffle.partitions": "4",
    }
    with failpoint("runtime.file"):
        folder.mkdir(mode=0o700, exist_ok=True)
        replace(properties, properties_text(conf | spark_properties(settings)))
    port, page = free_port(), free_port()
    master = f"spark://{LOOPBACK}:{port}"
    launch = _Launch(settings, home, properties)
    supervisor.start(launch.service(MASTER, "Master", ("--port", str(port), "--webui-port", str(page))))
    for number in range(1, workers + 1):
        name = WORKER.format(number)
        own = folder / name
        with failpoint("runtime.file"):
            own.mkdir(mode=0o700, exist_ok=True)
        offer = ("--cores", str(size.cores), "--memory", size.memory, "--work-dir", str(own))
        options = (*offer, "--port", "0", "--webui-port", "0", master)
        supervisor.start(launch.service(name, "Worker", options, own, _host(number)))
    supervisor.wait(
        lambda: _registered(page) == workers,
        service=f"The Spark cluster of {workers} workers",
        seconds=_READY_SECONDS,
    )
    return settings.model_copy(update={"spark_master": master, "spark_properties": properties})


@dataclass(frozen=True)
class _Launch:
    settings: Settings
    home: Home
    properties: Path

    def service(
        self, name: str, kind: str, options: tuple[str, ...], own: Path | None = None, host: str = LOOPBACK
    ) -> Service:
        """Return a daemon of Spark as a service. ``own``: the worker's own folder, into which its executors
        spill."""
        spark = spark_home_folder()
        environment = {
            "SPARK_HOME": str(spark),
            "JAVA_HOME": str(find_java(self.home.run).path),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": _DAEMON_MEMORY,
            "PYSPARK_PYTHON": sys.executable,
            # Executors get the package from the driver.
            "PYTHONPATH": "",
            # Spark does not connect to any database of ours.
            **dict.fromkeys(secret_variables(), ""),
        }
        if own is not None:
            environment["SPARK_LOCAL_DIRS"] = str(own)
        program = _CLASS.format(kind.lower(), kind)
        command = (str(spark / "bin" / "spark-class"), program, "--host", host)
        with_secret = ("--properties-file", str(self.properties))
        return Service(name, (*command, *with_secret, *options), environment=environment)


def _host(number: int) -> str:
    """Return the address of the worker ``number``. Each has its own, because Spark starts a slow task a
    second time only on another host.

    On Linux all of 127.0.0.0/8 is loopback; elsewhere there is one address.
    """
    return f"127.0.0.{number + 1}" if sys.platform.startswith("linux") else LOOPBACK


def _registered(page: int) -> int:
    """Return how many workers are alive, according to the master's page."""
    try:
        with build_opener(ProxyHandler({})).open(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
            return int(parse_json(answer.read(_ANSWER_BYTES))["aliveworkers"])
    except (OSError, ValueError, KeyError):
        return 0
