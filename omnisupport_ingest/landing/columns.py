"""Convert events to Arrow columns, a row group at a time; the batch writer uses it.

Converting whole buffers costs a fraction of appending each event to one list per column.
"""

from __future__ import annotations

from datetime import datetime
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.landing.parts import RowGroup
from omnisupport_ingest.landing.rows import EVENT_SCHEMA, LANDED_SCHEMA, LandedEvent

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_TIME = LandedEvent._fields.index("source_ts")


def events_table(events: list[LandedEvent]) -> pa.Table:
    """Return ``events`` (at least one) as a table of ``EVENT_SCHEMA``."""
    # Build column by column. A tuple or iterator per event would start the garbage collector, which costs
    # more than the conversion.
    arrays = []
    for i, field in enumerate(EVENT_SCHEMA):
        values = list(map(itemgetter(i), events))
        arrays.append(times(values) if i == _TIME else pa.array(values, field.type))
    return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)


def times(values: list[datetime]) -> pa.Array:
    """Return commit times as an array.

    Each distinct time is converted once: a transaction's events share one.
    """
    distinct = list(dict.fromkeys(values))
    index = {moment: i for i, moment in enumerate(distinct)}
    indices = pa.array([index[moment] for moment in values], pa.int32())
    return pa.array(distinct, EVENT_SCHEMA.field(_TIME).type).take(indices)


def row_group(window: str, events: pa.Table, batch_id: str) -> RowGroup:
    """Return ``events`` with the facts that the manifest records about them.

    ``events``: a table of ``EVENT_SCHEMA``, at least one row, all of ``window``.
    """
    epoch, commit_lsn, ordinal = (np.asarray(events.column(i)) for i in range(3))
    ascending = _rises(epoch, _rises(commit_lsn, _rises(ordinal)))
    ordered = bool(ascending.all())
    order = None if ordered else np.lexsort((ordinal, commit_lsn, epoch))
    first, last = (0, -1) if order is None else (order[0], order[-1])
    batch = pa.repeat(pa.scalar(batch_id, pa.string()), events.num_rows)
    return RowGroup(
        window=window,
        table=pa.Table.from_arrays([*events.columns, batch], schema=LANDED_SCHEMA),
        first=(int(epoch[first]), int(commit_lsn[first]), int(ordinal[first])),
        last=(int(epoch[last]), int(commit_lsn[last]), int(ordinal[last])),
        ordered=ordered,
        rows_per_table=_rows_per_table(events),
    )


def _rises(values: Numbers, where_equal: Flags | bool = False) -> Flags:
    """Whether each value is above the one before, or equal to it where ``where_equal`` is true."""
    before, after = values[:-1], values[1:]
    risen: Flags = (after > before) | ((after == before) & where_equal)
    return risen


def _rows_per_table(events: pa.Table) -> dict[str, int]:
    names = pc.binary_join_element_wise(events.column("source_schema"), events.column("source_table"), ".")
    counts = names.value_counts()
    return {count["values"]: count["counts"] for count in counts.to_pylist()}
