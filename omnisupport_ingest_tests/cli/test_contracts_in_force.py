"""A home keeps to its contracts and its decision table, wherever it is looked at from."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.contracts.decision_table import default_decision_table
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import settings_of_home
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command

DECISIONS = Path("reports/week03/late_arrival_decision_table.csv")
REFUSED = 3

WRITE = ("land", "--watch", "--once")
"""A command that opens the home for writing, with nothing to write."""


def project(folder: Path, *tables: str) -> Path:
    """A project folder with contracts of ``tables`` and a decision table of its own."""
    contracts = folder / "contracts" / "data"
    contracts.mkdir(parents=True)
    for table in tables:
        shutil.copy(program_file(f"contracts/data/{table}.json"), contracts)
    (folder / DECISIONS).parent.mkdir(parents=True)
    shutil.copy(program_file(str(DECISIONS)), folder / DECISIONS)
    return folder


def opened_for_writing() -> bool:
    """Whether the home was opened for writing; an epoch has begun in it then, as before anything lands."""
    done = command(*WRITE)
    store = LandingStore(Path(os.environ["OMNISUPPORT_HOME"]) / "landing", "support_desk")
    if store.current_epoch() is None:
        store.begin_epoch("first", None)
    return done.code == 0


def work_in(folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(home))


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose home was opened for writing in it; the working directory is that project."""
    for name in ("CONTRACTS_DIR", "DECISION_TABLE", "SOURCE", "SOURCE_DSN", "WINDOW"):
        monkeypatch.delenv(f"OMNISUPPORT_{name}", raising=False)
    folder = project(tmp_path / "ours", "tickets", "customers", "agents")
    work_in(folder, folder / ".omnisupport", monkeypatch)
    assert opened_for_writing()
    return folder


def tables(done_out: str) -> set[str]:
    return {table["table"] for source in json.loads(done_out)["sources"] for table in source["tables"]}


def test_a_home_looked_at_from_another_folder_keeps_its_tables_and_decisions(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = command("status", "--json")
    seen = tables(here.out)
    assert "support_desk/dim_agents" in seen
    other = project(tmp_path / "other", "tickets")
    for elsewhere in (other, tmp_path):
        work_in(elsewhere, ours / ".omnisupport", monkeypatch)
        there = command("status", "--json")
        assert tables(there.out) == seen
        assert json.loads(there.out)["in_force"] == json.loads(here.out)["in_force"]
    told = json.loads(here.out)["in_force"]
    assert told["contracts"] == str(ours / "contracts" / "data")
    assert told["decision_table"] == str(ours / DECISIONS)
    # A long path is wrapped.
    assert f"contracts{ours / 'contracts' / 'data'}" in "".join(command("status").out.split())


def test_other_contracts_are_refused_with_both_folders_and_the_command_that_takes_them(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = project(tmp_path / "other", "tickets")
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(other / "contracts" / "data"))
    refused = command("status")
    assert refused.code == REFUSED
    assert str(ours / "contracts" / "data") in refused.err
    assert str(other / "contracts" / "data") in refused.err
    assert f"omnisupport-ingest contracts use {other / 'contracts' / 'data'}" in refused.err
    # Contracts can be read and checked without a word about the home.
    assert command("contracts", "validate").code == 0

    assert command("contracts", "use", str(other / "contracts" / "data"), "--yes").code == 0
    assert "support_desk/dim_agents" not in tables(command("status", "--json").out)
    monkeypatch.delenv("OMNISUPPORT_CONTRACTS_DIR")
    assert "support_desk/dim_agents" not in tables(command("status", "--json").out)


def test_another_decision_table_is_refused_and_taken_by_name(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.csv"
    shutil.copy(default_decision_table(), mine)
    monkeypatch.setenv("OMNISUPPORT_DECISION_TABLE", str(mine))
    refused = command("status")
    assert refused.code == REFUSED
    assert str(ours / DECISIONS) in refused.err and str(mine) in refused.err
    assert f"contracts use --decision-table {mine}" in refused.err
    assert command("contracts", "use", "--decision-table", str(mine)).code == 0
    assert json.loads(command("status", "--json").out)["in_force"]["decision_table"] == str(mine)


def test_a_home_goes_on_where_its_project_folder_is_moved(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tables(command("status", "--json").out)
    moved = ours.rename(tmp_path / "moved")
    work_in(tmp_path, moved / ".omnisupport", monkeypatch)
    there = command("status", "--json")
    assert tables(there.out) == seen
    assert json.loads(there.out)["in_force"]["contracts"] == str(moved / "contracts" / "data")


def test_a_home_beside_contracts_of_other_tables_says_so(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the home finds another project's contracts at the same place beside it."""
    other = project(tmp_path / "other", "ticket_comments")
    shutil.copytree(ours / ".omnisupport", other / ".omnisupport")
    work_in(other, other / ".omnisupport", monkeypatch)
    refused = command("status")
    assert refused.code == REFUSED
    assert "none of the tables" in refused.err
    assert "contracts use" in refused.err


def test_contracts_that_are_gone_are_named_with_the_way_to_others(ours: Path) -> None:
    shutil.move(ours / "contracts", ours / "elsewhere")
    refused = command("status")
    assert refused.code == REFUSED
    assert str(ours / "contracts" / "data") in refused.err
    assert "contracts use" in refused.err
    assert command("contracts", "use", str(ours / "elsewhere" / "data")).code == 0
    assert command("status").code == 0


def test_a_home_from_before_takes_its_contracts_at_the_next_opening_for_writing(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = ours / ".omnisupport" / "in_force.json"
    record.unlink()
    other = project(tmp_path / "other", "tickets")
    work_in(other, ours / ".omnisupport", monkeypatch)
    command("status")
    assert not record.exists(), "a look decided what is in force"
    work_in(ours, ours / ".omnisupport", monkeypatch)
    assert opened_for_writing()
    assert json.loads(record.read_text())["contracts"] == "../contracts/data"


def test_contracts_that_come_with_the_program_are_recorded_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a home outlives the folder that the program is installed in."""
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    assert opened_for_writing()
    record = json.loads((tmp_path / "home" / "in_force.json").read_text())
    assert record["contracts"] == record["decision_table"] == "packaged"
    mine = project(tmp_path / "mine", "tickets")
    work_in(mine, tmp_path / "home", monkeypatch)
    assert json.loads(command("status", "--json").out)["in_force"]["contracts"] == str(
        program_file("contracts/data")
    )
    assert command("contracts", "use", str(mine / "contracts" / "data"), "--yes").code == 0
    assert command("contracts", "use", "packaged").code == 0
    assert json.loads((tmp_path / "home" / "in_force.json").read_text())["contracts"] == "packaged"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"contracts": 1, "decision_table": "x", "tables": []}'])
def test_a_damaged_record_is_named(ours: Path, content: str) -> None:
    (ours / ".omnisupport" / "in_force.json").write_text(content)
    refused = command("status")
    assert refused.code == REFUSED
    assert "in_force.json cannot be read" in refused.err


def test_the_home_decides_about_the_window_unless_one_is_set(tmp_path: Path) -> None:
    Home.open(tmp_path, WindowSize.parse("minutes:1"))
    assert settings_of_home(Settings(home=tmp_path)).window == "minutes:1"
    assert settings_of_home(Settings(home=tmp_path, window="daily")).window == "daily"
    assert settings_of_home(Settings(home=tmp_path / "none")).window == "hourly"


@pytest.mark.parametrize(
    ("dsn", "name"),
    [
        ("host=db dbname=shop user=capture", "shop"),
        ("postgresql://capture@db:5432/My-Shop?sslmode=require", "My_Shop"),
        ("dbname='2026 sales'", "db_2026_sales"),
        ("host=db user=capture", "capture"),
    ],
)
def test_a_database_of_ones_own_gives_a_new_home_the_name_of_its_source(
    tmp_path: Path, dsn: str, name: str
) -> None:
    settings = settings_of_home(Settings(home=tmp_path / "home", source_dsn=dsn, _env_file=None))
    assert settings.source == name
    asked = Settings(home=tmp_path / "home", source_dsn=dsn, source="mine", _env_file=None)
    assert settings_of_home(asked).source == "mine"


def test_a_home_keeps_the_name_of_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the database is renamed, and for a look without the connection string."""
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=shop")
    assert opened_for_writing()
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=renamed")
    assert open_settings().source == "shop"
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    assert open_settings().source == "shop"


def test_a_home_from_before_keeps_the_name_that_every_source_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home.open(tmp_path / "home", WindowSize(60))
    LandingStore(home.landing, "support_desk").begin_epoch("first start", None)
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=shop")
    assert open_settings().source == "support_desk"
    assert opened_for_writing()
    assert open_settings().source == "support_desk"


def test_services_that_begin_with_the_home_take_one_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them has made the home, and has not recorded yet what is in force."""
    Home.open(tmp_path / "home", WindowSize(60))
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=shop")
    assert open_settings().source == "shop"


def test_a_home_of_the_demo_gets_a_source_of_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    assert opened_for_writing()
    assert open_settings().source == "support_desk"
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=shop")
    assert opened_for_writing()
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    assert open_settings().source == "shop"


def test_a_home_that_holds_nothing_binds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first try with the wrong contracts, or before there are any, leaves nothing to undo."""
    work_in(tmp_path, tmp_path / "home", monkeypatch)
    assert command(*WRITE).code == 0
    mine = project(tmp_path / "mine", "tickets")
    monkeypatch.chdir(mine)
    assert json.loads(command("status", "--json").out)["in_force"]["tables"] == 1
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "host=127.0.0.1 port=9 dbname=shop")
    assert open_settings().source == "shop"
    assert opened_for_writing()
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN")
    monkeypatch.chdir(tmp_path)
    assert json.loads(command("status", "--json").out)["in_force"]["contracts"] == str(
        mine / "contracts" / "data"
    )
    assert open_settings().source == "shop"


def test_a_table_to_retype_is_named_with_its_source_where_two_sources_have_the_name(
    ours: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contracts = ours / "contracts" / "data"
    document = json.loads((contracts / "tickets.json").read_text())
    document["x-cdc"]["source"] = "other_desk"
    (contracts / "other_tickets.json").write_text(json.dumps(document))
    assert command(*WRITE).code == 0
    either = command("contracts", "retype", "tickets")
    assert either.code == 2
    assert "other_desk.tickets" in either.output and "support_desk.tickets" in either.output
    assert command("contracts", "retype", "other_desk.tickets").code == 0


def test_tables_that_would_lose_their_contracts_are_named_first_and_a_landed_source_is_never_hidden(
    ours: Path, tmp_path: Path
) -> None:
    record = ours / ".omnisupport" / "in_force.json"
    before = record.read_text()
    (ours / ".omnisupport" / "landing" / "support_desk" / "manifests").mkdir(exist_ok=True)
    other = project(tmp_path / "other", "tickets") / "contracts" / "data"

    asked = command("contracts", "use", str(other))
    assert asked.code != 0
    assert "support_desk.support.agents" in asked.out and "support.tickets" not in asked.out
    assert record.read_text() == before
    assert command("contracts", "use", str(other), "--yes").code == 0

    document = json.loads((other / "tickets.json").read_text())
    document["x-cdc"]["source"] = "shop"
    (other / "tickets.json").write_text(json.dumps(document))
    assert command("contracts", "use", str(other), "--yes").code == 0
    (gone,) = json.loads(command("status", "--json").out)["contracts_gone"]
    assert gone["what"] == "support_desk has landed, and none of its tables has a contract any more"
