"""While a contract, a source or the decision table is wrong, services go on with the last ones that were
right."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import dagster as dg
import pytest

from omnisupport_ingest import definitions
from omnisupport_ingest.contracts.decision_table import (
    CONTRACT_CHANGE,
    REPLAY_WINDOW,
    WAIT,
    DecisionTableRefused,
)
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import contracts_in_force, decisions_in_force, in_force
from omnisupport_ingest.contracts.kept import Documents, keep, usable
from omnisupport_ingest.contracts.learned import LearnedColumns
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.sources import sources_in_force
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with contracts of two tables and a decision table, which is the working directory."""
    for name in ("CONTRACTS_DIR", "DECISION_TABLE", "SOURCE", "SOURCE_DSN", "WINDOW"):
        monkeypatch.delenv(f"OMNISUPPORT_{name}", raising=False)
    contracts = tmp_path / "contracts" / "data"
    contracts.mkdir(parents=True)
    (tmp_path / "contracts" / "sources").mkdir()
    for table in ("tickets", "agents"):
        shutil.copy(program_file(f"contracts/data/{table}.json"), contracts)
    reports = tmp_path / "reports" / "week03"
    reports.mkdir(parents=True)
    shutil.copy(program_file("reports/week03/late_arrival_decision_table.csv"), reports)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.fixture(params=[False, True], ids=["nothing landed", "landed"])
def settings(folder: Path, request: pytest.FixtureRequest) -> Settings:
    """Settings of a home whose definitions were loaded once. The home is bound to its contracts once anything
    has landed."""
    definitions._load()
    if request.param:
        LandingStore(folder / "home" / "landing", "support_desk").begin_epoch("first", None)
    return Settings()


def in_use(settings: Settings) -> Documents:
    documents = usable(settings)
    contracts = contracts_in_force(documents.settings)
    decisions_in_force(documents.settings)
    sources_in_force(documents.settings, contracts)
    return documents


def titles(settings: Settings) -> dict[str, str]:
    return {each.name: each.title for each in contracts_in_force(settings)}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_wrong_contract_changes_nothing_of_what_services_use(folder: Path, settings: Settings) -> None:
    contracts = folder / "contracts" / "data"
    edit(contracts / "agents.json", title="Edited, and not loaded")
    (contracts / "tickets.json").write_text("{")
    documents = in_use(settings)
    assert titles(documents.settings) == {"agents": "Agents", "tickets": "Tickets"}
    assert documents.refused is not None and "tickets.json is not valid JSON" in documents.refused.problem
    assert documents.notice is not None and str(documents.since) in documents.notice
    with pytest.raises(ContractError, match=r"tickets\.json is not valid JSON"):
        contracts_in_force(settings)


def test_corrected_documents_are_used_again(folder: Path, settings: Settings) -> None:
    ticket = folder / "contracts" / "data" / "tickets.json"
    right = ticket.read_text()
    ticket.write_text("{")
    definitions._load()
    ticket.write_text(right)
    edit(ticket, title="Corrected")
    documents = in_use(settings)
    assert documents.refused is None and titles(documents.settings)["tickets"] == "Corrected"
    definitions._load()
    ticket.write_text("{")
    assert titles(in_use(settings).settings)["tickets"] == "Corrected"


@pytest.mark.parametrize(
    ("file", "error", "says"),
    [
        ("contracts/sources/shop.json", ContractError, "shop.json"),
        ("reports/week03/late_arrival_decision_table.csv", DecisionTableRefused, "decision_table.csv"),
    ],
)
def test_a_wrong_source_and_a_wrong_decision_table_do_not_either(
    folder: Path, settings: Settings, file: str, error: type[Exception], says: str
) -> None:
    (folder / file).write_text("{")
    documents = in_use(settings)
    assert isinstance(documents.refused, error) and says in documents.refused.problem
    assert in_force(documents.settings).decision_table.is_relative_to(folder / "home" / "documents")


def test_a_table_that_two_contracts_describe_leaves_the_earlier_one_in_use(
    folder: Path, settings: Settings
) -> None:
    contracts = folder / "contracts" / "data"
    shutil.copy(contracts / "tickets.json", contracts / "tickets_too.json")
    documents = in_use(settings)
    assert documents.refused is not None and "both contracts for" in documents.refused.problem
    assert len(contracts_in_force(documents.settings)) == 2


def test_a_home_that_never_loaded_right_documents_says_what_is_wrong(folder: Path) -> None:
    (folder / "contracts" / "data" / "tickets.json").write_text("{")
    with pytest.raises(ContractError, match=r"tickets\.json is not valid JSON"):
        definitions._load()
    assert not (folder / "home" / "documents").exists()


def test_a_file_that_becomes_wrong_while_it_is_copied_is_not_kept(folder: Path, settings: Settings) -> None:
    ticket = folder / "contracts" / "data" / "tickets.json"
    newest = folder / "home" / "documents" / "newest"
    before = newest.readlink()
    ticket.write_text("{")
    keep(Documents(settings))
    assert newest.readlink() == before


def test_two_copies_are_kept_at_most(folder: Path, settings: Settings) -> None:
    for number in range(4):
        edit(folder / "contracts" / "data" / "tickets.json", title=f"Title {number}")
        definitions._load()
    copies = [each for each in (folder / "home" / "documents").iterdir() if not each.is_symlink()]
    assert len(copies) == 2


def test_a_process_that_began_with_the_copy_goes_on_after_documents_were_corrected_twice(
    folder: Path, settings: Settings
) -> None:
    ticket = folder / "contracts" / "data" / "tickets.json"
    right = ticket.read_text()
    ticket.write_text("{")
    began_with = in_use(settings).settings
    ticket.write_text(right)
    for number in range(3):
        edit(ticket, title=f"Title {number}")
        definitions._load()
    assert titles(began_with)["tickets"] == "Title 2"


def test_a_copy_that_cannot_be_made_stops_nothing(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(folder / "contracts" / "data" / "tickets.json", title="Another")

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("omnisupport_ingest.contracts.kept.replace", no_space)
    definitions._load()
    assert in_use(settings).refused is None


def test_the_graph_stays_and_its_assets_say_why_an_edit_is_not_in_use(
    folder: Path, settings: Settings
) -> None:
    before = definitions._load().get_repository_def().asset_graph
    (folder / "contracts" / "data" / "tickets.json").write_text("{")
    repository = definitions._load().get_repository_def()
    assert repository.asset_graph.get_all_asset_keys() == before.get_all_asset_keys()
    assert {job.name for job in repository.get_all_jobs()} >= {"ingest_support_desk"}
    for name in ("raw_cdc_staging", "deduped_events", "dim_tickets", "dim_agents"):
        description = repository.asset_graph.get(dg.AssetKey(["support_desk", name])).description or ""
        assert "tickets.json is not valid JSON" in description, name


def test_the_record_of_what_is_in_force_never_names_the_copy(folder: Path, settings: Settings) -> None:
    (folder / "contracts" / "data" / "tickets.json").write_text("{")
    definitions._load()
    assert "documents" not in (folder / "home" / "in_force.json").read_text()


@pytest.mark.parametrize("learned", [False, True])
def test_a_workspace_that_stays_open_follows_the_documents(
    folder: Path, settings: Settings, learned: bool
) -> None:
    opened = Workspace.open(settings)
    assert opened.current() is opened
    if learned:
        size = {"type": ["string", "null"], "x-pg-type": "text", "description": "Size."}
        LearnedColumns(folder / "home", "support_desk").learn("tickets", {"size": size})
    else:
        edit(folder / "contracts" / "data" / "tickets.json", title="Edited")
    now = opened.current()
    assert now is not opened and opened.current() is now
    assert now.contracts != opened.contracts and now.contracts == contracts_in_force(settings)


def test_a_workspace_that_stays_open_uses_the_copy_while_a_document_is_wrong_and_then_the_file(
    folder: Path, settings: Settings
) -> None:
    ticket = folder / "contracts" / "data" / "tickets.json"
    right = ticket.read_text()
    opened = Workspace.of(usable(settings))
    edit(ticket, title="Edited")
    assert titles(opened.current().settings)["tickets"] == "Edited"
    # What a service uses is kept, though nothing has loaded the definitions meanwhile.
    ticket.write_text("{")
    assert titles(opened.current().settings)["tickets"] == "Edited"
    began_with_copy = Workspace.of(usable(settings))
    ticket.write_text(right)
    for each in (opened, began_with_copy):
        assert titles(each.current().settings)["tickets"] == "Tickets"
        assert in_force(each.current().settings).contracts == folder / "contracts" / "data"


def test_a_workspace_that_stays_open_follows_the_decision_table(folder: Path, settings: Settings) -> None:
    opened = Workspace.open(settings)
    table = folder / "reports" / "week03" / "late_arrival_decision_table.csv"
    text, was = table.read_text(), "contract_change,contract_version,replay_window"
    assert text.count(was) == 1
    table.write_text(text.replace(was, "contract_change,contract_version,wait"))
    assert opened.decisions.action(CONTRACT_CHANGE) == REPLAY_WINDOW
    assert opened.current().decisions.action(CONTRACT_CHANGE) == WAIT
