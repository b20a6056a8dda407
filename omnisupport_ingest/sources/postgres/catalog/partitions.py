"""Reads the partitions of a table from the catalog, compares them, and keeps the home's record of them.

The stream does not send rows that arrive by ATTACH, or leave by DETACH, DROP or TRUNCATE of a partition. The
catalog of partitions shows each of these.

The record of a table also keeps former partitions. If changes of partitions are sent under their own names,
changes that committed before a partition left belong to the table, however late they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.foreign import Unreadable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import decode_note, encode, read_note
from omnisupport_ingest.sources.postgres.session.connection import source_errors
from omnisupport_ingest.storage import update


@dataclass(frozen=True, slots=True)
class Partition:
    """A node in the tree of a partitioned table, including the root.

    ``attached``: changes when the partition is attached again; None for the root. ``file``: changes when it
    is truncated or rewritten. ``leaf``: it holds rows itself.
    """

    name: str
    attached: str | None
    file: int
    leaf: bool


Partitions = Mapping[str, Partition]
"""The partitions of one table, including the root, by oid as text."""


def read_partitions(connection: Connection, tables: Collection[TableName]) -> dict[TableName, Partitions]:
    """Return the trees of the partitioned tables among ``tables``, as ``connection`` sees them now."""
    schemas, names = [schema for schema, _ in tables], [name for _, name in tables]
    with source_errors("reading the partitions of the source"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_TREES, (schemas, names))
        rows = cursor.fetchall()
    partitions: dict[TableName, dict[str, Partition]] = {}
    for schema, table, oid, name, attached, file, leaf in rows:
        partitions.setdefault((schema, table), {})[oid] = Partition(name, attached, file, leaf)
    return dict(partitions)


_TREES = """
WITH RECURSIVE tree (schema, name, relation, attached) AS (
    SELECT w.schema, w.name, c.oid, NULL::text
    FROM unnest(%s::text[], %s::text[]) w (schema, name)
    JOIN pg_namespace n ON n.nspname = w.schema
    JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name AND c.relkind = 'p'
  UNION ALL
    SELECT t.schema, t.name, i.inhrelid, i.inhparent || '/' || i.xmin
    FROM tree t JOIN pg_inherits i ON i.inhparent = t.relation
)
SELECT t.schema, t.name, c.oid::text, n.nspname || '.' || c.relname, t.attached, c.relfilenode::bigint,
       c.relkind <> 'p'
FROM tree t JOIN pg_class c ON c.oid = t.relation JOIN pg_namespace n ON n.oid = c.relnamespace
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Changes of partitions. ``left``: partitions with which rows may have left the table, each with what
    happened, for messages. ``new``: oids of new leaves, whose rows have joined the table."""

    left: tuple[str, ...]
    new: tuple[str, ...]


def difference(before: Partitions, now: Partitions) -> Difference:
    """Return the changes between two reads of the partitions of a table."""
    left = []
    for oid, was in before.items():
        partition = now.get(oid)
        if partition is None:
            left.append(f"{was.name} was detached or dropped")
        elif partition.attached != was.attached:
            left.append(f"{partition.name} was attached anew")
        elif partition.leaf and partition.file != was.file:
            left.append(f"{partition.name} was truncated or rewritten")
    new = [oid for oid, partition in now.items() if partition.leaf and oid not in before]
    return Difference(tuple(sorted(left)), tuple(sorted(new, key=int)))


def read_root(connection: Connection, oid: int) -> TableName | None:
    """Return the root of the tree that partition ``oid`` belongs to; None if it is no partition, or gone."""
    with source_errors("looking for the root of a partition"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_ROOT, (oid,))
        row = cursor.fetchone()
    return None if row is None else (row[0], row[1])


_ROOT = """
SELECT n.nspname::text, c.relname::text
FROM pg_class leaf JOIN pg_class c ON c.oid = pg_partition_root(leaf.oid)
JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE leaf.oid = %s::bigint::oid AND leaf.relispartition
"""


class PartitionedTables:
    """Which tables are partitioned, by oid. A table stays what it is, so each is looked up only once.

    One query asks for the tables with contracts, however many there are.
    """

    def __init__(self, connection: Connection, tables: Collection[TableName]) -> None:
        """``tables``: those with contracts. Raises ``SourceUnavailable``."""
        self._connection = connection
        named = [schema for schema, _ in tables], [name for _, name in tables]
        with source_errors("looking for partitioned tables"), connection.cursor() as cursor:
            # No failpoint: a SELECT, put together elsewhere.
            cursor.execute(_PARTITIONED, named)
            self._known: dict[int, bool] = dict(cursor.fetchall())

    def has(self, oid: int) -> bool:
        """Whether the table ``oid`` is partitioned; False if it was gone when it was first looked up."""
        if oid not in self._known:
            with source_errors("looking for partitions"), self._connection.cursor() as cursor:
                cursor.execute(
                    "SELECT EXISTS (SELECT FROM pg_class WHERE oid = %s AND relkind = 'p')", (oid,)
                )
                (self._known[oid],) = cursor.fetchone()
        return self._known[oid]


_PARTITIONED = """
SELECT c.oid::bigint, c.relkind = 'p'
FROM unnest(%s::text[], %s::text[]) w (schema, name)
JOIN pg_namespace n ON n.nspname = w.schema
JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = w.name
"""


def rows_of(connection: Connection, oid: str) -> str | None:
    """Return the WHERE clause that selects the rows of leaf ``oid`` from its root; None if the leaf is gone.

    A role that may read the root may lack the right to read its partitions, so their rows are read through
    the root. The bounds in the clause let the planner skip the other partitions.
    """
    with source_errors("reading the bounds of a partition"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_get_partition_constraintdef(oid) FROM pg_class WHERE oid = %s", (oid,))
        row = cursor.fetchone()
    if row is None:
        return None
    bounds = f" AND {row[0]}" if row[0] else ""
    return f" WHERE tableoid = {int(oid)}{bounds}"


@dataclass(frozen=True, slots=True)
class OtherIdentity:
    """The partition ``schema``.``table``, whose old rows are sent without the columns ``missing``."""

    schema: str
    table: str
    missing: tuple[str, ...]


def without_key(connection: Connection, root: int, key: Collection[str]) -> list[OtherIdentity]:
    """Return the partitions of ``root`` (an oid) whose updates and deletes lack columns of ``key``."""
    with source_errors("reading the replica identities of partitions"), connection.cursor() as cursor:
        # No failpoint: a SELECT, put together elsewhere.
        cursor.execute(_IDENTITIES, (root,))
        rows = cursor.fetchall()
    identities = [(schema, table, tuple(sorted(set(key) - set(sent)))) for schema, table, sent in rows]
    return [OtherIdentity(*each) for each in identities if each[2]]


_IDENTITIES = """
SELECT n.nspname::text, c.relname::text,
       ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = c.oid
             AND a.attnum = ANY ((i.indkey::int2[])[0:i.indnkeyatts - 1]))
FROM pg_partition_tree(%s::bigint::oid::regclass) t
JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_index i ON i.indrelid = c.oid
WHERE t.isleaf AND (c.relreplident = 'd' AND i.indisprimary OR c.relreplident = 'i' AND i.indisreplident)
ORDER BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class Stay:
    """The period in which a table was a partition: from ``start`` on, below ``end``.

    Both are LSNs of checks, so the table may have been attached somewhat above ``start`` and detached
    somewhat above ``end``.
    """

    start: Lsn
    end: Lsn


@dataclass(frozen=True, slots=True)
class KnownPartitions:
    """The record of the partitions of one table.

    ``certain``: ``partitions`` includes every change of partitions that committed below this LSN. ``since``,
    by oid: below this LSN the table was not a partition yet; without an entry it always was one. ``left``, by
    oid: the last stay of a former partition, or of one that was attached again.
    """

    partitions: Partitions
    certain: Lsn
    since: Mapping[str, Lsn] = field(default_factory=dict)
    left: Mapping[str, Stay] = field(default_factory=dict)

    def stay_of(self, oid: str) -> Stay | None:
        """Return the current stay of ``oid``, with ``certain`` as its end; None if it is no partition now."""
        if oid not in self.partitions:
            return None
        return Stay(self.since.get(oid, Lsn(0)), self.certain)

    def followed_by(self, now: Partitions, before: Lsn, certain: Lsn, read_to: Lsn) -> KnownPartitions:
        """Return the record after a check that found the partitions ``now``.

        ``before`` and ``certain``: the LSNs up to which the old and the new partitions are certain.
        ``read_to``: the stream never sends commits below this LSN again.
        """
        left = dict(self.left)
        for oid in self.partitions.keys() - now.keys():
            left[oid] = Stay(self.since.get(oid, Lsn(0)), max(before, self.certain))
        since = {oid: self.since.get(oid, Lsn(0)) if oid in self.partitions else before for oid in now}
        return KnownPartitions(
            now,
            certain,
            {oid: lsn for oid, lsn in since.items() if lsn > read_to},
            {oid: stay for oid, stay in left.items() if stay.end > read_to},
        )


@dataclass(frozen=True, slots=True)
class _Record:
    table: str
    epoch: int
    partitions: dict[str, Partition]
    certain: Lsn = field(default_factory=partial(Lsn, 0))
    since: dict[str, Lsn] = field(default_factory=dict)
    left: dict[str, Stay] = field(default_factory=dict)


class PartitionRecords:
    """The records of the partitions of one source in one epoch, in its landing folder."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """``folder``: the landing folder of the source."""
        self._folder, self._epoch = folder, epoch

    def read(self, table: str) -> KnownPartitions | None:
        """Return the partitions of ``table`` (a contract's name) whose rows the lake has.

        None without a readable record of this epoch.
        """
        try:
            record = read_note(_Record, self._file(table))
        except (OSError, Unreadable):
            return None
        if record.epoch != self._epoch:
            return None
        return KnownPartitions(record.partitions, record.certain, record.since, record.left)

    def write(self, table: str, known: KnownPartitions) -> None:
        """Replace the record durably. The difference to the old one must have landed or be requested.

        In a bucket, the record of a capture on another machine that has checked further stays.
        """
        partitions, since, left = dict(known.partitions), dict(known.since), dict(known.left)
        record = _Record(table, self._epoch, partitions, known.certain, since, left)
        with failpoint("source.partitions", table):
            update(
                self._file(table),
                lambda content: None if self._is_further(content, known) else encode(record),
            )

    def _is_further(self, content: bytes | None, known: KnownPartitions) -> bool:
        """Whether the record in ``content`` is of this epoch, and of a later check than ``known``."""
        if content is None:
            return False
        try:
            record = decode_note(_Record, content)
        except Unreadable:
            return False
        return record.epoch == self._epoch and record.certain > known.certain

    def _file(self, table: str) -> Path:
        return self._folder / f"partitions-{table}.json"
