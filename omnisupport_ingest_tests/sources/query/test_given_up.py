"""Landing and raw of a table that is read by a cursor are given up by age."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.removed import LANDING, RAW, WindowSealed, refuse_sealed
from omnisupport_ingest.sources.query.state import FILE
from omnisupport_ingest.windows import KEY_FORMAT, WindowSize
from omnisupport_ingest_tests.retention.given_up import (
    KEPT,
    give_up,
    made_again,
    reasons,
    sealed,
    shown,
    take_all,
)
from omnisupport_ingest_tests.sources.query.platform_of_desk import Platform
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk

OLD_AT = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=15)
OLD = f"timestamptz '{OLD_AT.isoformat()}'"


@pytest.fixture
def platform(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """A home of three weeks, whose windows of two weeks ago have been given up."""
    Home.open(tmp_path / "home", WindowSize(60), now=datetime.now(UTC) - timedelta(days=21))
    desk.run(
        f"INSERT INTO tickets VALUES (1, 'one', {OLD} + interval '1 minute'),"
        f" (2, 'two', {OLD} + interval '2 minutes'), (3, 'live', now()), (4, 'no cursor', NULL),"
        " (5, 'before the home', now() - interval '90 days')"
    )
    return Platform(desk, tmp_path, monkeypatch, retention=KEPT)


def subjects(platform: Platform, spark: SparkSession) -> dict[int, str | None]:
    """The subject of every row that is alive; None where a column is not known."""
    return {
        row["id"]: None if row["_cdc_unresolved"] else row["subject"]
        for row in platform.rows(spark)
        if not row["_cdc_is_deleted"]
    }


@pytest.mark.slow
def test_a_table_is_read_on_and_read_anew_once_its_old_windows_are_given_up(
    desk: Desk, platform: Platform, spark: SparkSession
) -> None:
    platform.sync()
    at = platform.workspace
    old, first = OLD_AT.strftime(KEY_FORMAT), at.grid.first.strftime(KEY_FORMAT)
    take_all(at, SOURCE, spark)
    before = shown(at, SOURCE)
    assert subjects(platform, spark) == {1: "one", 2: "two", 3: "live", 4: "no cursor", 5: "before the home"}
    planned = give_up(at, SOURCE)
    assert {each.window for each in planned.of(LANDING)} == {first, old}
    assert {each.window for each in planned.of(RAW)} == {old}
    ((kept, why),) = {(each.window, each.why) for each in planned.refused}
    assert kept == first and "rows without a time" in why
    assert shown(at, SOURCE) == before

    # (a) Nothing is read twice; (b) what changes goes in, also a row without a cursor.
    platform.sync()
    take_all(at, SOURCE, spark)
    assert shown(at, SOURCE) == before
    desk.run("UPDATE tickets SET subject = 'new', updated_at = now() WHERE id = 1")
    desk.run("UPDATE tickets SET subject = 'changed' WHERE id = 4")
    platform.sync()
    take_all(at, SOURCE, spark)
    assert subjects(platform, spark)[1] == "new" and subjects(platform, spark)[4] == "changed"

    # (c) A row that committed late waits, if it is seen at all: its window is sealed. So does a copy, which
    # changes nothing.
    desk.run(f"INSERT INTO tickets VALUES (6, 'late', {OLD} + interval '3 minutes')")
    begin = (datetime.now(UTC) - timedelta(days=16)).isoformat(sep=" ")
    platform.sync(no_further_than={"public.tickets": begin})
    take_all(at, SOURCE, spark)
    assert reasons(at, SOURCE) == {(old, "too_late_arrival"): 2}
    found = subjects(platform, spark)
    assert found[2] == "two" and found[6] is None
    with pytest.raises(WindowSealed, match=old):
        refuse_sealed(at, SOURCE, [old])
    assert sealed(at, SOURCE) == {old}
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before

    # A full refresh reads rows of sealed windows: they land in the window in which its epoch began.
    desk.run("DELETE FROM tickets WHERE id = 3")
    platform.sync(reason="read anew")
    take_all(at, SOURCE, spark)
    wanted = {1: "new", 2: "two", 4: "changed", 5: "before the home", 6: "late"}
    assert subjects(platform, spark) == wanted
    assert reasons(at, SOURCE) == {(old, "too_late_arrival"): 2}
    record = at.landing(SOURCE).current_epoch()
    assert record is not None and record.rows_from is not None
    begun = at.grid.truncate(record.rows_from).strftime(KEY_FORMAT)
    second = {
        part.window
        for each in at.landing(SOURCE).windows()
        for part in at.landing(SOURCE).parts(each)
        if part.epoch == 2
    }
    # Rows without a time stay in the first window.
    assert {first, begun} <= second and min(second - {first}) == begun
    # Read again in that epoch, each finds the window where it was.
    platform.sync(no_further_than={"public.tickets": begin})
    take_all(at, SOURCE, spark)
    assert subjects(platform, spark) == wanted
    before = shown(at, SOURCE)
    assert made_again(at, SOURCE, spark) == before


@pytest.mark.slow
def test_a_lost_cursor_costs_a_full_reading_of_which_nothing_changes(
    platform: Platform, spark: SparkSession, desk: Desk
) -> None:
    desk.run("DELETE FROM tickets WHERE id = 4")
    platform.sync()
    at = platform.workspace
    take_all(at, SOURCE, spark)
    give_up(at, SOURCE)
    before = subjects(platform, spark)
    (at.landing(SOURCE).folder / FILE).unlink()
    platform.sync()
    take_all(at, SOURCE, spark)
    assert subjects(platform, spark) == before
