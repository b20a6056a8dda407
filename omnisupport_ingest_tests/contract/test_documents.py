"""Every contract, source and manifest of the repository is valid and describes its data."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contract, load_contracts
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.contracts.sources import load_source
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium.land import Inlet
from omnisupport_ingest.sources.debezium.lines import Lines
from omnisupport_ingest.sources.manifests.events import examine_events, land_events
from omnisupport_ingest.sources.manifests.examine import examine
from omnisupport_ingest.sources.manifests.formats import records
from omnisupport_ingest.sources.manifests.policies import CDC, MODES, ROW_MODES
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest.windows import WindowGrid, WindowSize

CONTRACTS = program_file("contracts/data")
SOCIAL = program_file("contracts/social/data")
CONTRACT_FILES = [path for folder in (CONTRACTS, SOCIAL) for path in sorted(folder.glob("*.json"))]
SOURCES = program_file("contracts/sources")
SOURCE_FILES = [path for folder in (CONTRACTS, SOCIAL) for path in (folder.parent / "sources").glob("*.json")]
MANIFEST_FILES = sorted(program_file("data/seed_manifests").glob("*.json"))


def name_of(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("schema", ["contract", "seed_manifest", "source"])
def test_our_own_schemas_are_json_schemas(schema: str) -> None:
    text = program_file(f"contracts/{schema}.schema.json").read_text()
    Draft202012Validator.check_schema(json.loads(text))


@pytest.mark.parametrize("path", CONTRACT_FILES, ids=name_of)
def test_contract_is_valid_and_is_itself_a_json_schema(path: Path) -> None:
    contract = load_contract(path)
    assert contract.name == path.stem
    Draft202012Validator.check_schema(json.loads(path.read_text()))


def test_the_contracts_stand_together() -> None:
    contracts = load_contracts(CONTRACTS)
    assert {contract.name for contract in contracts.of_source("support_desk")} == {
        "organizations",
        "customers",
        "agents",
        "tickets",
        "ticket_comments",
    }
    assert [contract.name for contract in contracts.of_source("support_files")] == ["legacy_tickets"]
    assert [contract.name for contract in contracts.of_source("partner_desk")] == ["partner_tickets"]
    assert [contract.name for contract in contracts.of_source("omnisupport_files")] == ["omnisupport_tickets"]


@pytest.mark.parametrize("path", SOURCE_FILES, ids=name_of)
def test_source_definition_is_valid_and_has_its_contracts(path: Path) -> None:
    definition = load_source(path)
    assert definition.name == path.stem
    assert definition.tables(load_contracts(path.parents[1] / "data"))


def test_the_contracts_of_the_social_network_stand_together() -> None:
    contracts = load_contracts(SOCIAL)
    keys = {contract.name: contract.key for contract in contracts.of_source("social")}
    assert keys == {
        "users": ("id",),
        "posts": ("id",),
        "follows": ("follower_id", "followee_id"),
        "comments": ("id",),
        "likes": ("user_id", "post_id"),
    }
    soft = {contract.name for contract in contracts if contract.soft_delete_column == "deleted_at"}
    assert soft == {"users", "posts", "comments"}


def test_the_manifests_show_every_load_mode() -> None:
    assert {load_manifest(path, load_contracts(CONTRACTS)).load_mode for path in MANIFEST_FILES} == set(MODES)


@pytest.mark.parametrize("path", CONTRACT_FILES, ids=name_of)
def test_personal_columns_say_why_their_policy_is_right(path: Path) -> None:
    for column in load_contract(path).source_columns:
        assert bool(column.pii_note) == column.personal
        assert column.personal or column.pii == "keep"


def test_what_comes_with_the_program_needs_no_secret_and_shows_no_address() -> None:
    columns = [each for path in CONTRACT_FILES for each in load_contract(path).source_columns]
    assert not {"hash", "tokenize"} & {column.pii for column in columns}
    addresses = {column.pii for column in columns if column.name.endswith("email")}
    assert addresses == {"mask"}


@pytest.mark.parametrize("path", MANIFEST_FILES, ids=name_of)
def test_seed_manifest_describes_its_files(path: Path) -> None:
    seed = load_manifest(path, load_contracts(CONTRACTS))
    assert seed.name == path.stem
    for file in seed.files:
        assert hashlib.sha256(file.path.read_bytes()).hexdigest() == file.sha256
        if seed.load_mode == CDC:
            assert sum(1 for _ in Lines(file.path)) == file.rows
        else:
            assert sum(1 for _ in records(file.path, seed.contract)) == file.rows


@pytest.mark.parametrize("path", MANIFEST_FILES, ids=name_of)
def test_seed_rows_keep_the_contract_and_no_gate_finds_a_fault(path: Path, tmp_path: Path) -> None:
    contracts = load_contracts(CONTRACTS)
    seed = load_manifest(path, contracts)
    taken = load_source(SOURCES / f"{seed.contract.source}.json").licenses
    if seed.load_mode == CDC:
        now = datetime(2026, 11, 21, 12, tzinfo=UTC)
        store = LandingStore(tmp_path, seed.contract.source)
        into = Inlet(store, WindowGrid(WindowSize(60), now - timedelta(days=7)), contracts, "support_desk")
        assert examine_events(seed, into, taken).faults == []
        for event in (each for file in land_events(seed, into, taken).batches for each in file.files):
            rows = pq.ParquetFile(store.path_of(event)).read().to_pylist()
            for after in (json.loads(row["after"]) for row in rows if row["after"] is not None):
                assert RowRules(seed.contract).broken(after) == []
        return
    if seed.load_mode not in ROW_MODES:
        return
    assert examine(seed, taken).faults == []
    keys = {
        tuple(record.row[name] for name in seed.contract.key)
        for file in seed.files
        for record in records(file.path, seed.contract)
        if record.row is not None
    }
    assert len(keys) == seed.rows


@pytest.mark.parametrize("path", MANIFEST_FILES, ids=name_of)
def test_json_rows_are_rows_of_the_contract_as_a_json_schema(path: Path) -> None:
    seed = load_manifest(path, load_contracts(CONTRACTS))
    row_schema = Draft202012Validator(json.loads(Path(seed.contract.path).read_text()))
    for file in seed.files:
        if seed.load_mode in ROW_MODES and file.path.suffix == ".jsonl":
            for line in file.path.read_bytes().splitlines():
                row_schema.validate(json.loads(line))


def test_every_time_of_omnisupports_tickets_is_a_cursor_candidate_with_a_reason() -> None:
    document = json.loads((CONTRACTS / "omnisupport_tickets.json").read_text())
    cursor = document["x-cdc"]["cursor"]
    usable = {each["column"]: each["usable"] for each in cursor["candidates"]}
    assert usable == {"updated_at": True, "created_at": False, "resolved_at": False}
    times = {name for name, each in document["properties"].items() if each["x-pg-type"] == "timestamptz"}
    assert usable.keys() == times and usable[cursor["field"]]


def test_a_ticket_of_omnisupport_is_what_was_agreed() -> None:
    contract = load_contract(CONTRACTS / "omnisupport_tickets.json")
    rules = RowRules(contract)
    path = program_file("data/seed_manifests/omnisupport_tickets_changes.json")
    seed = load_manifest(path, load_contracts(CONTRACTS))
    good = next(records(seed.files[0].path, contract)).row
    assert good is not None and rules.broken(good) == []
    wrong = {
        "ticket_id": "TKT-2026-1",
        "status": "solved",
        "priority": "p5_none",
        "product_line": "other",
        "sla_tier": "gold",
        "pii_level": "some",
        "quality_gate": "maybe",
    }
    for name, value in wrong.items():
        assert [each.partition(":")[0] for each in rules.broken(good | {name: value})] == [name]
