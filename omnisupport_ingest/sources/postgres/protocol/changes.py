"""Collects the changes of the stream, transaction after transaction, into blocks of a useful size.

The ordinal of a change is twice its index among the row changes, truncated relations and messages of its
transaction. Tables without a contract count too. An update that changes the key also takes the next, odd
number. So decoding the same WAL again gives the same positions, even with other contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.writer import BLOCK_BYTES, BLOCK_ROWS
from omnisupport_ingest.sources.postgres.protocol.change_block import ChangeBlock, TransactionRuns
from omnisupport_ingest.sources.postgres.protocol.frames import Rows, Transactions
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    Begin,
    LogicalMessage,
    OversizedRow,
    Relation,
)
from omnisupport_ingest.sources.postgres.protocol.row_events import (
    EventHeader,
    KeyNotSent,
    RowSchema,
    message_event,
    oversized_event,
    truncate_event,
)

Keys = Mapping[TableName, tuple[str, ...]]
"""Key columns of each contract, by table name; empty for a table that has a contract but is left out."""

IsPartitioned = Callable[[Relation], bool]
"""Whether the table of a description is partitioned. The description itself does not say so."""


class ChangeCollector:
    """Collects changes into a block. The caller takes the block when it is full, or earlier."""

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
        """Bytes of changes that are collected but not taken yet."""
        return self._block.received_bytes

    @property
    def without_contract(self) -> list[Relation]:
        """Described tables whose changes do not land with the key of a contract."""
        return [each.relation for each in self._schemas.values() if not self._keys.get(each.name)]

    def begin(self, transaction: Begin) -> None:
        """Begin ``transaction``: the changes that follow belong to it."""
        self._transaction, self._index = transaction, 0
        self._begin_run()

    def describe(
        self, relation: Relation, name: TableName | None = None, *, read_above: bool = False
    ) -> RowSchema:
        """Record a new description of a table. Raises ``KeyNotSent`` if it lacks the key of the contract.

        ``name``: the partitioned table that ``relation`` is a partition of. ``read_above``: a later snapshot
        reads the whole table, so its changes may land without a key, and a missing key is no error. If the
        table ``is_described`` already, call ``take`` first, because a block has one description per table.
        """
        schema = self._schema(relation, name or (relation.schema, relation.table), self._keys, read_above)
        self._install([schema])
        return schema

    def is_described(self, oid: int) -> bool:
        """Whether the table has been described before."""
        return oid in self._schemas

    def add_tables(self, keys: Keys, described: Sequence[tuple[Relation, TableName]]) -> list[RowSchema]:
        """Land later changes of the tables in ``keys`` with the keys of their contracts.

        ``described``: relations of these tables that are described already, each with the table's name. Call
        it only after ``take``.
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
        by_oid = {schema.relation.oid: schema for schema in schemas}
        assert not self._block.rows or self._schemas.keys().isdisjoint(by_oid), (
            "changes that were described otherwise have not been taken"
        )
        self._schemas.update(by_oid)
        self._block.schemas.update(by_oid)

    def add_row(self, message: bytes) -> bool:
        """Collect a row change (a ``WAL_DATA`` message); return whether the block is now full."""
        block = self._block
        block.messages.append(message)
        block.received_bytes += len(message)
        block.changes += 1
        self._index += 1
        return block.received_bytes >= BLOCK_BYTES or block.changes >= BLOCK_ROWS

    def add_rows(self, rows: Rows) -> bool:
        """Collect consecutive row changes; return whether the block is now full."""
        block = self._block
        block.end_messages()
        block.pieces.append(rows)
        block.received_bytes += rows.size
        block.changes += len(rows.starts)
        self._index += len(rows.starts)
        return block.received_bytes >= BLOCK_BYTES or block.changes >= BLOCK_ROWS

    def add_transactions(self, transactions: Transactions) -> bool:
        """Collect whole transactions; return whether the block is now full.

        Call ``begin`` before you add anything after them.
        """
        firsts, first = transactions.firsts, self._block.changes
        self._block.end_runs()
        self._block.runs.append(
            TransactionRuns(
                firsts + first,
                np.zeros_like(firsts),
                transactions.commit_lsns,
                transactions.commit_micros,
                transactions.xids,
            )
        )
        self._transaction = None
        return self.add_rows(transactions.rows)

    def table_of(self, relation: Relation) -> tuple[TableName, bool]:
        """Return the table that the rows of ``relation`` belong to, and whether it has a contract in use."""
        name = self._schemas[relation.oid].name
        return name, bool(self._keys.get(name))

    def add_oversized(self, change: OversizedRow, lsn: int) -> None:
        """Collect the change of a row that is too large to read. ``lsn``: the LSN of the change itself."""
        name, _ = self.table_of(change.relation)
        self._block.events.append(oversized_event(change.kind, name, self._next_header(lsn)))
        self._begin_run()

    def add_truncate(self, names: Sequence[TableName], lsn: int) -> None:
        """Collect one ``t`` event for each truncated table. ``lsn``: the LSN of the truncate itself."""
        for name in names:
            self._block.events.append(truncate_event(name, self._next_header(lsn)))
        self._begin_run()

    def add_message(self, message: LogicalMessage) -> None:
        """Collect the ``m`` event of a transactional message."""
        self._block.events.append(message_event(message, self._next_header(message.lsn)))
        self._begin_run()

    def take(self) -> ChangeBlock:
        """Return the block collected so far, which may be empty, and begin a new one."""
        block = self._block
        self._block = ChangeBlock(self._epoch, dict(self._schemas))
        self._begin_run()
        return block

    def _begin_run(self) -> None:
        """Begin a run: from here on, consecutive rows have consecutive indexes in the transaction."""
        if self._transaction is not None:
            self._block.begun.append((self._block.changes, self._transaction, self._index))

    def _next_header(self, lsn: int) -> EventHeader:
        transaction, index = self._transaction, self._index
        assert transaction is not None, "an event outside a transaction"
        self._index += 1
        return EventHeader(
            self._epoch, transaction.commit_lsn, 2 * index, transaction.commit_ts, transaction.xid, lsn
        )
