"""Databases over several slots: who shares one, and what no two of them may have."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.databases import database_of
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.sources import load_sources
from omnisupport_ingest.landing.errors import ManifestUnreadable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.sources.query.tickets import contract_document


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Two slots of the database shop, and a source beside them."""
    for name in ("data", "sources"):
        (tmp_path / name).mkdir()
    for source, table in (("orders", "orders"), ("events", "clicks"), ("alone", "clicks")):
        contract(tmp_path, source, table)
    define(tmp_path, "orders", database="shop", log={"slot": "s1", "publication": "p1"})
    define(tmp_path, "events", database="shop", log={"slot": "s2", "publication": "p2"})
    define(tmp_path, "alone")
    return tmp_path


def contract(project: Path, source: str, table: str) -> None:
    document = copy.deepcopy(contract_document())
    document["x-cdc"] |= {"source": source, "table": table}
    (project / "data" / f"{source}_{table}.json").write_text(json.dumps(document))


def define(project: Path, name: str, **members: Any) -> None:
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": name,
        "kind": "postgres_log",
        "description": "A slot.",
        "connection": {"env": "SHOP_URL"},
        **members,
    }
    (project / "sources" / f"{name}.json").write_text(json.dumps(document))


def found(project: Path, source: str):
    contracts = load_contracts(project / "data")
    database = database_of(project / "sources", contracts, source)
    return database, None if database is None else list(database.shared(contracts))


def test_sources_that_name_a_database_are_its_inputs(project: Path):
    for source in ("orders", "events"):
        database, shared = found(project, source)
        assert (database.name, database.names, shared) == ("shop", ("events", "orders"), [])
    assert [each.name for each in database.others("events")] == ["orders"]
    # The one beside them captures a table of that name, and is none of them.
    assert found(project, "alone") == (None, None)


def test_an_input_without_a_contract_holds_no_window_open(project: Path):
    define(project, "later", database="shop", log={"slot": "s3", "publication": "p3"})
    assert found(project, "orders")[0].names == ("events", "orders")
    assert found(project, "later") == (None, None)


def test_a_table_a_slot_or_a_publication_of_two_is_named_with_both(project: Path):
    contract(project, "orders", "clicks")
    define(project, "events", database="shop", log={"slot": "s1", "publication": "p1"})
    _, shared = found(project, "orders")
    assert [each.table for each in shared] == [None, None, "public.clicks"]
    assert "same slot, s1" in shared[0].problem and "same publication, p1" in shared[1].problem
    assert all("events and orders" in each.problem for each in shared)
    assert "contracts withdraw public.clicks --source orders" in shared[2].fix
    assert "row filters do not divide it" in shared[2].fix


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"database": "shop"}, "names its slot and its publication"),
        ({"database": "shop", "log": {"slot": "s4"}}, "names its slot and its publication"),
        ({"database": "a b", "log": {"slot": "s", "publication": "p"}}, "database"),
        ({"database": "shop", "kind": "query"}, "has none"),
    ],
)
def test_a_wrong_definition_is_refused_with_its_place(project: Path, members: dict[str, Any], told: str):
    define(project, "wrong", **members)
    with pytest.raises(ContractError, match=told):
        load_sources(project / "sources")


def workspace(project: Path) -> Workspace:
    return Workspace.open(Settings(home=project / "home", contracts_dir=project / "data", _env_file=None))


def test_an_input_that_is_added_counts_in_a_process_that_lives_on(project: Path):
    opened = workspace(project)
    assert opened.inputs("orders") == ("events", "orders")
    define(project, "later", database="shop", log={"slot": "s3", "publication": "p3"})
    assert opened.inputs("orders") == ("events", "orders")
    contract(project, "later", "visits")
    every = ("events", "later", "orders")
    assert opened.inputs("orders") == every == workspace(project).inputs("orders")
    # One that is half written is no input, and stops no other.
    (project / "sources" / "half.json").write_text('{"name": "ha')
    assert opened.inputs("orders") == every
    (project / "sources" / "half.json").unlink()
    (project / "sources" / "later.json").unlink()
    assert opened.inputs("orders") == ("events", "orders")


def test_an_input_whose_landing_cannot_be_read_holds_windows_open_and_stops_no_other(project: Path):
    opened = workspace(project)
    manifests = opened.landing("events").folder / "manifests"
    (manifests / "stream-000001-0000000000000000.json").write_text("{")
    assert opened.input_watermarks("orders") == {"events": None, "orders": None}
    assert opened.closing_watermark("orders") is None
    with pytest.raises(ManifestUnreadable):
        opened.closing_watermark("events")
