"""The tables of the index of files, and how one log entry changes them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import DeltaTable

from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.json_values import from_plain, to_plain
from omnisupport_ingest.lake import layout
from omnisupport_ingest.storage import at_hand, storage_of

FORMAT = 1

_VERSIONS_TOLD = 64
"""How many versions back the list tells of. A snapshot that is older asks Delta's library."""

_NOTES_KEPT = 1024

TABLES = """
CREATE TABLE listed (number INTEGER PRIMARY KEY, path TEXT UNIQUE, note TEXT, crc INTEGER);
CREATE TABLE file (listed INTEGER, "window" TEXT, path TEXT, since INTEGER, until INTEGER, facts TEXT,
    crc INTEGER, PRIMARY KEY (listed, "window", path, since)) WITHOUT ROWID;
CREATE INDEX gone ON file (listed, until) WHERE until IS NOT NULL;
"""


AT = "WHERE listed = ? AND since <= ? AND (until IS NULL OR until > ?)"
"""The files that one version holds."""


class Damaged(Exception):
    """The file does not hold what it held."""


@dataclass(frozen=True, slots=True)
class NotedTable:
    """One version of a table that the index tells of.

    ``era``: of its list, another one each time it is made anew, and of versions from ``floor`` on. ``entry``:
    digest of the version's log entry. ``schema``: the text that Delta has of it. ``configuration``: the
    table's properties. ``app_version``: the last of its writers' transactions (Delta protocol, ``txn``).
    """

    era: str
    floor: int
    table_id: str
    version: int
    entry: str
    schema: str
    partition_by: tuple[str, ...]
    configuration: Mapping[str, str]
    app_version: int


@dataclass(frozen=True, slots=True)
class TablePlace:
    """A table by its ``name`` in the lake, its ``folder``, and the ``app_id`` that its writers share."""

    name: str
    folder: Path
    app_id: str

    def entry(self, version: int) -> Path:
        """The commit's file in the log (Delta protocol, "Delta Log Entries")."""
        return self.folder / "_delta_log" / f"{version:020d}.json"


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file by its ``path`` relative to the table; ``rows``: null where a foreign writer does not say.
    ``partition``: the values of the partition columns, in their order."""

    path: str
    window: str
    partition: tuple[str | None, ...]
    rows: int | None
    bytes: int


def listed_by(handle: DeltaTable, partition_by: Sequence[str]) -> Iterator[ListedFile]:
    """The files of the version that ``handle`` has open."""
    found = pa.table(handle.get_add_actions(flatten=False))
    wanted = [
        name for name in ("path", "size_bytes", "num_records", "partition") if name in found.column_names
    ]
    for each in found.select(wanted).to_pylist():
        values = each.get("partition") or {}
        yield _listed(each["path"], values, each.get("num_records"), each["size_bytes"], partition_by)


def digest_of(entry: Path) -> str | None:
    """A digest of a log entry; None if it is not there."""
    # Of what is kept, not of a copy: a table in the bucket may have been restored since the copy was made.
    try:
        return storage_of(entry).digest(entry)[1]
    except OSError:
        return None


def entries(table: TablePlace, version: int) -> Iterator[tuple[int, str, bytes]]:
    """Number, digest and text of the log entries after ``version``."""
    storage = storage_of(table.folder)
    while storage.exists(entry := table.entry(version := version + 1)):
        try:
            text, digest = at_hand(entry).read_bytes(), digest_of(entry)
        except OSError:
            return
        if digest is None:
            return
        yield version, digest, text


def has_checkpoint_after(table: TablePlace, version: int) -> bool:
    """Whether the log goes on behind a hole after ``version``: a clean-up that was cut off left its entry and
    not the next, and readers begin at the checkpoint (Delta protocol, "Last Checkpoint File")."""
    last = table.folder / "_delta_log" / "_last_checkpoint"
    if not storage_of(last).is_local:
        return False
    try:
        return bool(json.loads(last.read_bytes())["version"] > version)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def forward(
    db: sqlite3.Connection,
    number: int,
    note: NotedTable,
    table: TablePlace,
    entries: Iterable[tuple[int, str, bytes]],
) -> NotedTable | None:
    """Have the list tell of ``entries``; None, and nothing is listed, where one says more than of files."""
    for version, digest, text in entries:
        try:
            app_version = _apply(db, number, note, table.app_id, version, text)
        except (_Foreign, ValueError, KeyError, AttributeError, TypeError):
            # No failpoint: inside the transaction that lake.listed stands around.
            db.execute("DELETE FROM file WHERE listed = ?", (number,))
            db.execute("DELETE FROM listed WHERE number = ?", (number,))
            return None
        note = replace(note, version=version, entry=digest, app_version=app_version)
    floor = max(note.floor, note.version - _VERSIONS_TOLD)
    db.execute("DELETE FROM file WHERE listed = ? AND until <= ?", (number, floor))
    note = replace(note, floor=floor)
    put(db, number, note)
    return note


class _Foreign(Exception):
    """A log entry that the index cannot follow: the list is made anew."""


def _apply(
    db: sqlite3.Connection, number: int, note: NotedTable, app_id: str, version: int, text: bytes
) -> int:
    added: list[ListedFile] = []
    app_version = note.app_version
    for line in text.splitlines():
        action = json.loads(line)
        if not action.keys().isdisjoint(("metaData", "protocol")):
            raise _Foreign
        if (txn := action.get("txn")) is not None and txn["appId"] == app_id:
            app_version = txn["version"]
        if (told := action.get("remove")) is not None:
            _remove(db, number, version, _of_action(told, note.partition_by))
        if (told := action.get("add")) is not None:
            if told.get("deletionVector") is not None:
                raise _Foreign
            added.append(_of_action(told, note.partition_by))
    for file in added:
        # One that the table holds may be added again with other statistics.
        _remove(db, number, version, file, missing_ok=True)
    add(db, number, version, added)
    return app_version


def _remove(
    db: sqlite3.Connection, number: int, version: int, file: ListedFile, *, missing_ok: bool = False
) -> None:
    row = db.execute(
        'SELECT since, facts FROM file WHERE listed = ? AND "window" = ? AND path = ? AND until IS NULL',
        (number, file.window, file.path),
    ).fetchone()
    if row is None:
        if missing_ok:
            return
        raise _Foreign
    since, facts = row
    # No failpoint: inside the transaction that lake.listed stands around.
    db.execute(
        'UPDATE file SET until = ?, crc = ? WHERE listed = ? AND "window" = ? AND path = ? AND since = ?',
        (version, _crc(file.window, file.path, since, version, facts), number, file.window, file.path, since),
    )


def add(db: sqlite3.Connection, number: int, version: int, files: Iterable[ListedFile]) -> None:
    rows = []
    for file in files:
        facts = json.dumps([file.bytes, file.rows, file.partition], separators=(",", ":"))
        crc = _crc(file.window, file.path, version, None, facts)
        rows.append((number, file.window, file.path, version, None, facts, crc))
    # No failpoint: inside the transaction that lake.listed stands around.
    db.executemany("INSERT INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def file_of(window: str, path: str, since: int, until: int | None, facts: str, crc: int) -> ListedFile:
    if crc != _crc(window, path, since, until, facts):
        raise Damaged
    size, rows, partition = json.loads(facts)
    return ListedFile(path, window, tuple(partition), rows, size)


def _of_action(told: Mapping[str, Any], partition_by: Sequence[str]) -> ListedFile:
    rows = json.loads(told["stats"]).get("numRecords") if told.get("stats") else None
    values = told["partitionValues"] if partition_by else {}
    return _listed(told["path"], values, rows, told.get("size") or 0, partition_by)


def _listed(
    path: str, values: Mapping[str, str | None], rows: int | None, size: int, partition_by: Sequence[str]
) -> ListedFile:
    path, partition = unquote(path), tuple(values[name] for name in partition_by)
    window = partition[0] or "" if partition else layout.WHOLE_TABLE
    return ListedFile(path, window, partition, 0 if layout.is_state(path) else rows, size)


def known(db: sqlite3.Connection, name: str) -> tuple[int, NotedTable] | None:
    row = db.execute("SELECT number, note, crc FROM listed WHERE path = ?", (name,)).fetchone()
    if row is None:
        return None
    number, text, crc = row
    if crc != _crc(name, text):
        raise Damaged
    try:
        return number, _noted(text)
    except Unreadable:
        raise Damaged from None


@lru_cache(maxsize=_NOTES_KEPT)
def _noted(text: str) -> NotedTable:
    """What a note says, which every question about a table's files asks."""
    return from_plain(NotedTable, parse_json(text))


def put(db: sqlite3.Connection, number: int, note: NotedTable) -> None:
    text = json.dumps(to_plain(note), separators=(",", ":"))
    (name,) = db.execute("SELECT path FROM listed WHERE number = ?", (number,)).fetchone()
    # No failpoint: inside the transaction that lake.listed stands around.
    db.execute("UPDATE listed SET note = ?, crc = ? WHERE number = ?", (text, _crc(name, text), number))


def place_of(file: Path) -> int:
    """Tells the SQLite file in its place from a copy of it, by the numbers of the file and its folders: a
    copy made while others write may hold pages of several moments, and each of them looks sound."""
    numbers = [each.stat().st_ino for each in (file, file.parent, file.parent.parent)]
    # SQLite keeps it in 32 bits with a sign; 0 stands for none.
    return _crc(*numbers) & 0x7FFFFFFF or 1


def require_place(db: sqlite3.Connection, file: Path) -> None:
    """``Damaged`` if the tables in ``file`` were made in another place."""
    if db.execute("PRAGMA application_id").fetchone() != (place_of(file),):
        raise Damaged


def make_tables(db: sqlite3.Connection, file: Path) -> None:
    if db.execute("PRAGMA user_version").fetchone() == (FORMAT,):
        return
    # No failpoint: inside the transaction that lake.listed stands around.
    db.execute("DROP TABLE IF EXISTS file")
    db.execute("DROP TABLE IF EXISTS listed")
    for statement in TABLES.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {place_of(file)}")
    db.execute(f"PRAGMA user_version = {FORMAT}")


@contextlib.contextmanager
def writing(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _crc(*parts: object) -> int:
    return zlib.crc32("\0".join(map(str, parts)).encode())
