"""How fast a snapshot is read, and what is left of it, by the chunks that have landed."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlan
from omnisupport_ingest.landing.snapshot_progress import ReadingTime, SnapshotProgress, progress
from omnisupport_ingest_tests.landing.landed_chunks import at, landed_chunk

HOUR = 3600
ITEMS = [landed_chunk(n, 0, 30 * n + 30, (10 * n, 10 * n + 9), table="items") for n in range(2)]


def told(
    chunks: int, *landed: Manifest, beside: list[Manifest] | None = None, compared: bool = False
) -> SnapshotProgress:
    """The progress of a snapshot in ``chunks`` of 100 rows that was planned at the beginning."""
    plan = SnapshotPlan(
        snapshot_id="of orders",
        epoch=1,
        table="orders",
        reason="a test",
        planned_at=at(0),
        boundary_ordinal=1,
        rows=100,
        by=("id",),
        types=("integer",),
        bounds=tuple((str(bound),) for bound in range(1, chunks)),
        compared=compared,
    )
    reading = ReadingTime([*landed, *(beside or [])], timedelta(0))
    return progress(plan, {each.chunk.chunk: each for each in landed if each.chunk}, reading)


@pytest.mark.parametrize(
    ("found", "rate", "left"),
    [
        pytest.param(told(5), None, None, id="nothing has landed"),
        pytest.param(told(1), None, None, id="the only chunk is being read"),
        pytest.param(told(1, landed_chunk(0, 3, 13, (100, 199))), 10, 0, id="the only chunk has landed"),
        pytest.param(told(5, landed_chunk(0, 0, 10, (100, 199))), 10, 40, id="one of five chunks"),
        pytest.param(told(5, beside=ITEMS), None, None, id="another table is being read first"),
        pytest.param(
            told(5, landed_chunk(0, 0, 70, (100, 199)), beside=ITEMS), 10, 40, id="after another table"
        ),
        pytest.param(
            told(5, landed_chunk(0, 0, 10, (100, 199)), landed_chunk(1, 9 * HOUR, 9 * HOUR + 10, (200, 299))),
            10,
            30,
            id="a pause of hours between two chunks",
        ),
        pytest.param(
            told(5, landed_chunk(0, 0, 10, (100, 298)), landed_chunk(1, 0, 10, (101, 299))),
            20,
            15,
            id="two chunks side by side",
        ),
        pytest.param(
            told(5, landed_chunk(4, 0, 1, (100, 109), rows=10)), 10, 40, id="the last chunk, which is small"
        ),
        pytest.param(
            told(5, landed_chunk(0, 0, 10, (100, 299), rows=200)), 20, 40, id="chunks larger than planned"
        ),
        pytest.param(told(5, landed_chunk(0, 0, 10, None)), None, None, id="a chunk without rows"),
        pytest.param(
            told(5, landed_chunk(0, 6, 10, None), landed_chunk(1, 18, 20, (100, 104), rows=5), compared=True),
            None,
            30,
            id="chunks that were compared with the lake, and looked at again and again",
        ),
        pytest.param(told(5, compared=True), None, None, id="nothing is compared yet"),
    ],
)
def test_rate_and_time_left_are_of_the_reading_of_this_table(
    found: SnapshotProgress, rate: float | None, left: float | None
) -> None:
    assert (found.rows_per_second, found.seconds_left) == (rate, left)


def test_rows_left_are_those_of_the_chunks_that_have_not_landed() -> None:
    found = told(5, landed_chunk(0, 0, 10, (100, 189), rows=90), landed_chunk(4, 0, 10, (190, 191), rows=2))
    assert (found.done, found.rows, found.rows_left) == (2, 92, 3 * 90)
    assert told(5).rows_left == 500
