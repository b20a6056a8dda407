"""What Spark stages is committed, read back by every engine, and replaced exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC
from functools import partial
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from omnisupport_ingest.lake import staging
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.file_tasks import Output, made_by_tasks
from omnisupport_ingest.lake.layout import StagedFile
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.staged_frames import stage_frame
from omnisupport_ingest.lake.staging import FrameMismatch, StagedFiles, place_files, spilled
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest_tests.lake.tables import (
    NOON,
    W1,
    W2,
    Row,
    by_window,
    by_window_and_table,
    change,
    frame_of,
    unpartitioned,
)

ODD = "we ird:x%y+ü{*}'="
"""A source table's name with all that paths, URLs and globs treat specially."""

ROWS: list[Row] = [
    (W1, "tickets", 1, NOON),
    (W1, ODD, 2, NOON),
    (W2, None, 3, NOON),
    (W2, "tickets", 4, NOON),
]


def _add(output: Output, rows: pa.Table) -> str:
    output.add(rows)
    return str(len(rows))


def fill(spark: SparkSession, table: LakeTable, rows: list[Row], *, by_tasks: bool = False) -> None:
    snapshot = table.open()
    windows = [W1, W2] if table.spec.partition_by else [""]
    frame, generation = frame_of(spark, table, rows), dict.fromkeys(windows, 1)
    if by_tasks:
        arrow = frame.toArrow()
        works = [partial(_add, rows=arrow.slice(place, 2)) for place in range(0, len(arrow), 2)]
        with made_by_tasks(spark, table, works, unit="u1", generation=generation) as made:
            assert made is not None and made.results == ("2",) * len(works)
            staged = made.place()
    else:
        staged = stage_frame(table, frame, unit="u1", generation=generation)
    snapshot.commit([change(window, staged.of(window), ["b1"]) for window in windows])


@pytest.mark.parametrize("by_tasks", [False, True], ids=["by Spark", "by tasks"])
@pytest.mark.parametrize("make", [by_window, by_window_and_table, unpartitioned])
def test_every_engine_reads_what_was_committed(
    spark: SparkSession, tmp_path: Path, make: Callable[[Path], LakeTable], by_tasks: bool
) -> None:
    table = make(tmp_path)
    fill(spark, table, ROWS, by_tasks=by_tasks)
    schema = arrow_schema(table.spec.schema, without=())
    again = rows_of(table.open().all_files(), schema).sort_by("n").to_pylist()
    assert again == frame_of(spark, table, ROWS).toArrow().cast(schema).sort_by("n").to_pylist()
    names = table.spec.schema.names
    all_columns = [dict(zip(("window", "source_table", "n", "at"), row, strict=True)) for row in ROWS]
    expected = [{name: row[name] for name in names} for row in all_columns]

    snapshot = table.open()
    delta = DeltaTable(str(table.folder))
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        in_duckdb = connection.read_parquet(delta.file_uris(), hive_partitioning=True)
        found = {
            "spark": [row.asDict() for row in snapshot.read(spark, snapshot.all_files()).collect()],
            "deltalake": delta.to_pyarrow_table().to_pylist(),
            "polars": pl.scan_delta(str(table.folder)).collect().to_dicts(),
            "duckdb": in_duckdb.to_arrow_table().to_pylist(),
        }
    for engine, rows in found.items():
        # Spark gives moments without a zone, in the machine's own.
        moments = [{**row, "at": row["at"].astimezone(UTC)} for row in rows]
        assert sorted(moments, key=lambda row: row["n"]) == expected, engine


def test_a_replaced_window_keeps_only_the_new_rows(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window_and_table(tmp_path)
    fill(spark, table, ROWS)
    snapshot = table.open()
    staged = stage_frame(table, frame_of(spark, table, [(W1, ODD, 7, NOON)]), unit="u1", generation={W1: 2})
    snapshot.commit([change(W1, staged.of(W1), ["b1"], generation=2, replaces=True)])
    snapshot = table.open()
    found = snapshot.read(spark, snapshot.all_files()).select("window", "source_table", "n")
    assert {tuple(row) for row in found.collect()} == {(W1, ODD, 7), (W2, None, 3), (W2, "tickets", 4)}


def test_a_window_without_rows_has_no_files(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window(tmp_path)
    snapshot = table.open()
    staged = stage_frame(table, frame_of(spark, table, ROWS[:2]), unit="u", generation={W1: 1, W2: 1})
    assert (staged.windows(), staged.of(W2)) == ([W1], ())
    snapshot.commit([change(window, staged.of(window), ["b1"]) for window in (W1, W2)])
    snapshot = table.open()
    assert snapshot.windows() == [W1, W2]
    assert snapshot.files(W2) == ()
    assert snapshot.read(spark, snapshot.files(W2)).schema.names == table.spec.schema.names
    assert snapshot.read(spark, snapshot.files(W2)).count() == 0


def test_the_same_unit_staged_again_gives_the_same_files(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window_and_table(tmp_path)
    table.open()
    first, second = (
        stage_frame(table, frame_of(spark, table, ROWS), unit="u", generation={W1: 1, W2: 1})
        for _ in range(2)
    )
    assert first == second
    assert len(list(table.folder.rglob("*.parquet"))) == len(first.files)
    assert list((table.folder / ".staging").iterdir()) == []


def test_rows_of_a_window_not_planned_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window(tmp_path)
    table.open()
    with pytest.raises(FrameMismatch, match=W2):
        stage_frame(table, frame_of(spark, table, ROWS), unit="u", generation={W1: 1})


def test_a_column_of_another_type_is_named(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window(tmp_path)
    table.open()
    frame = frame_of(spark, table, ROWS).selectExpr("window", "cast(n AS int) AS n", "at", "1 AS more")
    with pytest.raises(FrameMismatch, match=r"more \(int for nothing\), n \(int for bigint\)"):
        stage_frame(table, frame, unit="u", generation={W1: 1, W2: 1})


def test_a_column_added_to_the_spec_is_null_in_older_files(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window(tmp_path)
    fill(spark, table, ROWS)
    wider = replace(
        table.spec, schema=StructType([*table.spec.schema.fields, StructField("more", LongType())])
    )
    table = LakeTable(tmp_path, wider)
    snapshot = table.open()
    assert {row.more for row in snapshot.read(spark, snapshot.all_files()).collect()} == {None}
    assert pl.scan_delta(str(table.folder)).select("more").collect().null_count().item() == 4


CRASHING = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from omnisupport_ingest_tests.lake import test_staging
spark = (
    SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .config("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS").getOrCreate()
)
test_staging.fill(spark, test_staging.by_window(Path(sys.argv[1])), test_staging.ROWS)
"""


@pytest.mark.slow
def test_work_that_died_after_placing_its_files_is_done_again_with_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    died = subprocess.run(
        [sys.executable, "-c", CRASHING, str(tmp_path)],
        env={**os.environ, "OMNISUPPORT_FAILPOINT": "lake.place.after:2"},
        capture_output=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-2000:]
    table = by_window(tmp_path)
    placed = {path.relative_to(table.folder).as_posix() for path in table.folder.rglob("part-*.parquet")}
    placed = {path for path in placed if not path.startswith(".staging")}
    assert placed and table.open().windows() == []

    fill(spark, table, ROWS)
    snapshot = table.open()
    assert {file.path for file in snapshot.all_files()} == placed
    assert sorted(row.n for row in snapshot.read(spark, snapshot.all_files()).collect()) == [1, 2, 3, 4]


def test_a_full_disk_is_known_by_what_spark_was_writing() -> None:
    """The traces are Spark 4.3's, of a shuffle and of a file of a table on a full disk."""
    shuffled = (
        "Job aborted due to stage failure: … java.io.IOException: No space left on device\n"
        "\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)\n"
        "\tat org.apache.spark.storage.TimeTrackingOutputStream.write(TimeTrackingOutputStream.java:59)\n"
        "\tat net.jpountz.lz4.LZ4BlockOutputStream.finish(LZ4BlockOutputStream.java:259)\n"
        "\tat org.apache.spark.shuffle.sort.ShuffleExternalSorter.writeSortedFile(…)\n"
    )
    written = (
        "Job aborted due to stage failure: … java.io.IOException: No space left on device\n"
        "\tat java.base/java.io.FileOutputStream.writeBytes(Native Method)\n"
        "\tat org.apache.hadoop.fs.RawLocalFileSystem$LocalFSFileOutputStream.write(…)\n"
        "\tat org.apache.spark.sql.execution.datasources.FileFormatWriter$.executeTask(…)\n"
    )
    assert spilled(shuffled)
    assert not spilled(written)
    assert not spilled("OSError: [Errno 28] No space left on device")
    assert not spilled("at org.apache.spark.storage.X\nDisk quota exceeded\n\tat org.apache.parquet.hadoop.Y")


def test_what_a_failed_attempt_of_a_task_left_is_in_no_file_of_the_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = by_window(tmp_path)
    table.open()
    arrow = frame_of(spark, table, ROWS).toArrow()

    def work(output: Output) -> str:
        [draft] = (table.folder / ".staging").iterdir()
        folder = draft / "of another attempt" / "rows" / f"window={W1}"
        folder.mkdir(parents=True)
        (folder / "part-0.parquet").write_text("half a file")
        return _add(output, arrow)

    with made_by_tasks(spark, table, [work], unit="u1", generation={W1: 1, W2: 1}) as made:
        assert made is not None
        assert sum(file.rows for file in made.place().files) == len(ROWS)


def test_if_one_task_cannot_do_its_work_nothing_is_left(spark: SparkSession, tmp_path: Path) -> None:
    table = by_window(tmp_path)
    table.open()
    arrow = frame_of(spark, table, ROWS).toArrow()
    works = [partial(_add, rows=arrow), lambda output: None]
    with made_by_tasks(spark, table, works, unit="u1", generation={W1: 1}) as made:
        assert made is None
    assert list((table.folder / ".staging").iterdir()) == []


def test_rows_put_aside_are_in_no_file_of_the_table_and_gone_with_the_draft(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = by_window(tmp_path)
    table.open()
    arrow = frame_of(spark, table, ROWS).toArrow()

    def work(output: Output) -> str:
        output.put_aside(arrow.slice(0, 1))
        return _add(output, arrow.slice(1))

    with made_by_tasks(spark, table, [work], unit="u1", generation={W1: 1, W2: 1}) as made:
        assert made is not None
        assert spark.read.parquet(*made.aside).count() == 1
        assert sum(file.rows for file in made.place().files) == len(ROWS) - 1
    assert not Path(made.aside[0]).exists()


def test_what_an_attempt_that_spark_gave_up_writes_late_is_in_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a cluster a second copy of a task may write on while the driver places what the first one made."""
    table = unpartitioned(tmp_path)
    draft = table.folder / ".staging" / "draft"
    draft.mkdir(parents=True)
    (draft / "part-told.parquet").write_text("rows")
    place = staging._place

    def place_meanwhile(written: Path, target: Path) -> None:
        (draft / "part-late.parquet").write_text("the same rows")
        place(written, target)

    monkeypatch.setattr(staging, "_place", place_meanwhile)
    placed = place_files(table, draft, ["part-told.parquet"], unit="u1", generation=1)
    assert [Path(path).name for path in placed] == ["part-told.parquet"]
    assert not [path for path in placed if not (table.folder / path).is_file()]


def test_the_files_of_many_windows_are_looked_through_once() -> None:
    looks = []

    class Files(tuple[StagedFile, ...]):
        def __iter__(self) -> Iterator[StagedFile]:
            looks.append(len(self))
            return super().__iter__()

    windows = [f"2026-01-31T{hour:02d}00" for hour in range(24)]
    files = [
        StagedFile(f"{window}/{number}", window, (), 1, 1, "") for number in range(2) for window in windows
    ]
    staged = StagedFiles(Files(files))
    assert [[file.path for file in staged.of(window)] for window in windows] == [
        [f"{window}/0", f"{window}/1"] for window in windows
    ]
    assert (staged.of("2026-02-01T0000"), staged.windows()) == ((), windows)
    assert looks == [48]
