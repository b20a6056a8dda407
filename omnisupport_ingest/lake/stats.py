"""Delta statistics of a Parquet file, from its footer alone (Delta protocol, per-file statistics).

Only integer columns get bounds. The footer has exact bounds of integers, but may truncate those of text and
times. Personal columns get none: a bound is a value of some row, and the log would keep it for weeks after
the row is erased and its files are swept.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_MAX_COLUMNS = 32
"""Number of integer columns that get bounds, the first ones, as with Delta's own writers."""


def rows_in(path: Path) -> int:
    """Return the number of rows of the file."""
    return int(pq.read_metadata(path).num_rows)


def delta_stats(path: Path, personal: Collection[str] = ()) -> tuple[int, str]:
    """Return the number of rows of the file, and its statistics as Delta's JSON text.

    ``personal``: columns whose bounds are left out.
    """
    return stats_of(pq.read_metadata(path), personal)


def stats_of(footer: pq.FileMetaData, personal: Collection[str] = ()) -> tuple[int, str]:
    """Return what ``delta_stats`` does, from a footer that was read already."""
    schema = footer.schema.to_arrow_schema()
    minimum: dict[str, int] = {}
    maximum: dict[str, int] = {}
    nulls: dict[str, int] = {}
    numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
    wanted = [name for name in numbers if name not in personal][:_MAX_COLUMNS]
    index = {footer.schema.column(i).path: i for i in range(footer.num_columns)}
    for name in wanted:
        groups = [
            footer.row_group(group).column(index[name]).statistics for group in range(footer.num_row_groups)
        ]
        if not groups or any(group is None or not group.has_null_count for group in groups):
            continue
        nulls[name] = sum(group.null_count for group in groups)
        bounded = [group for group in groups if group.has_min_max]
        # A row group without bounds holds only NULL, or bounds its writer did not trust.
        if bounded and all(group.has_min_max or group.num_values == 0 for group in groups):
            minimum[name] = min(group.min for group in bounded)
            maximum[name] = max(group.max for group in bounded)
    stats = {
        "numRecords": footer.num_rows,
        "minValues": minimum,
        "maxValues": maximum,
        "nullCount": nulls,
    }
    return int(footer.num_rows), json.dumps(stats, separators=(",", ":"))
