"""The key by which the rows of a table are read, and its change to another one.

What has landed names its rows by the key that it landed with (``contracts.landed_keys``). So a table whose
contract gets another key is not read until a person has it read whole. That reading begins an epoch, and in
it the new key. Once its end has landed, the new key comes into force, and nothing with the former one counts
any more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from omnisupport_ingest.contracts.landed_keys import LandedKeys
from omnisupport_ingest.contracts.model import KeyEra, TableContract
from omnisupport_ingest.landing.schema_changes import SchemaChanges, renamed_key
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.query.cursor import END_ORDINAL


class ReadingKeys:
    """The keys by which the tables of a source are read. ``landing``: its folder."""

    def __init__(self, landing: Path) -> None:
        self._landing, self._record = landing, LandedKeys(landing)

    def waiting(self, tables: Collection[TableContract]) -> set[str]:
        """Return the names of those of ``tables`` that have landed by another key than their contracts'.

        A table of which nothing is recorded is read by the key of its contract from now on. A key column that
        was only renamed at the source is the same column.
        """
        self._record.note(tables)
        recorded = self._record.all()
        others = [each for each in tables if recorded[each.full_name].newest != each.key]
        changes = SchemaChanges(self._landing).read().changes if others else ()
        renamed = {
            each.full_name: recorded[each.full_name].renamed(each.key)
            for each in others
            if each.key == renamed_key(changes, each.name, recorded[each.full_name].newest)
        }
        if renamed:
            self._record.update(lambda _: renamed)
        return {each.name for each in others if each.full_name not in renamed}

    def unsettled(self) -> set[str]:
        """Return the full names of the tables whose reading by a new key has begun and not ended."""
        return {name for name, each in self._record.all().items() if each.waits}

    def begin(self, tables: Sequence[TableContract], epoch: int) -> None:
        """Record that ``tables`` are read by the keys of their contracts in ``epoch``, and whole."""
        waiting = self.waiting(tables)
        recorded = self._record.all()
        begun = {
            each.full_name: recorded[each.full_name].begin(KeyEra(each.key, epoch, Lsn(0), END_ORDINAL))
            for each in tables
            if each.name in waiting
        }
        if begun:
            self._record.update(lambda _: begun)

    def settle(self, tables: Iterable[TableContract]) -> None:
        """Put the newest keys of ``tables`` in force: the ends of their full readings have landed."""
        ended = {each.full_name for each in tables} & self.unsettled()
        if ended:
            self._record.update(lambda recorded: {name: recorded[name].settled for name in ended})
