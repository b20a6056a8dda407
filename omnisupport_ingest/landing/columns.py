"""Buffered events turned into Arrow columns, a row group at a time.

Converting whole buffers costs a fraction of appending to one list per column at every event.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from itertools import islice
from operator import itemgetter, lt

import pyarrow as pa

from omnisupport_ingest.landing.parts import RowGroup
from omnisupport_ingest.landing.rows import LANDED_SCHEMA, LandedEvent

_TIME = LandedEvent._fields.index("source_ts")
_SCHEMA_AND_TABLE = tuple(LandedEvent._fields.index(name) for name in ("source_schema", "source_table"))

_position = itemgetter(0, 1, 2)


def row_group(window: str, events: list[LandedEvent], batch_id: str) -> RowGroup:
    """``events`` (one or more, all of ``window``) as a table of ``LANDED_SCHEMA`` and its summary."""
    # No tuple or iterator per event is kept here: thousands of them at once would set off the
    # garbage collector, which costs more than the conversion.
    arrays = []
    for i, name in enumerate(LandedEvent._fields):
        values = list(map(itemgetter(i), events))
        arrays.append(_times(values) if i == _TIME else pa.array(values, LANDED_SCHEMA.field(name).type))
    arrays.append(pa.repeat(pa.scalar(batch_id, pa.string()), len(events)))
    ordered = all(map(lt, map(_position, events), map(_position, islice(events, 1, None))))
    tables = Counter(map(itemgetter(*_SCHEMA_AND_TABLE), events))
    return RowGroup(
        window=window,
        table=pa.Table.from_arrays(arrays, schema=LANDED_SCHEMA),
        first=_position(events[0] if ordered else min(events, key=_position)),
        last=_position(events[-1] if ordered else max(events, key=_position)),
        ordered=ordered,
        rows_per_table={f"{schema}.{table}": rows for (schema, table), rows in tables.items()},
    )


def _times(values: list[datetime]) -> pa.Array:
    """Commit times: each distinct one is converted once, as a transaction's events share theirs."""
    distinct = list(dict.fromkeys(values))
    place = {moment: i for i, moment in enumerate(distinct)}
    indices = pa.array([place[moment] for moment in values], pa.int32())
    return pa.array(distinct, LANDED_SCHEMA.field(_TIME).type).take(indices)
