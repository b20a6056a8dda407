"""Row changes turned into event columns a block at a time.

With one object per change, capture would spend most of its time on objects. Here the changes of one kind and
one table are columns from the start: arithmetic over all of them finds their texts, and Arrow joins their
keys and row images. Unusual changes go one by one through ``row_events``, which defines what an event is;
both ways give the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.landing.columns import events_table, times
from omnisupport_ingest.landing.rows import EVENT_SCHEMA, LandedEvent
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin, Decoder, RowChange
from omnisupport_ingest.sources.postgres.protocol.row_events import EventHeader, RowSchema, row_events
from omnisupport_ingest.sources.postgres.protocol.text_columns import (
    PADDING,
    Irregular,
    Positions,
    TextColumns,
    big_endian,
    escaped,
    json_arrays,
    json_objects,
    tuple_columns,
)
from omnisupport_ingest.sources.postgres.protocol.walstream import WAL_DATA_HEADER

_INSERT, _UPDATE, _DELETE = b"IUD"
_NEW, _OLD_KEY, _OLD_ROW = b"NKO"
_MARKER = WAL_DATA_HEADER + 5
"""Offset of the letter that says what the first tuple of a change is, after its kind and table oid."""

_OVERHEAD = 100
"""Estimated bytes that an event takes beside what was received of it."""


class Run(NamedTuple):
    """Rows of a block from ``first`` on: changes of ``transaction`` from ``from_index`` on."""

    first: int
    transaction: Begin
    from_index: int


@dataclass(slots=True)
class ChangeBlock:
    """Changes of one or more transactions, in the order received, with the tables' ``schemas`` by oid.

    ``messages``: row changes, as ``WAL_DATA`` messages. ``events``: truncates and logical messages, which
    have their positions already. ``received_bytes``: size of ``messages``.
    """

    epoch: int
    schemas: Mapping[int, RowSchema]
    messages: list[bytes] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    events: list[LandedEvent] = field(default_factory=list)
    received_bytes: int = 0

    @property
    def rows(self) -> int:
        """Number of changes. Each gives one event, and one more if it changed the key."""
        return len(self.messages) + len(self.events)

    @property
    def size(self) -> int:
        """Estimated size of the events in bytes."""
        return self.received_bytes + _OVERHEAD * self.rows

    @property
    def highest_ts(self) -> datetime:
        """The highest commit time. The block is not empty."""
        ends = [run.first for run in self.runs[1:]] + [len(self.messages)]
        moments = [
            run.transaction.commit_ts for run, end in zip(self.runs, ends, strict=True) if run.first < end
        ]
        return max(moments + [event.source_ts for event in self.events])

    def table(self) -> pa.Table:
        """Return all events as a table of ``EVENT_SCHEMA``, in the order of their positions.

        Call it once: the messages, which may be large, are freed as soon as they are one block of bytes.
        """
        parts = _Rows(self).tables() if self.messages else []
        if self.events:
            parts.append(events_table(self.events))
        if len(parts) == 1:
            return parts[0]
        table = pa.concat_tables(parts)
        order = np.lexsort((table.column("ordinal"), table.column("commit_lsn")))
        return table.combine_chunks().take(pa.array(order))


class _Rows:
    """The row changes of one block."""

    def __init__(self, block: ChangeBlock) -> None:
        messages, block.messages = block.messages, []
        self._epoch, self._schemas, self._runs = block.epoch, block.schemas, block.runs
        self._bytes = b"".join([*messages, PADDING])
        self._ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
        self._starts = np.concatenate((np.zeros(1, np.int64), self._ends[:-1]))
        firsts = np.array([run.first for run in block.runs] + [len(messages)])
        self._run_of = np.repeat(np.arange(len(block.runs)), np.diff(firsts))
        index = np.array([run.from_index for run in block.runs])[self._run_of]
        self._ordinals = 2 * (index + np.arange(len(messages)) - firsts[self._run_of])
        self._lsns = big_endian(self._bytes, ">u8", self._starts + 1).astype(np.int64)
        self._one_by_one: list[int] = []

    def tables(self) -> list[pa.Table]:
        """Return one table for each kind of change of each table, and one of the changes taken one by one."""
        letters = np.frombuffer(self._bytes, np.uint8)
        kinds = letters[self._starts + WAL_DATA_HEADER].astype(np.int64)
        self._is_insert = kinds == _INSERT
        oids = big_endian(self._bytes, ">u4", self._starts + WAL_DATA_HEADER + 1).astype(np.int64)
        markers = letters[self._starts + _MARKER]
        # Inserts and updates without an old row have the same layout; together they need no sorting.
        kinds[self._is_insert & (markers == _NEW)] = _UPDATE
        groups = kinds << 40 | oids << 8 | markers
        parts = []
        for group in np.unique(groups).tolist():
            rows = np.flatnonzero(groups == group)
            schema = self._schemas.get(group >> 8 & 0xFFFFFFFF)
            try:
                part = self._group(group >> 40, group & 0xFF, schema, rows)
            except (Irregular, pa.ArrowInvalid):
                part = None
            if part is None:
                self._one_by_one += rows.tolist()
            elif part.num_rows:
                parts.append(part)
        if self._one_by_one:
            parts.append(self._each_alone(sorted(self._one_by_one)))
        return parts

    def _group(self, kind: int, marker: int, schema: RowSchema | None, rows: Positions) -> pa.Table | None:
        """Return the events of ``rows``, changes of one kind of one table; None for rare kinds."""
        at = self._starts[rows] + _MARKER + 1
        if schema is None:
            return None
        if kind == _UPDATE and marker == _NEW:
            new = self._tuples(at, rows, schema)
            self._require_end(new, rows)
            ops = pc.if_else(pa.array(self._is_insert[rows]), "c", "u")
            return self._table(ops, schema, rows, _key(schema, new, None), None, new)
        if kind == _DELETE and marker in (_OLD_KEY, _OLD_ROW):
            old = self._tuples(at, rows, schema)
            self._require_end(old, rows)
            before = _old_image(schema, old, marker == _OLD_KEY)
            ops = pa.repeat("d", len(rows))
            return self._table(ops, schema, rows, _key(schema, old, None), before, None)
        if kind == _UPDATE and marker == _OLD_ROW:
            return self._updates_of_whole_rows(schema, rows, at)
        return None

    def _updates_of_whole_rows(self, schema: RowSchema, rows: Positions, at: Positions) -> pa.Table:
        """Return updates under replica identity FULL; those that changed the key are left to
        ``row_events``.
        """
        old = self._tuples(at, rows, schema)
        if (np.frombuffer(self._bytes, np.uint8)[old.ends] != _NEW).any():
            raise Irregular("an old row without a new one behind it")
        new = self._tuples(old.ends + 1, rows, schema)
        self._require_end(new, rows)
        key = _key(schema, new, old)
        ops = pa.repeat("u", len(rows))
        table = self._table(ops, schema, rows, key, _old_image(schema, old, False), new)
        if key is None:
            return table
        kept = pc.equal(key, _key(schema, old, None))
        self._one_by_one += rows[~np.asarray(kept)].tolist()
        return table.filter(kept)

    def _tuples(self, at: Positions, rows: Positions, schema: RowSchema) -> TextColumns:
        found = tuple_columns(self._bytes, at, self._ends[rows], len(schema.names))
        return TextColumns([escaped(column) for column in found.columns], found.unchanged, found.ends)

    def _require_end(self, last: TextColumns, rows: Positions) -> None:
        if (last.ends != self._ends[rows]).any():
            raise Irregular("a message that goes on behind its last tuple")

    def _table(
        self,
        ops: pa.StringArray,
        schema: RowSchema,
        rows: Positions,
        key: pa.StringArray | None,
        before: pa.StringArray | None,
        new: TextColumns | None,
    ) -> pa.Table:
        count, runs = len(rows), self._run_of[rows]
        transactions = [run.transaction for run in self._runs]
        columns = {
            "epoch": pa.repeat(pa.scalar(self._epoch, pa.int32()), count),
            "commit_lsn": np.array([each.commit_lsn for each in transactions])[runs],
            "ordinal": self._ordinals[rows],
            "op": ops,
            "source_ts": times([each.commit_ts for each in transactions]).take(pa.array(runs)),
            "tx_id": np.array([each.xid for each in transactions])[runs],
            "lsn": self._lsns[rows],
            "source_schema": pa.repeat(schema.name[0], count),
            "source_table": pa.repeat(schema.name[1], count),
            "key": _valid(key),
            "before": _valid(before),
        }
        if new is not None:
            columns["after"] = _valid(json_objects(schema.names, new.columns, new.unchanged))
            columns["unchanged"] = _unsent_names(schema.names, new)
        arrays = [_column(columns.get(each.name), each.type, count) for each in EVENT_SCHEMA]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)

    def _each_alone(self, rows: list[int]) -> pa.Table:
        decoder = Decoder(schema.relation for schema in self._schemas.values())
        events: list[LandedEvent] = []
        for row in rows:
            change = decoder.decode(self._bytes[self._starts[row] + WAL_DATA_HEADER : self._ends[row]])
            assert isinstance(change, RowChange)
            transaction = self._runs[self._run_of[row]].transaction
            place = EventHeader(
                self._epoch,
                transaction.commit_lsn,
                int(self._ordinals[row]),
                transaction.commit_ts,
                transaction.xid,
                int(self._lsns[row]),
            )
            events += row_events(self._schemas[change.relation.oid], change, place)
        return events_table(events)


def _key(schema: RowSchema, row: TextColumns, fallback: TextColumns | None) -> pa.StringArray | None:
    """Return the keys; a key value that was too long to be sent again stands in ``fallback``."""
    if not schema.key_indexes:
        return None
    columns = []
    for place in schema.key_indexes:
        column = row.columns[place]
        if row.unchanged is not None and row.unchanged[:, place].any():
            if fallback is None:
                raise Irregular("a key value that was not sent")
            column = pc.if_else(pa.array(row.unchanged[:, place]), fallback.columns[place], column)
        columns.append(column)
    return json_arrays(columns)


def _old_image(schema: RowSchema, row: TextColumns, is_key: bool) -> pa.StringArray:
    """Return the old rows as sent: in a key tuple the other columns are null without being so."""
    if is_key and (not schema.identity or row.unchanged is not None):
        raise Irregular("a key tuple without a key")
    places = schema.identity if is_key else range(len(schema.names))
    names, columns = [schema.names[i] for i in places], [row.columns[i] for i in places]
    if not schema.partitioned:
        return json_objects(names, columns, None if is_key else row.unchanged)
    if any(row.columns[i].null_count for i in schema.key_indexes):
        raise Irregular("an old row without its key")
    unsent = np.column_stack([np.asarray(column.is_null()) for column in columns])
    return json_objects(names, columns, unsent if row.unchanged is None else unsent | row.unchanged)


def _unsent_names(names: tuple[str, ...], row: TextColumns) -> pa.Array | None:
    """Return for each row the columns that were not sent, null where all were."""
    if row.unchanged is None:
        return None
    counts = np.count_nonzero(row.unchanged, axis=1)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts))).astype(np.int32)
    places = np.nonzero(row.unchanged)[1]
    return pa.ListArray.from_arrays(
        pa.array(offsets),
        pa.array(names, pa.string()).take(pa.array(places)),
        type=EVENT_SCHEMA.field("unchanged").type,
        mask=pa.array(counts == 0),
    )


def _valid(texts: pa.StringArray | None) -> pa.StringArray | None:
    """Return ``texts`` once they are known to be UTF-8; ``pa.ArrowInvalid`` otherwise."""
    if texts is not None:
        texts.validate(full=True)
    return texts


def _column(values: object, kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind) if values is None else pa.array(values, kind)
