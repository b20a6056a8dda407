"""The rows of one table under snapshot, landed many lines at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial

import numpy as np
import pyarrow as pa

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.protocol.copy_rows import keys_and_images

_OVERHEAD = 100
"""Bytes that an event costs beside its line; an estimate."""


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """What the ``r`` events of one read of ``table`` share: its ``columns``, and where and when it stands."""

    table: TableContract
    columns: tuple[str, ...]
    chunk_id: str
    epoch: int
    lsn: Lsn
    clock: datetime

    def events(self, lines: bytes, first_ordinal: int) -> pa.Table:
        """Events of COPY's ``lines`` (one or more), as a table of ``EVENT_SCHEMA``."""
        key = [self.columns.index(name) for name in self.table.key]
        keys, images = keys_and_images(lines, self.columns, key)
        count = len(keys)
        of_each = {
            "ordinal": pa.array(np.arange(first_ordinal, first_ordinal + count)),
            "key": keys,
            "after": images,
        }
        of_all = {
            "epoch": self.epoch,
            "commit_lsn": self.lsn.value,
            "op": "r",
            "source_ts": self.clock,
            "source_schema": self.table.schema,
            "source_table": self.table.table,
            "chunk_id": self.chunk_id,
        }
        arrays = [
            of_each[each.name]
            if each.name in of_each
            else pa.repeat(pa.scalar(of_all.get(each.name), each.type), count)
            for each in EVENT_SCHEMA
        ]
        return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)


class SnapshotRows:
    """Takes the lines of ``chunk`` to ``writer``; ``ordinals`` gives a block of lines its numbers."""

    def __init__(self, chunk: SnapshotChunk, writer: BatchWriter, ordinals: Callable[[int], int]) -> None:
        self._chunk, self._writer, self._ordinals = chunk, writer, ordinals

    def add(self, lines: bytes) -> int:
        """Take in one or more rows; returns how many."""
        count, clock = lines.count(b"\n"), self._chunk.clock
        table = partial(self._chunk.events, lines, self._ordinals(count))
        size = len(lines) + _OVERHEAD * count
        self._writer.add_block(EventBlock(self._writer.window_of(clock), count, size, clock, table))
        return count
