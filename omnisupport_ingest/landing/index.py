"""The landing index: facts of all manifests of a source in one SQLite file, so that nobody has to parse all.

The manifests are the truth; the index beside them can always be made again.

How a reader knows that the index is up to date: whoever updates it sets the modification time of the folder
of manifests to a value that nobody else would choose (the *stamp*), and writes the stamp into the index.
Adding or removing any file changes the folder's time. So while time and stamp are equal, the index has every
manifest and no other. When they differ, the folder is listed, new and changed manifests are parsed, and
missing ones are forgotten. A publisher locks the folder before it creates its manifest, and releases it when
the index has the manifest. If it dies in between, time and stamp differ.

The index is valid only where it was made: a copied file is made again. Checksums protect what is read from
it; a damaged index is made again. A process that cannot write the file keeps an index in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.index_tables import (
    BEHIND,
    FORMAT_VERSION,
    TABLES,
    Starts,
    connect,
    digest_of,
    fold,
    forget,
    insert,
    sortable,
    standing_in,
    step,
    touch,
)
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.standing import BatchLine, EpochStanding, LandedPart
from omnisupport_ingest.locks import locked_folder
from omnisupport_ingest.position import Position
from omnisupport_ingest.sqlite_index import IndexDamaged, reading, require_checksum, writing

T = TypeVar("T")

SUFFIX = ".json"

_NOT_WRITABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOLFS,
}
"""Errors of the file system, as opposed to damage of the index."""

_ROWS_AT_ONCE = 5000
"""Manifests that are parsed before the index is committed in between."""

_LOOKS = 5
"""How often to list a folder while others change it."""


class _Outdated(Exception):
    """Raised when the standing of an epoch must be computed again from its batches."""


@dataclass(frozen=True, slots=True)
class News:
    """What landed after the look that ended with ``number`` in ``era``: names of batches, and their windows.

    ``anew``: what earlier looks saw may have changed too; then ``batches`` is empty.
    """

    era: str
    number: int
    batches: tuple[tuple[str, tuple[str, ...]], ...]
    anew: bool


class LandingIndex:
    """The index of one source. Thread-safe; a forked process opens it for itself."""

    def __init__(
        self,
        folder: Path,
        manifests: Path,
        parse: Callable[[str], Manifest],
        bring: Callable[[], None] = lambda: None,
    ) -> None:
        """``folder``: the index's own folder, created when needed. ``manifests``: the folder of manifests.

        ``parse`` returns the manifest of a name; its errors are raised by every method that reads the index.
        ``bring`` is called before each read, and downloads manifests that others landed in an object store.
        """
        self._bring = bring
        self._folder, self._manifests, self._parse = folder, manifests, parse
        self._file = folder / "index.sqlite"
        self._memory: sqlite3.Connection | None = None
        self._db: sqlite3.Connection | None = None
        self._db_of: int | None = None
        self._lock, self._process = threading.RLock(), os.getpid()
        self._is_alone = False

    # --- reading it -------------------------------------------------------------------------------

    def standings(self, starts: Starts) -> tuple[EpochStanding, ...]:
        """Return the standing of every epoch with a batch, in order."""

        def question(db: sqlite3.Connection) -> tuple[EpochStanding, ...]:
            standings = []
            for number, text, crc in db.execute("SELECT number, standing, crc FROM epoch ORDER BY number"):
                if not text:
                    raise _Outdated
                require_checksum(crc, text)
                standing = standing_in(text)
                if standing.start != starts.get(number):
                    raise _Outdated
                standings.append(standing)
            return tuple(standings)

        return self._ask(question, starts)

    def parts(self, window: str) -> list[LandedPart]:
        """The data files in ``window``, by batch, whether or not downstream may take them."""

        def question(db: sqlite3.Connection) -> list[LandedPart]:
            rows = db.execute(
                'SELECT batch, facts, crc FROM part WHERE "window" = ? ORDER BY batch, number', (window,)
            ).fetchall()
            recorded = db.execute(
                'SELECT parts, digest FROM "window" WHERE "window" = ?', (window,)
            ).fetchone()
            if (len(rows), sum(crc for *_, crc in rows)) != (recorded or (0, 0)):
                raise IndexDamaged
            for batch, facts, crc in rows:
                require_checksum(crc, window, batch, facts)
            return [LandedPart.from_text(window, batch, facts) for batch, facts, _ in rows]

        return self._ask(question)

    def files_of(self, batch: str) -> frozenset[str]:
        """Return the paths of the data files of ``batch``; none if it has not landed."""

        def question(db: sqlite3.Connection) -> frozenset[str]:
            row = db.execute("SELECT windows FROM batch WHERE id = ?", (batch,)).fetchone()
            paths = set()
            for window in json.loads(row[0]) if row is not None else ():
                rows = db.execute(
                    'SELECT facts, crc FROM part WHERE "window" = ? AND batch = ?', (window, batch)
                ).fetchall()
                for facts, crc in rows:
                    require_checksum(crc, window, batch, facts)
                    paths.add(LandedPart.from_text(window, batch, facts).path)
            return frozenset(paths)

        return self._ask(question)

    def holds_just(self, window: str, batches: Collection[str]) -> bool:
        """Return whether exactly ``batches`` have landed in ``window``; compares their count and a digest."""

        def question(db: sqlite3.Connection) -> bool:
            row = db.execute('SELECT batches, names FROM "window" WHERE "window" = ?', (window,)).fetchone()
            return (row or (0, 0)) == (len(batches), digest_of(batches))

        return self._ask(question)

    def windows(self) -> list[str]:
        """Every window that anything has landed in, in order."""
        return self._ask(
            lambda db: [each for (each,) in db.execute('SELECT "window" FROM "window" ORDER BY "window"')]
        )

    def reaching(self, epoch: int, first: Position, last: Position) -> list[LandedPart]:
        """The data files of ``epoch`` that hold positions from ``first`` to ``last``, both included."""

        def question(db: sqlite3.Connection) -> list[LandedPart]:
            rows = db.execute(
                'SELECT reach."window", reach.batch, facts, part.crc FROM reach LEFT JOIN part ON '
                'part."window" = reach."window" AND part.batch = reach.batch AND part.number = reach.number '
                "WHERE epoch = ? AND last >= ? AND first <= ?",
                (epoch, sortable(first), sortable(last)),
            ).fetchall()
            for window, batch, facts, crc in rows:
                if facts is None:
                    raise IndexDamaged
                require_checksum(crc, window, batch, facts)
            return [LandedPart.from_text(window, batch, facts) for window, batch, facts, _ in rows]

        return self._ask(question)

    def names(self, prefix: str = "") -> list[str]:
        """The names of all batches that begin with ``prefix``, in order."""
        return self.between(prefix, prefix + BEHIND)

    def between(self, first: str, end: str) -> list[str]:
        """The names of all batches from ``first`` on, below ``end``, in order."""

        def question(db: sqlite3.Connection) -> list[str]:
            rows = db.execute("SELECT id FROM batch WHERE id >= ? AND id < ? ORDER BY id", (first, end))
            return [name for (name,) in rows]

        return self._ask(question)

    def highest(self, prefix: str, below: str | None = None, *, count: int = 100) -> list[str]:
        """The highest ``count`` names with ``prefix``, below ``below`` if given, the highest first."""
        limits = prefix, prefix + BEHIND if below is None else below, count

        def question(db: sqlite3.Connection) -> list[str]:
            rows = db.execute(
                "SELECT id FROM batch WHERE id >= ? AND id < ? ORDER BY id DESC LIMIT ?", limits
            )
            return [name for (name,) in rows]

        return self._ask(question)

    def news(self, era: str | None, number: int) -> News:
        """Return what landed after the look that ended with ``number`` in ``era`` (None: no look)."""

        def question(db: sqlite3.Connection) -> News:
            now, newest = db.execute("SELECT era, newest FROM meta").fetchone()
            if now != era or newest < number:
                return News(now, newest, (), anew=True)
            rows = db.execute(
                "SELECT id, line, windows, crc FROM batch WHERE number > ? ORDER BY number", (number,)
            ).fetchall()
            if len(rows) != newest - number:
                raise IndexDamaged
            for batch, line, windows, crc in rows:
                require_checksum(crc, batch, line, windows)
            return News(
                now,
                newest,
                tuple((batch, tuple(json.loads(windows))) for batch, _, windows, _ in rows),
                False,
            )

        return self._ask(question)

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        with self._mine():
            self._close()

    def look_again(self) -> None:
        """Have the next read compare every manifest with the index.

        This finds a manifest that was changed in place, which does not change the folder's time. It costs a
        look at every file.
        """
        with self._mine(), contextlib.suppress(OSError, sqlite3.Error, IndexDamaged):
            db = self._connected()
            with self._alone(), failpoint("landing.index", "look"), writing(db):
                db.execute("UPDATE meta SET stamp = NULL")

    # --- adding to it -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def adding(self) -> Iterator[Callable[[Manifest], None]]:
        """Context in which one manifest is created: call the yielded function with it once it exists.

        If the index cannot be updated now, the next read updates it.
        """
        with self._mine(), self._alone():
            current = self._current_on_disk()
            added: list[Manifest] = []
            yield added.append
            if current is not None:
                with contextlib.suppress(
                    OSError, sqlite3.Error, IndexDamaged, ValueError, TypeError, LookupError
                ):
                    self._add(current, added)

    def _add(self, db: sqlite3.Connection, added: list[Manifest]) -> None:
        stamp = self._stamp()
        with failpoint("landing.index", added[0].batch_id if added else ""), writing(db):
            for manifest in added:
                written = os.stat(self._manifests / f"{manifest.batch_id}{SUFFIX}")
                insert(db, manifest, written.st_size, written.st_mtime_ns)
                step(db, BatchLine.of(manifest))
            db.execute("UPDATE meta SET stamp = ?", (stamp,))

    def _current_on_disk(self) -> sqlite3.Connection | None:
        """Return the index if it is up to date, else None."""
        with contextlib.suppress(OSError, sqlite3.Error, IndexDamaged):
            db = self._connected()
            if self._is_current(db):
                return db
        return None

    # --- keeping it up to date --------------------------------------------------------------------

    def _ask(self, question: Callable[[sqlite3.Connection], T], starts: Starts | None = None) -> T:
        self._bring()
        with self._mine():
            try:
                return self._answer(question, starts)
            except (OSError, sqlite3.Error, IndexDamaged):
                self._close()
                return self._answer_in_memory(question, starts)

    def _answer(self, question: Callable[[sqlite3.Connection], T], starts: Starts | None) -> T:
        for look in range(_LOOKS):
            try:
                db = self._connected()
                with contextlib.suppress(_Outdated), reading(db):
                    if self._is_current(db):
                        return question(db)
                # Hold the lock: otherwise others may land one batch after the other meanwhile.
                with self._alone():
                    self._bring_up(db)
                    with contextlib.suppress(_Outdated):
                        return question(db)
                    with failpoint("landing.index", "epochs"), writing(db):
                        fold(db, starts or {})
                    return question(db)
            except (sqlite3.Error, IndexDamaged, ValueError, TypeError, LookupError) as problem:
                if look == _LOOKS - 1 or _is_of_the_file_system(problem):
                    raise
                self._drop()
        raise AssertionError("the last look answers or raises")

    def _answer_in_memory(self, question: Callable[[sqlite3.Connection], T], starts: Starts | None) -> T:
        if self._memory is None:
            self._memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._make(self._memory)
        with writing(self._memory):
            self._compare(self._memory)
        try:
            return question(self._memory)
        except _Outdated:
            fold(self._memory, starts or {})
            return question(self._memory)

    def _bring_up(self, db: sqlite3.Connection) -> None:
        """Update the index from the folder; call it with the lock held. A change by somebody who ignores the
        lock changes the folder's time, so the next read notices it."""
        if self._is_current(db):
            return
        stamp = self._stamp()
        with failpoint("landing.index", "all"), writing(db):
            self._compare(db)
            db.execute("UPDATE meta SET stamp = ?", (stamp,))

    def _compare(self, db: sqlite3.Connection) -> None:
        """Make ``db`` agree with the manifests in the folder, except for the standings of epochs."""
        # No failpoint: landing.index is around this transaction, or the index is in memory.
        db.execute(
            "CREATE TEMP TABLE IF NOT EXISTS listed (id TEXT PRIMARY KEY, size INTEGER, changed INTEGER)"
        )
        db.execute("DELETE FROM listed")
        db.executemany("INSERT INTO listed VALUES (?, ?, ?)", self._listed())
        gone = db.execute(
            "SELECT batch.id FROM batch LEFT JOIN listed USING (id) WHERE listed.id IS NULL "
            "OR listed.size <> batch.size OR listed.changed <> batch.changed"
        ).fetchall()
        for (batch_id,) in gone:
            forget(db, batch_id)
        if gone:
            db.execute("UPDATE meta SET era = ?", (uuid.uuid4().hex,))
        missing = "SELECT listed.* FROM listed LEFT JOIN batch USING (id) WHERE batch.id IS NULL"
        while new := db.execute(f"{missing} ORDER BY listed.id LIMIT {_ROWS_AT_ONCE}").fetchall():
            for batch_id, size, changed in new:
                manifest = self._parse(batch_id)
                insert(db, manifest, size, changed)
                if len(new) > 1 or gone:
                    touch(db, manifest.epoch)
                else:
                    step(db, BatchLine.of(manifest))
            if len(new) == _ROWS_AT_ONCE and db is not self._memory:
                # Commit what was parsed so far, in case this is interrupted.
                db.execute("UPDATE meta SET stamp = NULL")
                db.execute("COMMIT")
                db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM listed")

    def _listed(self) -> Iterator[tuple[str, int, int]]:
        with os.scandir(self._manifests) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield entry.name.removesuffix(SUFFIX), status.st_size, status.st_mtime_ns

    def _stamp(self) -> int:
        """Mark the state of the folder with a modification time that no other change produces."""
        stamp = time.time_ns() // 1000 * 1000 + 1 + uuid.uuid4().int % 999
        os.utime(self._manifests, ns=(stamp, stamp))
        if self._changed() != stamp:
            raise OSError("the file system does not keep times to the nanosecond")
        return stamp

    def _changed(self) -> int:
        return self._manifests.stat().st_mtime_ns

    def _is_current(self, db: sqlite3.Connection) -> bool:
        row = db.execute("SELECT made_for, stamp FROM meta").fetchone()
        if row is None or row[0] != self._made_for():
            raise IndexDamaged
        return bool(row[1] == self._changed())

    def _made_for(self) -> str:
        """Return the identity of the file that the index was made for: a copy has another one."""
        return f"{FORMAT_VERSION}/{os.stat(self._file).st_ino}/{os.stat(self._manifests).st_ino}"

    # --- the file ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _mine(self) -> Iterator[None]:
        if self._process != os.getpid():
            # The connections are the parent process's; closing them here would be as wrong as using them.
            _of_parents.append((self._db, self._memory))
            self._lock, self._process = threading.RLock(), os.getpid()
            self._db = self._memory = None
            self._is_alone = False
        with self._lock:
            yield

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self._is_alone:
            yield
            return
        with locked_folder(self._manifests):
            self._is_alone = True
            try:
                yield
            finally:
                self._is_alone = False

    def _connected(self) -> sqlite3.Connection:
        if self._db is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.stat(self._file).st_ino == self._db_of:
                    return self._db
            self._close()
        if not self._file.exists():
            with self._alone():
                if not self._file.exists():
                    self._create()
        self._db = connect(self._file)
        self._db_of = os.stat(self._file).st_ino
        return self._db

    def _create(self) -> None:
        # No failpoint: an empty file in the place of the index: it is made anew.
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._remove()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.close(descriptor)
        with failpoint("landing.index", "new"):
            db = connect(self._file)
            try:
                self._make(db)
            finally:
                db.close()

    def _make(self, db: sqlite3.Connection) -> None:
        made_for = self._made_for() if db is not self._memory else ""
        with writing(db):
            for statement in TABLES.split(";"):
                # No failpoint: landing.index is around this transaction, or the index is in memory.
                db.execute(statement)
            db.execute("INSERT INTO meta VALUES (1, ?, NULL, ?, 0, 0, 0)", (made_for, uuid.uuid4().hex))

    def _drop(self) -> None:
        """Remove an index that is damaged, unless somebody has done so meanwhile."""
        seen = self._db_of
        self._close()
        with self._alone(), contextlib.suppress(FileNotFoundError):
            if seen is None or os.stat(self._file).st_ino == seen:
                self._remove()

    def _remove(self) -> None:
        # The file last: while it is there, the others belong to it.
        for name in ("-wal", "-shm", "-journal", ""):
            with failpoint("landing.index", "removed"):
                Path(f"{self._file}{name}").unlink(missing_ok=True)

    def _close(self) -> None:
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = self._db_of = None


_of_parents: list[object] = []
"""Connections of the process that this one was forked from."""


def _is_of_the_file_system(problem: Exception) -> bool:
    """Return whether the file system keeps the index from being used: a full disk, a lock, missing rights."""
    code = getattr(problem, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _NOT_WRITABLE
