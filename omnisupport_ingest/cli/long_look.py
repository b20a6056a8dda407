"""The progress of a long look on standard error: what it does, how far it is, how long it may still take.

It is printed as lines, even without a terminal; a look that takes only seconds prints nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from omnisupport_ingest.cli.render import say_err, span
from omnisupport_ingest.progress import Stage, listening

FIRST_AFTER = 5.0
EVERY = 10.0
"""Seconds until the first line, and between two lines."""

_LEAST_SHARE = 0.02
"""Until so much is done, the remaining time is not estimated."""


class LongLook:
    """The stage of a look, and the lines about it."""

    def __init__(self, now: float) -> None:
        """``now``: seconds of a monotonic clock."""
        self._began = now
        self._stage = Stage("preparing")
        self._series_began = now

    def heard(self, stage: Stage, now: float) -> None:
        """Take the ``stage`` that has begun. The first stage of a series restarts the estimate."""
        if stage.done == 0:
            self._series_began = now
        self._stage = stage

    def line(self, now: float) -> str:
        """Return the line to print at ``now``."""
        stage = self._stage
        nth = f" ({stage.done + 1} of {stage.of})" if stage.of > 1 else ""
        share = self._share(stage)
        percent = f" {share:.0%}," if stage.of == 1 and share is not None else ""
        left = ""
        if share is not None and share >= _LEAST_SHARE:
            spent = now - self._series_began
            left = f", about {span(spent * (1 - share) / share)} left"
        return f"… {stage.what}{nth},{percent} {span(now - self._began)} so far{left}"

    @staticmethod
    def _share(stage: Stage) -> float | None:
        """Return how much of the series is done, from 0 to 1; None if unknown."""
        within = None
        if stage.share is not None:
            # The work may have ended just now.
            with suppress(Exception):
                within = min(1.0, max(0.0, stage.share()))
        if stage.of > 1:
            return (stage.done + (within or 0.0)) / stage.of
        return within


@contextmanager
def speaking() -> Iterator[None]:
    """Print on standard error how far the work in the block is, once it has taken some seconds."""
    look, stop, lock = LongLook(time.monotonic()), threading.Event(), threading.Lock()

    def heard(stage: Stage) -> None:
        with lock:
            look.heard(stage, time.monotonic())

    def speak() -> None:
        wait = FIRST_AFTER
        while not stop.wait(wait):
            wait = EVERY
            with lock:
                line = look.line(time.monotonic())
            say_err(line)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        with listening(heard):
            yield
    finally:
        stop.set()
        thread.join()
