"""Stages the rows of a DataFrame as files of a table.

Spark itself writes the draft where driver and executors see the same files; elsewhere Python tasks do
(``lake.frame_tasks``). Either way the draft is then moved to its final path (``lake.staging``).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omnisupport_ingest.failpoints import failpoint
from omnisupport_ingest.lake import layout, standing_task
from omnisupport_ingest.lake.drafts import Drafts
from omnisupport_ingest.lake.frame_tasks import write_by_tasks
from omnisupport_ingest.lake.staging import FrameMismatch, StagedFiles, gathered, place_draft, room_on_disk
from omnisupport_ingest.lake.table_spec import TablePlace

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

COMPILED_FROM = 50_000
"""From this many rows on, Spark compiles the plan that writes them; below, interpreting it costs less."""

_COMPILED = {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"}


def stage_frame(
    table: TablePlace, frame: DataFrame, *, unit: str, generation: Mapping[str, int], rows: int = 0
) -> StagedFiles:
    """Write ``frame`` as Parquet files at their final paths; no version of the table holds them yet.

    ``table``: must have been opened once. ``frame``: the columns of the table's spec, partition columns
    included, in any order. ``unit``: idempotency key of the work; the same key, window and generation must
    mean the same rows. ``generation``: the generation to write, for every window that may have rows (``""``
    for a table without partitions). ``rows``: number of rows that the frame is made from, if they may be
    many. Raises ``FrameMismatch`` if columns or windows differ.
    """
    spec = table.spec
    _check_columns(table, frame)
    standing_task.release()
    draft = table.folder / layout.STAGING / uuid.uuid4().hex
    drafts = Drafts.of(frame.sparkSession, draft)
    # No failpoint: the staging folder, and a draft in it that no table names.
    draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with (
            failpoint("lake.write", spec.path),
            room_on_disk(frame.sparkSession, draft),
            _compiled(frame.sparkSession, rows),
        ):
            whole = write_frame(frame.select(*spec.schema.names), drafts, spec.partition_by)
        placed = place_draft(table, whole, unit=unit, generation=generation)
        drafts.keep(file.path for file in placed.files)
        return placed
    finally:
        drafts.clear()


def write_frame(frame: DataFrame, drafts: Drafts, partition_by: tuple[str, ...]) -> Path:
    """Write ``frame`` as Parquet files, by partition; return the folder: that of ``drafts`` or one in it.

    Without rows there may be no file.
    """
    if drafts.visit is not None:
        names = [each.name for each in write_by_tasks(frame, drafts, partition_by)]
        drafts.bring(names)
        attempts = sorted({name.partition("/")[0] for name in names})
        # No failpoint: a draft that no table names yet.
        drafts.folder.mkdir(mode=0o700, exist_ok=True)
        return gathered((drafts.folder / each / "rows" for each in attempts), drafts.folder / "whole")
    writer = frame.write
    if partition_by:
        writer = writer.partitionBy(*partition_by)
    writer.parquet(f"file://{drafts.folder}")
    return drafts.folder


@contextmanager
def _compiled(spark: SparkSession, rows: int) -> Iterator[None]:
    """Let Spark compile the session's plans within the block, if ``rows`` are enough to be worth it."""
    if rows < COMPILED_FROM:
        yield
        return
    before = {name: spark.conf.get(name) for name in _COMPILED}
    try:
        for name, value in _COMPILED.items():
            spark.conf.set(name, value)
        yield
    finally:
        for name, held in before.items():
            spark.conf.set(name, str(held))


def _check_columns(table: TablePlace, frame: DataFrame) -> None:
    wanted = {field.name: field.dataType for field in table.spec.schema.toNullable()}
    actual = {field.name: field.dataType for field in frame.schema.toNullable()}
    wrong = sorted(name for name in wanted.keys() | actual.keys() if wanted.get(name) != actual.get(name))
    if wrong:
        raise FrameMismatch(
            f"The frame for {table.spec.path} differs from the table in: "
            + ", ".join(f"{name} ({_type(actual, name)} for {_type(wanted, name)})" for name in wrong),
            fix="Select and cast the columns of the table's spec before the frame is staged.",
        )


def _type(types: Mapping[str, DataType], name: str) -> str:
    return types[name].simpleString() if name in types else "nothing"
