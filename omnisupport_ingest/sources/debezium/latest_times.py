"""The latest time of each key in one file, on disk beyond a few megabytes: a file may have any number."""

from __future__ import annotations

import sqlite3
from typing import Self

from omnisupport_ingest.landing.rows import LandedEvent


class LatestTimes:
    """Says of each event whether one of the same key with a later time came before it."""

    def __init__(self) -> None:
        # An empty name: a temporary file of SQLite's, without a name, gone with the connection.
        self._base = sqlite3.connect("", isolation_level=None)
        self._base.execute("PRAGMA journal_mode = OFF")
        # No failpoint: a temporary database of one reading.
        self._base.execute("CREATE TABLE latest (key TEXT PRIMARY KEY, ordinal INTEGER) WITHOUT ROWID")

    def comes_after_a_later_one(self, event: LandedEvent) -> bool:
        """Take ``event`` in, in the order of the file; its ordinal is its time."""
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
