"""The key by which the rows of a table are read, and its change to another one.

What has landed names its rows by the key that it landed with (``contracts.landed_keys``). So a table whose
contract gets another key is not read until a person has it read whole. That reading begins an epoch, and in
it the new key. Once its end has landed, the new key comes into force, and nothing with the former one counts
any more. A table is not read either once nothing unique at the source is within its key any more: two of its
rows could then share a key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omnisupport_ingest.contracts.landed_keys import LOST, UNDECLARED, UNKNOWN, KeysOfTable, LandedKeys
from omnisupport_ingest.contracts.model import KeyEra, TableContract
from omnisupport_ingest.landing.schema_changes import SchemaChanges, renamed_key
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.catalog.recording import LiveSchema
from omnisupport_ingest.sources.postgres.catalog.schema_watch import LOGGED
from omnisupport_ingest.sources.query.cursor import END_ORDINAL
from omnisupport_ingest.sources.shown_columns import NOT_INSPECTED


class ReadingKeys:
    """The keys by which the tables of a source are read. ``landing``: its folder."""

    def __init__(self, landing: Path) -> None:
        self._changes, self._record = SchemaChanges(landing), LandedKeys(landing)
        self._unique: dict[str, bool | None] = {}
        self._keyed: dict[str, bool] = {}

    def look(self, tables: Sequence[TableContract], live: Mapping[str, LiveSchema]) -> None:
        """Record for each of ``tables`` whether its key tells its rows apart. ``live``: by contract name."""
        inspected = [
            (each, live[each.name])
            for each in tables
            if each.name in live and live[each.name].live.kind != NOT_INSPECTED
        ]
        self._keyed = {each.full_name: bool(found.seen.key) for each, found in inspected}
        self._unique = {
            each.full_name: is_unique(each, found)
            for each, found in inspected
            # Without a column of its key, or if it could not be inspected, the reading is refused.
            if all(found.column(name) for name in each.key)
        }
        waiting = self.waiting(tables)
        looked = {each.full_name for each in tables if each.name not in waiting} & self._unique.keys()
        self._change(lambda name, keys: keys.seen(unique=self._unique[name]), looked)

    def note(self, tables: Iterable[TableContract]) -> None:
        """Record the keys of those of ``tables`` of which nothing is recorded, before their first rows
        land."""
        recorded = self._record.all()
        first = {
            each.full_name: KeysOfTable.first(each.key) for each in tables if each.full_name not in recorded
        }
        for name in first.keys() & self._unique.keys():
            first[name] = first[name].seen(unique=self._unique[name])
        if first:
            self._record.update(lambda held: first | {**held})

    def waiting(self, tables: Iterable[TableContract]) -> set[str]:
        """Return the names of those of ``tables`` that have landed by another key than their contracts'.

        A key column that was only renamed at the source, since the table was last read whole, is the same
        column.
        """
        recorded = self._record.all()
        others = {
            each.full_name: each
            for each in tables
            if each.full_name in recorded and recorded[each.full_name].newest != each.key
        }
        open_changes = self._changes.open_changes
        renamed = {
            name
            for name, each in others.items()
            if each.key == renamed_key(open_changes(each.name), each.name, recorded[name].newest)
        }
        self._change(lambda name, keys: keys.renamed(others[name].key), renamed)
        return {each.name for name, each in others.items() if name not in renamed}

    def lost(self, tables: Iterable[TableContract]) -> set[str]:
        """Return the names of those of ``tables`` whose rows their keys no longer tell apart."""
        recorded = self._record.all()
        return {
            each.name
            for each in tables
            if each.full_name in recorded and recorded[each.full_name].apart == LOST
        }

    def unsettled(self) -> set[str]:
        """Return the full names of the tables whose reading by a new key has begun and not ended."""
        return {name for name, each in self._record.all().items() if each.waits}

    def begin(self, tables: Sequence[TableContract], epoch: int) -> None:
        """Record that ``tables`` are read by the keys of their contracts in ``epoch``, and whole.

        A person who has a table read whole that has no key at all at the source any more declares thereby
        that the contract's key is still right. The last ``look`` of this object says whether it has one; of a
        table that it did not see, the last reading does.
        """
        waiting, seen = self.waiting(tables), self._changes.tables()
        begun = {each.full_name: each for each in tables if each.name in waiting}
        held = {each.full_name: bool(seen[each.name].key) for each in tables if each.name in seen}
        keyed = {name for name, has_one in (held | self._keyed).items() if has_one}

        def began(name: str, keys: KeysOfTable) -> KeysOfTable:
            # The next look finds out whether the new key tells the rows apart; until then it does not.
            lost = name in keyed and keys.apart != UNDECLARED
            keys = keys.begin(KeyEra(begun[name].key, epoch, Lsn(0), END_ORDINAL))
            return replace(keys, apart=LOST if lost else UNKNOWN)

        self._change(began, {*begun})
        names = self.lost(tables)
        lost = {each.full_name for each in tables if each.name in names}
        self._change(lambda _, keys: replace(keys, apart=UNDECLARED), lost - keyed)

    def settle(self, tables: Iterable[TableContract]) -> None:
        """Put the newest keys of ``tables`` in force: the ends of their full readings have landed."""
        ended = {each.full_name for each in tables} & self.unsettled()
        self._change(lambda _, keys: keys.settled, ended)

    def _change(self, change: Callable[[str, KeysOfTable], KeysOfTable], names: Collection[str]) -> None:
        """Replace what is recorded of the tables called ``names``; what nothing is recorded of stays so."""
        recorded = self._record.all()
        due = [name for name in names if name in recorded and change(name, recorded[name]) != recorded[name]]
        if due:
            self._record.update(lambda held: {name: change(name, held[name]) for name in due if name in held})


def is_unique(table: TableContract, live: LiveSchema) -> bool | None:
    """Return whether something unique at the source, over columns that are NOT NULL, is within the key of
    ``table``; None for a view or foreign table, which has nothing unique."""
    if live.live.kind not in LOGGED:
        return None
    return any({*each.columns} <= {*table.key} for each in live.live.unique)
