"""A table without rows, or without cursors, is read whole in every sync, and that lands nothing twice."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import RetentionPolicy, TableContract
from omnisupport_ingest.sources.query.anew import refresh
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.dialect import DialectReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import SyncReport, rewind, sync
from omnisupport_ingest_tests.sources.query.tickets import Desk, contract_document

KEPT = timedelta(days=10)


class Tables:
    """Tables of SQLite whose cursor is NOT NULL, or ``nullable``; raw is given up after ``keep``."""

    def __init__(self, folder: Path) -> None:
        (folder / "landing").mkdir()
        self.url = f"sqlite:///{folder / 'desk.db'}"
        self.desk = Desk(None, "", folder / "landing")
        self.base = sqlite3.connect(folder / "desk.db", isolation_level=None)
        self.tables: list[TableContract] = []
        self.keep: timedelta | None = None
        self.ago = timedelta(0)

    def add(self, name: str, *, nullable: bool = False) -> TableContract:
        updated = {"type": "string", "x-pg-type": "timestamp with time zone", "description": "Last change."}
        if nullable:
            updated |= {"type": ["string", "null"]}
        document = contract_document(schema="main", updated_at=updated)
        document["required"] = ["id"] if nullable else ["id", "updated_at"]
        document["x-cdc"]["table"] = name
        self.tables.append(contract_of(document, Path(f"{name}.json")))
        rule = "" if nullable else "NOT NULL"
        self.base.execute(
            f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME {rule})"
        )
        return self.tables[-1]

    def inlet(self) -> Inlet:
        policy = RetentionPolicy(landing=self.keep, raw=self.keep)
        tables = tuple(replace(each, retention=policy) for each in self.tables)
        clock = datetime.now(UTC) - self.ago
        return replace(self.desk.inlet(), tables=tables, clock=lambda: clock)

    def sync(self) -> SyncReport:
        with (
            closing(DialectReader(self.url)) as reader,
            QueryState(self.desk.store.folder) as state,
        ):
            report = sync(self.inlet(), reader, state)
        assert report.finished
        return report

    def refresh(self, *tables: TableContract) -> None:
        with QueryState(self.desk.store.folder) as state:
            refresh(self.inlet(), state, tables or self.tables, "asked for")

    def landed(self, name: str) -> list[tuple[int, str]]:
        """Epoch and kind of each event of ``name`` that landed, in their order."""
        found = [each for each in self.desk.events() if each["source_table"] == name]
        return sorted((each["epoch"], each["op"]) for each in found)

    @property
    def epochs(self) -> int:
        return len(self.desk.store.epochs())


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[Tables]:
    found = Tables(tmp_path)
    yield found
    found.base.close()


@pytest.mark.parametrize("nullable", [False, True])
def test_an_epoch_has_one_end_of_an_empty_table_however_often_it_is_read(
    tables: Tables, nullable: bool
) -> None:
    tables.add("empty", nullable=nullable)
    tables.sync()
    assert tables.landed("empty") == [], "the first epoch needs no end"
    for epoch in (2, 3):
        tables.refresh()
        for _ in range(4):
            assert tables.sync().tables[0].full
        assert tables.landed("empty") == [(each, "b") for each in range(2, epoch + 1)]


def test_an_end_that_a_dead_process_may_not_have_landed_lands_with_the_next_sync(tables: Tables) -> None:
    tables.add("empty")
    tables.sync()
    tables.refresh()
    with (
        closing(DialectReader(tables.url)) as reader,
        QueryState(tables.desk.store.folder) as state,
    ):
        # It stops before the table has been read to its end.
        report = sync(tables.inlet(), reader, state, stopped=lambda: True)
    assert not report.finished and tables.landed("empty") == []
    tables.sync()
    assert tables.landed("empty") == [(2, "b")]


def test_rows_without_cursors_outlive_the_epoch_that_another_table_begins(tables: Tables) -> None:
    """They do not land again in it, so an end would end them."""
    tables.add("bare", nullable=True)
    tables.base.execute("INSERT INTO bare VALUES (1, 'one', NULL)")
    other = tables.add("other")
    tables.sync()
    tables.refresh(other)
    for _ in range(2):
        tables.sync()
    assert tables.landed("bare") == [(1, "r")]
    assert tables.landed("other") == [(2, "b")]


def test_a_table_that_is_set_back_to_its_beginning_loses_no_row_that_has_landed(tables: Tables) -> None:
    """Rows within the lookback do not land again, so an end in the epoch of another table would end them."""
    set_back = tables.add("tickets")
    tables.base.execute("INSERT INTO tickets VALUES (1, 'one', datetime('now'))")
    other = tables.add("other")
    tables.sync()
    tables.refresh(other)
    tables.sync()
    with QueryState(tables.desk.store.folder) as state:
        assert rewind(set_back, state, None)
    assert tables.sync().tables[0].full
    assert tables.landed("tickets") == [(1, "r")]


@pytest.mark.parametrize("nullable", [False, True])
def test_an_empty_table_begins_no_epoch_by_itself_and_its_first_rows_do(
    tables: Tables, nullable: bool
) -> None:
    tables.keep = KEPT
    tables.add("empty", nullable=nullable)
    for _ in range(3):
        # Since the first one, the windows of old rows may be sealed.
        tables.sync()
    assert tables.epochs == 1

    # In an epoch that is as old as raw is kept.
    tables.keep, tables.ago = 2 * KEPT, timedelta(days=12)
    tables.refresh()
    tables.sync()
    tables.keep, tables.ago = KEPT, timedelta(0)
    for _ in range(3):
        tables.sync()
    assert tables.epochs == 2 and tables.landed("empty") == [(2, "b")]

    tables.base.execute("INSERT INTO empty VALUES (1, 'old', datetime('now', '-15 days'))")
    for _ in range(3):
        tables.sync()
    assert tables.landed("empty") == [(2, "b"), (3, "b"), (3, "r")]
    assert tables.epochs == 3
    windows = {each["window"] for each in tables.desk.events() if each["epoch"] == 3}
    assert {(datetime.now(UTC) - tables.desk.grid.start_of(each)).days for each in windows} == {0}


def test_the_first_end_of_an_empty_table_lands_in_no_window_that_may_be_sealed(tables: Tables) -> None:
    """It stands in the window in which its epoch began."""
    tables.keep, tables.ago = KEPT, timedelta(days=12)
    first = tables.add("first")
    tables.sync()
    tables.refresh(first)
    tables.sync()
    tables.ago = timedelta(0)
    tables.sync()
    assert tables.epochs == 2
    tables.add("later")
    for _ in range(3):
        tables.sync()
    assert tables.landed("later") == [(3, "b")]
    assert tables.epochs == 3


def test_an_empty_table_that_cannot_be_read_keeps_no_other_table_from_landing(tables: Tables) -> None:
    tables.keep = KEPT
    tables.add("gone")
    tables.add("other")
    tables.sync()
    tables.base.execute("DROP TABLE gone")
    tables.base.execute("INSERT INTO other VALUES (1, 'old', datetime('now', '-15 days'))")
    with (
        closing(DialectReader(tables.url)) as reader,
        QueryState(tables.desk.store.folder) as state,
    ):
        report = sync(tables.inlet(), reader, state)
    (fault,) = report.faults
    assert "main.gone" in fault.problem
    assert tables.landed("other") == [(2, "b"), (2, "r")]
