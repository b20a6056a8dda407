"""A row that its source only marks as deleted: in the current state and in its history."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.current import current_state
from omnisupport_ingest.cdc.fold import fold_events
from omnisupport_ingest.cdc.history import history
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest_tests.cdc.lanes import CONTRACT, frame
from omnisupport_ingest_tests.oracle.model import Event, Position

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
MARKED = replace(
    CONTRACT,
    columns=(*CONTRACT.columns, Column("left", "timestamp with time zone")),
    soft_delete_column="left",
)


def test_a_mark_that_is_no_time_of_the_lake_marks_the_row_all_the_same(spark: SparkSession) -> None:
    def created(number: int, mark: str | None) -> Event:
        at = NOON + timedelta(minutes=number)
        image = {"status": "new", "note": None, "body": "long", "left": mark}
        return Event(Position(1, number, 0), "c", "tickets", ("1", str(number)), at, after=image)

    events = [
        created(1, None),
        created(2, "2026-03-01 09:30:00+00"),
        created(3, "infinity"),
    ]
    sent = frame(spark, events, {event.at[:2]: "2026-03-01T1200" for event in events})
    current = current_state(fold_events(sent, MARKED), MARKED).orderBy("id").collect()
    assert [(row["_cdc_is_deleted"], row["_cdc_deleted_at"]) for row in current] == [
        (False, None),
        (True, _naive(NOON.replace(hour=9, minute=30))),
        # It never comes, so the commit time of the mark stands for it.
        (True, _naive(NOON + timedelta(minutes=3))),
    ]
    versions = history(sent, MARKED).orderBy("id").collect()
    assert [row["_cdc_is_deleted"] for row in versions] == [False, True, True]


def _naive(moment: datetime) -> datetime:
    """As Spark hands a time to Python, in the zone of this process."""
    return moment.astimezone().replace(tzinfo=None)
