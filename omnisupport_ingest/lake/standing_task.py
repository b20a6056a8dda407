"""A Spark task that stays alive during a run and does its small pieces of work one after another.

A Spark job costs 0.15 to 0.25 seconds even for little work, and a run over few changes has four of them.
``standing_task`` starts a job of one task at once; the driver then sends work to that task over a Unix
socket. The job starts while the driver plans, and each layer plans, writes and commits as with a job of its
own.

Nothing depends on the task. If it cannot start, has ended or fails, ``ask`` returns None, and the caller runs
the same work as a Spark job, whose errors are Spark's. The task ends when the driver releases it, when the
driver's process is gone, or after some idle seconds. Until then it holds one of Spark's slots, so every
larger job releases it first (``release``).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")

IDLE_SECONDS = 3.0
"""How long the task waits for the next piece of work."""

_EXIT_SECONDS = 2.0
"""How long a process that exits waits for Spark to finish the job."""

_HERE, _GONE, _DONE, _FAILED = b"here", b"gone", b"done", b"failed"
_LEAVE = b""
_UNIX = "AF_UNIX"


class _Task:
    """The driver's side of one task: a job that runs in a thread, and the connection to its worker."""

    def __init__(self, spark: SparkSession) -> None:
        from pyspark import InheritableThread

        self.process = os.getpid()
        self._key = secrets.token_bytes(32)
        self._listener: Listener | None = Listener(None, _UNIX, authkey=self._key)
        self._connection: Connection | None = None
        address = str(self._listener.address)
        serve = partial(_serve, address=address, key=self._key, idle_seconds=IDLE_SECONDS)
        # The job inherits properties of the calling thread, such as its job group.
        self._thread = InheritableThread(
            target=partial(_hold, spark, serve, address, self._key), session=spark, daemon=True
        )
        self._thread.start()

    def ask(self, work: bytes) -> bytes | None:
        """Send ``work`` to the worker and return its answer; None if the worker is gone."""
        try:
            connection = self._connected()
            connection.send_bytes(work)
            return connection.recv_bytes()
        except (OSError, EOFError):
            self.end()
            return None
        except BaseException:
            # End it: a late answer would be taken for the answer to the next piece of work.
            self.end()
            raise

    def end(self) -> None:
        """Tell the worker to stop; its job then ends by itself."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send_bytes(_LEAVE)
            self._connection.close()
        if self._listener is not None:
            self._listener.close()
        self._listener = self._connection = None

    def wait(self) -> None:
        """Wait for the job to end, after ``end``."""
        self._thread.join(_EXIT_SECONDS)

    def _connected(self) -> Connection:
        if self._connection is None:
            if self._listener is None:
                raise EOFError
            # Either the worker connects, or ``_hold`` reports that the job ended without one.
            connection = self._listener.accept()
            if connection.recv_bytes() != _HERE:
                connection.close()
                raise EOFError
            self._connection = connection
        return self._connection


_depth = 0
_task: _Task | None = None


@contextlib.contextmanager
def standing_task(spark: SparkSession) -> Iterator[None]:
    """Do small pieces of work within the block by one task of ``spark``, which starts at once.

    The task outlives the block until it is idle for too long, so the next step of the run can use it. Only
    for a Spark on this machine with more than one slot.
    """
    global _depth
    _depth += 1
    try:
        _started(spark)
        yield
    finally:
        _depth -= 1


def ask(spark: SparkSession, work: Callable[[], T]) -> T | None:
    """Call ``work`` in the standing task and return its result; None outside of ``standing_task``, or if the
    task failed or could not start."""
    from pyspark import cloudpickle

    if not _depth:
        return None
    sent = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]
    for _ in range(2):
        task = _started(spark)
        if task is None:
            return None
        answer = task.ask(sent)
        if answer is not None:
            break
        # The task had been idle for too long and ended. Start a new one and ask that.
        release()
    else:
        return None
    if answer[:1] != _DONE[:1]:
        return None
    found: T = pickle.loads(answer[len(_DONE) :])  # noqa: S301 - of a process of ours, by a key that it knows
    return found


def release() -> None:
    """End the standing task, so that the next job has all of Spark's slots."""
    global _task
    task, _task = _task, None
    if task is not None and task.process == os.getpid():
        task.end()


@atexit.register
def _leave() -> None:
    task = _task
    release()
    if task is not None and task.process == os.getpid():
        task.wait()


def _started(spark: SparkSession) -> _Task | None:
    global _task
    if _task is None or _task.process != os.getpid():
        try:
            _task = _Task(spark)
        except OSError:
            return None
    return _task


def _hold(
    spark: SparkSession, serve: Callable[..., Iterator[pa.RecordBatch]], address: str, key: bytes
) -> None:
    """Run the job. When it ends, tell a driver that still waits for its worker that there is none."""
    try:
        # The caller then runs the work as another job, which raises the error.
        with contextlib.suppress(Exception):
            spark.range(0, 1, 1, 1).mapInArrow(serve, "works long").collect()
    finally:
        with contextlib.suppress(OSError, EOFError), Client(address, _UNIX, authkey=key) as connection:
            connection.send_bytes(_GONE)


def _serve(
    batches: Iterable[pa.RecordBatch], address: str, key: bytes, idle_seconds: float
) -> Iterator[pa.RecordBatch]:
    """Run in the worker: do each piece of work that the driver sends, until it sends none."""
    works = 0
    for _ in batches:
        with (
            contextlib.suppress(OSError, EOFError, AuthenticationError),
            Client(address, _UNIX) as connection,
        ):
            # The driver accepts the connection when it has a first piece of work, perhaps never. ``Client``
            # with a key would wait for that without a limit.
            if not connection.poll(idle_seconds):
                continue
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
            connection.send_bytes(_HERE)
            while connection.poll(idle_seconds):
                sent = connection.recv_bytes()
                if sent == _LEAVE:
                    break
                connection.send_bytes(_done(sent))
                works += 1
    yield pa.RecordBatch.from_pydict({"works": pa.array([works], pa.int64())})


def _done(sent: bytes) -> bytes:
    try:
        return _DONE + pickle.dumps(pickle.loads(sent)())  # noqa: S301 - of the driver, by a key that it knows
    except Exception:
        return _FAILED
