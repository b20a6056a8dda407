"""How a long-running command ends on Ctrl-C (SIGINT) or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set: the command then finishes its present step, and ends."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupt_on_terminate() -> Iterator[None]:
    """Make SIGTERM raise ``KeyboardInterrupt``, as Ctrl-C does, so that both stop a supervising command
    alike.

    A shell starts a background command with SIGINT ignored; here it counts all the same.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
