"""The epoch and the tables of a running capture.

Tables may be added while it runs. The thread that reads the stream takes them between two transactions. So
all changes of later transactions land with the key of the table's contract.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.epochs import EpochRecord
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables
from omnisupport_ingest.sources.postgres.catalog.schema_watch import SchemaWatch
from omnisupport_ingest.sources.postgres.slot.continuity import connect_to_source
from omnisupport_ingest.windows import WindowGrid


@dataclass(frozen=True)
class CapturedEpoch:
    """An epoch of a source, and where its batches go. The stream and the snapshots of a capture share it.

    When a batch is durable, the thread that wrote it calls ``landed`` with it.
    """

    dsn: str
    settings: Settings
    store: LandingStore
    grid: WindowGrid
    record: EpochRecord
    published: PublishedTables
    schemas: SchemaWatch
    landed: Callable[[Manifest], None]

    @property
    def number(self) -> int:
        return self.record.number

    @property
    def slot(self) -> str:
        """The name of its replication slot; empty if no slot was made for it."""
        return self.record.facts.slot if self.record.facts else ""

    @property
    def start(self) -> Lsn:
        """The LSN at which its stream begins."""
        return self.record.facts.consistent_point if self.record.facts else Lsn(0)

    def connect(self) -> Connection:
        """Open a connection for SQL, and verify that it leads to the server of this epoch.

        Raises ``SourceUnavailable``, and as ``connect_to_source`` does.
        """
        return connect_to_source(self.dsn, self.record)


class CapturedTables:
    """The tables of a running capture.

    Two threads share it: the one that reads the stream, and one other, which hands over one group of tables
    at a time.
    """

    def __init__(self, tables: Iterable[TableContract], left_out: Iterable[TableContract] = ()) -> None:
        """``left_out``: tables that have contracts but are not captured; their changes land without a key."""
        self._all = tuple(tables)
        self._by_name = {each.name: each for each in self._all}
        self._left_out = tuple(left_out)
        self._lock = threading.Lock()
        self._handed: tuple[TableContract, ...] = ()

    @property
    def all(self) -> tuple[TableContract, ...]:
        """The captured tables."""
        return self._all

    def named(self, name: str) -> TableContract | None:
        """Return the captured table whose contract is called ``name``; None if it is not captured."""
        return self._by_name.get(name)

    @property
    def left_out(self) -> tuple[TableContract, ...]:
        """The tables whose changes land without a key."""
        return self._left_out

    @property
    def keys(self) -> dict[TableName, tuple[str, ...]]:
        """Table name → key columns of its changes: the contract's; empty for a table that is left out."""
        left_out = set(self._left_out)
        return {
            each.table_name: () if each in left_out else each.key for each in (*self._left_out, *self._all)
        }

    @property
    def any_waiting(self) -> bool:
        """Whether tables wait to be taken. Takes no lock."""
        return bool(self._handed)

    def hand_over(self, tables: Sequence[TableContract]) -> None:
        """Offer ``tables`` to the thread that reads the stream. They replace tables that still wait."""
        with self._lock:
            self._handed = tuple(tables)

    def take(self, add_tables: Callable[[Sequence[TableContract]], None]) -> None:
        """Take the tables that wait: call ``add_tables`` with them, and capture them from now on."""
        with self._lock:
            if self._handed:
                add_tables(self._handed)
                self._all += self._handed
                self._by_name |= {each.name: each for each in self._handed}
                added = {each.name for each in self._handed}
                self._left_out = tuple(each for each in self._left_out if each.name not in added)
                self._handed = ()
