"""Which files a table holds, by window, kept in a file for processes to come.

Delta's library reads every file that a table holds whenever it opens one, and a table of events has some for
each window that ever was. This is an SQLite file in the lake's folder of a source, brought forward by the log
entries that are new; who asks for a window reads the files of that window. A file is listed ``since`` one
version and ``until`` another, so a snapshot goes on to find what its version holds while others commit.
The log is the truth: a list that is missing, damaged, copied from elsewhere, of another table or of a log
that went another way is made anew from what Delta's library reads. Who cannot use the file does without it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from deltalake import DeltaTable

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake.file_index_tables import (
    AT,
    FORMAT,
    Damaged,
    ListedFile,
    NotedTable,
    TablePlace,
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
    require_place,
    writing,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 60.0
_OPEN_FILES = 8

_FEATURES = {"appendOnly", "invariants", "timestampNtz"}
"""Features that change nothing of what a log entry says of files (Delta protocol, table features)."""


class ListGone(Exception):
    """The list does not tell of the version that was asked for; Delta's library does."""


class FileIndex:
    """The lists of the tables of one source, as this process has them open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._db_of: int | None = None

    def newest(self, table: TablePlace) -> NotedTable | None:
        """The newest version of ``table``, its list brought forward; None where it is not known."""
        return self._ask(lambda db: _newest(db, table))

    def learn(self, table: TablePlace, handle: DeltaTable) -> NotedTable | None:
        """List what ``handle`` holds, a version of ``table``; None if the index cannot."""
        protocol = handle.protocol()
        features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
        ordinary = protocol.min_reader_version == 1 and protocol.min_writer_version <= 2
        entry = digest_of(table.entry(handle.version()))
        if entry is None or not (ordinary or (features and features <= _FEATURES)):
            return None
        metadata = handle.metadata()
        note = NotedTable(
            era=uuid.uuid4().hex,
            floor=handle.version(),
            table_id=str(metadata.id),
            version=handle.version(),
            entry=entry,
            schema=handle.schema().to_json(),
            partition_by=tuple(metadata.partition_columns),
            configuration=dict(metadata.configuration),
            app_version=handle.transaction_version(table.app_id) or 0,
        )
        files = list(listed_by(handle, note.partition_by))
        return self._ask(lambda db: _learn(db, table, note, files))

    def windows(self, name: str, note: NotedTable) -> list[str]:
        """The windows with files at the version of ``note``, in order. ``ListGone``."""
        sql = f'SELECT DISTINCT "window" FROM file {AT} ORDER BY "window"'
        return [window for (window,) in self._rows(name, note, sql)]

    def last_window(self, name: str, note: NotedTable) -> str | None:
        """The last of ``windows``; None where there is none."""
        rows = self._rows(name, note, f'SELECT "window" FROM file {AT} ORDER BY "window" DESC LIMIT 1')
        return rows[0][0] if rows else None

    def files(self, name: str, note: NotedTable, window: str | None) -> list[ListedFile]:
        """The files of ``window`` (null: of all) at the version of ``note``, by window and path.
        ``ListGone``."""
        sql = f'SELECT "window", path, since, until, facts, crc FROM file {AT}'
        if window is None:
            rows = self._rows(name, note, f'{sql} ORDER BY "window", path')
        else:
            rows = self._rows(name, note, f'{sql} AND "window" = ? ORDER BY path', window)
        try:
            return [file_of(*row) for row in rows]
        except Damaged:
            self._drop()
            raise ListGone from None

    def close(self) -> None:
        """Let go of the file; who asks next opens it again."""
        with self._lock:
            if self._db is not None:
                with contextlib.suppress(sqlite3.Error):
                    self._db.close()
            self._db = self._db_of = None

    def _rows(self, name: str, note: NotedTable, sql: str, *more: str) -> list[tuple[Any, ...]]:
        found = self._ask(lambda db: _rows_of(db, name, note, sql, more))
        if found is None:
            raise ListGone
        return found

    def _ask(self, question: Callable[[sqlite3.Connection], T | None]) -> T | None:
        """What ``question`` finds; None if the file cannot be used. One that is damaged is removed."""
        with self._lock:
            try:
                db = self._connected()
                return None if db is None else question(db)
            except Damaged:
                self._drop()
            except OSError:
                self.close()
            except sqlite3.DatabaseError as problem:
                # An operational error is one of the place: the disk, a lock, rights.
                if isinstance(problem, sqlite3.OperationalError):
                    _log.debug("The index of files %s cannot be used: %s", self._file, problem)
                    self.close()
                else:
                    self._drop()
        return None

    def _drop(self) -> None:
        self.close()
        # The file last: while it is there, the others belong to it.
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
        require_place(db, self._file)
        db.execute("PRAGMA synchronous = NORMAL")
        return db


def index_of(lake: Path, name: str) -> FileIndex:
    """The index that the table ``name`` (``source/…``) of the ``lake`` is in, as this process has it open."""
    global _process, _indexes
    if _process != os.getpid():
        # What SQLite has opened is the parent's; to close it here would be as wrong as to use it.
        _of_parents.append(_indexes)
        _process, _indexes = os.getpid(), {}
    source = name.split("/")[0] if "/" in name else ""
    file = lake / source / "noted" / "files.sqlite"
    found = _indexes.pop(file, None) or FileIndex(file)
    _indexes[file] = found
    while len(_indexes) > _OPEN_FILES:
        # Another thread may let go of the same one.
        oldest = _indexes.pop(next(iter(list(_indexes)), file), None)
        if oldest is not None:
            oldest.close()
    return found


_indexes: dict[Path, FileIndex] = {}
_of_parents: list[dict[Path, FileIndex]] = []
"""What the process that this one was forked from has open."""
_process = os.getpid()


def _newest(db: sqlite3.Connection, table: TablePlace) -> NotedTable | None:
    while (held := known(db, table.name)) is not None:
        number, note = held
        if digest_of(table.entry(note.version)) != note.entry:
            return None
        news = list(entries(table, note.version))
        if has_checkpoint_after(table, note.version + len(news)):
            return None
        if not news:
            return note
        with failpoint("lake.listed", table.name), writing(db):
            if known(db, table.name) == held:
                return forward(db, number, note, table, news)
    return None


def _learn(
    db: sqlite3.Connection, table: TablePlace, note: NotedTable, files: Iterable[ListedFile]
) -> NotedTable | None:
    with failpoint("lake.listed", table.name), writing(db):
        held = known(db, table.name)
        if held is not None and held[1].version > note.version and _is_there(table, held[1]):
            # Another process was faster.
            return None
        db.execute("INSERT OR IGNORE INTO listed (path) VALUES (?)", (table.name,))
        (number,) = db.execute("SELECT number FROM listed WHERE path = ?", (table.name,)).fetchone()
        db.execute("DELETE FROM file WHERE listed = ?", (number,))
        add(db, number, note.version, files)
        put(db, number, note)
    return note


def _rows_of(
    db: sqlite3.Connection, name: str, note: NotedTable, sql: str, more: tuple[str, ...]
) -> list[tuple[Any, ...]] | None:
    db.execute("BEGIN")
    try:
        held = known(db, name)
        if held is None or held[1].era != note.era or held[1].floor > note.version:
            return None
        # No failpoint: a SELECT, put together elsewhere.
        return db.execute(sql, (held[0], note.version, note.version, *more)).fetchall()
    finally:
        db.execute("ROLLBACK")


def _is_there(table: TablePlace, note: NotedTable) -> bool:
    return digest_of(table.entry(note.version)) == note.entry


def _inode(file: Path) -> int | None:
    with contextlib.suppress(OSError):
        return file.stat().st_ino
    return None
