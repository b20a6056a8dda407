"""A row of one table as its source has it and as the lake has it, to be told apart or not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from omnisupport_ingest.contracts.model import Column, TableContract

CONTRACT = TableContract(
    name="notes",
    version="1.0.0",
    source="desk",
    schema="public",
    table="notes",
    title="",
    description="",
    owner="team:tests",
    key=("id",),
    columns=(
        Column("id", "bigint"),
        Column("title", "text"),
        Column("amount", "numeric(8,2)"),
        Column("tags", "text[]"),
        Column("at", "timestamptz"),
        Column("gone_at", "timestamptz"),
    ),
    soft_delete_column="gone_at",
    allowed_lateness=datetime.resolution,
    max_lateness=datetime.resolution,
    path="",
    fingerprint="",
)

SOURCE = {
    "id": "1",
    "title": "a",
    "amount": "1.50",
    "tags": '{"x,y",NULL}',
    "json:tags": '["x,y",null]',
    "at": "2026-01-01 00:00:00.5+00",
    "gone_at": None,
}
LAKE = {
    "id": 1,
    "title": "a",
    "amount": Decimal("1.50"),
    "tags": ["x,y", None],
    "at": datetime(2026, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC),
    "gone_at": None,
    "_cdc_key": '["1"]',
    "_cdc_is_deleted": False,
    "_cdc_unresolved": [],
    "_cdc_exact": [],
}
MOMENT = pa.timestamp("us", tz="UTC")
LAKE_SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("title", pa.string()),
        ("amount", pa.decimal128(8, 2)),
        ("tags", pa.list_(pa.string())),
        ("at", MOMENT),
        ("gone_at", MOMENT),
        ("_cdc_key", pa.string()),
        ("_cdc_is_deleted", pa.bool_()),
        ("_cdc_unresolved", pa.list_(pa.string())),
        ("_cdc_exact", pa.map_(pa.string(), pa.string())),
    ]
)


def write_source(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows of the source as text, as ``write_text_rows`` writes them."""
    schema = pa.schema([(name, pa.string()) for name in SOURCE])
    pq.write_table(pa.Table.from_pylist(list(rows), schema), file)
    return file


def write_lake(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file of the dimension."""
    pq.write_table(pa.Table.from_pylist(list(rows), LAKE_SCHEMA), file)
    return file
