"""From decoded messages to landed events: every event gets its position, key and row images.

The ordinal is twice the index of the received row change, truncated relation or message in its
transaction, whether or not a contract names its table; a key-changing update also takes the odd
number above. So decoding the same WAL again gives the same positions, with other contracts too.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import datetime

import orjson

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.sources.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    LogicalMessage,
    Relation,
    RowChange,
    Truncate,
    Value,
)

KeyOf = Callable[[str, str], tuple[str, ...] | None]
"""(schema, table) → the contract's key columns, or none if no contract names the table."""


class KeyNotSent(IngestError):
    """A table was altered so that the stream no longer carries the contract's key."""


def row_image(names: tuple[str, ...], values: list[str | None]) -> str:
    """A row as one JSON object, column → text or null."""
    return orjson.dumps(dict(zip(names, values, strict=True))).decode()


def row_key(values: list[str | None]) -> str:
    """Key values as a compact JSON array of their texts, ``["7","EU"]``."""
    return orjson.dumps(values).decode()


class EventReader:
    """Turns the changes of one transaction after another into landed events."""

    def __init__(self, epoch: int, key_of: KeyOf) -> None:
        self._epoch = epoch
        self._key_of = key_of
        self._shapes: dict[int, _Shape] = {}
        self._commit_lsn = 0
        self._commit_ts = datetime.min
        self._xid = 0
        self._index = 0

    def begin(self, transaction: Begin) -> None:
        """The changes that follow belong to ``transaction``."""
        self._commit_lsn, self._commit_ts, self._xid = transaction
        self._index = 0

    def describe(self, relation: Relation) -> tuple[str, ...]:
        """Take a new description of a table; returns its key columns (empty: it has no key)."""
        shape = _Shape(relation, self._key_of(relation.schema, relation.table))
        self._shapes[relation.oid] = shape
        return shape.key_names

    def row(self, change: RowChange, lsn: int) -> tuple[LandedEvent, ...]:
        """One event, or two for an update that changed the key: ``d`` of the old, ``c`` of the new.

        Both carry the old row as it was sent (``before``): all of it under replica identity full,
        else the columns of the identity. ``lsn`` is that of the change itself.
        """
        relation = change.relation
        shape = self._shapes[relation.oid]
        ordinal = self._next_ordinal()
        old, new = change.old, change.new
        before = None if old is None else shape.old_image(old, change.old_is_key)
        if new is None:
            key = shape.key(old or [], None)
            return (self._event(ordinal, "d", lsn, relation, key, before, None, None, None),)
        after, unchanged = shape.new_image(new)
        key = shape.key(new, old)
        if change.kind == "I":
            return (self._event(ordinal, "c", lsn, relation, key, None, after, unchanged, None),)
        old_key = key if old is None else shape.key(old, None)
        if old_key == key:
            return (self._event(ordinal, "u", lsn, relation, key, before, after, unchanged, None),)
        return (
            self._event(ordinal, "d", lsn, relation, old_key, before, None, None, None),
            self._event(ordinal + 1, "c", lsn, relation, key, before, after, unchanged, old_key),
        )

    def truncate(self, truncate: Truncate, lsn: int) -> tuple[LandedEvent, ...]:
        """One ``t`` event for each truncated table."""
        return tuple(
            self._event(self._next_ordinal(), "t", lsn, relation, None, None, None, None, None)
            for relation in truncate.relations
        )

    def message(self, message: LogicalMessage) -> LandedEvent:
        """An ``m`` event of no table; ``after`` holds the prefix and the content in base64."""
        content = base64.b64encode(message.content).decode()
        return LandedEvent(
            self._epoch, self._commit_lsn, self._next_ordinal(), "m", self._commit_ts, self._xid,
            message.lsn, "", "", None, None,
            row_image(("prefix", "content"), [message.prefix, content]), None, None, None,
        )  # fmt: skip

    def _next_ordinal(self) -> int:
        ordinal = 2 * self._index
        self._index += 1
        return ordinal

    def _event(
        self,
        ordinal: int,
        op: str,
        lsn: int,
        relation: Relation,
        key: str | None,
        before: str | None,
        after: str | None,
        unchanged: list[str] | None,
        moved_from_key: str | None,
    ) -> LandedEvent:
        return LandedEvent(
            self._epoch, self._commit_lsn, ordinal, op, self._commit_ts, self._xid, lsn,
            relation.schema, relation.table, key, before, after, unchanged, moved_from_key, None,
        )  # fmt: skip


class _Shape:
    """What is worked out once for each description of a table."""

    def __init__(self, relation: Relation, contract_key: tuple[str, ...] | None) -> None:
        self._names = tuple(column.name for column in relation.columns)
        self._identity = [i for i, column in enumerate(relation.columns) if column.in_identity]
        self._identity_names = tuple(self._names[i] for i in self._identity)
        # With replica identity nothing the source refuses updates and deletes: inserts need no more.
        carried = self._names if relation.replica_identity == "n" else self._identity_names
        if contract_key is not None and not set(contract_key) <= set(carried):
            missing = ", ".join(sorted(set(contract_key) - set(carried)))
            raise KeyNotSent(
                f"{relation.schema}.{relation.table}: key column {missing} of its contract is not in "
                "the table's replica identity (any more), so deletes cannot name their row.",
                fix="Make the columns the primary key or the replica identity again (ALTER TABLE … "
                "REPLICA IDENTITY USING INDEX …), or change the key in the contract.",
            )
        full_without_contract = relation.replica_identity == "f" and contract_key is None
        names = contract_key or (() if full_without_contract else self._identity_names)
        self.key_names = names
        self._key = [self._names.index(name) for name in names]

    def key(self, values: list[Value], fallback: list[Value] | None) -> str | None:
        """The key in ``values``; a key value too long to be sent again stands in ``fallback``."""
        if not self._key:
            return None
        found = [values[i] for i in self._key]
        if UNCHANGED in found and fallback is not None:
            found = [fallback[i] if values[i] is UNCHANGED else values[i] for i in self._key]
        return orjson.dumps(found).decode()

    def new_image(self, values: list[Value]) -> tuple[str, list[str] | None]:
        """The row as sent, and the columns that were not sent."""
        names = self._names
        if UNCHANGED not in values:
            return orjson.dumps(dict(zip(names, values, strict=True))).decode(), None
        sent = {name: value for name, value in zip(names, values, strict=True) if value is not UNCHANGED}
        unchanged = [name for name, value in zip(names, values, strict=True) if value is UNCHANGED]
        return orjson.dumps(sent).decode(), unchanged

    def old_image(self, values: list[Value], is_key: bool) -> str:
        """The old row as sent: in a key tuple the other columns are null without being so."""
        if is_key:
            return orjson.dumps({self._names[i]: values[i] for i in self._identity}).decode()
        return self.new_image(values)[0]
