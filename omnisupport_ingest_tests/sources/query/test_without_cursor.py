"""A table whose contract names no cursor is refused by itself; the other tables of its source are read."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.query.errors import QueryRefused
from omnisupport_ingest.sources.query.run import QuerySource
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.sources.query.test_compare import lake
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk, contract_document


class Tables:
    """A home that reads ``tickets`` and ``notes`` of a SQLite file."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.base = sqlite3.connect(folder / "desk.db", isolation_level=None)
        self.contracts = folder / "contracts" / "data"
        self.contracts.mkdir(parents=True)
        for name in ("notes", "tickets"):
            self.base.execute(
                f"CREATE TABLE {name} (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)"
            )
            self.add(name, 1)
            self.write(name)
        (folder / "contracts" / "sources").mkdir()
        definition = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": SOURCE,
            "kind": "query",
            "description": "A desk.",
            "connection": {"env": "DESK_URL"},
        }
        (folder / "contracts" / "sources" / f"{SOURCE}.json").write_text(json.dumps(definition))
        monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
        self.settings = Settings(_env_file=None, home=folder / "home", contracts_dir=self.contracts)
        now = datetime.now(UTC) - timedelta(days=30)
        self.home = Home.open(self.settings.home, WindowSize(60), now=now)

    def add(self, table: str, number: int) -> None:
        self.base.execute(f"INSERT INTO {table} VALUES (?, 's', datetime('now'))", (number,))

    def write(self, table: str, *, field: str | None = "updated_at") -> None:
        """Write the contract of ``table``, with ``field`` as its cursor."""
        document = contract_document(schema="main")
        document["x-cdc"] |= {"table": table, "retention": {"landing": "P7D", "raw": "P10D"}}
        document["x-cdc"]["cursor"] = {
            "field": field,
            "candidates": [{"column": "updated_at", "usable": False, "why": "Its name does not suggest it."}],
        }
        (self.contracts / f"{table}.json").write_text(json.dumps(document))

    @property
    def source(self) -> QuerySource:
        contracts = contracts_in_force(self.settings)
        return QuerySource.of(sources_in_force(self.settings, contracts).find(SOURCE), contracts, self.home)

    def landed(self) -> list[tuple[str, int]]:
        desk = Desk(None, "", self.home.landing)
        found = [each for each in desk.events() if each["op"] in ("r", "d")]
        return sorted((each["source_table"], json.loads(each["key"])[0]) for each in found)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tables]:
    found = Tables(tmp_path, monkeypatch)
    yield found
    found.base.close()


def test_the_others_are_read_in_every_sync(tables: Tables) -> None:
    tables.write("notes", field=None)
    for number in (2, 3):
        report = tables.source.sync(no_further_than={"main.notes": None})
        (fault,) = report.faults
        assert "notes.json names no cursor" in fault.problem
        # A new contract would name none either: its candidates say why.
        assert "x-cdc.cursor.field by the reasons in its candidates" in fault.fix
        assert [(each.table, each.refused, each.finished) for each in report.tables] == [
            ("main.notes", True, False),
            ("main.tickets", False, True),
        ]
        tables.add("tickets", number)
    assert tables.landed() == [("tickets", "1"), ("tickets", "2")]


def test_the_others_are_read_after_a_contract_has_lost_its_cursor(tables: Tables) -> None:
    """The source has looked at the table, and knows how far it was read; so old windows may be sealed."""
    assert tables.source.sync().finished
    tables.write("notes", field=None)
    tables.base.execute("ALTER TABLE notes DROP subject")
    tables.add("tickets", 2)
    assert len(tables.source.sync().faults) == 1
    assert tables.landed() == [("notes", "1"), ("tickets", "1"), ("tickets", "2")]
    tables.write("notes")
    assert tables.source.sync().finished


def test_a_full_refresh_reads_the_others_and_one_of_it_alone_begins_no_epoch(tables: Tables) -> None:
    tables.write("notes", field=None)
    tables.source.sync()
    source = tables.source
    (notes, tickets) = source.tables
    with pytest.raises(QueryRefused, match=r"notes\.json names no cursor"):
        source.sync(anew=[notes], reason="asked for")
    assert len(source.store.epochs()) == 1
    report = source.sync(anew=[notes, tickets], reason="asked for")
    assert [each.landed for each in report.tables] == [0, 1]
    assert len(report.faults) == 1 and len(source.store.epochs()) == 2


def test_the_keys_of_the_others_are_compared(tables: Tables, tmp_path: Path) -> None:
    assert tables.source.sync().finished
    tables.write("notes", field=None)
    tables.base.execute("DELETE FROM tickets")
    desk = Desk(None, "", tables.home.landing)
    by_name = {}
    for each in tables.source.tables:
        folder = tmp_path / each.name
        folder.mkdir()
        by_name[each.full_name] = lake(replace(desk, table=each), folder)
    found = tables.source.compare(by_name)
    assert [(each.table, each.deleted) for each in found.tables] == [("main.tickets", 1)]
    (fault,) = found.faults
    assert "notes.json names no cursor" in fault.problem


def test_a_source_none_of_whose_tables_names_one_is_refused(tables: Tables) -> None:
    for name in ("notes", "tickets"):
        tables.write(name, field=None)
    with pytest.raises(QueryRefused, match="names no cursor") as refused:
        _ = tables.source
    assert "candidates" in refused.value.fix
