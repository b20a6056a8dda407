"""How far a long piece of work is, for a listener: a command that a person waits for; in a run, nobody.

The work reports what it does now, without knowing who listens. A listener belongs to the thread that set it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stage:
    """What is done now: ``what``, for example ``comparing tickets``; ``done`` of ``of`` such items are
    finished.

    ``share``: returns how much of this stage is finished, from 0 to 1; another thread calls it. None if
    unknown.
    """

    what: str
    done: int = 0
    of: int = 1
    share: Callable[[], float] | None = None


_listener: ContextVar[Callable[[Stage], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[Stage], None]) -> Iterator[None]:
    """Call ``listener`` with every stage that this thread reaches inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reached(what: str, share: Callable[[], float] | None = None) -> None:
    """Report that ``what``, a stage of its own, begins."""
    _tell(Stage(what, share=share))


def each(items: Sequence[T], what: Callable[[T], str]) -> Iterator[T]:
    """Yield ``items``; report for each what is done with it, and how many there are."""
    for number, item in enumerate(items):
        _tell(Stage(what(item), number, len(items)))
        yield item


def _tell(stage: Stage) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(stage)
