"""How a command that runs for long ends at Ctrl-C (SIGINT) or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set: the command finishes the step that it is in, and ends."""
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
    """SIGTERM raises ``KeyboardInterrupt``, as Ctrl-C does, so that both stop a supervising command alike.

    A shell that starts a command in the background lets it ignore SIGINT; here it counts all the same.
    """
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
