"""A column of a target gets another type by hand: its values end right, whatever session that was."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.targets.columns import TargetColumn, TargetRefused, missing_columns
from omnisupport_ingest.targets.sync import target_lag
from omnisupport_ingest_tests.layers.story import FIRST, Change, Commit, Story
from omnisupport_ingest_tests.layers.test_layers import run
from omnisupport_ingest_tests.targets.test_target import (
    Warehouse,
    counts,
    sync,
    told,
    warehouse,
    with_target,
)

__all__ = ["warehouse"]

ZONED = "SELECT id, at AT TIME ZONE 'UTC' = '2026-01-01 12:00' FROM NOTES ORDER BY id"
PLAIN = "SELECT id, at = '2026-01-01 12:00' FROM NOTES ORDER BY id"
RIGHT = [(number, True) for number in range(1, 41)]


def with_time(warehouse: Warehouse, pg_type: str) -> dict[str, Any]:
    at = {"type": ["string", "null"], "x-pg-type": pg_type, "description": "A moment."}
    return with_target(warehouse, at=at)


def synced(tmp_path: Path, warehouse: Warehouse, spark: SparkSession, pg_type: str) -> Story:
    """Forty rows with a time of ``pg_type``, in the target."""
    story = Story(tmp_path)
    told(story, with_time(warehouse, pg_type))
    zone = "+00" if pg_type == "timestamptz" else ""
    values = {"title": "t", "body": "b", "at": f"2026-01-01 12:00:00{zone}"}
    story.land(Commit(10, 1, [Change("c", number, values) for number in range(1, 41)]))
    run(story, spark, FIRST)
    assert counts(sync(story)) == (40, 0, 0)
    return story


def in_new_york(warehouse: Warehouse, statement: str) -> None:
    with closing(psycopg2.connect(warehouse.dsn)) as connection, connection, connection.cursor() as cursor:
        cursor.execute("SET TimeZone = 'America/New_York'")
        cursor.execute(statement.replace("NOTES", f"{warehouse.schema}.notes"))


@pytest.mark.parametrize(
    ("former", "pg_type", "right"), [("timestamp", "timestamptz", ZONED), ("timestamptz", "timestamp", PLAIN)]
)
def test_the_sql_that_a_sync_prints_is_right_in_a_session_of_any_time_zone(
    tmp_path: Path, warehouse: Warehouse, spark: SparkSession, former: str, pg_type: str, right: str
) -> None:
    story = synced(tmp_path, warehouse, spark, former)
    told(story, with_time(warehouse, pg_type))
    with pytest.raises(TargetRefused) as refused:
        sync(story)
    in_new_york(warehouse, refused.value.fix.removeprefix("Run there: ").split(";")[0])
    assert warehouse.ask(right) == RIGHT


@pytest.mark.parametrize(
    ("former", "value", "pg_type", "expected"),
    [
        ("date", "2026-01-01", "timestamp with time zone", "2026-01-01 00:00:00+00"),
        ("timestamp with time zone", "2026-01-01 23:30+00", "date", "2026-01-01"),
        (
            "timestamp(3) without time zone",
            "2026-01-01 12:00",
            "timestamp with time zone",
            "2026-01-01 12:00:00+00",
        ),
        (
            "timestamp(3) with time zone",
            "2026-01-01 12:00+00",
            "timestamp with time zone",
            "2026-01-01 12:00:00+00",
        ),
        (
            "timestamp with time zone",
            "2026-01-01 23:30+00",
            "timestamp without time zone",
            "2026-01-01 23:30:00",
        ),
        ("date", "2026-01-01", "timestamp without time zone", "2026-01-01 00:00:00"),
        ("integer", "7", "text", "7"),
    ],
)
def test_the_sql_converts_dates_and_times_alike(
    warehouse: Warehouse, former: str, value: str, pg_type: str, expected: str
) -> None:
    warehouse.ask(f"CREATE SCHEMA {warehouse.schema}")
    warehouse.ask(f"CREATE TABLE NOTES AS SELECT '{value}'::{former} AS at")
    with pytest.raises(TargetRefused) as refused:
        missing_columns(warehouse.schema, "notes", [TargetColumn("at", pg_type, "at")], {"at": former})
    in_new_york(warehouse, refused.value.fix.removeprefix("Run there: ").split(";")[0])
    assert warehouse.ask("SELECT at::text FROM NOTES") == [(expected,)]


def test_a_sync_sends_every_row_again_after_a_column_got_another_type(
    tmp_path: Path, warehouse: Warehouse, spark: SparkSession
) -> None:
    story = synced(tmp_path, warehouse, spark, "timestamp")
    told(story, with_time(warehouse, "timestamptz"))
    in_new_york(
        warehouse, "ALTER TABLE NOTES ALTER COLUMN at TYPE timestamp with time zone USING at::timestamptz"
    )
    assert warehouse.ask(ZONED) != RIGHT
    assert target_lag(story.workspace, story.contract).rows == 40
    done = sync(story)
    assert counts(done) == (40, 0, 0) and done.whole
    assert warehouse.ask(ZONED) == RIGHT
    assert target_lag(story.workspace, story.contract).rows == 0
    assert counts(sync(story)) == (0, 0, 0)


def test_a_note_of_an_older_sync_without_types_is_read_and_gets_them(
    tmp_path: Path, warehouse: Warehouse, spark: SparkSession
) -> None:
    story = synced(tmp_path, warehouse, spark, "timestamp")
    warehouse.ask(f"ALTER TABLE {warehouse.schema}._omnisupport_targets DROP COLUMN types")
    lag = target_lag(story.workspace, story.contract)
    assert (lag.rows, lag.problem) == (0, None)
    assert counts(sync(story)) == (0, 0, 0)
    ((types,),) = warehouse.ask(f"SELECT types FROM {warehouse.schema}._omnisupport_targets")
    assert types["at"] == "timestamp without time zone"
