"""A Spark cluster of this machine: a standalone master and workers, each a service under the supervisor.

It is Spark's own cluster from the jars of ``pyspark``, with separate processes for master, workers and
executors, a secret between them, and nothing shared but the home. It is there to prove that the program runs
on a cluster, and to try settings before there is one; what a machine has of cores and memory it does not
multiply.
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
    """What each worker offers, and its one executor takes. ``memory``: of the executor's JVM, as Spark has
    it."""

    cores: int = 1
    memory: str = "1g"


def start_standalone(
    supervisor: Supervisor, settings: Settings, home: Home, workers: int, size: WorkerSize | None = None
) -> Settings:
    """Start a master and ``workers`` on loopback; return ``settings`` that have Spark run on them.

    ``spark_properties`` of the result is a file of the home with the cluster's secret, and with what the
    file of ``settings`` says. Raises ``JavaMissing``, or ``ServiceFailed`` if a worker does not register.
    """
    size = size or WorkerSize()
    folder = home.run / "spark-cluster"
    properties = folder / "spark.properties"
    conf = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secrets.token_urlsafe(24),
        # Loopback needs no encryption, and nobody submits an application but the driver.
        "spark.network.crypto.enabled": "false",
        "spark.master.rest.enabled": "false",
        "spark.ui.enabled": "false",
        "spark.ui.killEnabled": "false",
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.executor.cores": str(size.cores),
        "spark.executor.memory": size.memory,
        # 200, Spark's default, is for clusters that are larger than this machine.
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
        """A daemon of Spark. ``own``: the folder that is a worker's own, with what its executors spill."""
        spark = spark_home_folder()
        environment = {
            "SPARK_HOME": str(spark),
            "JAVA_HOME": str(find_java(self.home.run).path),
            "SPARK_LOCAL_IP": host,
            "SPARK_DAEMON_MEMORY": _DAEMON_MEMORY,
            "PYSPARK_PYTHON": sys.executable,
            # Executors have the package from the driver.
            "PYTHONPATH": "",
            # Spark connects to no database of ours.
            **dict.fromkeys(secret_variables(), ""),
        }
        if own is not None:
            environment["SPARK_LOCAL_DIRS"] = str(own)
        program = _CLASS.format(kind.lower(), kind)
        command = (str(spark / "bin" / "spark-class"), program, "--host", host)
        with_secret = ("--properties-file", str(self.properties))
        return Service(name, (*command, *with_secret, *options), environment=environment)


def _host(number: int) -> str:
    """Where the worker ``number`` listens: Spark begins a task a second time on another host alone.

    All of 127.0.0.0/8 is loopback on Linux; elsewhere there is one address.
    """
    return f"127.0.0.{number + 1}" if sys.platform.startswith("linux") else LOOPBACK


def _registered(page: int) -> int:
    """How many workers live, as the master's page tells."""
    try:
        with build_opener(ProxyHandler({})).open(f"http://{LOOPBACK}:{page}/json/", timeout=5) as answer:
            return int(parse_json(answer.read(_ANSWER_BYTES))["aliveworkers"])
    except (OSError, ValueError, KeyError):
        return 0
