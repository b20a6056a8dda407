"""Every contract and every seed manifest of the repository is valid and describes its data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contract, load_contracts
from omnisupport_ingest.sources.manifests.row_text import read_row
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest

CONTRACTS = program_file("contracts/data")
CONTRACT_FILES = sorted(CONTRACTS.glob("*.json"))
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


@pytest.mark.parametrize("path", CONTRACT_FILES, ids=name_of)
def test_personal_columns_say_why_they_are_kept(path: Path) -> None:
    for column in load_contract(path).columns:
        assert column.pii == "keep"
        assert bool(column.pii_note) == column.personal


@pytest.mark.parametrize("path", MANIFEST_FILES, ids=name_of)
def test_seed_manifest_describes_its_files(path: Path) -> None:
    seed = load_manifest(path, load_contracts(CONTRACTS))
    assert seed.name == path.stem
    for file in seed.files:
        content = file.path.read_bytes()
        assert hashlib.sha256(content).hexdigest() == file.sha256
        assert content.count(b"\n") == file.rows


@pytest.mark.parametrize("path", MANIFEST_FILES, ids=name_of)
def test_seed_rows_keep_the_contract_that_their_manifest_names(path: Path) -> None:
    seed = load_manifest(path, load_contracts(CONTRACTS))
    contract = seed.contract
    row_schema = Draft202012Validator(json.loads(Path(contract.path).read_text()))
    keys = set()
    for file in seed.files:
        for line in file.path.read_bytes().splitlines():
            row_schema.validate(json.loads(line))
            row = read_row(line, contract)
            keys.add(tuple(row[name] for name in contract.key))
    assert len(keys) == seed.rows
