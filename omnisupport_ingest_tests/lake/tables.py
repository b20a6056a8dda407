"""A small table of the lake, and ways to fill it, for the tests of this room."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.layout import LakeFile, StagedFile
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.lake.table_spec import TableSpec

W1, W2 = "2026-01-31T0900", "2026-01-31T1000"

NOON = datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=UTC)

Row = tuple[str, str | None, int, datetime]
"""``(window, source_table, n, at)``."""

SCHEMA = StructType(
    [
        StructField("window", StringType(), False),
        StructField("source_table", StringType()),
        StructField("n", LongType(), False),
        StructField("at", TimestampType()),
    ]
)


def by_window(root: Path) -> LakeTable:
    schema = StructType([field for field in SCHEMA if field.name != "source_table"])
    return LakeTable(root, TableSpec("desk/raw", schema, ("window",), "events"))


def by_window_and_table(root: Path) -> LakeTable:
    return LakeTable(root, TableSpec("desk/deduped", SCHEMA, ("window", "source_table"), "events"))


def unpartitioned(root: Path) -> LakeTable:
    schema = StructType([field for field in SCHEMA if field.name not in ("window", "source_table")])
    return LakeTable(root, TableSpec("desk/dimension", schema, (), "rows", ordered_by="n"))


def frame_of(spark: SparkSession, table: LakeTable, rows: Sequence[Row]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMA).select(*table.spec.schema.names)


def checkpoint(window: str, *, key: str = "key", run_id: str = "run") -> Checkpoint:
    return Checkpoint(
        layer="raw_cdc_staging",
        table="raw",
        source="desk",
        window=window,
        cursor="1:0/10:4",
        watermark=NOON,
        dedupe_key="(epoch, commit_lsn, ordinal)",
        idempotency_key=key,
        last_batch_id="b1",
        batches=1,
        lsn_start="0/1",
        lsn_end="0/10",
        rows=3,
        raw=3,
        deduped=0,
        duplicates=0,
        quarantined=0,
        content_hash="0" * 48,
        generation=1,
        delta_version=None,
        run_id=run_id,
        committed_at=NOON,
        upstream_version=None,
    )


def state(window: str, inputs: Sequence[str], *, generation: int = 1, run_id: str = "run") -> WindowState:
    return WindowState(generation, tuple(inputs), None, checkpoint(window, run_id=run_id))


def change(
    window: str,
    add: Sequence[StagedFile],
    inputs: Sequence[str],
    *,
    generation: int = 1,
    replaces: bool = False,
    remove: Sequence[LakeFile] = (),
    run_id: str = "run",
) -> WindowChange:
    new = state(window, inputs, generation=generation, run_id=run_id)
    return WindowChange(window, tuple(add), tuple(remove), new, replaces)


def place_without_spark(
    table: LakeTable, window: str, unit: str, numbers: Sequence[int], *, generation: int = 1
) -> tuple[StagedFile, ...]:
    """Put a unit of ``by_window`` in its place as ``stage_frame`` would, for tests of commits alone."""
    path = f"{layout.unit_folder(window, generation, unit)}/part-0.parquet"
    file = table.folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        schema = pa.schema([("n", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
        content = pa.table({"n": numbers, "at": [NOON] * len(numbers)}, schema=schema)
        draft = file.with_name(f".{uuid.uuid4().hex}")
        pq.write_table(content, draft)
        draft.rename(file)
    rows, stats = delta_stats(file)
    partition = layout.partition_in(path, table.spec.partition_by)
    return (StagedFile(path, window, partition, rows, file.stat().st_size, stats),)


def numbers_in(table: LakeTable) -> list[int]:
    """Every ``n`` that the newest version holds, read by deltalake."""
    return sorted(DeltaTable(str(table.folder)).to_pyarrow_table(columns=["n"])["n"].to_pylist())
