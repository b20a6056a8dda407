"""Opens a Spark session: through Connect if a warm server runs, otherwise a classic session.

Both have the same configuration, because the data must not depend on which one wrote it. Classic and Connect
cannot be mixed in one process: a process keeps the session that it opens first.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import sys
import tempfile
import uuid
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omnisupport_ingest.durable import replace
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.runtime.cluster import (
    JAVA_OPTIONS,
    PYTHON,
    is_local,
    package_archive,
    properties_text,
    spark_properties,
)
from omnisupport_ingest.runtime.connect_address import ConnectAddress, by_socket, socket_channel
from omnisupport_ingest.runtime.java import find_java
from omnisupport_ingest.runtime.ports import LOOPBACK
from omnisupport_ingest.runtime.private_folders import Scratch
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.visiting import ELSEWHERE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORKER_DAEMON = "omnisupport_ingest.cli.worker_daemon"
"""The program that is forked for each Python worker."""

_LOCAL = re.compile(r"local\[(?P<slots>\d+|\*)(?:,\d+)?\]")
"""A master on this machine, with its slots (Spark, "Master URLs")."""

_LOG4J = Path(__file__).with_name("log4j2.properties")
_FAIR = Path(__file__).with_name("fair_scheduler.xml")
_PACKAGE = Path(__file__).parent.parent

_COMPILED_LATE = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=10000",
    "-XX:Tier4CompileThreshold=100000",
    "-XX:Tier4BackEdgeThreshold=1000000",
)
"""The optimising compiler compiles only methods that are called ten times as often as by default (HotSpot,
tiered compiling).

Few rows pass through the JVM, so most of what it would optimise while Spark starts is not used often later.
That saves a quarter of the processor time until a first job is done. Code that a shuffle of many rows repeats
is still optimised.
"""


class SparkUnreachable(IngestError):
    """The Spark Connect server that ``OMNISUPPORT_SPARK_REMOTE`` names does not answer.

    Fix: Start it, or unset the setting: Spark then runs on this machine.
    """

    exit_code = 4


def spark_conf(settings: Settings, scratch: Scratch) -> dict[str, str]:
    """Return the configuration of every session of this platform, by Spark's names.

    Some of it is fixed when the JVM starts (memory, addresses, logging, debugging); ``session_conf`` repeats
    the rest on each Connect session. ``scratch``: where the JVM keeps its temporary files.
    """
    java = (
        f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
        "-Duser.timezone=UTC",
        f'"-Djava.io.tmpdir={scratch.tmp}"',
        # Otherwise the JVM keeps its counters in a file of the shared temporary folder, under the user's
        # name.
        "-XX:-UsePerfData",
        *_COMPILED_LATE,
    )
    conf = session_conf(settings) | {
        "spark.app.name": "omnisupport-ingest",
        "spark.master": settings.spark_master,
        "spark.driver.memory": settings.spark_driver_memory,
        JAVA_OPTIONS: " ".join(java),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(_home(settings) / "run" / "spark-warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        # The executors of a cluster have an environment of their own.
        **{f"spark.executorEnv.{name}": value for name, value in _KEPT_MEMORY.items()},
    }
    if settings.spark_master.startswith("local"):
        conf |= {
            # Otherwise Spark listens on the machine's own address. The executors of a cluster must reach the
            # driver, so there the operator chooses the address (``spark_properties``).
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            # Otherwise Spark would serve everyone who can connect to the ports of driver and block manager:
            # every user of the machine. With a local master, Spark makes the secret itself, in memory; for a
            # cluster, the operator sets it.
            "spark.authenticate": "true",
            # SASL without encryption: no other user can read loopback traffic. With encryption there is a
            # deadlock: the server's thread waits for a class loader, whose holder is a task that waits for
            # that thread.
            "spark.network.crypto.enabled": "false",
            # Information only: the process that starts a JVM sets SPARK_LOCAL_DIRS, which wins over
            # `spark.local.dir`. If the configuration has the latter, Spark warns at every start.
            "spark.omnisupport.localDir": str(scratch.path),
            # The executors of a cluster get this package only with a session.
            "spark.python.daemon.module": WORKER_DAEMON,
            # With FIFO scheduling, all tasks of a long job would run before those of an ingest run.
            "spark.scheduler.mode": "FAIR",
            "spark.scheduler.allocation.file": _FAIR.as_uri(),
        }
    own = spark_properties(settings, session_conf(settings).keys())
    if more := own.get(JAVA_OPTIONS):
        own[JAVA_OPTIONS] = f"{conf[JAVA_OPTIONS]} {more}"
    return conf | own


def session_conf(settings: Settings) -> dict[str, str]:
    """Return the part of ``spark_conf`` that affects data and can be set on a running server."""
    conf = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "true",
        # INT96 is Spark's default, but not every Delta reader reads it as a timestamp.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # timestamp_ntz would raise the table's reader and writer versions.
        "spark.sql.timestampType": "TIMESTAMP_LTZ",
        "spark.sql.parquet.inferTimestampNTZ.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # The plans are wide (a column's state is several expressions) and the batches small, so compiling a
        # plan costs more than interpreting it (measured: half the time without). Plans of large batches are
        # compiled (`lake.staged_frames`).
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        # Rows of up to this many windows are written as they come; with more, a task sorts them first.
        "spark.sql.maxConcurrentOutputFileWriters": "4",
        # Inferring filters from constraints takes the most time on such plans, and finds none.
        "spark.sql.constraintPropagation.enabled": "false",
        # A run may read many small files; a separate job to list them costs a second.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    }
    if not is_local(settings):
        conf[ELSEWHERE] = "true"
    else:
        # The default of 200 costs seconds per job on one machine; adaptive execution merges partitions
        # further.
        conf["spark.sql.shuffle.partitions"] = "4"
    return conf


def classic_session(settings: Settings) -> SparkSession:
    """Return a session with its own JVM in this process. Raises ``JavaMissing`` if there is no Java for it.

    Sets ``JAVA_HOME`` and ``PYSPARK_PYTHON`` in this process, where PySpark reads them.
    """
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        return _built(session_conf(settings))
    os.environ |= workers_environment(settings)
    os.environ["JAVA_HOME"] = str(find_java(_home(settings) / "run").path)
    scratch = Scratch.take(settings)
    atexit.register(scratch.remove)
    if settings.spark_master.startswith("local"):
        os.environ["SPARK_LOCAL_DIRS"] = str(scratch.path)
    conf = spark_conf(settings, scratch)
    if settings.spark_properties is not None:
        # The builder's settings stand on the command line of the JVM, which every user can read.
        own = spark_properties(settings)
        properties = scratch.tmp / "spark.properties"
        with failpoint("runtime.file"):
            replace(properties, properties_text(own))
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"--properties-file {shlex.quote(str(properties))} pyspark-shell"
        conf = {name: value for name, value in conf.items() if name not in own or name == JAVA_OPTIONS}
    spark = _built(conf)
    if not is_local(settings):
        spark.sparkContext.addPyFile(str(package_archive(scratch.tmp)))
    return spark


def _built(conf: Mapping[str, str]) -> SparkSession:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in conf.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def workers_environment(settings: Settings) -> dict[str, str]:
    """Return the environment in which Spark starts its Python workers: with this interpreter and its
    packages.

    A cluster whose machines have another interpreter names it in ``spark.pyspark.python``.
    """
    return {"PYSPARK_PYTHON": spark_properties(settings).get(PYTHON, sys.executable)} | _KEPT_MEMORY


_KEPT_MEMORY = {"MIMALLOC_PURGE_DELAY": "10000"}
"""By default, Arrow's allocator returns memory to the system after 10 ms, although the next row group needs
it again; the system then clears every page, which takes a seventh of a task's processor time. So it waits 10
seconds."""


LONG_ROWS = 1_000_000
"""A run that nobody waits for and that reads or writes at least so many rows of one table gets a Spark of its
own. In the shared one it would hold slots for seconds at a time. Opening a Spark takes as long as about
100,000 rows."""

_NICENESS = 10
"""Added to the niceness of the processes of ``session_apart``, so that others get the cores first."""

_apart: SparkSession | None = None
"""The session that ``session_apart`` has opened in this process. If there is one, every later call returns
it."""


def session_apart(settings: Settings) -> SparkSession:
    """Return a session for work that takes minutes and that nobody waits for.

    If the runs of a machine share a warm server, such work must not take its few slots. So it gets a JVM in
    this process with one slot, and this process, with the JVM and its workers, gets a lower priority.
    Otherwise the result is that of ``session``. A process keeps the session that it has opened before.
    """
    global _apart
    shared = settings.spark_remote is None and ConnectAddress.read(_home(settings) / "run") is not None
    if shared and is_local(settings) and not has_session():
        os.nice(_NICENESS)
        _apart = classic_session(settings.model_copy(update={"spark_master": "local[1]"}))
    return session(settings)


def is_apart() -> bool:
    """Whether the session of this process was opened by ``session_apart``."""
    return _apart is not None


def has_session() -> bool:
    """Whether this process has opened a session, which it keeps."""
    from pyspark.sql import SparkSession

    return "SPARK_CONNECT_MODE_ENABLED" in os.environ or SparkSession.getActiveSession() is not None


def session(settings: Settings) -> SparkSession:
    """Return a session on the warm server if there is one, else a classic session.

    The server is the one that ``OMNISUPPORT_SPARK_REMOTE`` names, or the one that ``up`` or ``demo`` runs on
    the same home. Raises ``SparkUnreachable`` if the named one does not answer.
    """
    if _apart is not None:
        return _apart
    if settings.spark_remote is not None:
        return connect_session(settings, settings.spark_remote.get_secret_value())
    running = ConnectAddress.read(_home(settings) / "run")
    return connect_session(settings, running.url) if running else classic_session(settings)


def connect_session(settings: Settings, remote: str) -> SparkSession:
    """Return a session on the Spark Connect server at ``remote`` (``sc://host:port``)."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    try:
        spark = _by_socket(remote) if by_socket(remote) else SparkSession.builder.remote(remote).getOrCreate()
        _try_again_only_for_a_while(spark, elsewhere=settings.spark_remote is not None)
        # All settings in one call: the builder would find the existing session.
        conf: dict[str, bool | float | int | str | None] = {**session_conf(settings)}
        ConnectSession.builder.config(map=conf).getOrCreate()
        if not is_local(settings):
            _send_package(spark, _home(settings) / "run")
    except PySparkException as error:
        raise SparkUnreachable(
            f"The Spark Connect server at {remote.partition('/;')[0]} does not answer.",
            fix="Start it, or unset OMNISUPPORT_SPARK_REMOTE to let Spark run in this process.",
        ) from error
    return spark


def _send_package(spark: SparkSession, folder: Path) -> None:
    with failpoint("runtime.file"), tempfile.TemporaryDirectory(prefix="package-", dir=folder) as scratch:
        spark.addArtifacts(str(package_archive(Path(scratch))), pyfile=True)


def _try_again_only_for_a_while(spark: SparkSession, *, elsewhere: bool) -> None:
    """Give up on a server that cannot be reached; PySpark would try for ten minutes.

    A session does not outlive its server, so waiting for a new server is useless. A server of this machine is
    given up after 4 seconds; one ``elsewhere``, which the network may have cut off, after a minute.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    # PySpark waits 0.05, 0.2, 0.8, 3.2, 12.8 and 51.2 seconds between its tries.
    spark.client.set_retry_policies([DefaultPolicy(max_retries=6 if elsewhere else 4)])


def _by_socket(remote: str) -> SparkSession:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # `SparkSession.builder` does the same for an address that it knows.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    builder = ConnectSession.builder.channelBuilder(socket_channel(remote, shared_session_id(remote)))
    spark = builder.getOrCreate()
    # So `stop` releases only this process's client; others continue to use the session.
    spark.release_session_on_close = False
    return cast("SparkSession", spark)


def shared_session_id(remote: str) -> str:
    """Return the id of the session that all processes with the same code share on the server at ``remote``.

    Spark starts new Python workers for each session. That costs its first job two seconds or more, and the
    workers of earlier sessions stay in memory. Processes of one session share its workers. Workers have
    imported the code of their processes, so other code needs another session.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{remote} {_code()}"))


@cache
def _code() -> str:
    """Return a hash of the code of this process: the files of this package when it is first called."""
    files = sorted(_PACKAGE.rglob("*.py"))
    seen = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return sha256(repr(seen).encode()).hexdigest()


def has_slot_to_spare(settings: Settings) -> bool:
    """Whether a run may keep one Spark task for itself (``lake.standing_task``): Spark's workers are on this
    machine, and another job still finds a slot."""
    slots = _LOCAL.fullmatch(settings.spark_master)
    if settings.spark_remote is not None or slots is None:
        return False
    return (os.cpu_count() or 1 if slots["slots"] == "*" else int(slots["slots"])) > 1


def _home(settings: Settings) -> Path:
    return settings.home.absolute()
