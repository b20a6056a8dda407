"""How each captured table has been published, so that a time in which it was not does not pass unseen.

``pgoutput`` asks the catalogs as they were at each change: what was not published then is never sent, and
nothing tells of it later. But whoever takes a table out of a publication and puts it back makes another
entry there, as do another column list and another row filter; a table that is made anew is another one, too.
Their numbers never come back. So the entries are recorded before a table is read, and compared at every start
and every few seconds while capture runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.durable import replace as replace_file
from omnisupport_ingest.failpoints import gate
from omnisupport_ingest.landing.encoding import decode, encode
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.connection import source_errors
from omnisupport_ingest.sources.postgres.continuity import REPAIR
from omnisupport_ingest.sources.postgres.errors import HoleInSource, TableInterrupted
from omnisupport_ingest.sources.postgres.pgoutput import Relation

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """What a table is at the source: its number, and ``entries``, what puts it into the publication.

    ``since``: an end of the WAL, read after that was seen.
    """

    table: str
    relation: int
    entries: str
    since: Lsn


@dataclass(frozen=True, slots=True)
class Published:
    """The publication of an epoch (its number and last change) and its tables, by their contracts' names."""

    epoch: int
    publication: str
    tables: dict[str, PublishedTable]
    format_version: int = FORMAT_VERSION


class PublishedTables:
    """The record of one epoch, in the landing folder of its source. For use by several threads."""

    def __init__(
        self,
        folder: Path,
        epoch: int,
        publication: str,
        contracts: Sequence[TableContract],
        asked: Callable[[], Collection[str]],
    ) -> None:
        """``asked``: the tables that are to be read again, by name; about those nothing is in doubt."""
        self._path = folder / f"published-e{epoch:06d}.json"
        self._epoch, self._publication, self._contracts = epoch, publication, tuple(contracts)
        self._asked, self._lock = asked, threading.Lock()
        self._record = self._read()

    def require_publication(self, connection: Connection) -> None:
        """``HoleInSource`` if the publication is not the recorded one any more."""
        with self._lock:
            self._compare_publication(self._now(connection))

    def begin(self, connection: Connection) -> None:
        """Record what was not recorded yet, and compare the rest; errors as of ``require_same``."""
        with self._lock:
            now = self._now(connection)
            self._compare(now)
            before = self._record.tables if self._record is not None else {}
            self._write(replace(now, tables=now.tables | before))

    def accept(self, connection: Connection, names: Collection[str]) -> None:
        """Take the tables ``names`` as they are now: they are about to be read."""
        with self._lock:
            now = self._now(connection)
            before = self._record.tables if self._record is not None else {}
            taken = {name: table for name, table in now.tables.items() if name in names}
            self._write(replace(self._record or now, tables=before | taken))

    def require_same(self, connection: Connection) -> None:
        """``TableInterrupted`` or ``HoleInSource`` if changes may have gone unsent since the record."""
        with self._lock:
            self._compare(self._now(connection))

    def require_named(self, relation: Relation, commit_lsn: int) -> None:
        """``TableInterrupted`` if the stream gives a captured table another name, or its name to another."""
        name = f"{relation.schema}.{relation.table}"
        with self._lock:
            record = self._record
            asked = self._asked() if record is not None else ()
        for contract, table in record.tables.items() if record is not None else ():
            if contract not in self._names or contract in asked or commit_lsn < table.since.value:
                continue
            if relation.oid == table.relation and name != table.table:
                raise _interrupted({contract: f"was called {name} for a time"})
            if relation.oid != table.relation and name == table.table:
                raise _interrupted({contract: "was dropped and made anew"})

    def _compare(self, now: Published) -> None:
        self._compare_publication(now)
        if self._record is None:
            return
        asked = self._asked()
        changed = {
            name: told
            for name, before in self._record.tables.items()
            if name in self._names and name not in asked
            if (told := _difference(before, now.tables.get(name))) is not None
        }
        if changed:
            raise _interrupted(changed)

    def _compare_publication(self, now: Published) -> None:
        if self._record is None or now.publication == self._record.publication:
            return
        what = "was dropped and made anew, or altered as a whole" if now.publication else "is gone"
        raise _hole(f"Publication {self._publication} {what}")

    @property
    def _names(self) -> set[str]:
        return {contract.name for contract in self._contracts}

    def _now(self, connection: Connection) -> Published:
        names = {(each.schema, each.table): each.name for each in self._contracts}
        schemas = _OF_SCHEMAS if connection.server_version >= 150000 else ""
        with source_errors("reading how the tables are published"), connection.cursor() as cursor:
            cursor.execute(
                "SELECT coalesce((SELECT oid || '.' || xmin FROM pg_publication WHERE pubname = %s), '')",
                (self._publication,),
            )
            (publication,) = cursor.fetchone()
            cursor.execute(
                _ENTRIES.format(schemas=schemas),
                ([schema for schema, _ in names], [table for _, table in names], self._publication),
            )
            rows = cursor.fetchall()
            cursor.execute("SELECT pg_current_wal_insert_lsn()::text")
            since = Lsn.parse(cursor.fetchone()[0])
        tables = {
            names[schema, table]: PublishedTable(f"{schema}.{table}", relation, entries or "", since)
            for schema, table, relation, entries in rows
        }
        return Published(self._epoch, publication, tables)

    def _read(self) -> Published | None:
        if not self._path.exists():
            return None
        return decode(Published, self._path.read_bytes(), self._path, newest=FORMAT_VERSION)

    def _write(self, record: Published) -> None:
        if record != self._record:
            with gate("source.published"):
                replace_file(self._path, encode(record))
            self._record = record


_ENTRIES = """
SELECT n.nspname::text, c.relname::text, c.oid::bigint,
       (SELECT string_agg(entry, ', ' ORDER BY entry) FROM (
           SELECT 'table ' || r.oid || '.' || r.xmin FROM pg_publication_rel r
           WHERE r.prpubid = p.oid
             AND (r.prrelid = c.oid OR r.prrelid IN (SELECT relid FROM pg_partition_ancestors(c.oid)))
         UNION ALL
           SELECT 'all tables' WHERE p.puballtables{schemas}
       ) AS found (entry))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN unnest(%s::text[], %s::text[]) AS wanted (of_schema, named)
  ON wanted.of_schema = n.nspname AND wanted.named = c.relname
JOIN pg_publication p ON p.pubname = %s
"""

_OF_SCHEMAS = """
         UNION ALL
           SELECT 'schema ' || s.oid || '.' || s.xmin FROM pg_publication_namespace s
           WHERE s.pnpubid = p.oid AND s.pnnspid = c.relnamespace"""


def _difference(before: PublishedTable, now: PublishedTable | None) -> str | None:
    if now is None:
        return "is gone"
    if now.relation != before.relation:
        return "was dropped and made anew"
    if not now.entries:
        return "is not in the publication any more"
    if now.entries != before.entries:
        return "was out of the publication for a time, or was published with other columns or rows"
    return None


def _interrupted(changed: Mapping[str, str]) -> TableInterrupted:
    told = ", ".join(f"{name} {what}" for name, what in sorted(changed.items()))
    return TableInterrupted(
        f"Changes of single tables may not have been sent: {told}.",
        fix="Find out what happened at the source. Then have them read again, which makes their current "
        "state right, and capture goes on: "
        f'omnisupport-ingest source snapshot {" ".join(sorted(changed))} --reason "what happened"',
        tables=tuple(sorted(changed)),
    )


def _hole(problem: str) -> HoleInSource:
    return HoleInSource(
        f"{problem}. What committed meanwhile was not sent. Events may be missing.", fix=REPAIR
    )
