"""Key changes in the stream that carried a column neither by value nor from a row that was ever read.

A snapshot reads its chunks one after the other. A row whose key changes meanwhile, from a range that is
still to be read to one that has been, is in neither chunk. The stream has it, but for the columns that the
change did not send (unchanged TOAST): those were never seen. So its new key has to be read once more.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.compute as pc
import pyarrow.parquet as pq

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn

_COLUMNS = ["op", "commit_lsn", "source_schema", "source_table", "key", "unchanged", "moved_from_key"]


def moved_rows(
    store: LandingStore, batches: Iterable[Manifest], schema: str, table: str, since: Lsn, below: Lsn
) -> frozenset[str]:
    """The new keys (JSON arrays, as events have them) of rows of ``table`` that moved with columns unsent.

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
                & pc.field("moved_from_key").is_valid()
                & (pc.field("commit_lsn") >= since.value)
                & (pc.field("commit_lsn") < below.value)
            )
            keys |= {row["key"] for row in moved.select(["key", "unchanged"]).to_pylist() if row["unchanged"]}
    return frozenset(keys)
