"""The layers are killed at every failpoint of the lake, in every layer, once and three times in a row."""

from __future__ import annotations

import itertools

import pytest

from omnisupport_ingest_tests.recovery.crash import CrashDesk, Point, died, finished

LAYERS = (
    "support_desk/raw_cdc_staging",
    # The quarantine is committed before the events it was told apart from.
    "support_desk/quarantine",
    "support_desk/deduped_events",
    "support_desk/net_changes/tickets",
    "support_desk/dim_tickets",
)
FAILPOINTS = ("lake.write", "lake.place", "lake.state", "lake.commit")
"""Passed by every unit of work of every layer."""

UPLOAD = "lake.upload"
"""Passed only where an object store keeps the lake."""

COVERED = {*FAILPOINTS, UPLOAD, "lake.table", "lake.columns"}

MOMENTS = ("before", "after")
TIMES = (1, 3)


@pytest.mark.crash
@pytest.mark.parametrize(
    ("name", "moment", "times"), itertools.product((*FAILPOINTS, UPLOAD), MOMENTS, TIMES)
)
def test_stages_killed_in_every_layer_end_as_the_source(
    crash_desk: CrashDesk, name: str, moment: str, times: int
) -> None:
    desk = crash_desk
    if name == UPLOAD and not desk.in_bucket:
        pytest.skip("nothing is uploaded to a folder")
    # The snapshot first: it shows rows, not the events that came before it.
    finished(desk.capture())
    desk.change()
    finished(desk.capture())
    for layer in LAYERS:
        point = Point(name, moment, layer)
        for attempt in range(times):
            if attempt and (name, moment) == ("lake.commit", "after"):
                # After its commit a layer has nothing left to do, so there must be news.
                desk.change()
                finished(desk.capture())
            died(desk.layers(at=point), point)
    desk.ends_well()
    assert len(desk.died) == len(LAYERS) * times


@pytest.mark.crash
@pytest.mark.parametrize(("moment", "times"), [("before", 1), ("before", 3), ("after", 1)])
def test_stages_killed_while_a_table_is_made_end_as_the_source(
    crash_desk: CrashDesk, moment: str, times: int
) -> None:
    """A table is made once, so three deaths in a row after it are those at three tables."""
    desk = crash_desk
    desk.change()
    finished(desk.capture())
    made = ("raw_cdc_staging", "deduped_events", "quarantine", "net_changes/tickets", "dim_tickets")
    for table in made:
        point = Point("lake.table", moment, f"support_desk/{table}")
        for _ in range(times):
            died(desk.layers(at=point), point)
    desk.ends_well()


@pytest.mark.crash
@pytest.mark.parametrize("table", ["support_desk/net_changes/tickets", "support_desk/dim_tickets"])
@pytest.mark.parametrize(("moment", "times"), [("before", 1), ("before", 3), ("after", 1), ("after", 3)])
def test_stages_killed_while_a_table_gets_columns_end_as_the_source(
    crash_desk: CrashDesk, table: str, moment: str, times: int
) -> None:
    """The contract grows by a column before each start after which one was added."""
    desk = crash_desk
    left_out = ["satisfaction", "channel", "priority"]
    desk.contract("tickets", without=left_out)
    desk.change()
    finished(desk.capture())
    finished(desk.layers())
    point = Point("lake.columns", moment, table)
    for attempt in range(times):
        if attempt == 0 or moment == "after":
            left_out.pop()
            desk.contract("tickets", without=left_out)
        died(desk.layers(at=point), point)
    desk.contract("tickets")
    desk.ends_well()
