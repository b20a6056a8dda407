"""What others do with the same landed files: DuckDB and Polars take them in, dedupe, fold and type them.

They write Parquet files and no table, check no row, keep no state that a later change could be merged with,
and quarantine nothing; so they do less.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import duckdb
import polars as pl

_TYPES = {
    "id": "BIGINT",
    "organization_id": "BIGINT",
    "customer_id": "UUID",
    "agent_handle": "VARCHAR",
    "subject": "VARCHAR",
    "body": "VARCHAR",
    "status": "VARCHAR",
    "priority": "SMALLINT",
    "channel": "VARCHAR",
    "metadata": "VARCHAR",
    "satisfaction": "DECIMAL(3, 2)",
    "created_at": "TIMESTAMPTZ",
    "updated_at": "TIMESTAMPTZ",
}
"""The columns of the tickets of ``bench.landed``."""

_POLARS = {
    "BIGINT": pl.Int64,
    "SMALLINT": pl.Int16,
    "DECIMAL(3, 2)": pl.Decimal(3, 2),
    "TIMESTAMPTZ": pl.Datetime("us", "UTC"),
}


def by_duckdb(landed: Sequence[Path], folder: Path) -> int:
    """Landed files → raw, deduped and current rows, as Parquet in ``folder``; how many rows there are.

    It has two threads, as Spark has.
    """
    with duckdb.connect(config={"threads": 2}) as con:
        files = [str(path) for path in landed]
        raw, deduped, rows = (folder / f"{name}.parquet" for name in ("raw", "deduped", "rows"))
        con.execute(f"COPY (SELECT *, now() AS landed_at FROM read_parquet({files})) TO '{raw}'")
        con.execute(
            f"COPY (SELECT * FROM '{raw}' QUALIFY row_number() OVER (PARTITION BY epoch, commit_lsn, ordinal "
            f"ORDER BY batch_id) = 1) TO '{deduped}'"
        )
        paths = "[" + ", ".join(f"'/{name}'" for name in _TYPES) + "]"
        newest = ", ".join(
            f"arg_max_null(texts[{number}], place) FILTER (op <> 'd' AND NOT list_contains(unsent, '{name}'))"
            f"::{of_type} AS {name}"
            for number, (name, of_type) in enumerate(_TYPES.items(), 1)
        )
        con.execute(
            f"COPY (SELECT key, arg_max(op, place) = 'd' AS is_deleted, {newest} FROM ("
            "SELECT key, op, (epoch, commit_lsn, ordinal) AS place, coalesce(unchanged, []) AS unsent, "
            f"json_extract_string(after, {paths}) AS texts FROM '{deduped}') GROUP BY key) TO '{rows}'"
        )
        found = con.execute(f"SELECT count(*) FROM '{rows}'").fetchone()
    assert found is not None
    return int(found[0])


def by_polars(landed: Sequence[Path], folder: Path) -> int:
    """The same by Polars."""
    raw, deduped, rows = (folder / f"{name}.parquet" for name in ("raw", "deduped", "rows"))
    pl.scan_parquet(landed).with_columns(pl.lit("now").alias("landed_at")).sink_parquet(raw)
    place = ["epoch", "commit_lsn", "ordinal"]
    pl.scan_parquet(raw).unique(place, keep="any").sink_parquet(deduped)
    image = pl.Struct(dict.fromkeys(_TYPES, pl.String))
    events = (
        pl.scan_parquet(deduped)
        .sort(place)
        .with_columns(
            pl.col("after").str.json_decode(image).alias("image"), pl.col("unchanged").fill_null([])
        )
    )
    newest = [
        pl.col("image")
        .struct.field(name)
        .filter((pl.col("op") != "d") & ~pl.col("unchanged").list.contains(name))
        .last()
        .alias(name)
        for name in _TYPES
    ]
    folded = events.group_by("key").agg((pl.col("op").last() == "d").alias("is_deleted"), *newest)
    typed = folded.with_columns(
        pl.col(name).str.to_datetime("%Y-%m-%d %H:%M:%S%.f%#z", time_zone="UTC", time_unit="us")
        if of_type == "TIMESTAMPTZ"
        else pl.col(name).cast(_POLARS[of_type])
        for name, of_type in _TYPES.items()
        if of_type in _POLARS
    )
    typed.sink_parquet(rows)
    return int(pl.scan_parquet(rows).select(pl.len()).collect().item())
