"""The threads of a writer: they make tables of events, make row groups of them, and write these and land the
batch.

NumPy, Arrow and system calls release the interpreter lock, so the caller can go on reading. Events are made
while others wait for the disk. Encrypting them takes as long as making their table, so each of the two has a
thread if there are the cores for it. If not, more threads only take cores from each other and from a server
on the same machine: on two cores, a snapshot takes a tenth less processor time with two threads than with
three.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")

MEANWHILE_SECONDS = 1.0
"""How often ``meanwhile`` is called while a caller waits for the disk."""

_MOST_THREADS = 3

_QUEUED_GROUPS = 3
"""Row groups that may wait; with more, ``write`` blocks."""


class WriterThreads:
    """Does one piece of work after another, in the order of submission.

    Writers of consecutive batches may share the threads: while one batch lands, the next takes events in. Few
    row groups wait, however many writers there are, so memory stays bounded.
    """

    def __init__(self, count: int | None = None) -> None:
        """``count``: number of threads, 1 to 3; None: one for each core."""
        wanted = min(_MOST_THREADS, cores()) if count is None else count
        pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"landing-{number}") for number in range(1, wanted + 1)
        ]
        # A thread with several kinds of work does it in the order of submission: it never waits for itself.
        self._maker, self._converter, self._writer = pools[0], pools[(wanted - 1) // 2], pools[-1]
        self._queued: deque[Future[None]] = deque()

    def write(
        self,
        make: Callable[[], Made],
        convert: Callable[[Future[Made]], T],
        write: Callable[[Future[T]], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Queue ``make``, ``convert`` and ``write``, each called with the result of the one before; block
        while too many others wait.

        Raises the error of an earlier ``write``.
        """
        converted = self._converter.submit(convert, self._maker.submit(make))
        self._queued.append(self._writer.submit(write, converted))
        while len(self._queued) > _QUEUED_GROUPS:
            awaited(self._queued[0], meanwhile)
            self._queued.popleft()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` on the thread that writes, behind all that is queued there."""
        return self._writer.submit(work)

    def settle(self) -> None:
        """Wait until all submitted work is done. Errors are left to the writer that submitted the work."""
        # The writing thread first: it waits for the work of the others.
        for pool in (self._writer, self._converter, self._maker):
            pool.submit(_nothing).result()
        self._queued.clear()

    def close(self) -> None:
        """End the threads once all work is done."""
        for pool in (self._writer, self._converter, self._maker):
            pool.shutdown(wait=True)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def awaited(done: Future[T], meanwhile: Callable[[], None]) -> T:
    """Return the result of ``done``; call ``meanwhile`` about every second until it is there."""
    while not wait((done,), MEANWHILE_SECONDS).done:
        meanwhile()
    return done.result()


def _nothing() -> None:
    """Do nothing. Its result shows that all work submitted before is done."""
