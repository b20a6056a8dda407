"""One way to a Spark session: warm through Connect where a server runs, classic otherwise.

The configuration is the same for both, because the data must not depend on who wrote it. Classic
and Connect cannot mix in one process: whichever session a process opens first, it keeps.
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
"""The program that Python workers are forks of."""

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
"""The optimising compiler takes what is called ten times as often as by default (HotSpot, tiered compiling).
Few rows pass through the JVM, so most of what it optimises while Spark starts is never hot again: a quarter
of the processor time until a first job is done. What a shuffle of many rows repeats is optimised as ever."""


class SparkUnreachable(IngestError):
    """The Spark Connect server that ``OMNISUPPORT_SPARK_REMOTE`` names does not answer.

    Fix: Start it, or unset the setting: Spark then runs on this machine.
    """

    exit_code = 4


def spark_conf(settings: Settings, scratch: Scratch) -> dict[str, str]:
    """The configuration of every session of this platform, as Spark names it.

    Some of it is fixed when the JVM starts (memory, addresses, logging, debugging); the rest is repeated on
    each Connect session by ``session_conf``. ``scratch``: where the JVM keeps its temporary files.
    """
    java = (
        f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}",
        "-Duser.timezone=UTC",
        f'"-Djava.io.tmpdir={scratch.tmp}"',
        # Its counters would be in a file of the shared temporary folder, under the user's name.
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
        # A cluster's executors have an environment of their own.
        **{f"spark.executorEnv.{name}": value for name, value in _KEPT_MEMORY.items()},
    }
    if settings.spark_master.startswith("local"):
        conf |= {
            # Spark otherwise listens on the machine's own address. A cluster's executors must reach
            # the driver, so there the choice stays with whoever runs it (``spark_properties``).
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.host": LOOPBACK,
            # Whoever can connect to the ports of driver and block manager, as every user of the machine can,
            # would be served. With a local master Spark makes the secret itself, in memory; a cluster's is
            # the cluster's to set.
            "spark.authenticate": "true",
            # By SASL, without encryption: no other user can read what loopback carries. With encryption, the
            # server's thread waits for a class loader that is held by a task which waits for that thread.
            "spark.network.crypto.enabled": "false",
            # Only tells where: whoever starts a JVM sets SPARK_LOCAL_DIRS, which wins over `spark.local.dir`,
            # and Spark warns at every start of a configuration that has the latter.
            "spark.omnisupport.localDir": str(scratch.path),
            # A cluster's executors get this package only with a session.
            "spark.python.daemon.module": WORKER_DAEMON,
            # First in, first out, the tasks of a long job would all come before those of an ingest run.
            "spark.scheduler.mode": "FAIR",
            "spark.scheduler.allocation.file": _FAIR.as_uri(),
        }
    own = spark_properties(settings, session_conf(settings).keys())
    if more := own.get(JAVA_OPTIONS):
        own[JAVA_OPTIONS] = f"{conf[JAVA_OPTIONS]} {more}"
    return conf | own


def session_conf(settings: Settings) -> dict[str, str]:
    """The part of ``spark_conf`` that decides about data, settable on a running server."""
    conf = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.ansi.enabled": "true",
        # INT96, Spark's default, is not readable as a timestamp by every Delta reader.
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        # timestamp_ntz would raise the table's reader and writer versions.
        "spark.sql.timestampType": "TIMESTAMP_LTZ",
        "spark.sql.parquet.inferTimestampNTZ.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # The plans are wide (a column's state is several expressions) and the batches small: compiling a
        # plan costs more than interpreting it (measured: half the time without). Large ones are compiled
        # (`lake.staged_frames`).
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        # Rows of up to so many windows are written as they come; for more, a task sorts them first.
        "spark.sql.maxConcurrentOutputFileWriters": "4",
        # Inferring filters from constraints is what takes longest on such plans, and finds none.
        "spark.sql.constraintPropagation.enabled": "false",
        # A run may read many small files; listing them in a job of its own costs a second.
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "10000",
    }
    if not is_local(settings):
        conf[ELSEWHERE] = "true"
    else:
        # The default of 200 costs seconds per job on one machine; adaptive execution merges more.
        conf["spark.sql.shuffle.partitions"] = "4"
    return conf


def classic_session(settings: Settings) -> SparkSession:
    """A session with its own JVM in this process; ``JavaMissing`` if there is no Java for it.

    Sets ``JAVA_HOME`` and ``PYSPARK_PYTHON`` in this process, where PySpark looks for them.
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
        # What the builder is given stands on the command line of the JVM, which every user can read.
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
    """The environment by which Spark starts its Python workers: with this interpreter and its packages.

    A cluster whose machines have another one names it by ``spark.pyspark.python``.
    """
    return {"PYSPARK_PYTHON": spark_properties(settings).get(PYTHON, sys.executable)} | _KEPT_MEMORY


_KEPT_MEMORY = {"MIMALLOC_PURGE_DELAY": "10000"}
"""Arrow's allocator gives memory back after 10 ms that it needs again for the next row group, and the system
clears every page of it again: a seventh of a task's processor time. So it waits 10 seconds."""


LONG_ROWS = 1_000_000
"""From so many rows of one table on that it reads or writes, a run that nobody waits for has a Spark of its
own: it would hold slots of the shared one for seconds each. Opening one takes as long as some 100,000."""

_NICENESS = 10
"""How much later than other processes those of ``session_apart`` get a core (``nice``)."""

_apart: SparkSession | None = None
"""What ``session_apart`` has opened in this process: from then on every session is this one."""


def session_apart(settings: Settings) -> SparkSession:
    """A session for work that takes minutes and that nobody waits for.

    Where the runs of a machine share a warm server, its few slots are not for such work. So it gets a JVM in
    this process, of one slot, and this process a lower priority, which the JVM and its workers have too.
    Elsewhere it is ``session``. Whichever session this process has opened before, it keeps.
    """
    global _apart
    shared = settings.spark_remote is None and ConnectAddress.read(_home(settings) / "run") is not None
    if shared and is_local(settings) and not has_session():
        os.nice(_NICENESS)
        _apart = classic_session(settings.model_copy(update={"spark_master": "local[1]"}))
    return session(settings)


def is_apart() -> bool:
    """Whether the session of this process is one that ``session_apart`` has opened."""
    return _apart is not None


def has_session() -> bool:
    """Whether this process has opened a session, which it keeps."""
    from pyspark.sql import SparkSession

    return "SPARK_CONNECT_MODE_ENABLED" in os.environ or SparkSession.getActiveSession() is not None


def session(settings: Settings) -> SparkSession:
    """A session on the warm server where there is one, else a classic session.

    The server is the one that ``OMNISUPPORT_SPARK_REMOTE`` names, or the one that ``up`` or
    ``demo`` has running on the same home. ``SparkUnreachable`` if the named one does not answer.
    """
    if _apart is not None:
        return _apart
    if settings.spark_remote is not None:
        return connect_session(settings, settings.spark_remote.get_secret_value())
    running = ConnectAddress.read(_home(settings) / "run")
    return connect_session(settings, running.url) if running else classic_session(settings)


def connect_session(settings: Settings, remote: str) -> SparkSession:
    """A session on the Spark Connect server at ``remote`` (``sc://host:port``)."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    try:
        spark = _by_socket(remote) if by_socket(remote) else SparkSession.builder.remote(remote).getOrCreate()
        _try_again_only_for_a_while(spark, elsewhere=settings.spark_remote is not None)
        # All of it in one call: the builder finds the session that there is.
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
    """Give a server up that cannot be reached, where PySpark would try for ten minutes.

    A session does not outlive its server, so nothing is won by waiting for another one: one of this machine
    is given up after 4 seconds, one ``elsewhere``, which a network may hide, after a minute.
    """
    from pyspark.sql.connect.client.retries import DefaultPolicy

    # It waits 0.05, 0.2, 0.8, 3.2, 12.8 and 51.2 seconds between the tries.
    spark.client.set_retry_policies([DefaultPolicy(max_retries=6 if elsewhere else 4)])


def _by_socket(remote: str) -> SparkSession:
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    # What `SparkSession.builder` does itself for an address that it knows.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    builder = ConnectSession.builder.channelBuilder(socket_channel(remote, shared_session_id(remote)))
    spark = builder.getOrCreate()
    # `stop` lets go of this process's client alone: others go on with the session.
    spark.release_session_on_close = False
    return cast("SparkSession", spark)


def shared_session_id(remote: str) -> str:
    """The session that every process with the same code has on the server at ``remote``.

    Spark starts Python workers for each session anew, which costs a first job two seconds or more and leaves
    the workers of every session before in memory. Processes of one session share them. What the workers have
    imported is what the processes have: other code is another session.
    """
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{remote} {_code()}"))


@cache
def _code() -> str:
    """Which code this process has: the files of this package as they are when it first asks."""
    files = sorted(_PACKAGE.rglob("*.py"))
    seen = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return sha256(repr(seen).encode()).hexdigest()


def has_slot_to_spare(settings: Settings) -> bool:
    """Whether one task of Spark may stay for a run (``lake.standing_task``): its workers are on this machine,
    and another job finds a slot beside it."""
    slots = _LOCAL.fullmatch(settings.spark_master)
    if settings.spark_remote is not None or slots is None:
        return False
    return (os.cpu_count() or 1 if slots["slots"] == "*" else int(slots["slots"])) > 1


def _home(settings: Settings) -> Path:
    return settings.home.expanduser().absolute()
