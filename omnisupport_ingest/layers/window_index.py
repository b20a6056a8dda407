"""Numbers about the windows of a source from the last look, in a file for later processes.

It is an SQLite file in the lake's folder of the source: a row per window, the totals, and a note of how far
the look came and at which versions (``LookNote``). So a new process looks only at what changed since. The
file is a cache: tables and landing are the truth. A file that is missing, damaged, copied from elsewhere, or
of another version or other tables is made again by a look at every window. A process that cannot use the file
(a full disk, another user's home) keeps the numbers in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from omnisupport_ingest import __version__
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.json_values import from_plain
from omnisupport_ingest.lake.snapshot import TableNote
from omnisupport_ingest.records import encode_line
from omnisupport_ingest.sqlite_index import (
    IndexDamaged,
    checksum,
    location_id,
    require_checksum,
    require_location,
)

FORMAT = f"5/{__version__}"
"""Version of the file and of the look; a process with another version looks at every window once."""

UNSETTLED, WITHHELD, WRONG = "unsettled", "withheld", "wrong"
UNEXPLAINED, TO_CLOSE = "unexplained", "to_close"
LEFT_COLLISION, LEFT_OLDER, UNAPPLIED = "left_collision", "left_older", "unapplied"
"""Numbers with an SQL index, which finds the windows where they are not 0."""

HELD = "held "
"""Prefix of a reason; names the number of events in quarantine for that reason."""

DISCARDED_OF = "discarded "
"""Prefix of a reason; names the number of its events that a review has discarded."""

_FLAGS = (
    *(UNSETTLED, WITHHELD, WRONG, UNEXPLAINED, TO_CLOSE),
    *(LEFT_COLLISION, LEFT_OLDER, UNAPPLIED),
)

_PAST_SECONDS = 2 * 86_400.0
"""How long the numbers of undiscarded events are kept."""
_COUNTED = "windows with "

_TABLES = """
CREATE TABLE look (one INTEGER PRIMARY KEY, note TEXT, crc INTEGER);
CREATE TABLE "window" ("window" TEXT PRIMARY KEY, numbers TEXT, crc INTEGER) WITHOUT ROWID;
CREATE TABLE flagged (flag TEXT, "window" TEXT, PRIMARY KEY (flag, "window")) WITHOUT ROWID;
CREATE TABLE past (at REAL PRIMARY KEY, held TEXT, crc INTEGER) WITHOUT ROWID;
"""

_WAIT_SECONDS = 60.0
"""How long to wait for the look of another process."""


@dataclass(frozen=True, slots=True)
class NotedWindow:
    """What a look found of an unsettled window. ``at``: when it looked (seconds since 1970). ``found``: as
    JSON text."""

    at: float
    found: str


@dataclass(frozen=True, slots=True)
class LookNote:
    """How far a look has seen: of landing, by ``era`` and ``number`` (``landing.index.News``); and of each
    partitioned table, by path.

    ``judged_by``: digest of what all windows are judged by; ``apart``: what some are judged by besides.
    ``looked_again``: the last window that was looked at without a sign of a change. ``totals``: the sums of
    the windows' numbers. Each look that finds something changes ``revision``. ``unsettled``: what was found
    of windows that are not settled, while they are few.
    """

    format: str = FORMAT
    revision: str = ""
    era: str | None = None
    number: int = 0
    judged_by: str = ""
    looked_again: str = ""
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tables: Mapping[str, TableNote] = field(default_factory=dict)
    totals: Mapping[str, int] = field(default_factory=dict)
    unsettled: Mapping[str, NotedWindow] = field(default_factory=dict)


class WindowIndex:
    """The index of one source, for one look at a time: ``begin``, then ``commit`` or ``rollback``.

    If the file cannot be used, methods raise ``IndexDamaged``, an ``sqlite3.Error`` or an ``OSError``.
    """

    def __init__(self, file: Path | None) -> None:
        """``file``: None keeps the index in memory."""
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._db_of: int | None = None
        self._process = os.getpid()
        self._changed = False
        self._read: tuple[str, LookNote] | None = None
        self.totals: Counter[str] = Counter()

    def begin(self) -> LookNote:
        """Lock out other looks and return the note of the last one; an empty note if there is none."""
        db = self._connected()
        db.execute("BEGIN IMMEDIATE")
        self._changed = False
        row = db.execute("SELECT note, crc FROM look").fetchone()
        if row is None:
            self.totals = Counter()
            return LookNote()
        require_checksum(row[1], row[0])
        if self._read is None or self._read[0] != row[0]:
            try:
                self._read = row[0], from_plain(LookNote, parse_json(row[0]))
            except Unreadable:
                raise IndexDamaged from None
        note = self._read[1]
        if note.format != FORMAT:
            raise IndexDamaged
        self.totals = Counter(note.totals)
        return note

    def put(self, window: str, numbers: Mapping[str, int]) -> None:
        """Set the numbers of ``window``; those that ``numbers`` lacks become 0."""
        db, new = self._db_open(), {name: number for name, number in sorted(numbers.items()) if number}
        old = self.numbers(window)
        if old == new:
            return
        self._changed = True
        self._count(old, -1)
        self._count(new, 1)
        for flag in _FLAGS:
            if flag in old and flag not in new:
                # No failpoint: lake.noted is around the commit of this transaction.
                db.execute('DELETE FROM flagged WHERE flag = ? AND "window" = ?', (flag, window))
            elif flag in new and flag not in old:
                db.execute("INSERT OR REPLACE INTO flagged VALUES (?, ?)", (flag, window))
        if new:
            text = json.dumps(new, separators=(",", ":"))
            db.execute(
                'INSERT OR REPLACE INTO "window" VALUES (?, ?, ?)', (window, text, checksum(window, text))
            )
        else:
            db.execute('DELETE FROM "window" WHERE "window" = ?', (window,))

    def forget_all(self) -> None:
        """Set all numbers of all windows to 0."""
        self._changed = True
        self.totals = Counter()
        for table in ("flagged", '"window"'):
            # No failpoint: lake.noted is around the commit of this transaction.
            self._db_open().execute(f"DELETE FROM {table}")

    def flagged(self, flag: str) -> list[str]:
        """The windows whose number ``flag`` is not 0, in order."""
        rows = self._db_open().execute(
            'SELECT "window" FROM flagged WHERE flag = ? ORDER BY "window"', (flag,)
        )
        found = [window for (window,) in rows]
        if len(found) != self.totals[_COUNTED + flag]:
            raise IndexDamaged
        return found

    def numbers(self, window: str) -> dict[str, int]:
        """The numbers of ``window`` that are not 0."""
        row = (
            self._db_open()
            .execute('SELECT numbers, crc FROM "window" WHERE "window" = ?', (window,))
            .fetchone()
        )
        if row is None:
            return {}
        require_checksum(row[1], window, row[0])
        found: dict[str, int] = json.loads(row[0])
        return found

    def after(self, window: str, count: int) -> list[str]:
        """The next ``count`` windows after ``window``, in order; fewer at the end."""
        rows = self._db_open().execute(
            'SELECT "window" FROM "window" WHERE "window" > ? ORDER BY "window" LIMIT ?', (window, count)
        )
        return [name for (name,) in rows]

    def last(self, below: str | None, count: int) -> list[str]:
        """The last ``count`` windows before ``below`` (None: of all), latest first."""
        rows = self._db_open().execute(
            'SELECT "window" FROM "window" WHERE ? IS NULL OR "window" < ? ORDER BY "window" DESC LIMIT ?',
            (below, below, count),
        )
        return [window for (window,) in rows]

    def held_at(self, moment: datetime) -> Counter[str] | None:
        """Return how many undiscarded events were in quarantine at ``moment`` (timezone-aware), by reason;
        None if no look that old is recorded."""
        row = (
            self._db_open()
            .execute("SELECT held, crc FROM past WHERE at <= ? ORDER BY at DESC", (moment.timestamp(),))
            .fetchone()
        )
        if row is None:
            return None
        require_checksum(row[1], row[0])
        return Counter(json.loads(row[0]))

    def commit(self, note: LookNote, before: LookNote) -> LookNote:
        """End the look; ``before``: the result of ``begin``. Writes only if something changed."""
        if not self._changed and note == before:
            self.rollback()
            return before
        noted = replace(note, revision=uuid.uuid4().hex, totals=dict(self.totals))
        text = encode_line(noted)
        db = self._db_open()
        with failpoint("lake.noted", self._file or ""):
            self._note_held(db, time.time())
            db.execute("INSERT OR REPLACE INTO look VALUES (1, ?, ?)", (text, checksum(text)))
            db.execute("COMMIT")
        self._read = text, noted
        return noted

    def rollback(self) -> None:
        """End the look and discard its changes."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def drop(self) -> None:
        """Remove the file: the next look starts empty."""
        self.close()
        # Delete the database file last: while it exists, SQLite takes the others as its own.
        for suffix in ("-wal", "-shm", "-journal", ""):
            with failpoint("lake.noted", "removed"), contextlib.suppress(OSError):
                Path(f"{self._file}{suffix}").unlink()

    def keep_in_memory(self) -> None:
        """Stop using the file; keep the index in memory from now on."""
        self.close()
        self._file = None

    def close(self) -> None:
        """Close the file; the next look opens it again."""
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):
                self._db.close()
        self._db = self._db_of = None

    def _note_held(self, db: sqlite3.Connection, now: float) -> None:
        reasons = [name.removeprefix(HELD) for name in self.totals if name.startswith(HELD)]
        held = {each: self.totals[f"{HELD}{each}"] - self.totals[f"{DISCARDED_OF}{each}"] for each in reasons}
        text = json.dumps({reason: held[reason] for reason in sorted(held) if held[reason]})
        last = db.execute("SELECT held FROM past ORDER BY at DESC").fetchone()
        if last is None or last[0] != text:
            db.execute("INSERT OR REPLACE INTO past VALUES (?, ?, ?)", (now, text, checksum(text)))
        oldest = "(SELECT max(at) FROM past WHERE at <= ?)"
        # No failpoint: lake.noted is around the commit of this transaction.
        db.execute(f"DELETE FROM past WHERE at < {oldest}", (now - _PAST_SECONDS,))

    def _count(self, numbers: Mapping[str, int], sign: int) -> None:
        for name, number in numbers.items():
            self.totals[name] += sign * number
            if name in _FLAGS:
                self.totals[_COUNTED + name] += sign

    def _db_open(self) -> sqlite3.Connection:
        assert self._db is not None, "between begin and its end"
        return self._db

    def _connected(self) -> sqlite3.Connection:
        if self._process != os.getpid():
            # The connection is the parent process's; closing it here would be as wrong as using it.
            _of_parents.append(self._db)
            self._db, self._process = None, os.getpid()
        if self._db is not None:
            if self._file is None or _inode(self._file) == self._db_of:
                return self._db
            self.close()
        if self._file is None:
            self._db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            self._db.executescript(_TABLES)
            return self._db
        return self._opened(self._file)

    def _opened(self, file: Path) -> sqlite3.Connection:
        with failpoint("lake.noted", "new"):
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Only the owner may read it, as for the rest of the lake.
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._db = sqlite3.connect(file, isolation_level=None, timeout=_WAIT_SECONDS, check_same_thread=False)
        self._db_of = _inode(file)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with failpoint("lake.noted", "tables"):
            self._db.execute("BEGIN IMMEDIATE")
            if self._db.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA application_id = {location_id(file)}")
            self._db.execute("COMMIT")
        require_location(self._db, file)
        return self._db


_of_parents: list[sqlite3.Connection | None] = []
"""Connections inherited from the parent process by a fork; they are kept open and never used."""


def _inode(file: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_ino
    return None
