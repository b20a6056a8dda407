"""The sensor of a query source: its cursor is the source's, moves with what is durable, may be set back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest_tests.sources.query.tickets import contract_document

TABLE = "main.tickets"


class Ticks:
    """A desk in SQLite, its home, and ticks of the sensor that reads it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DESK_URL", f"sqlite:///{folder / 'desk.db'}")
        self.base = sqlite3.connect(folder / "desk.db", isolation_level=None)
        self.base.execute("CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT, updated_at DATETIME)")
        for name in ("data", "sources"):
            (folder / "contracts" / name).mkdir(parents=True)
        (folder / "contracts" / "data" / "tickets.json").write_text(
            json.dumps(contract_document({"field": "updated_at", "lookback": "PT1M"}, schema="main"))
        )
        definition = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "name": "desk",
            "kind": "query",
            "description": "A desk.",
            "connection": {"env": "DESK_URL"},
            "schedule": {"compare_every": "PT1H"},
        }
        (folder / "contracts" / "sources" / "desk.json").write_text(json.dumps(definition))
        self.workspace = Workspace.open(
            Settings(home=folder / "home", contracts_dir=folder / "contracts" / "data")
        )
        repository = build_definitions(self.workspace).get_repository_def()
        self.sensor = repository.get_sensor_def("cursor_desk")
        self.due = repository.get_sensor_def("compare_desk")
        self.cursor: str | None = None

    def add(self, number: int, minutes_ago: float) -> None:
        at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
        text = at.strftime("%Y-%m-%d %H:%M:%S")
        self.base.execute("INSERT INTO tickets VALUES (?, 's', ?)", (number, text))

    def tick(self) -> dg.SensorResult:
        with dg.DagsterInstance.ephemeral() as instance:
            result = self.sensor(
                dg.build_sensor_context(instance, cursor=self.cursor), workspace=self.workspace
            )
        self.cursor = result.cursor
        return result

    def landed(self) -> list[tuple[str, int]]:
        store = self.workspace.landing("desk")
        found = []
        for batch in store.manifests():
            for file in batch.files:
                rows = pq.read_table(store.path_of(file)).to_pylist()
                found += [(row["key"], row["ordinal"]) for row in rows]
        return found


@pytest.fixture
def ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticks]:
    found = Ticks(tmp_path, monkeypatch)
    yield found
    found.base.close()


def test_the_cursor_is_the_value_up_to_which_all_has_landed(ticks: Ticks):
    ticks.add(1, 10)
    ticks.add(2, 5)
    ticks.tick()
    newest = ticks.base.execute("SELECT max(updated_at) FROM tickets").fetchone()[0]
    assert json.loads(ticks.cursor or "") == {TABLE: newest}
    assert len(ticks.landed()) == 2


@pytest.mark.parametrize(
    "cursor",
    [None, "", "{}", "no json", json.dumps({TABLE: None}), json.dumps({TABLE: "2020-01-01 00:00:00"})],
)
def test_a_cursor_that_is_lost_or_set_back_loses_and_doubles_nothing(ticks: Ticks, cursor: str | None):
    for number in range(1, 6):
        ticks.add(number, 60 - number)
    ticks.tick()
    ticks.add(6, 1)
    ticks.cursor = cursor
    ticks.tick()
    # What was read again is the same event at the same position; dedupe drops it.
    assert {key for key, _ in ticks.landed()} == {f'["{number}"]' for number in range(1, 7)}
    assert len(set(ticks.landed())) == 6
    assert json.loads(ticks.cursor or "")[TABLE] is not None


def test_a_cursor_that_is_set_ahead_is_not_believed(ticks: Ticks):
    ticks.add(1, 60)
    ticks.tick()
    ticks.cursor = json.dumps({TABLE: "2999-01-01 00:00:00"})
    ticks.add(2, 30)
    ticks.tick()
    assert len(ticks.landed()) == 2


def test_a_source_that_fails_keeps_its_cursor_and_says_why(ticks: Ticks):
    ticks.add(1, 10)
    ticks.tick()
    before = ticks.cursor
    ticks.base.execute("ALTER TABLE tickets RENAME TO elsewhere")
    result = ticks.tick()
    assert "has no table main.tickets" in str(result.skip_reason)
    assert ticks.cursor == before
    ticks.base.execute("ALTER TABLE elsewhere RENAME TO tickets")
    ticks.add(2, 5)
    ticks.tick()
    assert len(ticks.landed()) == 2


def test_a_paused_source_is_not_read(ticks: Ticks):
    PauseRequest(ticks.workspace.landing("desk").folder).write("maintenance")
    ticks.add(1, 10)
    assert "paused" in str(ticks.tick().skip_reason)
    assert ticks.landed() == []


def test_a_comparison_waits_until_the_lake_has_all(ticks: Ticks):
    with dg.DagsterInstance.ephemeral() as instance:

        def tick() -> str:
            told = ticks.due(dg.build_sensor_context(instance), workspace=ticks.workspace)
            return str(told.skip_message)

        assert "Nothing has landed" in tick()
        ticks.add(1, 10)
        ticks.tick()
        assert "does not have all yet" in tick()
