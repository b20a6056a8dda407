"""The threads of a writer: one makes tables of events, one makes row groups of them as they land, one writes
these, then lands the batch.

NumPy, Arrow and the calls of the disk let go of the interpreter's lock, so the caller goes on reading. What
lands encrypted takes as long as making its table, so each has a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")
Made = TypeVar("Made")

MEANWHILE_SECONDS = 1.0
"""How often ``meanwhile`` is called while a caller waits for the disk."""

_QUEUED_GROUPS = 3
"""Row groups that may wait before ``write`` waits for them."""


class WriterThreads:
    """Does one piece of work after another, in the order of submission.

    Writers of batches that follow one another may share them: while one is landing, the next takes events in.
    So few row groups wait however many writers there are, which bounds the memory.
    """

    def __init__(self) -> None:
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="landing-maker")
        self._converter = ThreadPoolExecutor(1, thread_name_prefix="landing-converter")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="landing-writer")
        self._queued: deque[Future[None]] = deque()

    def write(
        self,
        make: Callable[[], Made],
        convert: Callable[[Future[Made]], T],
        write: Callable[[Future[T]], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Have ``make``, then ``convert``, then ``write`` called, each with what came of the one before; wait
        until few others wait before them.

        Raises what an earlier ``write`` has raised.
        """
        converted = self._converter.submit(convert, self._maker.submit(make))
        self._queued.append(self._writer.submit(write, converted))
        while len(self._queued) > _QUEUED_GROUPS:
            awaited(self._queued[0], meanwhile)
            self._queued.popleft()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Have ``work`` done on the thread that writes, behind everything that is to be written."""
        return self._writer.submit(work)

    def settle(self) -> None:
        """Wait until all submitted work is done. Its errors are left to the writer that submitted it."""
        # The writer first: it waits for what the others are working on.
        for pool in (self._writer, self._converter, self._maker):
            pool.submit(_nothing).result()
        self._queued.clear()

    def close(self) -> None:
        """End the threads, once all is done."""
        for pool in (self._writer, self._converter, self._maker):
            pool.shutdown(wait=True)


def awaited(done: Future[T], meanwhile: Callable[[], None]) -> T:
    """Return what comes of ``done``; call ``meanwhile`` about every second until it has come."""
    while not wait((done,), MEANWHILE_SECONDS).done:
        meanwhile()
    return done.result()


def _nothing() -> None:
    """Do nothing: its result comes when all work submitted before is done."""
