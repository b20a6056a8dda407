"""How far each table of a source has been read, the row versions within the lookback, and the last versions
of rows without a cursor.

It is a small SQLite file in the landing folder. How far a table was read is written only after the rows have
landed. If a process dies in between, the next one reads and lands those rows again, and the copies are
dropped as duplicates. If the file is lost, every table is read whole once more.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.json_values import from_note
from omnisupport_ingest.records import encode_line
from omnisupport_ingest.sources.query.advice import read_anew
from omnisupport_ingest.sources.query.cursor import KeysetPosition
from omnisupport_ingest.sources.query.errors import AnotherDatabase

FILE = "cursors.sqlite"


class CursorsUnreadable(IngestError):
    """The file with the cursors of a source cannot be read.

    Fix: Move it away: every table is read once from its beginning, and what has landed before is dropped as
    duplicates.
    """


@dataclass(frozen=True, slots=True)
class UnfinishedReading:
    """A reading of a table that has begun and not ended. Cursors are texts of the source.

    ``started``: the source's clock when it began. ``low``, ``high``: the cursors between which it reads
    (None: open, or no row has one). ``until``: the table's cursor once it has ended. ``full``: it reads the
    whole table. ``after``: the last row that has landed. ``nulls``: it is at the rows without a cursor.
    """

    started: datetime
    low: str | None
    high: str | None
    until: str | None
    full: bool
    nulls: bool
    after: KeysetPosition | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a table has been read. ``cursor``: all rows up to it were read; None: never read to its end.

    ``epoch``: in which it was last read whole. ``type``: the cursor column's type then. ``reading``: the
    unfinished one. ``finished``: the source's clock when the last finished reading started. ``column``: the
    cursor column (None: written by an earlier version).
    """

    epoch: int
    type: str
    cursor: str | None = None
    reading: UnfinishedReading | None = None
    finished: datetime | None = None
    column: str | None = None


@dataclass(frozen=True, slots=True)
class LandedVersion:
    """A landed version of a row: key (JSON), cursor as a number, hash of its image."""

    key: str
    cursor: int
    image: int


@dataclass(frozen=True, slots=True)
class NullRow:
    """The last landed version of a row without a cursor: key (JSON), ordinal, hash of its image (None: a
    delete, or unknown)."""

    key: str
    ordinal: int
    image: int | None


class QueryState:
    """The state in ``folder``; a context manager that closes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        # Landing has a folder per source, so the folder's name is the source's.
        self._source = folder.name
        try:
            with failpoint("query.state"):
                self._base = sqlite3.connect(self.path, isolation_level=None)
                self.path.chmod(0o600)
                self._base.execute("PRAGMA synchronous = FULL")
                # Deleted entries are overwritten: from the hash of a plain image, its values can be guessed.
                self._base.execute("PRAGMA secure_delete = ON")
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS progress (name TEXT PRIMARY KEY, told TEXT NOT NULL)"
                )
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS seen (name TEXT, key TEXT, cursor INTEGER, image INTEGER,"
                    " PRIMARY KEY (name, key, cursor, image)) WITHOUT ROWID"
                )
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS null_rows (name TEXT, key TEXT, ordinal INTEGER NOT NULL,"
                    " image INTEGER, PRIMARY KEY (name, key)) WITHOUT ROWID"
                )
                self._base.execute("CREATE TABLE IF NOT EXISTS null_rows_known (name TEXT PRIMARY KEY)")
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS source"
                    " (one INTEGER PRIMARY KEY CHECK (one = 1), database TEXT)"
                )
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS reached"
                    " (one INTEGER PRIMARY KEY CHECK (one = 1), lsn INTEGER NOT NULL)"
                )
                self._base.execute(
                    "CREATE TABLE IF NOT EXISTS schemas"
                    " (name TEXT PRIMARY KEY, number INTEGER NOT NULL, columns TEXT NOT NULL)"
                )
        except sqlite3.DatabaseError as error:
            raise self._unreadable(error) from None

    def progress(self, table: str) -> Progress | None:
        """Return the progress of ``schema.table``; None before its first reading."""
        try:
            found = self._base.execute("SELECT told FROM progress WHERE name = ?", (table,)).fetchone()
            return None if found is None else from_note(Progress, parse_json(found[0]))
        except (sqlite3.DatabaseError, Unreadable) as error:
            raise self._unreadable(error) from None

    def claim(self, database: str | None) -> None:
        """Record the identity of the database to which the cursors belong, if it is known and none is
        recorded yet.

        Raises ``AnotherDatabase`` if the recorded one differs.
        """
        found = self._base.execute("SELECT database FROM source").fetchone()
        if database is None or (found is not None and found[0] == database):
            return
        if found is not None:
            raise AnotherDatabase(
                f"The connection leads to the database {database}; the cursors are of {found[0]}. What "
                "committed in the one says nothing of the other.",
                fix="Correct the connection. If the database was moved there or restored from a backup, read "
                f"all of it anew: {read_anew(self._source, 'restored from a backup')}",
            )
        with failpoint("query.state"):
            self._base.execute("INSERT INTO source VALUES (1, ?)", (database,))

    def reach(self, lsn: int | None) -> None:
        """Record that from now on, rows that committed up to ``lsn`` (None: unknown) may land."""
        if lsn is None:
            return
        with failpoint("query.state"):
            self._base.execute(
                "INSERT INTO reached VALUES (1, ?) ON CONFLICT DO UPDATE SET lsn = max(lsn, excluded.lsn)",
                (lsn,),
            )

    def reached(self) -> int | None:
        """Return an LSN above which no landed row has committed; None if unknown."""
        found = self._base.execute("SELECT lsn FROM reached").fetchone()
        return None if found is None else found[0]

    def schema_number(self, table: str, columns: str) -> int:
        """Return how often the schema of ``table`` has changed until now. ``columns``: the present schema, as
        text.

        If an earlier version read the table and recorded no schema, that counts as one change. The number is
        durable on return, so rows that land with it are never read again with a lower one.
        """
        found = self._base.execute("SELECT number, columns FROM schemas WHERE name = ?", (table,)).fetchone()
        if found is not None and found[1] == columns:
            return int(found[0])
        number = int(found[0]) + 1 if found is not None else int(self.progress(table) is not None)
        with failpoint("query.state", table):
            self._base.execute("INSERT OR REPLACE INTO schemas VALUES (?, ?, ?)", (table, number, columns))
        return number

    def save(
        self,
        table: str,
        progress: Progress,
        seen: Sequence[LandedVersion] = (),
        below: int | None = None,
        *,
        replaced: bool = False,
    ) -> None:
        """Save the progress of ``table`` and the landed versions ``seen``, in one transaction.

        ``below``: versions with a lower cursor are forgotten. ``replaced``: other images of the versions
        ``seen`` are forgotten, because the same row now lands in another form.
        """
        with failpoint("query.state", table):
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.execute(
                    "INSERT OR REPLACE INTO progress VALUES (?, ?)", (table, encode_line(progress))
                )
                if replaced:
                    self._base.executemany(
                        "DELETE FROM seen WHERE name = ? AND key = ? AND cursor = ?",
                        ((table, each.key, each.cursor) for each in seen),
                    )
                self._base.executemany(
                    "INSERT OR IGNORE INTO seen VALUES (?, ?, ?, ?)",
                    ((table, each.key, each.cursor, each.image) for each in seen),
                )
                if below is not None:
                    self._base.execute("DELETE FROM seen WHERE name = ? AND cursor < ?", (table, below))
                self._base.execute("COMMIT")
            except BaseException:
                self._base.execute("ROLLBACK")
                raise

    def versions(self, table: str, keys: Sequence[str]) -> dict[str, list[LandedVersion]]:
        """Return the landed versions of ``keys``, by key; keys without any are left out."""
        found: dict[str, list[LandedVersion]] = {}
        for key in keys:
            rows = self._base.execute(
                "SELECT key, cursor, image FROM seen WHERE name = ? AND key = ?", (table, key)
            ).fetchall()
            if rows:
                found[key] = [LandedVersion(*row) for row in rows]
        return found

    def knows_null_rows(self, table: str) -> bool:
        """Whether the last versions of all rows of ``table`` without a cursor are remembered."""
        found = self._base.execute("SELECT 1 FROM null_rows_known WHERE name = ?", (table,)).fetchone()
        return found is not None

    def has_null_rows(self, table: str) -> bool:
        """Whether any row of ``table`` without a cursor is remembered."""
        found = self._base.execute("SELECT 1 FROM null_rows WHERE name = ? LIMIT 1", (table,)).fetchone()
        return found is not None

    def null_rows(self, table: str, keys: Sequence[str]) -> dict[str, NullRow]:
        """Return the remembered rows without a cursor that have one of ``keys``, by key."""
        found = {}
        for key in keys:
            row = self._base.execute(
                "SELECT key, ordinal, image FROM null_rows WHERE name = ? AND key = ?", (table, key)
            ).fetchone()
            if row is not None:
                found[key] = NullRow(*row)
        return found

    def expect_null_rows(self, table: str) -> None:
        """Record that rows of ``table`` without a cursor begin to land. Until they are remembered, only
        landing knows which have landed."""
        with failpoint("query.state", table):
            self._base.execute("DELETE FROM null_rows_known WHERE name = ?", (table,))

    def remember_null_rows(self, table: str, rows: Sequence[NullRow]) -> None:
        """Remember the last rows of ``table`` without a cursor that landed; from now on all are known."""
        self._add_null_rows(table, rows, known=True)

    def add_null_rows(self, table: str, rows: Sequence[NullRow]) -> None:
        """Remember ``rows`` of ``table``; others may have landed as well."""
        self._add_null_rows(table, rows, known=False)

    def _add_null_rows(self, table: str, rows: Sequence[NullRow], *, known: bool) -> None:
        with failpoint("query.state", table):
            self._base.execute("BEGIN IMMEDIATE")
            try:
                self._base.executemany(
                    "INSERT OR REPLACE INTO null_rows VALUES (?, ?, ?, ?)",
                    ((table, each.key, each.ordinal, each.image) for each in rows),
                )
                if known:
                    self._base.execute("INSERT OR IGNORE INTO null_rows_known VALUES (?)", (table,))
                self._base.execute("COMMIT")
            except BaseException:
                self._base.execute("ROLLBACK")
                raise

    def highest_seen(self, table: str) -> int | None:
        """Return the highest cursor of the remembered versions of ``table``; None if there are none."""
        found = self._base.execute("SELECT max(cursor) FROM seen WHERE name = ?", (table,)).fetchone()
        return None if found is None else found[0]

    def forget(self, table: str) -> None:
        """Make the next reading of ``table`` its first."""
        with failpoint("query.state", table):
            self._base.execute("BEGIN IMMEDIATE")
            self._base.execute("DELETE FROM progress WHERE name = ?", (table,))
            self._base.execute("DELETE FROM seen WHERE name = ?", (table,))
            self._base.execute("DELETE FROM schemas WHERE name = ?", (table,))
            self._base.execute("DELETE FROM null_rows WHERE name = ?", (table,))
            self._base.execute("DELETE FROM null_rows_known WHERE name = ?", (table,))
            self._base.execute("COMMIT")

    def forget_all(self) -> None:
        """Make the next reading of every table its first one, of any database."""
        with failpoint("query.state"):
            self._base.execute("BEGIN IMMEDIATE")
            for name in ("progress", "seen", "schemas", "null_rows", "null_rows_known", "source", "reached"):
                self._base.execute(f"DELETE FROM {name}")
            self._base.execute("COMMIT")

    def rewind(self, table: str, cursor: str | None) -> None:
        """Make the next reading of ``table`` begin at ``cursor`` (None: at the beginning)."""
        progress = self.progress(table)
        if progress is not None:
            self.save(table, replace(progress, cursor=cursor, reading=None))

    def close(self) -> None:
        self._base.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unreadable(self, error: Exception) -> CursorsUnreadable:
        return CursorsUnreadable(
            f"{self.path} cannot be read: {type(error).__name__}.",
            fix="Move it away, then sync: every table is read once from its beginning, and what has landed "
            "before is dropped as duplicates. Where columns of a table have changed since it was last read "
            f"whole, its older rows would be collisions: {read_anew(self._source, 'REASON')}",
        )
