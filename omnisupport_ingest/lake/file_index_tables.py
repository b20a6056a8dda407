"""The tables of the index of files, and how one log entry changes them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from omnisupport_ingest.foreign import Unreadable, parse_json
from omnisupport_ingest.json_values import from_plain
from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.deletion_vectors import FEATURE, DeletionVector
from omnisupport_ingest.lake.delta import entry_file
from omnisupport_ingest.lake.log_files import LogUnreadable, files_in_log, has_vectors, vector_of
from omnisupport_ingest.records import encode_line
from omnisupport_ingest.sqlite_index import IndexDamaged, checksum, location_id, require_checksum
from omnisupport_ingest.storage import at_hand, storage_of

FORMAT = 3

_VERSIONS_KEPT = 64
"""How many versions back the index knows. An older snapshot asks delta-rs instead."""

_NOTES_KEPT = 1024
_MEMBERS = 7
"""What is listed of a file, besides its window and path."""

TABLES = """
CREATE TABLE listed (number INTEGER PRIMARY KEY, path TEXT UNIQUE, note TEXT, crc INTEGER);
CREATE TABLE file (listed INTEGER, "window" TEXT, path TEXT, since INTEGER, until INTEGER, facts TEXT,
    crc INTEGER, PRIMARY KEY (listed, "window", path, since)) WITHOUT ROWID;
CREATE INDEX gone ON file (listed, until) WHERE until IS NOT NULL;
"""


AT = "WHERE listed = ? AND since <= ? AND (until IS NULL OR until > ?)"
"""Selects the files that one version holds."""


Bounds = tuple[int | str | None, int | str | None]
NO_BOUNDS: Bounds = (None, None)


@dataclass(frozen=True, slots=True)
class IndexedVersion:
    """One version of a table that the index knows.

    ``era``: names this build of the table's list; each rebuild has another. ``floor``: the oldest version
    that the list knows. ``entry``: digest of the version's log entry. ``schema``: Delta's text of it.
    ``configuration``: the table's properties. ``app_version``: the last transaction number of its writers
    (Delta protocol, ``txn``). ``has_vectors``: whether files may have deletion vectors. ``ordered_by``: the
    column whose bounds are listed for each file.
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
    has_vectors: bool = False
    ordered_by: str | None = None


@dataclass(frozen=True, slots=True)
class TableLog:
    """The log of the table ``name`` of the lake, in ``folder``; all its writers share ``app_id``.

    ``ordered_by``: the column by which the table's files are ordered; None if they are not.
    """

    name: str
    folder: Path
    app_id: str
    ordered_by: str | None = None

    def entry(self, version: int) -> Path:
        """Return the file of the commit that made ``version``."""
        return entry_file(self.folder, version)


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of a table. ``path``: relative to the table. ``rows``: None where a foreign writer does not say.
    ``partition``: the values of the partition columns, in their order. ``rows`` counts dead rows too.
    ``vector``, ``stats`` (JSON text): of a table that may have deletion vectors. ``bounds``: the lowest and
    the highest value of the column by which the files are ordered, None where the statistics lack them."""

    path: str
    window: str
    partition: tuple[str | None, ...]
    rows: int | None
    bytes: int
    vector: DeletionVector | None = None
    stats: str | None = None
    bounds: Bounds = NO_BOUNDS


_FEATURES = {"appendOnly", "invariants", "timestampNtz", "variantType", FEATURE}
"""Features that do not change how a log entry describes files, except for vectors (Delta protocol, table
features). delta-rs adds ``variantType`` when it sets properties of a table with deletion vectors."""


def unknown_features(handle: DeltaTable) -> list[str]:
    """Return the features that the version of ``handle`` demands and that this program does not know."""
    protocol = handle.protocol()
    reads, writes = protocol.min_reader_version, protocol.min_writer_version
    features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    if features:
        return sorted(features - _FEATURES)
    return [] if reads == 1 and writes <= 2 else [f"protocol {reads}/{writes}"]


def version_of(handle: DeltaTable, table: TableLog) -> IndexedVersion | None:
    """Return the version that ``handle`` has open as the first version of a new list; None if its log entry
    is gone."""
    entry = digest_of(table.entry(handle.version()))
    if entry is None:
        return None
    metadata = handle.metadata()
    return IndexedVersion(
        era=uuid.uuid4().hex,
        floor=handle.version(),
        table_id=str(metadata.id),
        version=handle.version(),
        entry=entry,
        schema=handle.schema().to_json(),
        partition_by=tuple(metadata.partition_columns),
        configuration=dict(metadata.configuration),
        app_version=handle.transaction_version(table.app_id) or 0,
        has_vectors=has_vectors(handle),
        ordered_by=table.ordered_by,
    )


def listed_by(handle: DeltaTable, table: TableLog, partition_by: Sequence[str]) -> Iterator[ListedFile]:
    """Yield the files of the version of ``table`` that ``handle`` has open."""
    found = pa.table(handle.get_add_actions(flatten=False))
    in_log = files_in_log(table.folder, handle.version()).held if has_vectors(handle) else {}
    wanted = [
        name for name in ("path", "size_bytes", "num_records", "partition") if name in found.column_names
    ]
    bounds = _bounds_of(found, table, handle.version())
    for each in found.select(wanted).to_pylist():
        values = each.get("partition") or {}
        file = _listed(each["path"], values, each.get("num_records"), each["size_bytes"], partition_by)
        file = replace(file, bounds=bounds.get(file.path, NO_BOUNDS))
        more = in_log.get(file.path)
        yield file if more is None else replace(file, vector=more.vector, stats=more.stats)


def _bounds_of(found: pa.Table, table: TableLog, version: int) -> dict[str, Bounds]:
    """Return the bounds of the files that delta-rs ``found``, by path; none if the table is not ordered."""
    column = table.ordered_by
    if column is None or not found.num_rows:
        return {}
    values = []
    for name in ("min", "max"):
        stats = found[name].combine_chunks() if name in found.column_names else None
        if stats is None or not pa.types.is_struct(stats.type) or stats.type.get_field_index(column) < 0:
            # delta-rs reads statistics of the first 32 columns alone.
            return _bounds_in_log(table, version, column)
        # Statistics of other columns are not turned into Python objects: a table may have thousands of files.
        of_column = pc.struct_field(stats, column)
        if not (pa.types.is_integer(of_column.type) or pa.types.is_string(of_column.type)):
            return {}
        values.append(of_column.to_pylist())
    return dict(zip(map(unquote, found["path"].to_pylist()), zip(*values, strict=True), strict=True))


def _bounds_in_log(table: TableLog, version: int, column: str) -> dict[str, Bounds]:
    with contextlib.suppress(LogUnreadable, ValueError, AttributeError):
        held = files_in_log(table.folder, version).held
        return {path: _bounds_in(json.loads(each.stats or "{}"), column) for path, each in held.items()}
    return {}


def _bounds_in(stats: Mapping[str, Any], column: str) -> Bounds:
    """Return the bounds of ``column`` in the statistics of a file."""
    return stats.get("minValues", {}).get(column), stats.get("maxValues", {}).get(column)


def digest_of(entry: Path) -> str | None:
    """Return a digest of a log entry; None if it does not exist."""
    # Read the stored object, not a local copy: the table may have been restored since the copy was made.
    try:
        return storage_of(entry).digest(entry)[1]
    except OSError:
        return None


def entries(table: TableLog, version: int) -> Iterator[tuple[int, str, bytes]]:
    """Yield version, digest and text of the log entries after ``version``."""
    storage = storage_of(table.folder)
    while storage.exists(entry := table.entry(version := version + 1)):
        try:
            text, digest = at_hand(entry).read_bytes(), digest_of(entry)
        except OSError:
            return
        if digest is None:
            return
        yield version, digest, text


def has_checkpoint_after(table: TableLog, version: int) -> bool:
    """Return whether the log continues after a gap behind ``version``.

    An interrupted clean-up of the log may delete the entry after ``version`` and keep ``version`` itself.
    Readers then begin at a later checkpoint (Delta protocol, "Last Checkpoint File").
    """
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
    indexed: IndexedVersion,
    table: TableLog,
    entries: Iterable[tuple[int, str, bytes]],
) -> IndexedVersion | None:
    """Apply ``entries`` to the list of a table and return the new version.

    Returns None, and removes the list, if an entry changes more than files.
    """
    for version, digest, text in entries:
        try:
            app_version = _apply(db, number, indexed, table.app_id, version, text)
        except (_Foreign, ValueError, KeyError, AttributeError, TypeError):
            # No failpoint: the failpoint lake.listed is around this transaction.
            db.execute("DELETE FROM file WHERE listed = ?", (number,))
            db.execute("DELETE FROM listed WHERE number = ?", (number,))
            return None
        indexed = replace(indexed, version=version, entry=digest, app_version=app_version)
    floor = max(indexed.floor, indexed.version - _VERSIONS_KEPT)
    db.execute("DELETE FROM file WHERE listed = ? AND until <= ?", (number, floor))
    indexed = replace(indexed, floor=floor)
    put(db, number, indexed)
    return indexed


class _Foreign(Exception):
    """Raised for a log entry that the index cannot follow: the list is rebuilt."""


def _apply(
    db: sqlite3.Connection, number: int, indexed: IndexedVersion, app_id: str, version: int, text: bytes
) -> int:
    added: list[ListedFile] = []
    app_version = indexed.app_version
    for line in text.splitlines():
        action = json.loads(line)
        if not action.keys().isdisjoint(("metaData", "protocol")):
            raise _Foreign
        if (txn := action.get("txn")) is not None and txn["appId"] == app_id:
            app_version = txn["version"]
        if (fields := action.get("remove")) is not None:
            _remove(db, number, version, _of_action(fields, indexed))
        if (fields := action.get("add")) is not None:
            added.append(_of_action(fields, indexed))
    for file in added:
        # A file that the table holds may be added again with other statistics, but not with other dead rows.
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
    if _vector_of(_members(facts)[3]) != file.vector:
        # The entry removes a file that the table does not hold. Readers ignore that; the index cannot.
        raise _Foreign
    # No failpoint: the failpoint lake.listed is around this transaction.
    db.execute(
        'UPDATE file SET until = ?, crc = ? WHERE listed = ? AND "window" = ? AND path = ? AND since = ?',
        (
            version,
            checksum(file.window, file.path, since, version, facts),
            number,
            file.window,
            file.path,
            since,
        ),
    )


def add(db: sqlite3.Connection, number: int, version: int, files: Iterable[ListedFile]) -> None:
    rows = []
    for file in files:
        vector = None if file.vector is None else astuple(file.vector)
        members = [file.bytes, file.rows, file.partition, vector, file.stats, *file.bounds]
        # Most tables have neither vectors nor bounds.
        while members[-1] is None:
            members.pop()
        facts = json.dumps(members, separators=(",", ":"))
        crc = checksum(file.window, file.path, version, None, facts)
        rows.append((number, file.window, file.path, version, None, facts, crc))
    # No failpoint: the failpoint lake.listed is around this transaction.
    db.executemany("INSERT INTO file VALUES (?, ?, ?, ?, ?, ?, ?)", rows)


def file_of(window: str, path: str, since: int, until: int | None, facts: str, crc: int) -> ListedFile:
    require_checksum(crc, window, path, since, until, facts)
    size, rows, partition, vector, stats, low, high = _members(facts)
    return ListedFile(path, window, tuple(partition), rows, size, _vector_of(vector), stats, (low, high))


def _members(facts: str) -> list[Any]:
    members: list[Any] = json.loads(facts)
    return members + [None] * (_MEMBERS - len(members))


def _vector_of(members: Sequence[Any] | None) -> DeletionVector | None:
    return None if members is None else DeletionVector(*members)


def _of_action(fields: Mapping[str, Any], indexed: IndexedVersion) -> ListedFile:
    stats = fields.get("stats")
    statistics = json.loads(stats) if stats else {}
    rows = statistics.get("numRecords")
    values = fields["partitionValues"] if indexed.partition_by else {}
    file = _listed(fields["path"], values, rows, fields.get("size") or 0, indexed.partition_by)
    if indexed.ordered_by is not None:
        file = replace(file, bounds=_bounds_in(statistics, indexed.ordered_by))
    vector = vector_of(fields)
    if not indexed.has_vectors:
        if vector is not None:
            raise _Foreign
        return file
    return replace(file, vector=vector, stats=stats)


def _listed(
    path: str, values: Mapping[str, str | None], rows: int | None, size: int, partition_by: Sequence[str]
) -> ListedFile:
    path, partition = unquote(path), tuple(values[name] for name in partition_by)
    window = partition[0] or "" if partition else layout.WHOLE_TABLE
    return ListedFile(path, window, partition, 0 if layout.is_state(path) else rows, size)


def known(db: sqlite3.Connection, name: str) -> tuple[int, IndexedVersion] | None:
    row = db.execute("SELECT number, note, crc FROM listed WHERE path = ?", (name,)).fetchone()
    if row is None:
        return None
    number, text, crc = row
    require_checksum(crc, name, text)
    try:
        return number, _noted(text)
    except Unreadable:
        raise IndexDamaged from None


@lru_cache(maxsize=_NOTES_KEPT)
def _noted(text: str) -> IndexedVersion:
    """Decode a note. Cached, because every lookup of a table's files needs it."""
    return from_plain(IndexedVersion, parse_json(text))


def put(db: sqlite3.Connection, number: int, indexed: IndexedVersion) -> None:
    text = encode_line(indexed)
    (name,) = db.execute("SELECT path FROM listed WHERE number = ?", (number,)).fetchone()
    # No failpoint: the failpoint lake.listed is around this transaction.
    db.execute("UPDATE listed SET note = ?, crc = ? WHERE number = ?", (text, checksum(name, text), number))


def make_tables(db: sqlite3.Connection, file: Path) -> None:
    if db.execute("PRAGMA user_version").fetchone() == (FORMAT,):
        return
    # No failpoint: the failpoint lake.listed is around this transaction.
    db.execute("DROP TABLE IF EXISTS file")
    db.execute("DROP TABLE IF EXISTS listed")
    for statement in TABLES.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {location_id(file)}")
    db.execute(f"PRAGMA user_version = {FORMAT}")
