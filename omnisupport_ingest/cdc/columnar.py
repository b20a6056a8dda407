"""Convert between Arrow columns and the plain Python values of ``life``: positions, endings, times and lists.

The kernels of judging and of the fold use it on every batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc.life import Ending, Micros, PositionTuple
from omnisupport_ingest.contracts.model import PositionRange

EPOCH_START = datetime(1970, 1, 1, tzinfo=UTC)
TIME = pa.timestamp("us", tz="UTC")
POSITION = pa.struct([("epoch", pa.int32()), ("commit_lsn", pa.int64()), ("ordinal", pa.int64())])
_BATCH_ROWS = 20_000
_BATCH_BYTES = 16 * 1024 * 1024

_MOST_STRETCHES = 1_000
"""``filter_slices`` slices at most so many stretches of rows; with more it copies."""

_NULL_POSITION: PositionTuple = (0, 0, 0)
"""Value under the mask of a null position."""

ENDING = pa.struct([("position", POSITION), ("at", TIME)])


def one_table(batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
    """Return all ``batches`` as one table of one chunk with nullable columns; None if they have no row."""
    held = [batch for batch in batches if batch.num_rows]
    if not held:
        return None
    table = pa.Table.from_batches(held).combine_chunks()
    nullable = pa.schema([field.with_nullable(True) for field in table.schema])
    return pa.Table.from_arrays(table.columns, schema=nullable)


def in_batches(table: pa.Table) -> list[pa.RecordBatch]:
    """Return ``table`` in batches that are small enough for the JVM."""
    if not table.num_rows:
        return []
    row_bytes = max(1, table.nbytes // table.num_rows)
    batches: list[pa.RecordBatch] = table.to_batches(
        max_chunksize=max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    )
    return batches


def one_chunk(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the column as one array; a column of one chunk is not copied."""
    if isinstance(column, pa.Array):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def texts(column: pa.ChunkedArray | pa.Array, rows: pa.Array | None = None) -> pa.StringArray:
    """Return a column of texts, plain or dictionary-encoded, as plain texts; of ``rows`` alone if given."""
    array = one_chunk(column)
    chosen = array if rows is None else array.take(rows)
    if not pa.types.is_dictionary(chosen.type):
        return chosen
    numbers, held = chosen.indices, chosen.dictionary
    if len(numbers) == len(held) and not numbers.null_count:
        stand = numbers.to_numpy()
        if (stand == np.arange(len(stand))).all():
            # The texts are in order already, as in a snapshot: nothing is copied.
            return held
    return held.take(numbers)


def filter_slices(
    rows: pa.Table, kept: npt.NDArray[np.bool_], *, most_stretches: int = _MOST_STRETCHES
) -> pa.Table:
    """Return the rows that are ``kept``, as slices of the table: a chunk per stretch of kept rows, nothing
    copied.

    If few rows of a file are dropped, or few are kept, this costs a hundredth of a filter. With more than
    ``most_stretches`` stretches the rows are filtered and copied instead.
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    if len(edges) > 2 * most_stretches:
        return rows.filter(pa.array(kept))
    stretches = [rows.slice(start, end - start) for start, end in edges.reshape(-1, 2).tolist()]
    return pa.concat_tables(stretches) if stretches else rows.slice(0, 0)


def split_rows(rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> tuple[pa.Table, pa.Table]:
    """Return the rows that are ``chosen``, and the others, each in one chunk."""
    return filter_slices(rows, chosen).combine_chunks(), filter_slices(rows, ~chosen).combine_chunks()


def concat(tables: Iterable[pa.Table]) -> pa.Table:
    """Concatenate ``tables`` (at least one) into one chunk; if only one has rows, it is not copied."""
    every = list(tables)
    held = [table for table in every if table.num_rows]
    return pa.concat_tables(held or every[:1]).combine_chunks()


def positions(column: pa.ChunkedArray | pa.Array) -> list[PositionTuple | None]:
    """Return a struct column of positions as tuples; None where the struct is null."""
    array = one_chunk(column)
    fields = [pc.struct_field(array, index).to_pylist() for index in range(3)]
    return [
        None if epoch is None else (epoch, lsn, ordinal) for epoch, lsn, ordinal in zip(*fields, strict=True)
    ]


def position_parts(column: pa.Array) -> list[npt.NDArray[np.int64]]:
    """Return epochs, LSNs and ordinals of a struct column of positions; 0 where it is null."""
    parts = (pc.fill_null(pc.struct_field(column, index), 0) for index in range(3))
    return [part.to_numpy(zero_copy_only=False) for part in parts]


def below(column: pa.Array, last: PositionTuple | pa.Array) -> npt.NDArray[np.bool_]:
    """Return which positions of ``column`` are lower than ``last``, or than those in it."""
    epoch, lsn, ordinal = position_parts(column)
    other = last if isinstance(last, tuple) else position_parts(last)
    in_epoch = (lsn < other[1]) | ((lsn == other[1]) & (ordinal < other[2]))
    found: npt.NDArray[np.bool_] = (epoch < other[0]) | ((epoch == other[0]) & in_epoch)
    return found


def within(column: pa.Array, ranges: Iterable[PositionRange]) -> npt.NDArray[np.bool_]:
    """Return which positions of ``column`` lie in one of ``ranges``; a null lies in none."""
    found = np.zeros(len(column), np.bool_)
    for start, end in ranges:
        found |= ~below(column, start) & (below(column, end) if end is not None else True)
    found &= column.is_valid().to_numpy(zero_copy_only=False)
    return found


def mask(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bool_]:
    """Return a column of flags; a null is none."""
    found: npt.NDArray[np.bool_] = one_chunk(pc.fill_null(column, False)).to_numpy(zero_copy_only=False)
    return found


def micros_of(moment: datetime) -> int:
    """Return the microseconds from 1970 to ``moment`` (timezone-aware)."""
    return (moment - EPOCH_START) // timedelta(microseconds=1)


def micros(column: pa.ChunkedArray | pa.Array) -> list[Micros | None]:
    """Return a time column as microseconds since 1970."""
    return column.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]


def endings(column: pa.ChunkedArray) -> list[Sequence[Ending]]:
    """Return a column of lists of endings; a null list is empty."""
    array = one_chunk(column)
    flat = array.flatten()
    found = [
        Ending(position, at)  # type: ignore[arg-type]
        for position, at in zip(
            positions(pc.struct_field(flat, 0)), micros(pc.struct_field(flat, 1)), strict=True
        )
    ]
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_pylist()
    lists: list[Sequence[Ending]] = []
    start = 0
    for length in lengths:
        lists.append(found[start : start + length] if length else ())
        start += length
    return lists


def position_array(values: Sequence[PositionTuple | None]) -> pa.Array:
    if not values:
        return pa.nulls(0, POSITION)
    mask = pa.array([value is None for value in values], pa.bool_())
    columns = zip(*[value or _NULL_POSITION for value in values], strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, POSITION, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(POSITION), mask=mask)


def time_array(values: Sequence[Micros | None]) -> pa.Array:
    return pa.array(values, pa.int64()).cast(TIME)


def ending_lists(values: Sequence[Sequence[Ending]]) -> pa.Array:
    flat = [ending for each in values for ending in each]
    items = pa.StructArray.from_arrays(
        [position_array([ending.position for ending in flat]), time_array([ending.at for ending in flat])],
        fields=list(ENDING),
    )
    return pa.ListArray.from_arrays(offsets([len(each) for each in values]), items)


def position_column(epoch: pa.Array, commit_lsn: pa.Array, ordinal: pa.Array) -> pa.Array:
    """Return three columns without nulls as one column of positions."""
    return pa.StructArray.from_arrays(
        [one_chunk(column) for column in (epoch, commit_lsn, ordinal)], fields=list(POSITION)
    )


def text_lists(values: Sequence[Sequence[str]]) -> pa.Array:
    return pa.array(values, pa.list_(pa.string()))


def position_maps(values: Sequence[Sequence[tuple[str, PositionTuple]]]) -> pa.Array:
    flat = [pair for each in values for pair in each]
    return pa.MapArray.from_arrays(
        offsets([len(each) for each in values]),
        pa.array([name for name, _ in flat], pa.string()),
        position_array([position for _, position in flat]),
    )


def text_maps(values: Sequence[Sequence[tuple[str, str]]]) -> pa.Array:
    flat = [pair for each in values for pair in each]
    return pa.MapArray.from_arrays(
        offsets([len(each) for each in values]),
        pa.array([name for name, _ in flat], pa.string()),
        pa.array([text for _, text in flat], pa.string()),
    )


def take(column: pa.ChunkedArray, rows: Sequence[int | None]) -> pa.Array:
    """Return the values of ``column`` at ``rows``; null where the row is None."""
    return one_chunk(column).take(pa.array(rows, pa.int64()))


def offsets(counts: Sequence[int] | npt.NDArray[np.int64]) -> pa.Array:
    """Return where each list begins and the last one ends, of lists of ``counts`` items."""
    return pa.array(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), pa.int32())


def is_same(one: Any, other: Any) -> bool:
    """Whether Spark finds the two values the same: NaN is the same as NaN, within arrays too."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other or (one != one and other != other))
