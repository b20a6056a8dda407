"""Compute the hash of stored rows (``_cdc_row_hash``) by whole columns.

The meaning is a query of DuckDB. ``compiled_hashes.c`` makes the same, at a third of the processor time, from
the texts and whole numbers of the rows. Texts of other values (decimals, floats, dates) come from DuckDB in
any case, so that there is one way of writing them.
"""

from __future__ import annotations

from functools import cache

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.compiled import (
    HashedColumn,
    buffer_of,
    compiled_hashes,
    hashed_numbers,
    hashed_texts,
)

Hashes = npt.NDArray[np.int64]

_INFINITE = (1 << 63) - 1


def row_hashes(rows: pa.Table) -> Hashes:
    """Return a 64-bit hash of each row of ``rows``, of all columns.

    The hash is the lower half of the MD5 sum (RFC 1321) of one JSON array with the columns' texts as DuckDB
    writes them. Times are microseconds since 1970, bytes hexadecimal.
    """
    if not rows.num_rows:
        # An empty query costs milliseconds, and an updated file often has no rows of some kind.
        return np.zeros(0, np.int64)
    if compiled_hashes is None:
        return _by_query(rows)
    arrays = [columnar.one_chunk(column) for column in rows.columns]
    found = [_hashed(array) for array in arrays]
    others = [field.name for field, one in zip(rows.schema, found, strict=True) if one is None]
    if others:
        texts = _query(rows.select(others), ", ".join(_text(rows.schema.field(each)) for each in others))
        of_others = iter(texts.columns)
        found = [hashed_texts(columnar.one_chunk(next(of_others))) if one is None else one for one in found]
    made = compiled_hashes.hash_rows(rows.num_rows, tuple(each for each in found if each is not None))
    return np.frombuffer(buffer_of(made), np.int64)


def _hashed(values: pa.Array) -> HashedColumn | None:
    """Return ``values`` as the compiled function takes them; None if only DuckDB writes their texts."""
    kind = values.type
    if pa.types.is_string(kind):
        return hashed_texts(values)
    if pa.types.is_boolean(kind):
        return hashed_texts(values.cast(pa.string()))
    if pa.types.is_signed_integer(kind) or _are_moments(values):
        return hashed_numbers(values.cast(pa.int64()))
    if (pa.types.is_map(kind) or pa.types.is_list(kind)) and _are_empty(values):
        return "c", values.offset, None, b"[]", values.buffers()[0] if values.null_count else None
    return None


def _are_moments(values: pa.Array) -> bool:
    """Whether ``values`` are times whose text is the number that Arrow has. The extremes are DuckDB's
    infinities."""
    if not pa.types.is_timestamp(values.type) or values.type.unit != "us":
        return False
    bounds = pc.min_max(values.cast(pa.int64())).as_py()
    return bounds["min"] is None or (bounds["max"] < _INFINITE and bounds["min"] > -_INFINITE)


def _are_empty(values: pa.Array) -> bool:
    """Whether no list (or map) of ``values`` has an element."""
    bounds = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, 4 * values.offset)
    return bool(bounds[0] == bounds[-1])


def _by_query(rows: pa.Table) -> Hashes:
    texts = ", ".join(map(_text, rows.schema))
    # DuckDB's number has its bytes reversed, so its upper half is the sum's lower one.
    found = _query(rows, f"md5_number_upper(to_json([{texts}])::VARCHAR)")
    hashes: npt.NDArray[np.uint64] = columnar.one_chunk(found.column(0)).to_numpy()
    return hashes.view(np.int64)


def _query(rows: pa.Table, selected: str) -> pa.Table:
    found = _connection().from_arrow(rows).query("hashed_rows", f"SELECT {selected} FROM hashed_rows")
    assert found is not None, "a SELECT has a result"
    return found.to_arrow_table()


def _text(field: pa.Field) -> str:
    """Return the SQL expression for the text of a column."""
    column = '"' + field.name.replace('"', '""') + '"'
    if pa.types.is_timestamp(field.type):
        return f"epoch_us({column})::VARCHAR"
    if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
        return f"hex({column})"
    if pa.types.is_map(field.type):
        return f"to_json(list_sort(map_entries({column})))::VARCHAR"
    if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
        return f"to_json({column})::VARCHAR"
    return f"{column}::VARCHAR"


@cache
def _connection() -> duckdb.DuckDBPyConnection:
    """One DuckDB connection per process, in memory, with one thread: processes that update rows have one
    thread."""
    return duckdb.connect(config={"threads": 1})
