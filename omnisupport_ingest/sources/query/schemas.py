"""Records what has changed in the tables that are read by a cursor, before their rows land.

Every reading first looks at the tables, in its own transaction. PostgreSQL's catalogs show a change exactly;
other databases only give names and types of columns. If a column of the contract has disappeared, the reading
continues without it, unless the table is read by that column. A table whose contract says ``block`` is no
longer read once it has changed, and neither is one whose key has (``landed_key``). Beginning a full reading
accepts the changes that were seen before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import BLOCK, TableContract
from omnisupport_ingest.landing.schema_changes import UNKNOWN, Look, SchemaChanges
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema, record, shown_under_another_name
from omnisupport_ingest.sources.query.cursor import CursorColumn
from omnisupport_ingest.sources.query.landed_key import ReadingKeys
from omnisupport_ingest.sources.query.reader import Moment, Reader

_GONE = ("column_dropped", "column_added_again")


def schemas_now(
    reader: Reader, store: LandingStore, tables: Sequence[TableContract]
) -> Mapping[str, LiveSchema] | None:
    """Return the schemas of ``tables`` as they are, by contract name, and record nothing; None if the
    database does not show schemas. ``reader`` has no transaction open."""
    reader.begin()
    try:
        return reader.schemas(tables, SchemaChanges(store.folder).tables())
    finally:
        reader.end()


class CursorSchemas:
    """Looks at the ``tables`` of one source for one reading. ``learned``: as of ``record``."""

    def __init__(
        self, store: LandingStore, tables: Sequence[TableContract], learned: LearnedColumns | None
    ) -> None:
        self._changes, self._tables, self._learned = SchemaChanges(store.folder), tables, learned
        self.keys = ReadingKeys(store.folder)
        self._other_key = set[str]()

    def look(self, reader: Reader, moment: Moment, epoch: int) -> None:
        """Record what has changed, and let ``reader`` continue without columns that have disappeared.

        ``moment``: when its open transaction began.
        """
        live = reader.schemas(self._tables, self._changes.tables())
        if live is not None:
            low, high = (UNKNOWN if lsn is None else Lsn(lsn) for lsn in (moment.low, moment.high))
            contracts = {each.name: each for each in self._tables}
            record(self._changes, Look(epoch, low, high), contracts, live, learned=self._learned)
            self.keys.look(self._tables, live)
        self._other_key = self.keys.waiting(self._tables) | self.keys.lost(self._tables)
        for table in self._tables:
            reader.go_on_without(table, self._gone(table))

    def blocks(self, table: TableContract) -> bool:
        """Whether ``table`` must not be read until a person has decided about its changes.

        By a full reading (``anew.refresh``) if the contract says ``block``, or if the table has another key,
        at the source or in its contract. If a personal column has the name of another one, only the contract
        can decide.
        """
        if table.name in self._other_key or self._has_another_column(table):
            return True
        changes = [each for each in self._changes.held().changes if each.table == table.name]
        if shown_under_another_name(table, changes):
            return True
        return table.evolution == BLOCK and bool(self._changes.open_changes(table.name))

    def _has_another_column(self, table: TableContract) -> bool:
        """Whether a column of the key is another one than when ``table`` was last read whole."""
        seen = self._changes.tables().get(table.name)
        if seen is None:
            return False
        # The present names of the columns that had the names of the key then; None: it is gone.
        now: dict[str, str | None] = {name: name for name in table.key}
        changes = self._changes.open_changes(table.name)
        for _, look in groupby(changes, key=lambda each: each.noticed_at):
            of_look = [*look]
            names = {each.before: each.after for each in of_look if each.kind == "column_renamed"}
            # Where columns are known by name only, one that was left out for a time is no other one.
            gone = {each.column for each in of_look if each.kind in _GONE and seen.relation}
            now = {name: None if its in gone else names.get(its, its) for name, its in now.items()}
        # Without a column of that name the reading is refused, and says so.
        there = {each.name for each in seen.columns}
        return any(its != name for name, its in now.items() if name in there)

    def read_whole(self, table: TableContract) -> None:
        """Record that a full reading of ``table`` begins in the transaction of the last look."""
        self._changes.accept([table.name])

    def _gone(self, table: TableContract) -> frozenset[str]:
        """Return the columns of the contract that the table had and no longer has, except those by which it
        is read."""
        seen = self._changes.tables().get(table.name)
        if seen is None or table.cursor is None:
            # Without a cursor it is not read.
            return frozenset()
        there = {each.name for each in seen.columns} | CursorColumn.of(table).needs(table)
        had = {
            each.column
            for each in self._changes.held().changes
            if each.table == table.name and each.kind in ("column_dropped", "column_renamed")
        }
        return frozenset(
            each.name for each in table.source_columns if each.name in had and each.name not in there
        )
