"""Waiting for a state, in one place: a test waits until something is so, never for a time.

The bound is there to end a test that waits in vain. It is far longer than anything here takes on a slow and
busy machine, so it never decides whether a test passes. ``TESTS_PATIENCE_SECONDS`` sets another.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = float(os.environ.get("TESTS_PATIENCE_SECONDS", "420"))
"""Seconds after which a test gives up waiting: for a state, a thread, or the end of a process."""


def until(condition: Callable[[], T], seconds: float = PATIENCE, *, every: float = 0.05) -> T:
    """Wait until ``condition`` returns something true, and return that.

    Fails after ``seconds`` with what was waited for (the source of ``condition``) and what it returned last.
    """
    give_up = time.monotonic() + seconds
    while not (seen := condition()):
        if time.monotonic() >= give_up:
            raise AssertionError(
                f"Waited {seconds:.0f} s in vain for: {_source(condition)}\nIt returned {seen!r} at last."
            )
        time.sleep(every)
    return seen


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
