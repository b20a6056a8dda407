"""Findings of the last look at a source's windows, kept for the next look: most windows are settled.

A window is looked at again if something landed in it, a table committed to it, or its versions (rules,
contract) changed; if it is unknown which windows changed, all are. So a look costs only what is new and the
windows that are not settled. A new process continues from the notes of the last look (``window_index``). It
also looks at a few more windows, and so finds in time what no commit reports, such as a damaged file.
"""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from omnisupport_ingest.lake.looks import Looks
from omnisupport_ingest.lake.snapshot import TableMark, TableNote, TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.index import News
from omnisupport_ingest.layers.window_index import UNSETTLED, LookNote, NotedWindow, WindowIndex
from omnisupport_ingest.sqlite_index import IndexDamaged

T = TypeVar("T")
F = TypeVar("F")

_LOOKED_AGAIN = 16
"""Settled windows that a process looks at once, after it starts."""

_NOTED_SECONDS = 600.0
"""How long a finding about an unsettled window counts in other processes. What no commit and no landing
reports is found by the first look after that."""

_NOTED_WINDOWS = 8
_NOTED_LENGTH = 65_536
"""Findings about more unsettled windows, or with longer texts, are not noted: a look writes all of them."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What a look has ``found`` of the tables at ``paths``. ``by``: the looks that found them, and their
    moment. ``revision``: of the note at the end of that look."""

    by: tuple[Looks, tuple[int, int]]
    paths: frozenset[str]
    found: Any
    revision: str | None = None


class SurveyCache(Generic[T]):
    """The findings about one source. Use it as a context manager, which lets one look at a time use it."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: keeps the findings for other processes; None: they are not kept."""
        self.unsettled: dict[str, T] = {}
        """The findings about each window that is not settled."""
        self._looked_at: dict[str, float] = {}
        self._taken: set[str] = set()
        self.index = WindowIndex(file)
        self._before = self._note = LookNote()
        self._marks: dict[str, TableNote] | None = {}
        self._caught_up: tuple[Looks, str] | None = None
        self._last_found: _Found | None = None
        self._touched: set[str] | None = None
        self._tables: dict[str, TableSnapshot | None] = {}
        self._looked_again = False
        self._found: dict[str, tuple[tuple[object, ...], Any]] = {}
        self._lock = threading.Lock()

    def ask(self, question: Callable[[], F]) -> F:
        """Return the result of ``question``, which uses these findings. If their file is damaged, remove it
        and call ``question`` again.
        """
        for _ in range(2):
            try:
                return question()
            except IndexDamaged:
                self._give_up(self.index.drop)
            except sqlite3.DatabaseError as problem:
                # An operational error comes from outside the file: the disk, a lock, missing rights.
                of_place = isinstance(problem, sqlite3.OperationalError)
                self._give_up(self.index.keep_in_memory if of_place else self.index.drop)
        self._give_up(self.index.keep_in_memory)
        return question()

    def __enter__(self) -> Self:
        self._lock.acquire()
        try:
            note = self._begun()
        except BaseException:
            self.index.close()
            self._lock.release()
            raise
        if note.revision != self._note.revision:
            # Another process has looked since.
            self.unsettled.clear()
            self._taken.clear()
            self._found.clear()
        self._before = self._note = note
        self._touched, self._marks = set(), {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._note = self.index.commit(self._note, self._before)
                if self._last_found is not None:
                    self._last_found = replace(self._last_found, revision=self._note.revision)
            else:
                # An interrupted look does not count.
                self.index.rollback()
                self._forget()
        except BaseException:
            self.index.rollback()
            self._forget()
            raise
        finally:
            self._lock.release()

    @property
    def era(self) -> str | None:
        """With ``number``: up to where the last look has seen landing."""
        return self._note.era

    @property
    def number(self) -> int:
        return self._note.number

    def catch_up(self, looks: Looks, lake: Path) -> None:
        """Begin ``looks`` anew if somebody has noted a newer version of a table of ``lake`` than they have.

        Call it before the first table is used. All tables are looked at again: a single one, looked at later
        than the others, would be newer than the tables made from it.
        """
        root = lake.absolute()
        if self._caught_up is not None and self._caught_up == (looks, self._note.revision):
            return
        for path, noted in self._note.tables.items():
            folder = root / path
            if looks.has(folder) and _is_behind(looks.seen(folder), noted.mark):
                looks.begin()
                break
        self._caught_up = looks, self._note.revision

    def newest(self, table: LakeTable, fits: str = "") -> TableSnapshot | None:
        """Return the newest version of ``table``; None if it does not exist. It is opened only after a
        commit.

        The newest version is that which the table's ``looks`` have seen. ``fits``: fingerprint of the
        contract of the table. While it is the noted one, this process opens a table only if somebody
        committed since the last look of any process; without one, the first look of a process opens it.
        """
        path = table.spec.path
        now = self._tables.get(path)
        if now is None or now.table != table or not table.is_newest(now):
            noted = self._note.tables.get(path)
            now = table.look(noted if fits and noted is not None and noted.fits == fits else None)
        self._tables[path] = now
        if table.spec.partition_by and self._marks is not None:
            self._compare(path, now, fits)
        return now

    def once_looked(self, looks: Looks | None, find: Callable[[], F]) -> F:
        """Return the result of ``find``, which asks for the newest version of tables: that of the last look
        while all ``looks`` count that it was found by, and no other process has noted anything.

        ``looks``: those of the tables; None: call ``find``.
        """
        now, last = None if looks is None else (looks, looks.moment), self._last_found
        if now is not None and last is not None and last.by == now and last.revision == self._note.revision:
            self._marks = (self._marks or {}) | {
                path: note for path, note in self._note.tables.items() if path in last.paths
            }
            result: F = last.found
            return result
        before = set(self._marks or ())
        found = find()
        paths = frozenset(self._marks or ()) - before
        self._last_found = None if now is None else _Found(now, paths, found)
        return found

    def _compare(self, path: str, now: TableSnapshot | None, fits: str) -> None:
        """Record which windows of a table have changed since the last look."""
        assert self._marks is not None, "within a look"
        noted, note = self._note.tables.get(path), now.note(fits) if now is not None else None
        before = noted.mark if noted is not None else None
        mark = note.mark if note is not None else None
        self._marks.pop(path, None)
        if note is not None:
            self._marks[path] = note
        if mark == before and (mark is not None or now is None):
            return
        changed = now.windows_since(before) if now is not None and before is not None else None
        self._touched = None if changed is None or self._touched is None else self._touched | changed

    def changed(
        self,
        news: News,
        versions: object,
        of_windows: Mapping[str, tuple[str, ...]],
        *,
        read: Callable[[str], T],
        more: bool = True,
    ) -> set[str] | None:
        """Return the windows to look at again; None: all.

        ``versions``: of the rules and contracts by which all windows are judged. ``of_windows``: further
        versions, by window. ``more``: once per process, add the unsettled windows and a few others without
        any sign of a change. Otherwise, what another process found of an unsettled window lately counts:
        ``read`` makes it from its text.
        """
        looks_again, self._looked_again = more and not self._looked_again, more or self._looked_again
        note, anew = self._note, _digest(versions) != self._note.judged_by
        if anew:
            self._found.clear()
        if news.anew or note.era is None or self._touched is None or anew:
            self.index.forget_all()
            return None
        judged_otherwise = {
            window
            for window in {*of_windows, *note.apart}
            if of_windows.get(window) != note.apart.get(window)
        }
        landed = {window for _, windows in news.batches for window in windows}
        if not looks_again:
            self._take_noted(read)
        # Where all is looked at again, what was only noted is as well.
        known = self.unsettled.keys() - (self._taken if looks_again else self._taken_long_ago())
        of_others = set(self.index.flagged(UNSETTLED)) - known
        return (
            landed
            | judged_otherwise
            | self._touched
            | of_others
            | (self._some_more() if looks_again else set())
        )

    def _take_noted(self, read: Callable[[str], T]) -> None:
        now = time.time()
        for window, noted in self._note.unsettled.items():
            if window in self.unsettled or not 0 <= now - noted.at < _NOTED_SECONDS:
                continue
            # A finding of another form is looked for anew.
            with suppress(ValueError, TypeError):
                self.unsettled[window], self._looked_at[window] = read(noted.found), noted.at
                self._taken.add(window)

    def _taken_long_ago(self) -> set[str]:
        limit = time.time() - _NOTED_SECONDS
        return {window for window in self._taken if self._looked_at[window] < limit}

    def _some_more(self) -> set[str]:
        found = self.index.after(self._note.looked_again, _LOOKED_AGAIN)
        self._note = replace(self._note, looked_again=found[-1] if len(found) == _LOOKED_AGAIN else "")
        return set(found)

    def settle(self, window: str, found: T | None, numbers: Mapping[str, int]) -> None:
        """Record the finding about ``window`` (None: it is settled) and its ``numbers``."""
        self._taken.discard(window)
        if found is None:
            self.unsettled.pop(window, None)
        else:
            self.unsettled[window], self._looked_at[window] = found, time.time()
        self.index.put(window, {**numbers, UNSETTLED: int(found is not None)})

    def settled(
        self,
        news: News,
        versions: object,
        of_windows: Mapping[str, tuple[str, ...]],
        *,
        write: Callable[[T], str],
    ) -> None:
        """Record that the look has covered every window. Tables opened from now on belong to the next look.

        ``write``: returns a finding as text.
        """
        few = self.unsettled if len(self.unsettled) <= _NOTED_WINDOWS else {}
        texts = {window: NotedWindow(self._looked_at[window], write(each)) for window, each in few.items()}
        self._note = replace(
            self._note,
            era=news.era,
            number=news.number,
            judged_by=_digest(versions),
            apart=dict(of_windows),
            tables=self._marks or {},
            unsettled={window: each for window, each in texts.items() if len(each.found) <= _NOTED_LENGTH},
        )
        self._marks = None

    def once(self, what: str, find: Callable[[], F], *, of: tuple[object, ...]) -> F:
        """Return the result of ``find``, cached under ``what`` while ``of`` has the same objects: versions of
        tables from ``newest``, and what they are judged by."""
        known = self._found.get(what)
        if known is None or any(before is not now for before, now in zip(known[0], of, strict=True)):
            self._found[what] = known = of, find()
        result: F = known[1]
        return result

    def _begun(self) -> LookNote:
        try:
            return self.index.begin()
        except OSError:
            self.index.keep_in_memory()
            return self.index.begin()

    def _give_up(self, how: Callable[[], None]) -> None:
        with self._lock:
            how()
            self._forget()

    def _forget(self) -> None:
        self._last_found = None
        self._note = LookNote()
        self.unsettled.clear()
        self._taken.clear()
        self._found.clear()


def _is_behind(now: TableSnapshot | None, noted: TableMark | None) -> bool:
    """Whether the note has a later version of the table than ``now``, or another table of its name."""
    if noted is None:
        return False
    return now is None or now.table_id != noted.table_id or now.version < noted.version


def _digest(judged_by: object) -> str:
    return hashlib.sha256(repr(judged_by).encode()).hexdigest()
