"""Makes landed events with key and row images from decoded messages, one message at a time.

This module defines what an event *is*. ``change_block`` converts most row changes, a block at a time, and
must give the same events.
"""

from __future__ import annotations

import base64
from datetime import datetime
from typing import NamedTuple

import orjson

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.postgres.protocol.pgoutput import (
    UNCHANGED,
    LogicalMessage,
    Relation,
    RowChange,
    Value,
)


class KeyNotSent(IngestError):
    """The changes of a table no longer carry the key of its contract, because the table or a partition was
    altered.

    Fix: Make the key the replica identity again, then ``omnisupport-ingest source snapshot TABLE``.
    """

    def __init__(self, problem: str, *, fix: str, table: TableName) -> None:
        super().__init__(problem, fix=fix)
        self.table = table


_OPS = {"I": "c", "U": "u", "D": "d"}

_THEN = (
    "The changes that were written meanwhile name no row for good: then have the table read again, "
    "omnisupport-ingest source snapshot TABLE"
)


def row_image(names: tuple[str, ...], values: list[str | None]) -> str:
    """Return a row as one JSON object, column → text or null."""
    return orjson.dumps(dict(zip(names, values, strict=True))).decode()


def row_key(values: list[str | None]) -> str:
    """Return key values as a compact JSON array of their texts, ``["7","EU"]``."""
    return orjson.dumps(values).decode()


class EventHeader(NamedTuple):
    """The position of an event, its commit time, its transaction, and the LSN of the change itself."""

    epoch: int
    commit_lsn: int
    ordinal: int
    commit_ts: datetime
    xid: int
    lsn: int


def row_events(schema: RowSchema, change: RowChange, header: EventHeader) -> tuple[LandedEvent, ...]:
    """Return one event; or two if the key changed: ``d`` of the old key, ``c`` of the new key.

    Both of the two carry in ``before`` the old row as it was sent: the whole row under replica identity FULL,
    else the columns of the replica identity. Raises ``KeyNotSent`` if a part of the old key was not sent.
    """
    old, new = change.old, change.new
    before = None if old is None else schema.old_image(old, change.old_is_key)
    if new is None:
        key = schema.old_key(old or [])
        return (_event(header, "d", schema.name, _Content(key, before)),)
    after, unchanged = schema.new_image(new)
    key = schema.key(new, old)
    if change.kind == "I":
        return (_event(header, "c", schema.name, _Content(key, None, after, unchanged)),)
    old_key = key if old is None else schema.old_key(old)
    if old_key == key:
        return (_event(header, "u", schema.name, _Content(key, before, after, unchanged)),)
    above = header._replace(ordinal=header.ordinal + 1)
    return (
        _event(header, "d", schema.name, _Content(old_key, before)),
        _event(above, "c", schema.name, _Content(key, before, after, unchanged, old_key)),
    )


def oversized_event(kind: str, name: TableName, header: EventHeader) -> LandedEvent:
    """Return the event of a row that is too large to read. It has no key and no image."""
    return _event(header, _OPS[kind], name, _Content())


def truncate_event(name: TableName, header: EventHeader) -> LandedEvent:
    """Return the ``t`` event of one truncated table."""
    return _event(header, "t", name, _Content())


def message_event(message: LogicalMessage, header: EventHeader) -> LandedEvent:
    """Return the ``m`` event of a message, without a table. ``after``: prefix, and content in base64."""
    content = base64.b64encode(message.content).decode()
    return LandedEvent(
        header.epoch, header.commit_lsn, header.ordinal, "m", header.commit_ts, header.xid, header.lsn,
        "", "", None, None, row_image(("prefix", "content"), [message.prefix, content]), None, None, None,
    )  # fmt: skip


class _Content(NamedTuple):
    """The content of an event besides its header: JSON texts, and the columns that were not sent."""

    key: str | None = None
    before: str | None = None
    after: str | None = None
    unchanged: list[str] | None = None
    moved_from_key: str | None = None


def _event(header: EventHeader, op: str, name: TableName, content: _Content) -> LandedEvent:
    return LandedEvent(
        header.epoch, header.commit_lsn, header.ordinal, op, header.commit_ts, header.xid, header.lsn,
        *name, content.key, content.before, content.after, content.unchanged, content.moved_from_key, None,
    )  # fmt: skip


class RowSchema:
    """The schema of a table as the stream described it, with everything that is derived from it once.

    Raises ``KeyNotSent`` if the replica identity lacks the contract's key.
    """

    def __init__(
        self,
        relation: Relation,
        contract_key: tuple[str, ...] | None,
        *,
        name: TableName | None = None,
        partitioned: bool = False,
    ) -> None:
        """Derive everything from ``relation``.

        ``contract_key``: key columns of the table's contract; None without a contract; empty if its events
        must have no key. ``name``: the partitioned table that ``relation`` is a partition of; None: the
        relation's own name. ``partitioned``: the old rows come from partitions and carry the columns of the
        partition's replica identity. The table's own replica identity decides whether they are sent as keys
        or as whole rows.
        """
        self.relation, self.partitioned = relation, partitioned
        self.name = name or (relation.schema, relation.table)
        self.names = tuple(column.name for column in relation.columns)
        self.identity = [i for i, column in enumerate(relation.columns) if column.in_identity]
        identity_names = tuple(self.names[i] for i in self.identity)
        # With replica identity NOTHING the server refuses updates and deletes, and inserts carry all columns.
        carried = self.names if relation.replica_identity == "n" else identity_names
        if contract_key is not None and not set(contract_key) <= set(carried):
            missing = ", ".join(sorted(set(contract_key) - set(carried)))
            raise KeyNotSent(
                f"{relation.schema}.{relation.table}: key column {missing} of its contract is not in "
                "the table's replica identity (any more), so deletes cannot name their row.",
                fix="Make the columns the primary key or the replica identity again (ALTER TABLE … "
                f"REPLICA IDENTITY USING INDEX …), or change the key in the contract. {_THEN}",
                table=self.name,
            )
        names = contract_key
        if names is None:
            # The stream has the columns of a replica identity in the order of the table. A contract that
            # comes later may have another order, by which these values would be the keys of other rows.
            names = identity_names if relation.replica_identity != "f" and len(identity_names) == 1 else ()
        self.key_names = names
        """The columns of the key: the contract's, else the one of the replica identity; may be none."""
        self.key_indexes = [self.names.index(name) for name in names]
        self._contracted = contract_key is not None

    def key(self, values: list[Value], fallback: list[Value] | None) -> str | None:
        """Return the key in ``values`` as JSON; None without a key. ``fallback`` replaces unsent values."""
        if not self.key_indexes:
            return None
        key_values = [values[i] for i in self.key_indexes]
        if UNCHANGED in key_values and fallback is not None:
            key_values = [fallback[i] if values[i] is UNCHANGED else values[i] for i in self.key_indexes]
        return orjson.dumps(key_values).decode()

    def old_key(self, values: list[Value]) -> str | None:
        """Return the key in an old row. Raises ``KeyNotSent`` if a part of it was not sent."""
        lacking = [self.names[i] for i in self.key_indexes if values[i] is None]
        if lacking and self._contracted and self.partitioned:
            raise KeyNotSent(
                f"{self.relation.schema}.{self.relation.table}: a change names its row without key column "
                f"{', '.join(lacking)} of the contract: a partition has, or had, another replica identity.",
                fix="Give every partition one with the key (ALTER TABLE … REPLICA IDENTITY DEFAULT); "
                f"`omnisupport-ingest preflight` names those without. {_THEN}",
                table=self.name,
            )
        return self.key(values, None)

    def new_image(self, values: list[Value]) -> tuple[str, list[str] | None]:
        """Return the new row as sent, and the names of the columns that were not sent; None for none."""
        names = self.names
        if UNCHANGED not in values:
            return orjson.dumps(dict(zip(names, values, strict=True))).decode(), None
        sent = {name: value for name, value in zip(names, values, strict=True) if value is not UNCHANGED}
        unchanged = [name for name, value in zip(names, values, strict=True) if value is UNCHANGED]
        return orjson.dumps(sent).decode(), unchanged

    def old_image(self, values: list[Value], is_key: bool) -> str:
        """Return the old row as sent. Leaves out the columns that a key tuple has no values for.

        For a partitioned table it leaves out nulls too, because a partition's replica identity may lack the
        column.
        """
        if self.partitioned:
            indexes = self.identity if is_key else range(len(values))
            sent = {self.names[i]: values[i] for i in indexes if values[i] not in (None, UNCHANGED)}
            return orjson.dumps(sent).decode()
        if is_key:
            return orjson.dumps({self.names[i]: values[i] for i in self.identity}).decode()
        return self.new_image(values)[0]
