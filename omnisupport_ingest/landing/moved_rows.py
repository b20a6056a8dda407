"""Rows of which the stream carried a column neither by value nor from a row that was ever read.

A snapshot reads its chunks one after the other. A row whose key changes meanwhile, from a range that is
still to be read to one that has been, is in neither chunk. The stream has it, but for the columns that the
change did not send (unchanged TOAST): those were never seen. So its new key has to be read once more. So has
that of a row which a change of its key takes into the publication's row filter: it is sent as an insert, with
those columns unsent.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn

_COLUMNS = ["op", "commit_lsn", "source_schema", "source_table", "key", "unchanged"]


def moved_rows(
    store: LandingStore, batches: Iterable[Manifest], schema: str, table: str, since: Lsn, below: Lsn
) -> frozenset[str]:
    """The new keys (JSON arrays, as events have them) of rows of ``table`` that came with columns unsent.

    ``batches``: of the epoch's stream. Of the commits from ``since`` on, below ``below``.
    """
    keys: set[str] = set()
    for batch in batches:
        span = batch.stream
        if span is None or span.last_commit_lsn is None or span.start_lsn is None:
            continue
        if span.last_commit_lsn < since or span.start_lsn >= below:
            continue
        for file in batch.files:
            if f"{schema}.{table}" not in file.rows_per_table:
                continue
            rows = pq.read_table(store.path_of(file), columns=_COLUMNS, partitioning=None)
            moved = rows.filter(
                (pc.field("source_schema") == schema)
                & (pc.field("source_table") == table)
                & (pc.field("op") == "c")
                & (pc.list_value_length(pc.field("unchanged")) > 0)
                & (pc.field("commit_lsn") >= since.value)
                & (pc.field("commit_lsn") < below.value)
            )
            keys.update(moved.column("key").to_pylist())
    return frozenset(keys)
