"""Convert rows whose contract columns are texts to rows with typed columns, by whole columns.

Spark's workers do it where the rows are made. As column expressions the types of a wide table would be a plan
of thousands of nodes, planned again for every run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.typed_values import typed_column

EXACT = "_cdc_exact"
"""Column with the exact texts of values that their typed columns cannot hold, by column."""


def typed_batches(
    batches: Iterable[pa.RecordBatch], columns: Sequence[Column], order: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Return ``batches`` with the columns ``order``: ``columns`` by their types, and ``EXACT``.

    The row hash is the one column of ``order`` that a batch may lack. It becomes NULL (a 64-bit integer);
    whoever compares rows computes it.
    """
    for batch in batches:
        texts = {column.name: batch.column(column.name) for column in columns}
        typed = {column.name: typed_column(texts[column.name], column) for column in columns}
        made = typed | {EXACT: _exact(texts, typed, columns, batch.num_rows)}
        names = set(batch.schema.names)
        arrays = [
            made[name]
            if name in made
            else batch.column(name)
            if name in names
            else pa.nulls(batch.num_rows, pa.int64())
            for name in order
        ]
        yield pa.RecordBatch.from_arrays(arrays, names=list(order))


def _exact(
    texts: dict[str, pa.Array], typed: dict[str, pa.Array], columns: Sequence[Column], count: int
) -> pa.Array:
    unfit: list[tuple[int, str, str]] = []
    for column in columns:
        text = texts[column.name]
        if typed[column.name].null_count == text.null_count:
            continue
        # Also where the rules let only values of the type in: a value that was hashed in a sealed window
        # stays a hash if its column is a number again.
        lost = np.flatnonzero(
            pc.and_(pc.is_null(typed[column.name]), pc.is_valid(text)).to_numpy(zero_copy_only=False)
        )
        unfit += [(int(row), column.name, text[row].as_py()) for row in lost]
    if not unfit:
        nothing = pa.nulls(0, pa.string())
        return pa.MapArray.from_arrays(pa.array(np.zeros(count + 1, np.int32)), nothing, nothing)
    pairs: list[list[tuple[str, str]]] = [[] for _ in range(count)]
    for row, name, held in unfit:
        pairs[row].append((name, held))
    return columnar.text_maps(pairs)
