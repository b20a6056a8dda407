"""Compute the hash of events (``envelope.event_hash``) by whole columns, without Spark.

Spark hashes several columns one after another: the hash of one column is the seed of the next. The first seed
is 42. NULL leaves the seed as it is. A number is hashed as its bytes, the lowest first, a text as UTF-8, by
XXH64 (xxHash specification 0.1.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.compiled import (
    HashedColumn,
    buffer_of,
    compiled_hashes,
    hashed_numbers,
    hashed_texts,
)
from omnisupport_ingest.position import UNREAD

_SEED = 42
_NULL, _NO_NAMES = b"\x00", b"\x01"
"""What is hashed for NULL in a column of texts, and in ``unchanged``."""


def event_hashes(events: pa.Table) -> pa.Int64Array:
    """Return ``event_hash`` of each of ``events``, which have the columns of ``LANDED_TYPE``."""

    if not events.num_rows:
        return pa.array([], pa.int64())

    def texts(name: str) -> pa.Array:
        return columnar.one_chunk(events[name]).cast(pa.string())

    def longs(name: str) -> pa.Array:
        return columnar.one_chunk(events[name]).cast(pa.int64())

    columns: list[tuple[pa.Array, bytes | None]] = [
        (longs("epoch").cast(pa.int32()), None),
        *((longs(name), None) for name in ("commit_lsn", "ordinal")),
        *((texts(name), None) for name in ("op", "source_schema", "source_table")),
        *((texts(name), _NULL) for name in ("key", "before", "after")),
        (_joined(events["unchanged"]), _NO_NAMES),
        (texts("moved_from_key"), _NULL),
        (longs("source_ts"), None),
        (_unread(texts("identity")), None),
    ]
    if compiled_hashes is None:
        return _one_by_one(columns, events.num_rows)
    made = compiled_hashes.hash_events(
        events.num_rows,
        tuple(_hashed(each) for each, _ in columns),
        tuple(absent for _, absent in columns),
    )
    return pa.array(np.frombuffer(buffer_of(made), np.int64))


def _hashed(values: pa.Array) -> HashedColumn:
    return hashed_texts(values) if pa.types.is_string(values.type) else hashed_numbers(values)


def _one_by_one(columns: Sequence[tuple[pa.Array, bytes | None]], rows: int) -> pa.Int64Array:
    """Return the hashes of events with these columns, each with what is hashed for NULL (None: nothing)."""
    hashes = [_SEED] * rows
    for column, absent in columns:
        size = None if pa.types.is_string(column.type) else column.type.bit_width // 8
        for row, value in enumerate(column.to_pylist()):
            if value is None:
                held = absent
            else:
                held = value.encode() if size is None else value.to_bytes(size, "little", signed=True)
            if held is not None:
                hashes[row] = xxhash.xxh64_intdigest(held, hashes[row])
    return pa.array(np.array(hashes, np.uint64).view(np.int64))


def _unread(identities: pa.Array) -> pa.Array:
    """Return the identities of events that could not be read, and NULL for all others."""
    if identities.null_count == len(identities):
        return identities
    unread = reduce(pc.or_, (pc.starts_with(identities, start) for start in UNREAD))
    return pc.if_else(unread, identities, pa.scalar(None, pa.string()))


def _joined(names: pa.ChunkedArray) -> pa.Array:
    """Return the sorted names of each event as one text."""
    if names.null_count == len(names):
        return pa.nulls(len(names), pa.string())
    found = np.full(len(names), -1)
    known = np.flatnonzero(names.is_valid().to_numpy())
    # A column has few different lists: each is joined once.
    lists: dict[tuple[str | None, ...], int] = {}
    for row, each in zip(known.tolist(), names.take(pa.array(known)).to_pylist(), strict=True):
        found[row] = lists.setdefault(tuple(each), len(lists))
    texts = ["\x00".join(sorted(name for name in each if name is not None)) for each in lists]
    return pa.array(texts, pa.string()).take(pa.array(found, mask=found < 0))
