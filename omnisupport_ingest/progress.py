"""How far a long piece of work is, for whoever listens: a command that a person waits for, nobody in a run.

The work says what it does now, and does not know who hears it. A listener belongs to the thread that set it.
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
    """What is done now: ``what``, like ``comparing tickets``; ``done`` of ``of`` such are over.

    ``share``: how much of this stage is done, from 0 to 1, asked from another thread; None if it cannot tell.
    """

    what: str
    done: int = 0
    of: int = 1
    share: Callable[[], float] | None = None


_listener: ContextVar[Callable[[Stage], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[Stage], None]) -> Iterator[None]:
    """Have ``listener`` hear of every stage that this thread reaches inside."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def reached(what: str, share: Callable[[], float] | None = None) -> None:
    """Say that ``what`` begins, a stage of its own."""
    _tell(Stage(what, share=share))


def each(items: Sequence[T], what: Callable[[T], str]) -> Iterator[T]:
    """Yield ``items``, and say of each what is done with it, and how many there are."""
    for number, item in enumerate(items):
        _tell(Stage(what(item), number, len(items)))
        yield item


def _tell(stage: Stage) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(stage)
