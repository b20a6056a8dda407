"""Converts row changes to event columns, a block of changes at a time.

With one Python object per change, capture would spend most of its time on objects. So the changes of a block
are columns from the start, whatever their tables are, and one compiled pass builds their keys and row images
(``parsed_rows``). Irregular changes are converted one by one through ``row_events``, which defines what an
event is; both ways give the same events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omnisupport_ingest.contracts.names import TableName
from omnisupport_ingest.landing.columns import events_table
from omnisupport_ingest.landing.rows import DIVIDED_SCHEMA, EVENT_SCHEMA, Division, LandedEvent
from omnisupport_ingest.sources.postgres.protocol.frames import WAL_DATA_HEADER, Rows
from omnisupport_ingest.sources.postgres.protocol.parsed_rows import Images, used_tables
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin, Decoder, RowChange
from omnisupport_ingest.sources.postgres.protocol.row_events import EventHeader, RowSchema, row_events
from omnisupport_ingest.sources.postgres.protocol.text_columns import Numbers, Positions, big_endian
from omnisupport_ingest.sources.postgres.protocol.walstream import POSTGRES_EPOCH, from_microseconds

_INSERT, _UPDATE = b"IU"

_MICROSECOND = timedelta(microseconds=1)
_MICROS_TO_2000 = (POSTGRES_EPOCH - datetime(1970, 1, 1, tzinfo=UTC)) // _MICROSECOND

_OPS = pa.array(["c", "u", "d"])
_OVERHEAD = 100
"""Estimated bytes that an event takes in addition to its message."""

DivisionsOf = Callable[[Sequence[TableName]], Sequence[Division | None]]
"""Returns for each of the given tables how its row images are divided; None: not divided."""


class TransactionRuns(NamedTuple):
    """Runs of consecutive row changes of a block; each run belongs to one transaction.

    ``firsts``: index of the run's first row in the block. ``indexes``: index of that row's change in its
    transaction. ``commit_micros``: commit time in microseconds since 2000. One entry per run in each array.
    """

    firsts: Positions
    indexes: Positions
    commit_lsns: Positions
    commit_micros: Positions
    xids: Positions

    @classmethod
    def of(cls, begun: Sequence[tuple[int, Begin, int]]) -> TransactionRuns:
        """Return the runs of ``begun``: index of the first row, transaction, index of the first change."""
        values = [
            (first, index, each.commit_lsn, (each.commit_ts - POSTGRES_EPOCH) // _MICROSECOND, each.xid)
            for first, each, index in begun
        ]
        return cls(*np.array(values, np.int64).T)

    @classmethod
    def joined(cls, runs: Sequence[TransactionRuns]) -> TransactionRuns:
        """Return all ``runs`` as one value, in their order."""
        return cls(*(np.concatenate(each) for each in zip(*runs, strict=True)))


@dataclass(slots=True)
class ChangeBlock:
    """Changes of one or more transactions, in the order received, with the tables' ``schemas`` by oid.

    The row changes are in ``pieces`` (many at once), followed by ``messages`` (single ``WAL_DATA`` messages);
    ``changes`` is their number. ``runs``, followed by ``begun`` (see ``TransactionRuns.of``), assign them to
    transactions. ``events``: events of truncates and logical messages, which already have positions.
    ``received_bytes``: size of the row changes.
    """

    epoch: int
    schemas: dict[int, RowSchema]
    pieces: list[Rows] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)
    changes: int = 0
    runs: list[TransactionRuns] = field(default_factory=list)
    begun: list[tuple[int, Begin, int]] = field(default_factory=list)
    events: list[LandedEvent] = field(default_factory=list)
    received_bytes: int = 0

    @property
    def rows(self) -> int:
        """Number of changes. Each change gives one event; a change of the key gives two."""
        return self.changes + len(self.events)

    @property
    def size(self) -> int:
        """Estimated size of the events in bytes."""
        return self.received_bytes + _OVERHEAD * self.rows

    @property
    def highest_ts(self) -> datetime:
        """The highest commit time (UTC). The block must not be empty."""
        moments = [event.source_ts for event in self.events]
        if self.changes:
            runs = self.all_runs()
            has_rows = np.diff(runs.firsts, append=self.changes) > 0
            moments.append(from_microseconds(int(runs.commit_micros[has_rows].max())))
        return max(moments)

    def end_messages(self) -> None:
        """Append the single messages to the pieces, as one piece."""
        if self.messages:
            self.pieces.append(Rows.of(self.messages))
            self.messages = []

    def end_runs(self) -> None:
        """Append the runs that were begun one by one to the runs."""
        if self.begun:
            self.runs.append(TransactionRuns.of(self.begun))
            self.begun = []

    def all_runs(self) -> TransactionRuns:
        """Return all runs. The block must have changes."""
        self.end_runs()
        self.runs = [TransactionRuns.joined(self.runs)]
        return self.runs[0]

    def table(self, divisions_of: DivisionsOf = lambda names: [None] * len(names)) -> pa.Table:
        """Return all events as a table of ``EVENT_SCHEMA``, in the order of their positions.

        ``divisions_of``: returns how the images of each table are divided. If any table is divided, the
        result has ``DIVIDED_SCHEMA``. Irregular changes and logical messages keep whole images in any case.

        Call it only once: it takes the messages, which may be large, so that they are freed when they are
        converted.
        """
        parts = _RowChanges(self, divisions_of).tables() if self.changes else []
        if self.events:
            parts.append(events_table(self.events))
        if len(parts) == 1:
            return parts[0]
        table = _concatenated(parts)
        order = np.lexsort((table.column("ordinal"), table.column("commit_lsn")))
        return table.combine_chunks().take(pa.array(order))


class _RowChanges:
    """The row changes of one block."""

    def __init__(self, block: ChangeBlock, divisions_of: DivisionsOf) -> None:
        self._divisions_of = divisions_of
        block.end_messages()
        pieces, block.pieces = block.pieces, []
        self._epoch, self._schemas, self._runs = block.epoch, block.schemas, block.all_runs()
        self._pieces = [each for each in pieces if len(each.starts)]
        self._firsts = np.cumsum([0, *(len(each.starts) for each in self._pieces)])
        runs = self._runs
        self._run_of = np.repeat(np.arange(len(runs.firsts)), np.diff(runs.firsts, append=block.changes))
        self._ordinals = 2 * (np.arange(block.changes) + (runs.indexes - runs.firsts)[self._run_of])
        self._lsns = self._of_all(lambda data, starts: big_endian(data, ">u8", starts + 1)).astype(np.int64)

    def _of_all(self, read: Callable[[bytes | memoryview, Positions], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """Return what ``read`` returns for the messages of each piece, given where they start."""
        return np.concatenate([read(each.data, each.starts) for each in self._pieces])

    def tables(self) -> list[pa.Table]:
        """Return tables of events: of regular changes, and of changes that were converted one by one."""
        oid_of = self._of_all(lambda data, starts: big_endian(data, ">u4", starts + WAL_DATA_HEADER + 1))
        oids, table_of = np.unique(oid_of, return_inverse=True)
        known = [oid in self._schemas for oid in oids.tolist()]
        schemas = [self._schemas[oid] for oid, is_known in zip(oids.tolist(), known, strict=True) if is_known]
        numbers = np.where(known, np.cumsum(known) - 1, -1).astype(np.int32)[table_of]
        tables = used_tables(tuple(schemas), tuple(self._divisions_of([each.name for each in schemas])))
        try:
            images = tables.images(self._pieces, numbers)
        except (pa.ArrowInvalid, OverflowError):
            # One of the texts is not UTF-8, or all images are too much for one array.
            return [self._one_by_one(range(len(numbers)))]
        if images.converted.all():
            return [self._events(schemas, numbers, images)]
        others = np.flatnonzero(~images.converted).tolist()
        if len(others) == len(numbers):
            return [self._one_by_one(others)]
        regular = self._events(schemas, numbers, images).filter(pa.array(images.converted))
        return [regular, self._one_by_one(others)]

    def _events(self, schemas: Sequence[RowSchema], table_of: Numbers, images: Images) -> pa.Table:
        """Return an event for every change. Those of changes that were not converted mean nothing."""
        count, runs = len(table_of), self._run_of
        moments = pa.array(self._runs.commit_micros[runs] + _MICROS_TO_2000, pa.int64())
        kinds = self._of_all(lambda data, starts: np.frombuffer(data, np.uint8)[starts + WAL_DATA_HEADER])
        ops = np.where(kinds == _INSERT, 0, np.where(kinds == _UPDATE, 1, 2))
        tables = pa.array(np.maximum(table_of, 0))
        columns = {
            "epoch": np.full(count, self._epoch, np.int32),
            "commit_lsn": self._runs.commit_lsns[runs],
            "ordinal": self._ordinals,
            "op": _OPS.take(pa.array(ops)),
            "source_ts": moments.view(EVENT_SCHEMA.field("source_ts").type),
            "tx_id": self._runs.xids[runs],
            "lsn": self._lsns,
            "source_schema": pa.array([each.name[0] for each in schemas]).take(tables),
            "source_table": pa.array([each.name[1] for each in schemas]).take(tables),
            **images.columns,
        }
        schema = DIVIDED_SCHEMA if "after_hidden" in images.columns else EVENT_SCHEMA
        arrays = [_column(columns.get(each.name), each.type, count) for each in schema]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _message(self, row: int) -> bytes:
        number = int(np.searchsorted(self._firsts, row, "right")) - 1
        piece, at = self._pieces[number], row - int(self._firsts[number])
        return bytes(piece.data[piece.starts[at] + WAL_DATA_HEADER : piece.ends[at]])

    def _one_by_one(self, rows: Iterable[int]) -> pa.Table:
        decoder = Decoder(schema.relation for schema in self._schemas.values())
        events: list[LandedEvent] = []
        for row in rows:
            change = decoder.decode(self._message(row))
            assert isinstance(change, RowChange)
            run = self._run_of[row]
            header = EventHeader(
                self._epoch,
                int(self._runs.commit_lsns[run]),
                int(self._ordinals[row]),
                from_microseconds(int(self._runs.commit_micros[run])),
                int(self._runs.xids[run]),
                int(self._lsns[row]),
            )
            events += row_events(self._schemas[change.relation.oid], change, header)
        return events_table(events)


def _concatenated(parts: Sequence[pa.Table]) -> pa.Table:
    """Return ``parts`` as one table. Some parts may lack the columns of divided images."""
    return pa.concat_tables(parts, promote_options="default")


def _column(values: object, kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind) if values is None else pa.array(values, kind)
