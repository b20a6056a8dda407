"""Landed batches of many changes of the desk's tickets, made as columns: a million in seconds.

DuckDB writes the images, and the writer of every capture lands them. So a dimension of millions of rows can
be filled for a measurement. Equal seeds give equal changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.rows import EVENT_SCHEMA
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, EventBlock
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import WindowGrid

Keys = npt.NDArray[np.int64]

_PER_TRANSACTION = 50
_LSNS = 0x10000
_BLOCK = 20_000
_BATCH = 500_000
_RECENT = 1_000
_BODY = "The export starts and the bar reaches ninety percent, then nothing happens for an hour. " * 7

_IMAGES = f"""
SELECT '["' || id || '"]' AS key,
       CASE WHEN op = 'd' THEN '{{"id":"' || id || '"}}' END AS before,
       CASE WHEN op <> 'd' THEN
           '{{"id":"' || id || '","organization_id":"' || id % 997 + 1
           || '","customer_id":"18c79895-0569-4d18-af04-' || lpad(id::VARCHAR, 12, '0')
           || '","agent_handle":"agent-' || id % 50 || '","subject":"Export never ends"'
           || CASE WHEN unsent THEN ''
                   ELSE ',"body":"' || id || ' ' || substr('{_BODY}', 1, 100 + (salt % 500)::INT) || '"' END
           || ',"status":"' || ['new', 'open', 'pending', 'solved', 'closed'][1 + (salt % 5)::INT]
           || '","priority":"' || id % 4 + 1
           || '","channel":null,"metadata":"{{\\"browser\\": \\"firefox\\", \\"tries\\": [1, 2]}}"'
           || ',"satisfaction":"0.25","created_at":"2026-01-01 08:17:58.25+00"'
           || ',"updated_at":"2026-12-24 08:00:14.25+00"}}'
       END AS after,
       CASE WHEN unsent THEN ['body'] END AS unchanged
FROM changes ORDER BY number
"""


@dataclass
class Bulk:
    """A stream of changes of one table that goes on batch by batch. ``keys``: those there are, from 1."""

    store: LandingStore
    grid: WindowGrid
    seed: int = 1
    keys: int = 0
    lsn: int = 0x1000
    schema: str = "support"
    table: str = "tickets"
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def fill(self, rows: int, at: datetime) -> None:
        """Insert ``rows`` new keys, committed at ``at``."""
        self._land(self._new(rows), np.full(rows, "c"), at)

    def scattered(self, changes: int, at: datetime) -> None:
        """Update as many keys, anywhere in the table."""
        keys = self._rng.choice(self.keys, changes, replace=False) + 1
        self._land(keys, np.full(changes, "u"), at)

    def recent(self, changes: int, at: datetime) -> None:
        """Insert two fifths as many keys, and update others of the newest thousand."""
        new = self._new(changes * 2 // 5)
        low = max(1, self.keys - _RECENT)
        others = self._rng.integers(low, self.keys + 1, changes - len(new))
        self._land(np.concatenate([new, others]), np.repeat(["c", "u"], [len(new), len(others)]), at)

    def mixed(self, changes: int, at: datetime) -> None:
        """40 % inserts, 50 % updates of any key, 10 % deletes of any key, in random order."""
        kinds = self._rng.random(changes)
        ops = np.where(kinds < 0.4, "c", np.where(kinds < 0.9, "u", "d"))
        keys = self._rng.integers(1, self.keys + 1, changes)
        keys[ops == "c"] = self._new(int((ops == "c").sum()))
        self._land(keys, ops, at)

    def _new(self, count: int) -> Keys:
        self.keys += count
        return np.arange(self.keys - count + 1, self.keys + 1)

    def _land(self, keys: Keys, ops: npt.NDArray[np.str_], at: datetime) -> None:
        for start in range(0, len(keys), _BATCH):
            self._batch(keys[start : start + _BATCH], ops[start : start + _BATCH], at)

    def _batch(self, keys: Keys, ops: npt.NDArray[np.str_], at: datetime) -> None:
        before = self.lsn
        name = stream_batch_id(1, Lsn(before))
        with BatchWriter(self.store, self.grid, 1, name, clock=lambda: at) as writer:
            window = writer.window_of(at)
            for start in range(0, len(keys), _BLOCK):
                events = self._events(keys[start : start + _BLOCK], ops[start : start + _BLOCK], at)
                writer.add_block(EventBlock(window, len(events), events.nbytes, at, lambda made=events: made))
            end = Lsn(self.lsn + 8)
            writer.seal(
                stream=StreamSpan(
                    previous_end_lsn=Lsn(before),
                    end_lsn=end,
                    start_lsn=Lsn(before),
                    last_commit_lsn=Lsn(self.lsn),
                    last_xid=self.lsn & 0x7FFFFFFF,
                    first_commit_ts=at,
                    last_commit_ts=at,
                )
            )
        self.lsn = end.value

    def _events(self, keys: Keys, ops: npt.NDArray[np.str_], at: datetime) -> pa.Table:
        count = len(keys)
        numbers = np.arange(count)
        lsns = self.lsn + _LSNS * (1 + numbers // _PER_TRANSACTION)
        self.lsn = int(lsns[-1])
        salt = self._rng.integers(0, 1 << 30, count)
        changes = pa.table(
            {
                "number": numbers,
                "id": keys,
                "op": pa.array(ops.tolist(), pa.string()),
                "salt": salt,
                "unsent": (ops == "u") & (salt % 10 == 0),
            }
        )
        with duckdb.connect(config={"threads": 2}) as connection:
            connection.register("changes", changes)
            images = connection.sql(_IMAGES).to_arrow_table()
        values = {
            "epoch": np.ones(count, np.int32),
            "commit_lsn": lsns,
            "ordinal": 2 * (numbers % _PER_TRANSACTION),
            "op": changes["op"],
            "source_ts": pa.repeat(pa.scalar(at, pa.timestamp("us", tz="UTC")), count),
            "tx_id": lsns & 0x7FFFFFFF,
            "lsn": lsns - 8,
            "source_schema": pa.repeat(self.schema, count),
            "source_table": pa.repeat(self.table, count),
            **{name: images[name] for name in images.column_names},
        }
        columns = [
            pa.chunked_array(values[each.name]).cast(each.type).combine_chunks()
            if isinstance(values.get(each.name), pa.ChunkedArray)
            else pa.array(values[each.name]).cast(each.type)
            if each.name in values
            else pa.nulls(count, each.type)
            for each in EVENT_SCHEMA
        ]
        return pa.Table.from_arrays(columns, schema=EVENT_SCHEMA)


def an_hour_before(at: datetime) -> datetime:
    """A moment of the window before, where windows are hours."""
    return at - timedelta(hours=1)
