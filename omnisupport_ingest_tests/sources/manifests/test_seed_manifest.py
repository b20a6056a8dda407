"""A seed manifest asks only for what is carried out; anything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifestError, load_manifest

CONTRACTS = load_contracts(program_file("contracts/data"))


def manifest() -> dict[str, Any]:
    """A valid manifest document."""
    document: dict[str, Any] = json.loads(
        program_file("data/seed_manifests/legacy_tickets_2025.json").read_text()
    )
    return document


def written(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "seed_manifests" / "delivery.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_a_manifest_is_read_whole(tmp_path: Path) -> None:
    document = manifest() | {"as_of": "2026-01-01T00:00:00Z"}
    seed = load_manifest(written(tmp_path, document), CONTRACTS)
    assert (seed.load_mode, seed.license, seed.owner) == ("full_snapshot", "CC0-1.0", "team:support-platform")
    assert seed.contract.full_name == "files.legacy_tickets"
    assert seed.as_of == datetime(2026, 1, 1, tzinfo=UTC)
    assert seed.files[0].path == tmp_path / "seed_manifests/../support_tickets/legacy_tickets_2025.jsonl"
    assert (seed.rows, seed.gates.row) == (300, "quarantine")


@pytest.mark.parametrize("mode", ["incremental_cursor", "backfill"])
def test_a_mode_by_cursor_needs_one_in_the_contract(tmp_path: Path, mode: str) -> None:
    with pytest.raises(SeedManifestError, match=rf"load_mode: {mode} needs a column that orders"):
        load_manifest(written(tmp_path, manifest() | {"load_mode": mode}), CONTRACTS)


@pytest.mark.parametrize(
    ("mode", "path"),
    [
        ("full_snapshot", "rows.xlsx"),
        ("full_snapshot", "rows.parquet.gz"),
        ("full_snapshot", "rows.gz"),
        ("cdc", "rows.csv"),
        ("cdc", "rows.parquet"),
    ],
)
def test_a_file_of_a_format_that_is_not_read_is_refused(tmp_path: Path, mode: str, path: str) -> None:
    document = manifest() | {"load_mode": mode}
    document["gates"]["unknown_column"] = "accept"
    document["files"][0]["path"] = path
    with pytest.raises(SeedManifestError, match=rf"files\[0\]\.path: .*{path}"):
        load_manifest(written(tmp_path, document), CONTRACTS)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a load mode nobody knows": (lambda d: d.update(load_mode="guess"), "$.load_mode"),
    "no owner": (lambda d: d.pop("owner"), "'owner' is a required property"),
    "no licence": (lambda d: d.pop("license"), "'license' is a required property"),
    "a gate is missing": (lambda d: d["gates"].pop("row"), "$.gates"),
    "no contract for the table": (lambda d: d["contract"].update(table="nope"), "$.contract"),
    "another version of the contract": (
        lambda d: d["contract"].update(version="9.0.0"),
        "$.contract.version",
    ),
    "a file twice": (
        lambda d: d["files"].append({**d["files"][0], "rows": 1}),
        "is the file of files[0], too",
    ),
    "a hash that is none": (lambda d: d["files"][0].update(sha256="abc"), "$.files[0].sha256"),
    "a moment without a zone": (lambda d: d.update(as_of="2026-01-01T00:00:00"), "$.as_of"),
    "no files": (lambda d: d.update(files=[]), "$.files"),
    "files left out": (lambda d: d.pop("files"), "'files' is a required property"),
    "a replay of files": (lambda d: d.update(load_mode="replay"), "$"),
    "what only a replay has": (lambda d: d.update(replay={"reason": "x", "batches": ["f-1"]}), "$.replay"),
    "an unknown member": (lambda d: d.update(colour="red"), "'colour' was unexpected"),
}


@pytest.mark.parametrize("situation", REFUSED)
def test_refused_with_file_and_place(tmp_path: Path, situation: str) -> None:
    edit, words = REFUSED[situation]
    document = manifest()
    edit(document)
    path = written(tmp_path, document)
    with pytest.raises(SeedManifestError) as refused:
        load_manifest(path, CONTRACTS)
    assert str(path) in refused.value.problem and words in refused.value.problem


@pytest.mark.parametrize(
    "named", ["/etc/rows.csv", "../rows.csv", "a/../../rows.csv", "linked/rows.csv", "link.csv"]
)
def test_a_file_outside_the_folder_of_the_manifest_is_refused(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "delivered"
    folder.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rows.csv").write_text("secret")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "link.csv").symlink_to(tmp_path / "elsewhere" / "rows.csv")
    document = manifest()
    path = folder / "manifest.json"
    document["files"][0]["path"] = named
    path.write_text(json.dumps(document))
    with pytest.raises(SeedManifestError, match=r"files\[0\]\.path: .*stays in .*delivered") as refused:
        load_manifest(path, CONTRACTS)
    assert refused.value.fix


@pytest.mark.parametrize("named", ["rows.csv", "below/rows.csv", "below/../rows.csv", "link.csv"])
def test_a_file_in_the_folder_of_the_manifest_or_below_is_taken(tmp_path: Path, named: str) -> None:
    (tmp_path / "rows.csv").write_text("")
    (tmp_path / "link.csv").symlink_to("rows.csv")
    document = manifest()
    document["files"][0]["path"] = named
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document))
    assert load_manifest(path, CONTRACTS).files[0].path == tmp_path / named
