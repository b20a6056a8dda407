"""Read landed events back in the order of their positions, a batch at a time (``landing tail``)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from datetime import UTC
from itertools import islice

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
    return _events_of(store, batch, table, last_first=False)


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
        descending = _events_of(store, batch, table, last_first=True)
        wanted = islice((event for event in descending if event.op in operations), missing)
        events = [(batch, event) for event in reversed(list(wanted))] + events
    return events


def _events_of(
    store: LandingStore, batch: Manifest, table: str | None, *, last_first: bool
) -> Iterator[LandedEvent]:
    files = [file for file in batch.files if any(_names(table, name) for name in file.rows_per_table)]
    events = (_events_in(store, file, table, last_first=last_first) for file in files)
    return heapq.merge(*events, key=_position, reverse=last_first)


def _events_in(
    store: LandingStore, file: DataFile, table: str | None, *, last_first: bool
) -> Iterator[LandedEvent]:
    try:
        rows = _rows(store, file, table, last_first=last_first)
        # Only another program can have written a file out of order into the chain.
        yield from rows if file.ordered else sorted(rows, key=_position, reverse=last_first)
    except (OSError, pa.ArrowException):
        store.verify_file(file)
        raise


def _rows(
    store: LandingStore, file: DataFile, table: str | None, *, last_first: bool
) -> Iterator[LandedEvent]:
    """Return the events as the file has them, or from its last row to its first."""
    with pq.ParquetFile(store.path_of(file)) as content:
        for batch in _pieces(content, last_first=last_first):
            rows = batch.to_pylist()
            for row in reversed(rows) if last_first else rows:
                event = LandedEvent(**row | {"source_ts": row["source_ts"].astimezone(UTC)})
                if _names(table, f"{event.source_schema}.{event.source_table}"):
                    yield event


def _pieces(content: pq.ParquetFile, *, last_first: bool) -> Iterator[pa.RecordBatch | pa.Table]:
    if not last_first:
        yield from content.iter_batches(_ROWS_AT_ONCE, columns=_COLUMNS)
        return
    for group in reversed(range(content.num_row_groups)):
        rows = content.read_row_group(group, columns=_COLUMNS)
        for end in range(rows.num_rows, 0, -_ROWS_AT_ONCE):
            start = max(0, end - _ROWS_AT_ONCE)
            yield rows.slice(start, end - start)


def _names(table: str | None, full_name: str) -> bool:
    """Whether ``table`` means the table ``full_name``; None means all."""
    return table in (None, full_name, full_name.partition(".")[2])


def _position(event: LandedEvent) -> tuple[int, int, int]:
    return event.epoch, event.commit_lsn, event.ordinal
