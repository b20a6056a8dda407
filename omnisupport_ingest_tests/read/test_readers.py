"""Other engines read every table that a run of the pipeline wrote, and agree on what is in it."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story

TEXT = "naïve – „quoted“, 日本 🦉\nnew line"

Rows = list[tuple[object, ...]]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Two windows through every layer: a duplicate, a collision, a broken rule, a delete, a key change."""
    told = Story(tmp_path_factory.mktemp("readers") / "told")
    insert = Commit(10, 1, [Change("c", 1, {"title": "one", "body": TEXT}), Change("c", 2, {"title": "two"})])
    update = Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])
    told.land(insert, update, Commit(30, 3, [Change("u", 2, {"title": "x" * 21})]))
    told.land_again(insert)
    told.land_again(Commit(20, 2, [Change("u", 1, {"title": "other"}, unchanged=("body",))]))
    told.land(
        Commit(40, 61, [Change("d", 1), Change("c", 9, {"title": "uno"}, unchanged=("body",), moved_from=1)]),
        Commit(50, 62, [Change("d", 2)]),
    )
    for layer in (raw, deduped):
        layer.materialize(told.workspace, spark, SOURCE, [FIRST, SECOND], "run")
    net_changes.materialize(told.workspace, spark, told.contract, [FIRST, SECOND], "run")
    dimensions.update(told.workspace, spark, told.contract, "run")
    return told


def each_reader(table: LakeTable, columns: list[str]) -> Iterator[tuple[str, int, Rows]]:
    """Engine, number of rows, and the rows of ``columns`` in order, for every engine."""
    delta = DeltaTable(str(table.folder))
    selected = delta.to_pyarrow_table(columns=columns).to_pylist()
    yield (
        "deltalake",
        delta.to_pyarrow_table().num_rows,
        [tuple(row[name] for name in columns) for row in selected],
    )
    scanned = pl.scan_delta(str(table.folder))
    yield "polars", scanned.collect().height, scanned.select(columns).collect().rows()
    with duckdb.connect() as connection:
        hive = bool(table.spec.partition_by)
        frame = connection.read_parquet(delta.file_uris(), hive_partitioning=hive)
        count = frame.count("*").fetchall()[0][0]
        # DuckDB knows partition values from the paths only.
        picked = frame.select(", ".join(f'"{name}"' for name in columns)).fetchall()
        yield "duckdb", count, picked


def check(table: LakeTable, columns: list[str], expected: Rows) -> None:
    for engine, count, rows in each_reader(table, columns):
        assert count == len(expected), engine
        assert sorted(rows, key=repr) == sorted(expected, key=repr), engine


def test_raw_holds_every_event_as_often_as_it_landed(story: Story):
    check(
        story.workspace.raw(SOURCE),
        ["window", "commit_lsn", "ordinal", "op", "key"],
        [
            *[(FIRST, 10, 0, "c", '["1"]'), (FIRST, 10, 2, "c", '["2"]')] * 2,
            *[(FIRST, 20, 0, "u", '["1"]')] * 2,
            (FIRST, 30, 0, "u", '["2"]'),
            (SECOND, 40, 0, "d", '["1"]'),
            (SECOND, 40, 1, "c", '["9"]'),
            (SECOND, 50, 0, "d", '["2"]'),
        ],
    )


def test_deduped_holds_each_accepted_event_once(story: Story):
    check(
        story.workspace.deduped(SOURCE),
        ["window", "source_table", "commit_lsn", "ordinal"],
        [
            (FIRST, "notes", 10, 0),
            (FIRST, "notes", 10, 2),
            (SECOND, "notes", 40, 0),
            (SECOND, "notes", 40, 1),
            (SECOND, "notes", 50, 0),
        ],
    )


def test_quarantine_holds_the_others_with_their_reason(story: Story):
    check(
        story.workspace.quarantine(SOURCE),
        ["window", "reason", "commit_lsn", "review_state"],
        [
            *[(FIRST, "collision", 20, "open")] * 2,
            (FIRST, "row_rule", 30, "open"),
        ],
    )


def test_net_changes_hold_the_change_of_each_window(story: Story):
    check(
        story.workspace.net_changes(story.contract),
        ["window", "_cdc_key", "_cdc_kind", "_cdc_moved_from_key"],
        [
            (FIRST, '["1"]', "key", None),
            (FIRST, '["2"]', "key", None),
            (SECOND, '["1"]', "key", None),
            (SECOND, '["1"]', "ended", None),
            (SECOND, '["2"]', "key", None),
            (SECOND, '["9"]', "key", '["1"]'),
        ],
    )


def test_the_dimension_holds_the_current_row_of_each_key(story: Story):
    check(
        story.workspace.dimension(story.contract),
        ["id", "body", "_cdc_is_deleted", "_cdc_unresolved"],
        [
            (1, TEXT, True, ["title"]),
            (2, None, True, ["title", "body"]),
            (9, TEXT, False, []),
        ],
    )
