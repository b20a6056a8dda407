"""Looks: within one stretch of work, the newest version of each table is looked up once.

In an object store, every look for a newer version is a request that somebody waits for. A stretch of work,
such as one step of a run, may use each table as it was at the first look: it could have missed a later commit
anyway. Three rules keep that correct:

- What this process commits counts at once.
- Whoever plans a commit begins anew. It looks first at the table that it will change, then at the tables that
  it reads, so those are never older than the first (``table.retrying``).
- A commit is refused if its table has a newer version, however old the look was.

A table without ``Looks``, as sensors and commands use it, looks every time.
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
    """Record that this process has changed the table in ``folder``, so earlier looks no longer count."""
    _changes[folder] += 1


class Looks:
    """What one stretch of work has seen: for each table's folder, the result of the first look there."""

    def __init__(self) -> None:
        self._found: dict[Path, tuple[int, Any]] = {}
        self._begun = 0

    def of(self, folder: Path, look: Callable[[], T]) -> T:
        """Return what an earlier look found in ``folder``, if that still counts; else call ``look``."""
        # Read the count before the look: a commit of this process meanwhile makes the look outdated.
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
        """Return the result of an earlier look at ``folder``; None if it found no table or no longer
        counts."""
        return self._found[folder][1] if self.has(folder) else None

    def begin(self) -> None:
        """Forget all looks, so that each table is looked at again."""
        self._begun += 1
        self._found.clear()

    @property
    def moment(self) -> tuple[int, int]:
        """What stays the same while every earlier look still counts."""
        return self._begun, _changes.total()

    def __reduce__(self) -> tuple[type[Looks], tuple[()]]:
        # A copy for another process has seen nothing.
        return Looks, ()
