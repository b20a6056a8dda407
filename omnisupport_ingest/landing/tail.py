"""Read landed events back in the order of their positions, a batch at a time (``landing tail``)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import UTC

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.landing.manifest import DataFile, Manifest
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.store import LandingStore

_ROWS_AT_ONCE = 1024
_COLUMNS = list(LandedEvent._fields)


def events_of(store: LandingStore, batch: Manifest, table: str | None = None) -> Iterator[LandedEvent]:
    """Return the events of ``batch``, lowest position first; only those of ``table`` if given.

    ``table`` is ``schema.table`` or the table alone. Raises ``DamagedBatch`` if a file is missing or cannot
    be read.
    """
    files = [file for file in batch.files if any(_names(table, name) for name in file.rows_per_table)]
    return heapq.merge(*(_events_in(store, file, table) for file in files), key=_position)


def last_events(
    store: LandingStore,
    batches: Sequence[Manifest],
    count: int,
    *,
    operations: frozenset[str],
    table: str | None = None,
) -> list[tuple[Manifest, LandedEvent]]:
    """Return the last ``count`` events of ``batches`` with one of ``operations``, each with its batch.

    ``batches`` are in landing order; so is the result.
    """
    events: list[tuple[Manifest, LandedEvent]] = []
    for batch in reversed(batches):
        missing = count - len(events)
        if missing <= 0:
            break
        wanted = (event for event in events_of(store, batch, table) if event.op in operations)
        events = [(batch, event) for event in deque(wanted, maxlen=missing)] + events
    return events


def _events_in(store: LandingStore, file: DataFile, table: str | None) -> Iterator[LandedEvent]:
    try:
        rows = _rows(store, file, table)
        # Only another program can have written a file out of order into the chain.
        yield from rows if file.ordered else sorted(rows, key=_position)
    except (OSError, pa.ArrowException):
        store.verify_file(file)
        raise


def _rows(store: LandingStore, file: DataFile, table: str | None) -> Iterator[LandedEvent]:
    with pq.ParquetFile(store.path_of(file)) as content:
        for batch in content.iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS):
            for row in batch.to_pylist():
                event = LandedEvent(**row | {"source_ts": row["source_ts"].astimezone(UTC)})
                if _names(table, f"{event.source_schema}.{event.source_table}"):
                    yield event


def _names(table: str | None, full_name: str) -> bool:
    """Whether ``table`` means the table ``full_name``; None means all."""
    return table in (None, full_name, full_name.partition(".")[2])


def _position(event: LandedEvent) -> tuple[int, int, int]:
    return event.epoch, event.commit_lsn, event.ordinal
