"""What a look at a source found unsettled, remembered for the next one: most windows are settled for good.

A window is looked at again when something lands in it, when a table commits to it, or when what it is judged
by changes; and every window, where it cannot be told which have changed. So a look costs what is new and the
windows that are not settled. It is memory alone: who starts looks at every window once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from omnisupport_ingest.lake.table import LakeTable, TableSnapshot
from omnisupport_ingest.landing.index import News
from omnisupport_ingest.stages.looking import look

T = TypeVar("T")
F = TypeVar("F")


class Seen(Generic[T]):
    """The memory of one source; a context manager, so that one look at a time uses it."""

    def __init__(self) -> None:
        self.era: str | None = None
        self.number = 0
        self.unsettled: dict[str, T] = {}
        """What was found of each window that is not settled."""
        self._tables: dict[str, TableSnapshot | None] = {}
        self._touched: set[str] | None = None
        self._everything: object = None
        self._apart: Mapping[str, object] = {}
        self._found: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            # Half a look is none.
            self.era = None
        self._lock.release()

    def newest(self, table: LakeTable) -> TableSnapshot | None:
        """The newest version of ``table``, None if it is not there; not opened again while it is the same."""
        path = table.spec.path
        before = self._tables.get(path)
        if before is not None and before.is_newest() and before.table == table:
            return before
        now = look(table)
        if now is not None or before is not None:
            self._found.clear()
            if table.spec.partition_by:
                changed = now.windows_since(before) if now is not None and before is not None else None
                self._touched = None if changed is None or self._touched is None else self._touched | changed
        self._tables[path] = now
        return now

    def changed(self, news: News, everything: object, apart: Mapping[str, object]) -> set[str] | None:
        """The windows to look at again; None: all. ``everything``: what all windows are judged by,
        ``apart``: what some windows are judged by besides."""
        if everything != self._everything:
            self._found.clear()
        if news.anew or self.era is None or self._touched is None or everything != self._everything:
            return None
        judged_otherwise = {
            window for window in {*apart, *self._apart} if apart.get(window) != self._apart.get(window)
        }
        landed = {window for _, windows in news.batches for window in windows}
        return landed | judged_otherwise | self._touched

    def settle(self, window: str, found: T | None) -> None:
        """What was found of ``window``; None: it is settled."""
        if found is None:
            self.unsettled.pop(window, None)
        else:
            self.unsettled[window] = found

    def settled(self, news: News, everything: object, apart: Mapping[str, object]) -> None:
        """Every window is settled or known not to be."""
        self.era, self.number = news.era, news.number
        self._everything, self._apart, self._touched = everything, apart, set()

    def once(self, what: str, find: Callable[[], F]) -> F:
        """What ``find`` gives, found once for the versions of all tables that ``newest`` has given."""
        if what not in self._found:
            found = find()
            self._found[what] = found
        result: F = self._found[what]
        return result
