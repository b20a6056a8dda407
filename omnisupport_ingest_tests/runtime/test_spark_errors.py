"""What Spark fails for is named, memory by its setting, and at once."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from py4j.clientserver import ClientServer, JavaParameters, PythonParameters
from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.errors.exceptions.connect import SparkConnectGrpcException, UnknownException

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.runtime.spark_connect import NAME, start_spark_connect
from omnisupport_ingest.runtime.spark_errors import (
    SparkGone,
    SparkOutOfMemory,
    name_spark_error,
    named_spark_errors,
)
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings

LOCAL = Settings(home=Path("/nowhere"), spark_driver_memory="3g", spark_master="local[7]")
ELSEWHERE = Settings(spark_remote="sc://spark.example:15002/;token=hunter2")

WORKER = "An exception was thrown from the Python worker: Traceback (most recent call last):\n  File …\n"
TEXTS = {
    "python": WORKER + "MemoryError: no\n SQLSTATE: 38000",
    "arrow": WORKER + "pyarrow.lib.ArrowMemoryError: malloc of size 36028797018963968 failed",
    "numpy": WORKER + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7 TiB",
    "duckdb": WORKER + "_duckdb.OutOfMemoryException: Out of Memory Error: failed to allocate",
    "fork": WORKER + "OSError: [Errno 12] Cannot allocate memory",
    "no fork": 'java.io.IOException: Cannot run program "python3": error=12, Cannot allocate memory',
    "killed": "Job aborted: … SparkException: Python worker exited unexpectedly (crashed). Consider …",
    "heap": "java.lang.OutOfMemoryError: Java heap space",
    "task": "Job aborted due to stage failure: … java.lang.OutOfMemoryError: Java heap space\n",
    "gone": 'RPC that terminated with:\n\tstatus = StatusCode.UNAVAILABLE\n\tdetails = "failed to connect"',
    "ending": "(java.lang.IllegalStateException) Cannot call methods on a stopped SparkContext.\nThis …",
    "cancelled": "Job 8 cancelled because SparkContext was shut down",
    "anew": "[INVALID_HANDLE.SESSION_NOT_FOUND] The handle 5 is invalid. Session not found.",
}


@pytest.mark.parametrize("kind", ["python", "arrow", "numpy", "duckdb", "fork", "no fork", "killed"])
def test_memory_of_python_workers_is_named_with_how_many_there_are(kind: str) -> None:
    named = name_spark_error(UnknownException(TEXTS[kind]), LOCAL)
    assert isinstance(named, SparkOutOfMemory)
    assert "Python worker" in named.problem
    assert "OMNISUPPORT_SPARK_MASTER says: local[7]" in named.problem
    assert "OMNISUPPORT_SPARK_MASTER=local[1]" in named.fix


@pytest.mark.parametrize("kind", ["heap", "task"])
def test_memory_of_java_is_named_with_its_setting_and_the_value_of_it(kind: str) -> None:
    named = name_spark_error(UnknownException(TEXTS[kind]), LOCAL)
    assert isinstance(named, SparkOutOfMemory)
    assert "OMNISUPPORT_SPARK_DRIVER_MEMORY is 3g" in named.problem


@pytest.mark.parametrize("kind", ["heap", "killed"])
def test_memory_of_a_cluster_is_its_executors_and_set_in_its_file(kind: str) -> None:
    cluster = Settings(spark_master="spark://spark.example:7077", _env_file=None)
    named = name_spark_error(UnknownException(TEXTS[kind]), cluster)
    assert isinstance(named, SparkOutOfMemory)
    assert "spark://spark.example:7077" in named.problem
    assert "spark.executor." in named.fix and "OMNISUPPORT_SPARK_PROPERTIES" in named.fix


@pytest.mark.parametrize("kind", ["gone", "ending", "cancelled", "anew"])
def test_a_server_that_is_gone_is_told_by_its_log(tmp_path: Path, kind: str) -> None:
    settings = LOCAL.model_copy(update={"home": tmp_path})
    error = SparkConnectGrpcException(TEXTS[kind])
    assert isinstance(name_spark_error(error, settings), SparkGone)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "spark-connect.log").write_text(
        "ERROR\njava.lang.OutOfMemoryError: Java heap space\n"
    )
    assert isinstance(name_spark_error(error, settings), SparkOutOfMemory)
    # A run may have a Spark of its own, of which the server's log knows nothing.
    own = name_spark_error(Py4JNetworkError("Answer from Java side is empty"), settings)
    assert isinstance(own, SparkGone)
    assert "spark-connect" not in f"{own.problem} {own.fix}"


@pytest.mark.parametrize("closed_before", [0, 1])
def test_a_jvm_that_resets_its_connection_has_ended(closed_before: int) -> None:
    """``closed_before``: connections that it closes first, so that py4j tries again by another one."""
    listening = socket.create_server(("127.0.0.1", 0))

    def end() -> None:
        for _ in range(closed_before):
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            # It knows the token.
            connection.sendall(b"!yv\n")
            connection.recv(1 << 16)
            connection.close()
        connection, _ = listening.accept()
        listening.close()
        connection.recv(1 << 16)
        # Close by a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    threading.Thread(target=end, daemon=True).start()
    java = JavaParameters(port=listening.getsockname()[1], auth_token="known" if closed_before else None)
    jvm = ClientServer(java, PythonParameters(port=0, eager_load=False))
    with pytest.raises(SparkGone, match="has ended"), named_spark_errors(LOCAL):
        JavaObject("o1", jvm._gateway_client).count()
    jvm.shutdown_callback_server()


@pytest.mark.parametrize("kind", TEXTS)
def test_of_a_server_elsewhere_its_own_options_are_named_and_no_token(kind: str) -> None:
    named = name_spark_error(UnknownException(TEXTS[kind]), ELSEWHERE)
    assert named is not None
    assert "OMNISUPPORT_SPARK_REMOTE" in named.problem
    assert "hunter2" not in str(named)


@pytest.mark.parametrize(
    "error",
    [
        UnknownException("[DIVIDE_BY_ZERO] Division by zero."),
        UnknownException(WORKER + "ValueError: the MemoryError of a row"),
        ValueError(TEXTS["heap"]),
        KeyboardInterrupt(),
    ],
)
def test_what_is_not_of_memory_stays_what_it_is(error: BaseException) -> None:
    assert name_spark_error(error, LOCAL) is None


@pytest.mark.slow
def test_real_workers_and_a_real_server_that_have_no_memory_are_named_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A session on a server sets it for the whole process, whose other tests have a classic session.
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    settings = Settings(home=tmp_path / "home", spark_driver_memory="512m")
    home = Home.open(settings.home, settings.window_size)

    # Inside the test, so that workers are sent them and need not import this module.
    def allocates(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            bytearray(1 << 62)
            yield batch

    def is_killed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        import signal

        for batch in batches:
            os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    with Supervisor(home) as supervisor:
        start_spark_connect(supervisor, settings, home)
        spark = session(settings)
        for worker, said in ((allocates, "had no memory left"), (is_killed, "was killed while it worked")):
            with pytest.raises(SparkOutOfMemory, match=said), named_spark_errors(settings):
                spark.range(0, 4, 1, 2).mapInArrow(worker, "id long").collect()
        # The server lives on: another step has its workers again.
        assert spark.range(3).count() == 3
        began = time.monotonic()
        too_much = spark.sql("SELECT collect_list(repeat('x', 1000000)) AS a FROM range(3000)")
        with (
            pytest.raises(SparkOutOfMemory, match="OMNISUPPORT_SPARK_DRIVER_MEMORY is 512m"),
            named_spark_errors(settings),
        ):
            too_much.selectExpr("size(a)").collect()
        assert time.monotonic() - began < 120, "PySpark itself gives up after ten minutes"
        supervisor.stop(NAME)
        with pytest.raises(PySparkException) as gone:
            began = time.monotonic()
            spark.range(3).count()
        assert time.monotonic() - began < 60
        (home.logs / f"{NAME}.log").unlink()
        assert isinstance(name_spark_error(gone.value, settings), SparkGone)
        spark.stop()
