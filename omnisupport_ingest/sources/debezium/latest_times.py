"""The latest time of each key in one file. Beyond a few megabytes it is kept on disk: a file may have any
number of keys."""

from __future__ import annotations

import sqlite3
from typing import Self

from omnisupport_ingest.landing.rows import LandedEvent


class LatestTimes:
    """Finds events that come after an event of the same key with a later time."""

    def __init__(self) -> None:
        # The empty name makes a temporary SQLite database, which is deleted when the connection closes.
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        # No failpoint: a temporary database of one reading.
        self._base.execute("CREATE TABLE latest (key TEXT PRIMARY KEY, ordinal INTEGER) WITHOUT ROWID")

    def comes_after_a_later_one(self, event: LandedEvent) -> bool:
        """Take the next ``event`` of the file; return whether one with a later time came before. The ordinal
        is the time."""
        if event.key is None or event.identity is None:
            return False
        row = self._base.execute("SELECT ordinal FROM latest WHERE key = ?", (event.identity,)).fetchone()
        if row is not None and row[0] > event.ordinal:
            return True
        self._base.execute("INSERT OR REPLACE INTO latest VALUES (?, ?)", (event.identity, event.ordinal))
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()
