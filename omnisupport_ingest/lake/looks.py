"""The looks of one stretch of work: each table is looked at once, however many ask for it.

In an object store, every look whether a table has a newer version is a request that somebody waits for. A
stretch of work, such as one step of a run, may take its tables as its first look found them: a commit that
comes a moment later would have been missed just the same. Three rules keep that true:

- What this process commits counts at once.
- Whoever plans a commit begins anew: first it looks at the table that it will change, then at those that it
  reads, so it never holds an older version of these than of that one (``table.retrying``).
- A commit is refused if its table has gone on since the look, whenever that was.

A table without ``Looks``, as sensors and commands use it, asks the store every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_changes: Counter[Path] = Counter()
"""How often this process has changed the table in each folder."""


def changed(folder: Path) -> None:
    """Record that this process has changed the table in ``folder``: earlier looks no longer count."""
    _changes[folder] += 1


class Looks:
    """What one stretch of work has seen: for each folder of a table, what the first look found there."""

    def __init__(self) -> None:
        self._found: dict[Path, tuple[int, Any]] = {}

    def of(self, folder: Path, look: Callable[[], T]) -> T:
        """Return what an earlier look found in ``folder``, if that still counts; else call ``look``."""
        # Before the look: what this process commits meanwhile may be newer than what the look finds.
        before = _changes[folder]
        known = self._found.get(folder)
        if known is None or known[0] != before:
            known = self._found[folder] = before, look()
        found: T = known[1]
        return found

    def has(self, folder: Path) -> bool:
        """Return whether an earlier look at ``folder`` still counts."""
        known = self._found.get(folder)
        return known is not None and known[0] == _changes[folder]

    def seen(self, folder: Path) -> Any:
        """Return what an earlier look found in ``folder``; None if that is no table, or counts no longer."""
        return self._found[folder][1] if self.has(folder) else None

    def begin(self) -> None:
        """Forget everything: what is looked at from now on is looked at anew."""
        self._found.clear()

    def __reduce__(self) -> tuple[type[Looks], tuple[()]]:
        # A copy for another process has seen nothing.
        return Looks, ()
