"""Recognises why Spark failed: out of memory (and the setting that limits it), or a server that is gone.

Spark reports a lack of memory in many ways: by a Python or Java exception in the text of another one, by a
worker that "exited unexpectedly" (the kernel has killed it), or not at all if the server itself is gone.
PySpark's client then tries again for ten minutes, although a session does not outlive its server.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.runtime.cluster import is_local
from omnisupport_ingest.settings import PREFIX, Settings

_LIBRARIES = ("pyspark.", "py4j.", "grpc.")
"""Modules whose exceptions are examined."""

_JAVA_MEMORY = re.compile(
    r"java\.lang\.OutOfMemoryError|SparkOutOfMemoryError|Java heap space|GC overhead limit exceeded"
    r"|UNABLE_TO_ACQUIRE_MEMORY"
)
_PYTHON_MEMORY = re.compile(
    r"^\s*(?:\w+\.)*(?:\w*MemoryError|OutOfMemoryException)\b"
    r"|^\s*OSError: \[Errno 12\]|error=12, Cannot allocate memory",
    re.MULTILINE,
)
_WORKER_KILLED = re.compile(r"Python worker exited unexpectedly|Python worker (?:process )?(?:has )?crashed")
_SERVER_GONE = re.compile(
    r"StatusCode\.UNAVAILABLE|INVALID_HANDLE\.SESSION_|SESSION_NOT_SAME|SESSION_CHANGED|SESSION_NOT_FOUND"
    r"|stopped SparkContext|SparkContext was shut down|SparkContext has been shutdown"
    r"|Answer from Java side is empty|while trying to connect to the Java server"
    # py4j says only this about a reset connection. An error in Java has a trace.
    r"|^Error while sending|^An error occurred while calling \S+$"
)
_OF_OWN_JVM = ("py4j.", "pyspark.errors.exceptions.captured")
"""Modules whose exceptions come from a JVM of this process, not from a server."""

_END_OF_LOG = 64 * 1024
_STAYS = "What is committed stays."


class SparkOutOfMemory(IngestError):
    """Spark, or one of its Python workers, ran out of memory in a step. What was committed stays.

    Fix: Give it more memory by the settings that the message names, or less to do at a time; then run again.
    """

    exit_code = 4


class SparkGone(IngestError):
    """The Spark that ran a step has ended, or cannot be reached any more. What was committed stays.

    Fix: Read the end of its log and that of the kernel (``dmesg``), which kills the largest process when
    memory is short; then start again.
    """

    exit_code = 4


@contextmanager
def named_spark_errors(settings: Settings) -> Iterator[None]:
    """Raise ``SparkOutOfMemory`` or ``SparkGone`` instead of the exceptions of Spark's libraries."""
    try:
        yield
    except Exception as error:
        named = name_spark_error(error, settings)
        if named is None:
            raise
        raise named from error


def name_spark_error(error: BaseException, settings: Settings) -> IngestError | None:
    """Return the named error for ``error`` if it is about memory or a Spark that is gone; else None.

    No text of ``error`` is repeated: it may quote a row.
    """
    if isinstance(error, ConnectionError) and _passed_py4j(error):
        return _own_gone(settings)
    if not type(error).__module__.startswith(_LIBRARIES):
        return None
    text = str(error)
    if _JAVA_MEMORY.search(text):
        return _java_memory(settings)
    if _PYTHON_MEMORY.search(text):
        return _worker_memory("A Python worker of Spark had no memory left", settings)
    if _WORKER_KILLED.search(text):
        return _worker_memory(
            "A Python worker of Spark was killed while it worked, as the kernel does it when the memory of "
            "the machine or of the container is used up",
            settings,
        )
    if _SERVER_GONE.search(text):
        return _own_gone(settings) if type(error).__module__.startswith(_OF_OWN_JVM) else _gone(settings)
    return None


def _passed_py4j(error: BaseException) -> bool:
    """Whether ``error`` was raised on a call to a JVM of this process, whose connection is refused once it is
    gone."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__", "").startswith("py4j.") for frame in frames)


def _java_memory(settings: Settings) -> SparkOutOfMemory:
    if settings.spark_remote is not None:
        return SparkOutOfMemory(
            f"The Spark server that {PREFIX}SPARK_REMOTE names had no memory left "
            "(java.lang.OutOfMemoryError).",
            fix="Start it with more: spark.driver.memory, on a cluster spark.executor.memory.",
        )
    if not is_local(settings):
        return SparkOutOfMemory(
            f"The Spark cluster {settings.spark_master} had no memory left (java.lang.OutOfMemoryError).",
            fix=f"Set spark.executor.memory to more in the file of {PREFIX}SPARK_PROPERTIES, or "
            f"{PREFIX}SPARK_DRIVER_MEMORY if the log of spark-connect has the error. {_STAYS}",
        )
    return SparkOutOfMemory(
        f"Spark had no memory left (java.lang.OutOfMemoryError): {PREFIX}SPARK_DRIVER_MEMORY is "
        f"{settings.spark_driver_memory}.",
        fix=f"Set {PREFIX}SPARK_DRIVER_MEMORY to more, as far as the machine has it, and start again. "
        f"{_STAYS}",
    )


def _worker_memory(problem: str, settings: Settings) -> SparkOutOfMemory:
    if settings.spark_remote is not None:
        return SparkOutOfMemory(
            f"{problem}, on the server that {PREFIX}SPARK_REMOTE names.",
            fix="Give its workers more memory (spark.executor.pyspark.memory, "
            f"spark.executor.memoryOverhead), or fewer cores, and start again. {_STAYS}",
        )
    if not is_local(settings):
        return SparkOutOfMemory(
            f"{problem}, on the cluster {settings.spark_master}.",
            fix="Give its workers more memory (spark.executor.pyspark.memory, "
            f"spark.executor.memoryOverhead), or fewer cores, in the file of {PREFIX}SPARK_PROPERTIES, and "
            f"start again. {_STAYS}",
        )
    return SparkOutOfMemory(
        f"{problem}. As many work at a time as {PREFIX}SPARK_MASTER says: {settings.spark_master}; beside "
        f"them Spark itself may use {PREFIX}SPARK_DRIVER_MEMORY: {settings.spark_driver_memory}.",
        fix=f"Give the machine more memory, or set {PREFIX}SPARK_MASTER=local[1] so that one works at a "
        f"time, or {PREFIX}SPARK_DRIVER_MEMORY to less; then start again. {_STAYS}",
    )


def _own_gone(settings: Settings) -> SparkGone:
    return SparkGone(
        "The Spark that this process had started for itself has ended while a step ran on it.",
        fix="Look in the log of the kernel (`dmesg`): it kills a Spark when the memory of the machine is "
        f"used up. Then give it more, or set {PREFIX}SPARK_DRIVER_MEMORY (now "
        f"{settings.spark_driver_memory}) to less, and start again. {_STAYS}",
    )


def _gone(settings: Settings) -> IngestError:
    if settings.spark_remote is not None:
        return SparkGone(
            f"The Spark server that {PREFIX}SPARK_REMOTE names has gone away while a step ran on it.",
            fix="See that it runs, and why it ended: a kernel that has no memory left kills the largest "
            f"process. Then start again. {_STAYS}",
        )
    log = settings.home.absolute() / "logs" / "spark-connect.log"
    if _JAVA_MEMORY.search(_end_of(log)):
        return _java_memory(settings)
    return SparkGone(
        f"Spark has ended while a step ran on it, and its log {log} does not say that it had no memory left.",
        fix="Read the end of that log. If it just stops, the kernel has killed Spark, as it does when the "
        f"memory of the machine is used up: give it more, or set {PREFIX}SPARK_DRIVER_MEMORY (now "
        f"{settings.spark_driver_memory}) to less, or {PREFIX}SPARK_MASTER=local[1]. Then start again. "
        f"{_STAYS}",
    )


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END_OF_LOG))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
