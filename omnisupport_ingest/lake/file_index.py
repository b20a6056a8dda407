"""An index of the files that each table holds, by window, shared by all processes.

delta-rs reads the list of all files whenever it opens a table, and a table of events has files for every
window it ever had. The index is an SQLite file in the source's folder of the lake. It is updated from the new
entries of the log, and a lookup of one window reads only that window's files. Each file is listed with the
version that added it (``since``) and the one that removed it (``until``), so an older snapshot still finds
its files while others commit.

The log is the truth. An index is rebuilt from what delta-rs reads if it is missing, damaged, a copy, or of
another table or another history of the log. A process that cannot use the file works without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from deltalake import DeltaTable

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.file_index_tables import (
    AT,
    FORMAT,
    IndexedVersion,
    ListedFile,
    TableLog,
    add,
    digest_of,
    entries,
    file_of,
    forward,
    has_checkpoint_after,
    known,
    listed_by,
    make_tables,
    put,
    unknown_features,
    version_of,
)
from omnisupport_ingest.sqlite_index import (
    IndexDamaged,
    reading,
    require_checksum,
    require_location,
    writing,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0
_OPEN_FILES = 8


class VersionNotIndexed(Exception):
    """Raised when the index no longer knows the wanted version; delta-rs does."""


class FileIndex:
    """The index of the tables of one source, as this process has it open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._db_of: int | None = None

    def newest(self, table: TableLog) -> IndexedVersion | None:
        """Update the index of ``table`` from its log and return the newest version; None if it is unknown."""
        return self._query(lambda db: _newest(db, table))

    def held(self, name: str) -> IndexedVersion | None:
        """Return the version of the table ``name`` up to which the index has read its log; None without
        one."""
        found = self._query(lambda db: known(db, name))
        return None if found is None else found[1]

    def without(self, window: str, entries: Mapping[str, str]) -> frozenset[str]:
        """Return those tables that have no file of ``window``, by one look at the index for all.

        ``entries``: digest of the log entry of each version, by the name of its table. A table that the
        index knows at another version is not returned.
        """
        return self._query(lambda db: _without(db, window, entries)) or frozenset()

    def learn(self, table: TableLog, handle: DeltaTable) -> IndexedVersion | None:
        """Index the files of the version that ``handle`` has open; None if the index cannot be used for
        it."""
        indexed = None if unknown_features(handle) else version_of(handle, table)
        if indexed is None:
            return None
        files = list(listed_by(handle, table, indexed.partition_by))
        return self._query(lambda db: _learn(db, table, indexed, files))

    def windows(self, name: str, indexed: IndexedVersion) -> list[str]:
        """Return the windows that have files at ``indexed``, sorted. Raises ``VersionNotIndexed``."""
        sql = f'SELECT DISTINCT "window" FROM file {AT} ORDER BY "window"'
        return [window for (window,) in self._rows(name, indexed, sql)]

    def last_window(self, name: str, indexed: IndexedVersion) -> str | None:
        """Return the last window that has files; None without one. Raises ``VersionNotIndexed``."""
        rows = self._rows(name, indexed, f'SELECT "window" FROM file {AT} ORDER BY "window" DESC LIMIT 1')
        return rows[0][0] if rows else None

    def files(
        self, name: str, indexed: IndexedVersion, window: str | None, *, like: str = "*"
    ) -> list[ListedFile]:
        """Return the files of ``window`` (None: of all windows) at ``indexed``, sorted by window and path.

        ``like``: only those of ``window`` whose path matches this pattern of SQLite's GLOB. Raises
        ``VersionNotIndexed``.
        """
        sql = f'SELECT "window", path, since, until, facts, crc FROM file {AT}'
        if window is None:
            rows = self._rows(name, indexed, f'{sql} ORDER BY "window", path')
        else:
            sql = f'{sql} AND "window" = ? AND path GLOB ? ORDER BY path'
            rows = self._rows(name, indexed, sql, window, like)
        try:
            return [file_of(*row) for row in rows]
        except IndexDamaged:
            self._drop()
            raise VersionNotIndexed from None

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        with self._lock:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()
            self._db = self._db_of = None

    def _rows(self, name: str, indexed: IndexedVersion, sql: str, *more: str) -> list[tuple[Any, ...]]:
        found = self._query(lambda db: _rows_of(db, name, indexed, sql, more))
        if found is None:
            raise VersionNotIndexed
        return found

    def _query(self, query: Callable[[sqlite3.Connection], T | None]) -> T | None:
        """Return the result of ``query``; None if the file cannot be used. A damaged file is removed."""
        with self._lock:
            try:
                db = self._connected()
                return None if db is None else query(db)
            except IndexDamaged:
                self._drop()
            except OSError:
                self.close()
            except sqlite3.DatabaseError as problem:
                # An operational error comes from outside the file: the disk, a lock, missing rights.
                if isinstance(problem, sqlite3.OperationalError):
                    _log.debug("The index of files %s cannot be used: %s", self._file, problem)
                    self.close()
                else:
                    self._drop()
        return None

    def _drop(self) -> None:
        self.close()
        # The database file last: while it exists, SQLite takes the others as its own.
        for suffix in ("-wal", "-shm", "-journal", ""):
            with failpoint("lake.listed", "removed"), contextlib.suppress(OSError):
                Path(f"{self._file}{suffix}").unlink()

    def _connected(self) -> sqlite3.Connection | None:
        if self._db is not None and _inode(self._file) == self._db_of:
            return self._db
        self.close()
        try:
            with failpoint("lake.listed", "new"):
                self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                # Open to its owner only, as the lake is.
                os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            return None
        db = sqlite3.connect(self._file, isolation_level=None, timeout=_WAIT_SECONDS, check_same_thread=False)
        self._db, self._db_of = db, _inode(self._file)
        if db.execute("PRAGMA user_version").fetchone() != (FORMAT,):
            db.execute("PRAGMA journal_mode = WAL")
            with failpoint("lake.listed", "tables"), writing(db):
                make_tables(db, self._file)
        require_location(db, self._file)
        db.execute("PRAGMA synchronous = NORMAL")
        return db


def index_of(lake: Path, name: str) -> FileIndex:
    """Return the index of the table ``name`` (``source/…``) in ``lake``, as this process has it open."""
    global _process, _indexes
    if _process != os.getpid():
        # SQLite forbids a forked process both to use and to close what its parent opened.
        _of_parents.append(_indexes)
        _process, _indexes = os.getpid(), {}
    source = name.split("/")[0] if "/" in name else ""
    file = lake / source / "noted" / "files.sqlite"
    found = _indexes.pop(file, None) or FileIndex(file)
    _indexes[file] = found
    while len(_indexes) > _OPEN_FILES:
        # Another thread may have removed the same one.
        oldest = _indexes.pop(next(iter(list(_indexes)), file), None)
        if oldest is not None:
            oldest.close()
    return found


_indexes: dict[Path, FileIndex] = {}
_of_parents: list[dict[Path, FileIndex]] = []
"""The indexes that the parent process had open before it forked this one."""
_process = os.getpid()


def _newest(db: sqlite3.Connection, table: TableLog) -> IndexedVersion | None:
    while (held := known(db, table.name)) is not None:
        number, indexed = held
        if indexed.ordered_by != table.ordered_by:
            return None
        if digest_of(table.entry(indexed.version)) != indexed.entry:
            return None
        news = list(entries(table, indexed.version))
        if has_checkpoint_after(table, indexed.version + len(news)):
            return None
        if not news:
            return indexed
        with failpoint("lake.listed", table.name), writing(db):
            if known(db, table.name) == held:
                return forward(db, number, indexed, table, news)
    return None


def _without(db: sqlite3.Connection, window: str, entries: Mapping[str, str]) -> frozenset[str]:
    with reading(db):
        rows = db.execute(
            "SELECT path, note, crc, json_extract(note, '$.entry') FROM listed "
            'WHERE NOT EXISTS (SELECT 1 FROM file WHERE listed = number AND "window" = ?)',
            (window,),
        ).fetchall()
    found = [(name, text, crc) for name, text, crc, entry in rows if entries.get(name) == entry]
    for name, text, crc in found:
        require_checksum(crc, name, text)
    return frozenset(name for name, _, _ in found)


def _learn(
    db: sqlite3.Connection, table: TableLog, indexed: IndexedVersion, files: Iterable[ListedFile]
) -> IndexedVersion | None:
    with failpoint("lake.listed", table.name), writing(db):
        held = known(db, table.name)
        if held is not None and held[1].version > indexed.version and _is_there(table, held[1]):
            # Another process indexed a newer version meanwhile.
            return None
        db.execute("INSERT OR IGNORE INTO listed (path) VALUES (?)", (table.name,))
        (number,) = db.execute("SELECT number FROM listed WHERE path = ?", (table.name,)).fetchone()
        db.execute("DELETE FROM file WHERE listed = ?", (number,))
        add(db, number, indexed.version, files)
        put(db, number, indexed)
    return indexed


def _rows_of(
    db: sqlite3.Connection, name: str, indexed: IndexedVersion, sql: str, more: tuple[str, ...]
) -> list[tuple[Any, ...]] | None:
    db.execute("BEGIN")
    try:
        held = known(db, name)
        if held is None or held[1].era != indexed.era or held[1].floor > indexed.version:
            return None
        # No failpoint: a SELECT, put together elsewhere.
        return db.execute(sql, (held[0], indexed.version, indexed.version, *more)).fetchall()
    finally:
        db.execute("ROLLBACK")


def _is_there(table: TableLog, indexed: IndexedVersion) -> bool:
    return digest_of(table.entry(indexed.version)) == indexed.entry


def _inode(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        return file.stat().st_ino
    return None
