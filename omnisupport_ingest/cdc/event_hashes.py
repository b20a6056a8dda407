"""Compute the hash of events (``envelope.event_hash``) by whole columns, without Spark.

Spark hashes several columns one after another: the hash of one column is the seed of the next. The first seed
is 42. NULL leaves the seed as it is. A number is hashed as its bytes, the lowest first.

Numbers, and texts that many events share, are hashed for all events at once: xxHash64 of fewer than 32 bytes
is a few multiplications (xxHash specification 0.1.1, XXH64, steps 1 and 4 to 6). The library hashes any other
text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import repeat

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from omnisupport_ingest.position import UNREAD

Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]

_PRIME_1, _PRIME_2, _PRIME_3, _PRIME_4, _PRIME_5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)

_SHORT = 32
"""Texts of so many bytes or more are not hashed here: XXH64 hashes their 32-byte stripes first."""

_SHARED = 16
"""A column with at most so many different texts is hashed text by text, each for all its events at once."""


def event_hashes(events: pa.Table) -> pa.Int64Array:
    """Return ``event_hash`` of each of ``events``, which have the columns of ``LANDED_TYPE``."""
    with np.errstate(over="ignore"):
        found = np.full(events.num_rows, 42, np.uint64)
        found = _of_numbers(found, events["epoch"], np.uint32)
        for name in ("commit_lsn", "ordinal"):
            found = _of_numbers(found, events[name], np.uint64)
        for name in ("op", "source_schema", "source_table"):
            found = _of_texts(found, events[name].combine_chunks(), None)
        for name in ("key", "before", "after"):
            found = _of_texts(found, events[name].combine_chunks(), b"\x00")
        found = _of_texts(found, _joined(events["unchanged"]), b"\x01")
        found = _of_texts(found, events["moved_from_key"].combine_chunks(), b"\x00")
        found = _of_numbers(found, events["source_ts"].cast(pa.int64()), np.uint64)
        found = _of_texts(found, _unread(events["identity"].combine_chunks()), None)
    return pa.array(found.view(np.int64))


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


def _of_numbers(seeds: Hashes, column: pa.ChunkedArray, of_type: type[np.unsignedinteger]) -> Hashes:
    signed = np.int32 if of_type is np.uint32 else np.int64
    numbers = column.fill_null(0).to_numpy().astype(signed).view(of_type).astype(np.uint64)
    size = np.uint64(np.dtype(of_type).itemsize)
    begun = seeds + _PRIME_5 + size
    hashed = _mixed(_of_four(begun, numbers) if size == 4 else _of_eight(begun, numbers))
    if not column.null_count:
        return hashed
    return np.where(column.is_null().to_numpy().astype(np.bool_), seeds, hashed)


def _of_texts(seeds: Hashes, column: pa.Array, absent: bytes | None) -> Hashes:
    """Hash a column of texts with ``seeds``. ``absent``: the bytes hashed for NULL; None: NULL keeps the
    seed."""
    known = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    found = seeds.copy()
    if absent is not None and len(known) < len(column):
        found = _of_short(seeds, absent)
    if not len(known):
        return found
    if _are_shared(column):
        codes = column.cast(pa.binary()).dictionary_encode()
        chosen = codes.indices.fill_null(-1).to_numpy()[known]
        for code, text in enumerate(codes.dictionary.to_pylist()):
            here = known[chosen == code]
            of_short = len(text) < _SHORT
            found[here] = _of_short(seeds[here], text) if of_short else _by_library(seeds[here], repeat(text))
    else:
        found[known] = _by_library(seeds[known], _bytes_of(column, known))
    return found


def _are_shared(texts: pa.Array) -> bool:
    """Whether the column has few different texts. Its first values are looked at first, to refuse most others
    cheaply."""
    some = texts.slice(0, 4 * _SHARED)
    return len(some.unique()) <= _SHARED and len(texts.unique().drop_null()) <= _SHARED


def _bytes_of(texts: pa.StringArray, known: Rows) -> Iterator[memoryview]:
    """Return views of the bytes of those of ``texts`` whose numbers are ``known``, without copying.

    A generator, not a list: the garbage collector would walk through thousands of views.
    """
    _, offsets, held = texts.buffers()
    ends = np.frombuffer(offsets, np.int32, len(texts) + 1, 4 * texts.offset)
    whole = memoryview(held)
    starts, stops = ends[known].tolist(), ends[known + 1].tolist()
    return (whole[start:stop] for start, stop in zip(starts, stops, strict=True))


def _by_library(seeds: Hashes, texts: Iterable[bytes | memoryview]) -> Hashes:
    """Hash each text with its seed. ``texts``: at least as many as seeds."""
    return np.fromiter(map(xxhash.xxh64_intdigest, texts, seeds.tolist()), np.uint64, len(seeds))


def _of_short(seeds: Hashes, text: bytes) -> Hashes:
    """Return the hash of one text of fewer than 32 bytes with each of ``seeds``."""
    found = seeds + _PRIME_5 + np.uint64(len(text))
    start = 0
    while len(text) - start >= 8:
        found = _of_eight(found, np.uint64(int.from_bytes(text[start : start + 8], "little")))
        start += 8
    if len(text) - start >= 4:
        found = _of_four(found, np.uint64(int.from_bytes(text[start : start + 4], "little")))
        start += 4
    for byte in text[start:]:
        found = _rotated(found ^ (np.uint64(byte) * _PRIME_5), 11) * _PRIME_1
    return _mixed(found)


def _of_eight(found: Hashes, numbers: Hashes | np.uint64) -> Hashes:
    lane = _rotated(np.asarray(numbers * _PRIME_2), 31) * _PRIME_1
    return _rotated(found ^ lane, 27) * _PRIME_1 + _PRIME_4


def _of_four(found: Hashes, numbers: Hashes | np.uint64) -> Hashes:
    return _rotated(found ^ (numbers * _PRIME_1), 23) * _PRIME_2 + _PRIME_3


def _rotated(numbers: Hashes, by: int) -> Hashes:
    """Rotate the bits of each number to the left."""
    rotated: Hashes = (numbers << np.uint64(by)) | (numbers >> np.uint64(64 - by))
    return rotated


def _mixed(found: Hashes) -> Hashes:
    found = (found ^ (found >> np.uint64(33))) * _PRIME_2
    found = (found ^ (found >> np.uint64(29))) * _PRIME_3
    return found ^ (found >> np.uint64(32))
