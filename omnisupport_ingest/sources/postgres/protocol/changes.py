"""The changes of one transaction after another, collected as they were received.

The ordinal is twice the index of the received row change, truncated relation or message in its
transaction, whether or not a contract names its table; a key-changing update also takes the odd
number above. So decoding the same WAL again gives the same positions, with other contracts too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from omnisupport_ingest.landing.writer import BLOCK_BYTES, BLOCK_ROWS
from omnisupport_ingest.sources.postgres.catalog.live_table import TableName
from omnisupport_ingest.sources.postgres.protocol.change_block import ChangeBlock, Run
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin, LogicalMessage, Relation, RowNotTaken
from omnisupport_ingest.sources.postgres.protocol.row_events import (
    EventHeader,
    KeyNotSent,
    RowSchema,
    message_event,
    not_taken_event,
    truncate_event,
)

Keys = Mapping[TableName, tuple[str, ...]]
"""The key columns of the contracts, by (schema, table); none where a contracted table is left out."""

IsPartitioned = Callable[[Relation], bool]
"""Whether a table that the stream has described is partitioned; the description does not say."""


class EventReader:
    """Collects changes into blocks; whoever uses it takes a block when it is full, or ready for it."""

    def __init__(
        self, epoch: int, keys: Keys, is_partitioned: IsPartitioned = lambda _relation: False
    ) -> None:
        self._epoch = epoch
        self._keys, self._is_partitioned = dict(keys), is_partitioned
        self._schemas: dict[int, RowSchema] = {}
        self._transaction: Begin | None = None
        self._index = 0
        self._block = ChangeBlock(epoch, {})

    @property
    def collected_bytes(self) -> int:
        """Size of the changes collected and not taken."""
        return self._block.received_bytes

    @property
    def without_contract(self) -> list[Relation]:
        """What has been described and is of no table that is told by its contract."""
        return [each.relation for each in self._schemas.values() if not self._keys.get(each.name)]

    def begin(self, transaction: Begin) -> None:
        """The changes that follow belong to ``transaction``."""
        self._transaction, self._index = transaction, 0
        self._begin_run()

    def describe(
        self, relation: Relation, name: TableName | None = None, *, read_above: bool = False
    ) -> RowSchema:
        """Take a new description of a table, which may have no key; ``KeyNotSent``.

        ``name``: of the table whose rows these are, if it is not its own: that of which it is a partition.
        ``read_above``: all of the table is read by a snapshot above these changes, so that they stop nothing
        where the key is not sent: they have none then. Only after ``take``: a block knows one description of
        each table.
        """
        schema = self._schema(relation, name or (relation.schema, relation.table), self._keys, read_above)
        self._install([schema])
        return schema

    def add_tables(self, keys: Keys, described: Sequence[tuple[Relation, TableName]]) -> list[RowSchema]:
        """Give what comes from now on of the tables of ``keys``, new ones, the keys of their contracts.

        ``described``: what has been described already and is theirs, with the table's name. Only after
        ``take``.
        """
        schemas = [self._schema(relation, name, keys, True) for relation, name in described]
        self._keys.update(keys)
        self._install(schemas)
        return schemas

    def _schema(self, relation: Relation, name: TableName, keys: Keys, read_above: bool) -> RowSchema:
        partitioned = self._is_partitioned(relation)
        try:
            return RowSchema(relation, keys.get(name), name=name, partitioned=partitioned)
        except KeyNotSent:
            if not read_above:
                raise
            return RowSchema(relation, (), name=name, partitioned=partitioned)

    def _install(self, schemas: Sequence[RowSchema]) -> None:
        assert not self._block.rows, "changes that were described otherwise have not been taken"
        self._schemas.update({schema.relation.oid: schema for schema in schemas})
        self.take()

    def row(self, message: bytes) -> bool:
        """Collect the change of a row (a ``WAL_DATA`` message); whether the block is full now."""
        block = self._block
        block.messages.append(message)
        block.received_bytes += len(message)
        self._index += 1
        return block.received_bytes >= BLOCK_BYTES or len(block.messages) >= BLOCK_ROWS

    def table_of(self, relation: Relation) -> tuple[TableName, bool]:
        """The name of the table whose rows those of ``relation`` are, and whether its contract tells them."""
        name = self._schemas[relation.oid].name
        return name, bool(self._keys.get(name))

    def not_taken(self, change: RowNotTaken, lsn: int) -> None:
        """Collect, of a row change whose row was not taken, that it was. ``lsn`` is that of the change."""
        name, _ = self.table_of(change.relation)
        self._block.events.append(not_taken_event(change.kind, name, self._next_header(lsn)))
        self._begin_run()

    def truncate(self, names: Sequence[TableName], lsn: int) -> None:
        """Collect one ``t`` event for each truncated table. ``lsn`` is that of the change itself."""
        for name in names:
            self._block.events.append(truncate_event(name, self._next_header(lsn)))
        self._begin_run()

    def message(self, message: LogicalMessage) -> None:
        """Collect the ``m`` event of a transactional message."""
        self._block.events.append(message_event(message, self._next_header(message.lsn)))
        self._begin_run()

    def take(self) -> ChangeBlock:
        """What was collected; it may be empty."""
        block = self._block
        self._block = ChangeBlock(self._epoch, dict(self._schemas))
        self._begin_run()
        return block

    def _begin_run(self) -> None:
        """From here, the rows of the block have ordinals that follow one another."""
        if self._transaction is not None:
            self._block.runs.append(Run(len(self._block.messages), self._transaction, self._index))

    def _next_header(self, lsn: int) -> EventHeader:
        transaction, index = self._transaction, self._index
        assert transaction is not None, "an event outside a transaction"
        self._index += 1
        return EventHeader(
            self._epoch, transaction.commit_lsn, 2 * index, transaction.commit_ts, transaction.xid, lsn
        )
