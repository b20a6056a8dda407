"""Schema changes as commands show them: what, when, where in the WAL, how many rows, and what to do."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.cli import contracts_changes
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.load import ContractError, load_contracts
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.schema_changes import (
    Difference,
    Look,
    SchemaChanges,
    SeenColumn,
    SeenTable,
)
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.catalog.next_contract import NextContract
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command

TABLE = SeenTable(7, "support.tickets", (), ("ticket_id",), 1204)
CHANGED = replace(TABLE, columns=(SeenColumn(9, "mood", "text", False, None, None, ()),))


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose capture has seen a column come and one go that no contract names."""
    for name in ("CONTRACTS_DIR", "DECISION_TABLE", "SOURCE", "SOURCE_DSN", "WINDOW"):
        monkeypatch.delenv(f"OMNISUPPORT_{name}", raising=False)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    home = Home.open(tmp_path / "home", WindowSize.parse("minutes:1"))
    store = LandingStore(home.landing, "support_desk")
    store.begin_epoch("first", None)
    record = SchemaChanges(store.folder)
    record.seen(Look(1, Lsn(16), Lsn(32)), {"tickets": TABLE}, {})
    found = [
        Difference("column_added", "mood", None, "text"),
        Difference("column_dropped", "never_contracted", "text", None),
    ]
    record.seen(Look(1, Lsn(48), Lsn(64)), {"tickets": CHANGED}, {"tickets": found})
    record.first_rows("tickets", {"mood": "text"}, Lsn(56))
    return tmp_path / "home"


@pytest.mark.parametrize("folder", ["contracts/data", "contracts/social/data"])
def test_no_contract_of_an_installed_program_is_changed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "omnisupport_ingest" / "packaged"
    shutil.copytree(program_file("contracts"), packaged / "contracts")
    monkeypatch.setattr("omnisupport_ingest.contracts.documents._PACKAGE", packaged.parent)
    contract = load_contracts(packaged / folder).all[0]
    before = Path(contract.path).read_bytes()
    with pytest.raises(ContractError, match="comes with the program"):
        contracts_changes.write(tmp_path / "home", contract, NextContract({}, (), ()))
    assert Path(contract.path).read_bytes() == before


def test_a_change_is_shown_until_the_contract_says_it(changed: Path) -> None:
    done = command("contracts", "changes")
    assert done.code == 1
    assert "column added: mood text" in done.out and "0/38" in done.out and "1,204 rows" in done.out
    assert "To do:" in done.out and "tickets.json: add mood under properties" in done.out
    assert "2 schema changes, 1 to be looked after." in done.out
    (added, dropped) = json.loads(command("contracts", "changes", "tickets", "--json").out)["changes"]
    assert (added["above_lsn"], added["below_lsn"], added["first_commit_lsn"]) == ("0/10", "0/40", "0/38")
    assert (added["compatibility"], added["asks"], added["rows"]) == ("additive", True, 1204)
    assert (dropped["compatibility"], dropped["asks"]) == ("none", False)
    assert json.loads(command("contracts", "changes", "agents", "--json").out)["changes"] == []

    assert "support_desk.tickets: column added: mood text. To do:" in command("status").out
    (shown,) = json.loads(command("status", "--json").out)["schema_changes"]
    assert (shown["table"], shown["column"], shown["kind"]) == ("tickets", "mood", "column_added")

    line = {"type": ["string", "null"], "x-pg-type": "text", "description": "Mood.", "default": None}
    LearnedColumns(changed, "support_desk").learn("tickets", {"mood": line})
    assert command("contracts", "changes").code == 0
    assert json.loads(command("status", "--json").out)["schema_changes"] == []


def schema_alarms(sent: Path) -> list[dict[str, object]]:
    """Those of schema changes among what was sent: the home has no source and no platform that runs."""
    return [each for each in json.loads(sent.read_text())["problems"] if each["kind"].startswith("schema ")]


def test_every_change_is_an_alarm_of_its_own_whatever_is_open_of_its_table(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"cat > {tmp_path / 'sent'}")
    assert command("alarms").code == 0
    (alarm,) = schema_alarms(tmp_path / "sent")
    assert alarm["problem"] == "support_desk.tickets: column added: mood text"
    assert "add mood under properties" in alarm["fix"] and alarm["new"]
    assert "1 schema change to be looked after" in command("status").out
    table = replace(
        CHANGED, columns=(*CHANGED.columns, SeenColumn(10, "tone", "text", False, None, None, ()))
    )
    record = SchemaChanges(next((changed / "landing").glob("*/schema-changes.json")).parent)
    another = Difference("column_added", "tone", None, "text")
    record.seen(Look(1, Lsn(80), Lsn(96)), {"tickets": table}, {"tickets": [another]})
    assert command("alarms").code == 0
    problems = schema_alarms(tmp_path / "sent")
    assert [each["problem"].split(": ")[-1] for each in problems if each["new"]] == ["tone text"]
    assert len(problems) == 2


@pytest.mark.parametrize("rows", [1250, None])
def test_rows_affected_are_the_rows_of_the_table_however_many_of_its_changes_ask(
    changed: Path, rows: int | None
) -> None:
    workspace = Workspace.open(Settings(_env_file=None, window="minutes:1"))

    def numbers() -> dict[str, int | float]:
        return schemas_as_contracted(workspace, "support_desk", ["tickets"])["tickets"].numbers

    assert numbers()["rows_affected"] == 1204
    tone = SeenColumn(10, "tone", "text", False, None, None, ())
    table = replace(CHANGED, columns=(*CHANGED.columns, tone), rows=rows)
    record = SchemaChanges(workspace.landing("support_desk").folder)
    another = Difference("column_added", "tone", None, "text")
    record.seen(Look(1, Lsn(80), Lsn(96)), {"tickets": table}, {"tickets": [another]})
    assert (numbers()["to_be_looked_after"], numbers()["rows_affected"]) == (2, rows or 1204)


def test_rows_affected_are_left_out_where_the_server_has_no_estimate(changed: Path) -> None:
    workspace = Workspace.open(Settings(_env_file=None, window="minutes:1"))
    record = SchemaChanges(workspace.landing("support_desk").folder)
    unknown, gone = replace(TABLE, rows=None), Difference("table_gone", None, "support.agents", None)
    record.seen(Look(1, Lsn(48), Lsn(64)), {"agents": unknown}, {})
    record.seen(Look(1, Lsn(80), Lsn(96)), {}, {"agents": [gone]})
    found = schemas_as_contracted(workspace, "support_desk", ["agents"])["agents"]
    assert not found.passed and "rows_affected" not in found.numbers


def test_a_record_that_cannot_be_read_is_named_and_stops_no_status(changed: Path) -> None:
    next(changed.glob("landing/*/schema-changes.json")).write_text("{")
    done = command("status")
    assert "schema-changes.json cannot be read" in " ".join(done.out.split())
    assert command("contracts", "changes").code != 0
