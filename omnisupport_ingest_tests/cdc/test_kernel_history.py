"""The kernel of the history by itself, where it must agree with the fold about one position."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.cdc.current_rows import EXISTENCE
from omnisupport_ingest.cdc.history_rows import history_groups
from omnisupport_ingest_tests.cdc import kernels
from omnisupport_ingest_tests.cdc.kernels import Table
from omnisupport_ingest_tests.oracle.histories import SHAPE
from omnisupport_ingest_tests.oracle.model import Event, Position

TABLE = Table(SHAPE, ("id",), {"id": "text", **dict.fromkeys(SHAPE.columns, "text")})
START = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("holes", "body", "doubtful"),
    [("", "new", False), ("c", None, False), ("d", "new", False), ("cd", None, True)],
)
@pytest.mark.parametrize("arrived", [1, -1])
def test_a_delete_stands_before_the_creation_of_its_position(
    holes: str, body: str | None, doubtful: bool, arrived: int
) -> None:
    """A log without an order inside one LSN has both halves of a key change there."""
    at, then = Position(1, 5, 0), START + timedelta(seconds=5)
    events = [
        Event(Position(1, 3, 0), "c", SHAPE.name, ("1",), START, after={"body": "old"}),
        Event(at, "d", SHAPE.name, ("1",), then, identity="d", quarantined="d" in holes),
        Event(
            at, "c", SHAPE.name, ("1",), then, None, {"body": "new"}, identity="c", quarantined="c" in holes
        ),
    ]
    windows = {event.at[:2]: "w" for event in events}
    table = kernels.events_table(events[::arrived], TABLE, windows)
    rows = [row for batch in history_groups(table.to_batches(), TABLE.shape, ()) for row in batch.to_pylist()]
    first, last = sorted(rows, key=lambda row: row["_cdc_valid_from"])
    assert (first["body"], first["_cdc_valid_to"]) == ("old", then)
    assert (last["body"], last["_cdc_valid_to"]) == (body, None)
    assert (EXISTENCE in last["_cdc_unresolved"]) == doubtful
