"""The sensor of a query source: its cursor is the source's, moves with what is durable, may be set back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import query_sensors
from omnisupport_ingest.layers.scheduling.pending import Pending, pending_windows
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
        self.repository = build_definitions(self.workspace).get_repository_def()
        self.sensor = self.repository.get_sensor_def("cursor_desk")
        self.due = self.repository.get_sensor_def("compare_desk")
        self.cursor: str | None = None

    def add(self, number: int, minutes_ago: float, **more: str) -> None:
        at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
        text = at.strftime("%Y-%m-%d %H:%M:%S")
        row = {"id": number, "subject": "s", "updated_at": text, **more}
        named = f"({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        self.base.execute(f"INSERT INTO tickets {named}", tuple(row.values()))

    def tick(self) -> dg.SensorResult:
        with dg.DagsterInstance.ephemeral() as instance:
            result = self.sensor(
                dg.build_sensor_context(instance, cursor=self.cursor), workspace=self.workspace
            )
        self.cursor = result.cursor
        return result

    def landed(self) -> list[tuple[str, int]]:
        return [(row["key"], row["ordinal"]) for row in self._landed()]

    def rows(self) -> list[str]:
        return [row["after"] for row in self._landed()]

    def _landed(self) -> list[dict[str, Any]]:
        store = self.workspace.landing("desk")
        found: list[dict[str, Any]] = []
        for batch in store.manifests():
            for file in batch.files:
                found += pq.read_table(store.path_of(file)).to_pylist()
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


def test_a_paused_source_is_not_compared_and_a_run_that_was_requested_before_says_so(ticks: Ticks):
    ticks.add(1, 10)
    ticks.tick()
    PauseRequest(ticks.workspace.landing("desk").folder).write("pg_restore")
    with dg.DagsterInstance.ephemeral() as instance:
        told = ticks.due(dg.build_sensor_context(instance), workspace=ticks.workspace)
        assert str(told.skip_message) == "The source is paused."
        job = ticks.repository.get_job("compare_desk")
        ended = job.execute_in_process(
            instance=instance, resources={"workspace": ticks.workspace}, raise_on_error=False
        )
    (failed,) = (each for each in ended.all_events if each.is_step_failure)
    error = failed.step_failure_data.error
    assert error is not None and error.cause is not None
    assert "The source desk is paused since" in error.cause.message
    assert "source resume desk" in error.cause.message


def test_a_contract_that_is_edited_counts_for_the_next_tick(ticks: Ticks):
    ticks.add(1, 10)
    ticks.tick()
    ticks.base.execute("ALTER TABLE tickets ADD COLUMN note TEXT")
    note = {"type": ["string", "null"], "x-pg-type": "text", "description": "Note."}
    document = contract_document({"field": "updated_at", "lookback": "PT1M"}, schema="main", note=note)
    folder = ticks.workspace.settings.contracts_dir
    assert folder is not None
    (folder / "tickets.json").write_text(json.dumps(document))
    ticks.add(2, 5, note="new")
    ticks.tick()
    assert '"note":"new"' in "".join(ticks.rows())


def test_what_a_contract_has_learned_counts_for_the_comparison(ticks: Ticks, monkeypatch: pytest.MonkeyPatch):
    ticks.add(1, 10)
    ticks.tick()
    note = {"type": ["string", "null"], "x-pg-type": "text", "description": "Note."}
    LearnedColumns(ticks.workspace.home.path, "desk").learn("tickets", {"note": note})
    used: list[Workspace] = []

    def pending(workspace: Workspace, source: str) -> Pending:
        used.append(workspace)
        return pending_windows(workspace, source)

    monkeypatch.setattr(query_sensors, "pending_windows", pending)
    with dg.DagsterInstance.ephemeral() as instance:
        ticks.due(dg.build_sensor_context(instance), workspace=ticks.workspace)
    (contract,) = used[0].contracts.of_source("desk")
    assert "note" in contract.column_names
