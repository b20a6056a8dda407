"""The columns of a batch of raw events as Python lists, for judging its events one by one."""

from __future__ import annotations

from datetime import datetime, timedelta

import pyarrow as pa

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.cdc.images import is_whole
from omnisupport_ingest.contracts.names import TableName

EventId = tuple[int, int, int, int]
"""(epoch, commit LSN, ordinal, event hash): identifies one event, whichever batch brought it."""

TableOfBatch = tuple[str, str, str, str]
"""(window, schema, table, batch): the events of one table that one batch brought into one window."""


class EventColumns:
    """The columns of a batch that judging one event reads, as Python lists."""

    def __init__(self, batch: pa.RecordBatch, *, with_batch: bool) -> None:
        """``with_batch``: read also which batch brought each event."""
        self._batch_id: list[str] | None = batch.column("batch_id").to_pylist() if with_batch else None
        self.window: list[str] = batch.column("window").to_pylist()
        self.copy: list[int] = batch.column("copy").to_pylist()
        self.collision: list[bool] = batch.column("collision").to_pylist()
        self.epoch: list[int] = batch.column("epoch").to_pylist()
        self.newest_epoch_before: list[int | None] = batch.column("newest_epoch_before").to_pylist()
        self.op: list[str] = batch.column("op").to_pylist()
        self.key: list[str | None] = batch.column("key").to_pylist()
        self.after: list[str | None] = batch.column("after").to_pylist()
        self.unchanged: list[list[str] | None] = batch.column("unchanged").to_pylist()
        self.misplaced: list[bool | None] = batch.column("misplaced").to_pylist()
        self.file_row: list[int | None] = batch.column("file_row").to_pylist()
        self.watermark_before = _moments(batch.column("watermark_before"))
        self._moved_from: list[str | None] = batch.column("moved_from_key").to_pylist()
        self._schema: list[str] = batch.column("source_schema").to_pylist()
        self._table: list[str] = batch.column("source_table").to_pylist()
        self._batch = batch

    def table_name(self, row: int) -> TableName:
        return self._schema[row], self._table[row]

    def of_batch(self, row: int) -> TableOfBatch:
        """Return the table's part of the batch that brought the event; the batch is empty if it was not
        read."""
        batch_id = "" if self._batch_id is None else self._batch_id[row]
        return (self.window[row], *self.table_name(row), batch_id)

    def before(self, row: int) -> str | None:
        """Return the old image; None if every column was sent, because then it is not needed."""
        return self._batch.column("before")[row].as_py() if self.unchanged[row] else None

    def has_whole_keys(self, row: int) -> bool:
        """Whether the event has a key without NULL, and the same of the key that it changed from, if any."""
        moved_from: str | None = self._moved_from[row]
        return is_whole(self.key[row]) and (moved_from is None or is_whole(moved_from))

    def source_ts(self, row: int) -> datetime:
        moment = _moments(self._batch.column("source_ts").slice(row, 1))[0]
        assert moment is not None, "source_ts is never null"
        return moment

    def event(self, row: int) -> EventId:
        return (
            self.epoch[row],
            self._batch.column("commit_lsn")[row].as_py(),
            self._batch.column("ordinal")[row].as_py(),
            self._batch.column("event_hash")[row].as_py(),
        )


def _moments(column: pa.Array) -> list[datetime | None]:
    """Return the times as datetimes. A batch has one watermark in all of its rows, so each distinct time is
    made once."""
    known: dict[int, datetime] = {}
    found: list[datetime | None] = []
    for at in columnar.micros(column):
        if at is not None and at not in known:
            known[at] = columnar.EPOCH_START + timedelta(microseconds=at)
        found.append(None if at is None else known[at])
    return found
