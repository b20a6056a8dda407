"""Fold events to rows with typed columns, as a worker of Spark does it.

It folds the groups that Spark sends it. In a small run the worker reads all events itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar, ordinary
from omnisupport_ingest.cdc.event_fold import TableColumns, fold_groups
from omnisupport_ingest.cdc.key_changes import OLD_KEY_ENDED
from omnisupport_ingest.cdc.ordinary import ROW_OPS
from omnisupport_ingest.cdc.typed_rows import typed_batches
from omnisupport_ingest.contracts.model import Column, PositionRange

EVENT_COLUMNS = (
    *("window", "key", "op", "epoch", "commit_lsn", "ordinal", "source_ts"),
    *("before", "after", "unchanged", "moved_from_key", "batch_id", "landed_at", "withheld"),
)
"""The columns of an event that the fold uses."""

_ROW_OPS, _TABLE_OPS = pa.array(sorted(ROW_OPS)), pa.array(["t", "b"])


def fold_typed(
    batches: Iterable[pa.RecordBatch],
    table_columns: TableColumns,
    columns: Sequence[Column],
    state: Sequence[str],
    *,
    few: int = ordinary.FEW,
) -> Iterator[pa.RecordBatch]:
    """Fold as ``event_fold.fold_groups`` does and type the contract's ``columns``; row hashes are left NULL.

    Most hashes are never needed; whoever compares rows computes them (``fold.hashed``). ``state``: the
    columns of folded rows beside the window and the contract's.
    """
    return typed_batches(
        fold_groups(batches, table_columns, few=few), columns, ("window", *table_columns.names, *state)
    )


def events_to_fold(events: pa.Table, other_keys: Sequence[PositionRange] = ()) -> pa.Table:
    """Return what ``fold.to_fold`` returns, for ``events`` (``EVENT_COLUMNS``); none of them may void a
    withheld one.

    Images may be missing; further columns are kept. ``other_keys``: where events have a former key.
    """
    key, op = columnar.one_chunk(events["key"]), columnar.one_chunk(events["op"])
    of_row = pc.and_(pc.is_in(op, _ROW_OPS), pc.is_valid(key)).to_numpy(zero_copy_only=False)
    doubtful = pc.fill_null(pc.match_substring(key, "null"), False).to_numpy(zero_copy_only=False)
    for row in np.flatnonzero(of_row & doubtful):
        of_row[row] = None not in json.loads(key[row].as_py())
    folded = of_row | pc.is_in(op, _TABLE_OPS).to_numpy(zero_copy_only=False)
    if other_keys:
        # The snapshot end of a read by another key says nothing of rows with this one.
        at = columnar.position_column(events["epoch"], events["commit_lsn"], events["ordinal"])
        truncates = pc.equal(op, "t").to_numpy(zero_copy_only=False)
        folded &= truncates | ~columnar.within(at, other_keys)
    known = events if folded.all() else events.filter(pa.array(folded))
    left = known.filter(pc.and_not(pc.is_valid(known["moved_from_key"]), known["withheld"]))
    values = {"key": left["moved_from_key"], "op": pa.repeat(pa.scalar(OLD_KEY_ENDED), left.num_rows)}
    if not left.num_rows:
        return known.combine_chunks()
    left = pa.table([values.get(name, left[name]) for name in known.column_names], schema=known.schema)
    return pa.concat_tables([known, left]).combine_chunks()
