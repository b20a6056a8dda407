"""Landing and raw of a table that is read by a cursor are given up by age."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.model import RetentionPolicy
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.removed import LANDING, RAW, WindowSealed, refuse_sealed
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.state import FILE, QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, sync
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
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk, lite_contract
from omnisupport_ingest_tests.waiting import PATIENCE

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


class Tables:
    """Tables of SQLite with one old and one new row each, read by their cursor. All of them give up raw after
    ten days, or ``keep``."""

    def __init__(self, folder: Path, keep: timedelta | None = timedelta(days=10)) -> None:
        (folder / "landing").mkdir(exist_ok=True)
        self.file, self.keep = folder / "desk.db", keep
        self.desk = Desk(None, "", folder / "landing", page_rows=1)
        self.names: list[str] = []

    def add(self, name: str) -> None:
        self.names.append(name)
        with closing(sqlite3.connect(self.file, isolation_level=None)) as base:
            base.execute(f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
            base.execute(
                f"INSERT INTO {name} VALUES (1, 'old', datetime('now', '-15 days')),"
                " (2, 'new', datetime('now'))"
            )

    def sync(self, pages: int = 99) -> SyncReport:
        """Read ``pages`` of all tables, one row each."""
        policy = RetentionPolicy(landing=self.keep, raw=self.keep)
        tables = tuple(
            replace(lite_contract(), name=each, table=each, retention=policy) for each in self.names
        )
        # It is asked before each page, and once more at the end of a table.
        left = iter(range(pages))
        with (
            closing(DialectReader(f"sqlite:///{self.file}")) as reader,
            QueryState(self.desk.store.folder) as state,
        ):
            inlet = replace(self.desk.inlet(), tables=tables)
            report = sync(inlet, reader, state, stopped=lambda: next(left, None) is None)
        assert not report.faults
        return report

    def landed(self, name: str) -> list[tuple[int, int, str]]:
        """Epoch, days since its window, and subject of each row of ``name`` that landed."""
        return [
            (
                each["epoch"],
                (datetime.now(UTC) - self.desk.grid.start_of(each["window"])).days,
                "old" if '"old"' in each["after"] else "new",
            )
            for each in self.desk.events()
            if each["source_table"] == name and each["op"] == "r"
        ]


def test_a_table_that_a_source_gets_later_lands_clear_of_sealed_windows(tmp_path: Path) -> None:
    """Its old rows would wait in them, and nobody could release them."""
    tables = Tables(tmp_path)
    tables.add("tickets")
    assert tables.sync().finished
    # Nothing had been given up when the first table was read.
    assert tables.landed("tickets") == [(1, 15, "old"), (1, 0, "new")]
    tables.add("notes")
    assert tables.sync().finished
    assert tables.landed("notes") == [(2, 0, "old"), (2, 0, "new")]
    assert len(tables.landed("tickets")) == 2
    # Its epoch is young enough for one more, and for what comes.
    tables.add("calls")
    assert tables.sync().finished
    assert tables.landed("calls") == [(2, 0, "old"), (2, 0, "new")]
    assert len(tables.desk.store.epochs()) == 2


def test_a_table_is_read_in_an_epoch_whose_own_window_may_not_be_sealed(tmp_path: Path) -> None:
    tables = Tables(tmp_path)
    tables.add("tickets")
    begun = datetime.now(UTC) - timedelta(days=12)
    tables.desk.store.begin_epoch("read anew", None, now=begun, rows_from=begun)
    tables.sync()
    assert tables.landed("tickets") == [(1, 12, "old"), (1, 0, "new")]
    tables.add("notes")
    tables.sync()
    assert tables.landed("notes") == [(2, 0, "old"), (2, 0, "new")]


def test_a_full_reading_that_stops_often_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The epoch that it needs begins once."""
    tables = Tables(tmp_path)
    tables.add("tickets")
    tables.sync()
    tables.add("calls")
    tables.add("notes")
    for _ in range(20):
        if tables.sync(pages=10).finished:
            break
    assert tables.landed("calls") == tables.landed("notes") == [(2, 0, "old"), (2, 0, "new")]
    assert len(tables.desk.store.epochs()) == 2


_PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.sources.query.test_given_up import Tables
tables = Tables(Path(sys.argv[1]))
tables.names = sys.argv[2:]
tables.sync()
"""


@pytest.mark.full
@pytest.mark.parametrize("point", ["query.state.after@notes", "landing.epoch.before", "landing.epoch.after"])
def test_no_reading_is_in_two_epochs_wherever_the_sync_that_begins_one_is_killed(
    tmp_path: Path, point: str
) -> None:
    """At its end a full reading ends the rows that only older epochs have: also those of its own first
    half."""
    tables = Tables(tmp_path, keep=None)
    tables.add("tickets")
    tables.sync()
    tables.add("notes")
    while not tables.landed("notes"):
        tables.sync(pages=6)
    assert tables.landed("notes") == [(1, 15, "old")]
    tables.keep = timedelta(days=10)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    ends = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), *tables.names],
        env={**inherited, VARIABLE: point},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ends.returncode == -signal.SIGKILL, ends.stderr
    tables.sync()
    assert tables.landed("notes")[1:] == [(2, 0, "old"), (2, 0, "new")]


def test_where_nothing_is_given_up_a_later_table_lands_in_the_windows_of_its_rows(tmp_path: Path) -> None:
    tables = Tables(tmp_path, keep=None)
    tables.add("tickets")
    tables.sync()
    tables.add("notes")
    tables.sync()
    assert tables.landed("notes") == [(1, 15, "old"), (1, 0, "new")]
