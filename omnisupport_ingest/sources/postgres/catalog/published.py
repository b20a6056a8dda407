"""Detects that a captured table was for a time not published as before, by its entries in the publication.

``pgoutput`` decides by the catalogs as they were at each change: a change that was not published then is
never sent, and nothing reports it later. But the entries change. A table that is removed from a publication
and added again gets a new entry, and so does a table with a new column list or row filter. A table that was
dropped and created again has a new oid. So the entries are recorded before a table is read, and compared at
every start and every few seconds while capture runs. A difference is first recorded as missed changes, then
reported, and only then does the record take the new state. So a crash in between loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.landing.encoding import content_of, decode
from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import Document, Format, encode
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Relation
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, TableMissedChanges
from omnisupport_ingest.sources.postgres.session.safe_watermark import (
    REMEMBER_SECONDS,
    CatalogWatermarks,
    page_end,
)
from omnisupport_ingest.sources.postgres.slot.continuity import REPAIR
from omnisupport_ingest.storage import update

FORMAT_VERSION = 2
"""Version 2 added ``certain`` to each table."""


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """A table at the source. ``relation``: its oid. ``entries``: its entries in the publication.

    ``since``: the end of the WAL, read after the entries. ``certain``: the LSN up to which the last check
    proved that nothing had changed; None in a record of version 1.
    """

    table: str
    relation: int
    entries: str
    since: Lsn
    certain: Lsn | None


@dataclass(frozen=True, slots=True)
class Published:
    """The publication of an epoch (oid and xmin), and its tables by the names of their contracts."""

    epoch: int
    publication: str
    tables: dict[str, RecordedTable]
    format_version: int = FORMAT_VERSION


class _Places:
    """The recorded tables by name and by oid, so that the first sight of a table does not search them all."""

    def __init__(self, record: Published | None) -> None:
        self.record = record
        self._order: dict[str, int] = {}
        self._by_name: dict[str, dict[str, RecordedTable]] = {}
        self._by_oid: dict[int, dict[str, RecordedTable]] = {}
        for number, (contract, table) in enumerate(record.tables.items() if record is not None else ()):
            self._order[contract] = number
            self._by_name.setdefault(table.table, {})[contract] = table
            self._by_oid.setdefault(table.relation, {})[contract] = table

    def named(self, name: str) -> Mapping[str, RecordedTable]:
        """Return the tables called ``name`` (``schema.table``), by the names of their contracts."""
        return self._by_name.get(name, {})

    def named_or_of(self, name: str, oid: int) -> Mapping[str, RecordedTable]:
        """Return the tables called ``name``, and those with ``oid``, in the order of the record."""
        found = {**self.named(name), **self._by_oid.get(oid, {})}
        return {contract: found[contract] for contract in sorted(found, key=self._order.__getitem__)}


class PublishedTables:
    """The record of how the tables of one epoch are published, in the landing folder. Thread-safe."""

    def __init__(
        self,
        folder: Path,
        epoch: int,
        publication: str,
        contracts: Sequence[TableContract],
        requested: Callable[[], Collection[str]],
    ) -> None:
        """``requested``: returns the tables (contract names) to be read again, which are not reported."""
        self.lost = LostChanges(folder, epoch)
        """The missed changes found so far."""
        self._watermarks, self._written = CatalogWatermarks(), -REMEMBER_SECONDS
        self._path = _record_file(folder, epoch)
        self._epoch, self._publication, self._contracts = epoch, publication, tuple(contracts)
        self._requested, self._lock = requested, threading.Lock()
        self._read_below: dict[str, Lsn] = {}
        self._record = self._durable = _read(self._path)
        self._places = _Places(self._record)

    def require_publication(self, connection: Connection) -> None:
        """Raise ``GapInSource`` if the publication is no longer the recorded one."""
        with self._lock:
            self._compare_publication(self._now(connection), self._record_missed)

    def begin(self, connection: Connection) -> None:
        """Record tables that are not recorded yet; compare the others. Raises as ``require_same`` does."""
        with self._lock:
            now = self._now(connection)
            self._compare(now, self._record_missed)
            before = self._record.tables if self._record is not None else {}
            if self._record is None or now.tables.keys() - before.keys():
                self._write(replace(now, tables=now.tables | before))

    def add_tables(self, connection: Connection, contracts: Sequence[TableContract]) -> None:
        """Record new tables, which the publication must already contain. Raises as ``require_same`` does."""
        with self._lock:
            self._contracts += tuple(contracts)
        self.begin(connection)

    def accept(self, connection: Connection, names: Collection[str]) -> None:
        """Accept the tables ``names`` as they are published now. The caller must then plan a snapshot of each
        whole table."""
        with self._lock:
            now = self._now(connection)
            before = self._record.tables if self._record is not None else {}
            taken = {name: table for name, table in now.tables.items() if name in names}
            for name, table in taken.items():
                if name in before and (change := _difference(before[name], table)) is not None:
                    self._record_missed({name: change})
                self.lost.will_be_read(name, page_end(table.since))
            self._write(replace(self._record or now, tables=before | taken))

    def require_same(self, connection: Connection, *, last: bool = False) -> None:
        """Raise ``TableMissedChanges`` or ``GapInSource`` if changes since the record may not have been sent.

        ``last``: no check follows this one, so write its LSN at once.
        """
        with self._lock:
            now = self._now(connection)
            self._compare(now, self._record_missed)
            if self._record is None:
                return
            seen = {
                name: replace(table, certain=max(table.certain or Lsn(0), same.certain or Lsn(0)))
                for name, table in self._record.tables.items()
                if (same := now.tables.get(name)) is not None and _difference(table, same) is None
            }
            record = replace(self._record, tables=self._record.tables | seen)
            self._record = record
            if last or time.monotonic() - self._written >= REMEMBER_SECONDS:
                self._write(record)

    def look(self, connection: Connection) -> None:
        """Compare as ``require_same`` does, without writing. For callers other than capture."""
        with self._lock:
            self._compare(self._now(connection), _record_nothing)

    def require_named(self, relation: Relation, commit_lsn: int) -> None:
        """Raise ``TableMissedChanges`` if a captured table was renamed, or if another table now has its name.

        Call it before anything of the transaction that committed at ``commit_lsn`` lands.
        """
        name, at = f"{relation.schema}.{relation.table}", Lsn(commit_lsn)
        for contract, table in self._recorded().named_or_of(name, relation.oid).items():
            renamed = relation.oid == table.relation and name != table.table
            other = relation.oid != table.relation and name == table.table
            if not (renamed or other) or contract not in self._names:
                continue
            if at < table.since:
                if renamed:
                    # The catalogs do not show a rename that was undone, so record it here.
                    self.lost.add(contract, _renamed(name), at, page_end(table.since))
                continue
            change = _renamed(name) if renamed else _MADE_ANEW
            self.lost.add(contract, change, at if renamed else min(at, table.certain or Lsn(0)))
            if contract not in self._requested():
                raise _missed({contract: change})

    def leave_out(self, reasons: Mapping[str, str], landed: Lsn) -> None:
        """Record that changes of the tables in ``reasons`` may be missing from now on.

        ``landed``: the end of the chain; above it, the changes of these tables land without keys. Skips
        tables that were never read.
        """
        with self._lock:
            tables = self._record.tables if self._record is not None else {}
            for name, reason in reasons.items():
                if name in tables:
                    self.lost.add(name, reason, min(landed, tables[name].certain or Lsn(0)))

    def will_be_read(self, names: Collection[str], below: Lsn) -> None:
        """Expect the requested snapshots of the tables ``names``, which will read above ``below``.

        ``below``: the end of the WAL, read before each table was found to match its contract.
        """
        self._read_below = dict.fromkeys(names, below)

    def read_above(self, name: TableName, commit_lsn: int) -> bool:
        """Whether a planned or expected snapshot reads the whole table ``name`` above ``commit_lsn``.

        Then no change at or below ``commit_lsn`` matters for the final state of the table.
        """
        for contract, table in self._recorded().named(".".join(name)).items():
            return commit_lsn < max(table.since, self._read_below.get(contract, Lsn(0))).value
        return True

    def reads_above(self, name: TableName, commit_lsn: int, reason: str) -> bool:
        """Return ``read_above``. If True, record the change as missed until that snapshot, for ``reason``."""
        for contract, table in self._recorded().named(".".join(name)).items():
            if not self.read_above(name, commit_lsn):
                return False
            to = page_end(table.since) if commit_lsn < table.since.value else None
            self.lost.add(contract, reason, Lsn(commit_lsn), to)
        return True

    def _recorded(self) -> _Places:
        with self._lock:
            if self._places.record is not self._record:
                self._places = _Places(self._record)
            return self._places

    def _compare(self, now: Published, record: Callable[[Mapping[str, str]], None]) -> None:
        self._compare_publication(now, record)
        if self._record is None:
            return
        names = self._names
        changed = {
            name: change
            for name, before in self._record.tables.items()
            if name in names
            if (change := _difference(before, now.tables.get(name))) is not None
        }
        if not changed:
            return
        # Also requested tables: the stream may still be far below the position at which they are read.
        record(changed)
        requested = self._requested()
        if reported := {name: change for name, change in changed.items() if name not in requested}:
            raise _missed(reported)

    def _compare_publication(self, now: Published, record: Callable[[Mapping[str, str]], None]) -> None:
        if self._record is None or now.publication == self._record.publication:
            return
        change = "was dropped and made anew, or altered as a whole" if now.publication else "is gone"
        record(dict.fromkeys(self._record.tables, f"its publication {change}"))
        raise _gap(f"Publication {self._publication} {change}")

    def _record_missed(self, changed: Mapping[str, str]) -> None:
        tables = self._record.tables if self._record is not None else {}
        for name, change in changed.items():
            self.lost.add(name, change, tables[name].certain or Lsn(0))

    @property
    def _names(self) -> set[str]:
        return {contract.name for contract in self._contracts}

    def _now(self, connection: Connection) -> Published:
        """Read the publication and the entries of the tables with contracts from the catalogs."""
        names = {each.table_name: each.name for each in self._contracts}
        since_15 = _SINCE_15 if connection.server_version >= 150000 else ""
        certain = self._watermarks.next(connection)
        with source_errors("reading how the tables are published"), connection.cursor() as cursor:
            cursor.execute(
                "SELECT coalesce((SELECT oid || '.' || xmin FROM pg_publication WHERE pubname = %s), '')",
                (self._publication,),
            )
            (publication,) = cursor.fetchone()
            cursor.execute(
                _ENTRIES.format(since_15=since_15),
                ([schema for schema, _ in names], [table for _, table in names], self._publication),
            )
            rows = cursor.fetchall()
            cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
            since = Lsn.parse(cursor.fetchone()[0])
        tables = {
            names[schema, table]: RecordedTable(f"{schema}.{table}", relation, entries or "", since, certain)
            for schema, table, relation, entries in rows
        }
        return Published(self._epoch, publication, tables)

    def _write(self, record: Published) -> None:
        def merged(content: bytes | None) -> bytes:
            nonlocal record
            if content is not None:
                record = _merged(decode(_FORMAT, content, self._path), record)
            return encode(record)

        if record != self._durable:
            with failpoint("source.published"):
                update(self._path, merged)
            self._durable, self._written = record, time.monotonic()
        self._record = record


def _merged(stored: Published, record: Published) -> Published:
    """Return ``record`` with what a capture on another machine has recorded later: other tables, and tables
    as it found or accepted them after this one."""
    if stored.publication != record.publication:
        return record

    def age(table: RecordedTable) -> tuple[Lsn, Lsn]:
        return table.since, table.certain or Lsn(0)

    later = {
        name: table
        for name, table in stored.tables.items()
        if name not in record.tables or age(table) > age(record.tables[name])
    }
    return replace(record, tables=record.tables | later)


def recorded_tables(folder: Path, epoch: int) -> set[str]:
    """Return the tables that a capture of ``epoch`` has recorded, as ``schema.table``; none at first."""
    record = _read(_record_file(folder, epoch))
    return set() if record is None else {each.table for each in record.tables.values()}


def _record_file(folder: Path, epoch: int) -> Path:
    return folder / f"published-e{epoch:06d}.json"


def _read(path: Path) -> Published | None:
    try:
        content = content_of(path)
    except FileNotFoundError:
        return None
    return decode(_FORMAT, content, path)


def _with_certain(document: Document) -> Document:
    tables = document.get("tables")
    if not isinstance(tables, dict):
        return document
    each = {
        name: table | {"certain": None} if isinstance(table, dict) else table
        for name, table in tables.items()
    }
    return document | {"tables": each}


_FORMAT = Format(Published, FORMAT_VERSION, {1: _with_certain})


_ENTRIES = """
SELECT n.nspname::text, c.relname::text, c.oid::bigint,
       (SELECT string_agg(entry, ', ' ORDER BY entry) FROM (
           SELECT 'table ' || r.oid || '.' || r.xmin FROM pg_publication_rel r
           WHERE r.prpubid = p.oid
             AND (r.prrelid = c.oid OR r.prrelid IN (SELECT relid FROM pg_partition_ancestors(c.oid)))
         UNION ALL
           SELECT 'all tables' WHERE p.puballtables{since_15}
       ) AS found (entry))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN unnest(%s::text[], %s::text[]) AS wanted (of_schema, named)
  ON wanted.of_schema = n.nspname AND wanted.named = c.relname
JOIN pg_publication p ON p.pubname = %s
"""

_SINCE_15 = """
         UNION ALL
           SELECT 'schema ' || s.oid || '.' || s.xmin FROM pg_publication_namespace s
           WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace
         UNION ALL
           SELECT 'partition ' || r.oid || '.' || r.xmin FROM pg_publication_rel r
           WHERE NOT p.pubviaroot AND r.prpubid = p.oid AND r.prrelid <> c.oid
             AND (r.prqual IS NOT NULL OR r.prattrs IS NOT NULL)
             AND r.prrelid IN (SELECT relid FROM pg_partition_tree(c.oid))"""
"""Entries of whole schemas; and of partitions with their own filter or column list, where these apply."""


_MADE_ANEW = "was dropped and made anew"


def _renamed(name: str) -> str:
    return f"was called {name} for a time"


def _record_nothing(changed: Mapping[str, str]) -> None:
    pass


def _difference(before: RecordedTable, now: RecordedTable | None) -> str | None:
    if now is None:
        return "is gone"
    if now.relation != before.relation:
        return _MADE_ANEW
    if not now.entries:
        return "is not in the publication any more"
    if now.entries != before.entries:
        return "was out of the publication for a time, or was published with other columns or rows"
    return None


def _missed(changed: Mapping[str, str]) -> TableMissedChanges:
    listed = ", ".join(f"{name} {change}" for name, change in sorted(changed.items()))
    return TableMissedChanges(
        f"Changes of single tables may not have been sent: {listed}.",
        fix="Find out what happened at the source. Then have them read again, which makes their current "
        "state right, and capture goes on: "
        f'omnisupport-ingest source snapshot {" ".join(sorted(changed))} --reason "what happened"',
        reasons={
            name: f"Its changes may not have been sent: {name} {change}." for name, change in changed.items()
        },
    )


def _gap(problem: str) -> GapInSource:
    return GapInSource(
        f"{problem}. What committed meanwhile was not sent. Events may be missing.", fix=REPAIR
    )
