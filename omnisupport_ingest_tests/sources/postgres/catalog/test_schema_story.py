"""Tables that change their schemas in the middle of a workload, from real ALTERs to dimension and history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.cli.contracts_changes import propose, write
from omnisupport_ingest.contracts.documents import document_text
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import judged_changes
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import draft
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest

POLICIES = {
    "tickets": {"evolution": "additive", "history": "changed_only"},
    "agents": {},
}


@pytest.fixture
def desk(source: SourceUnderTest, tmp_path: Path) -> SourceUnderTest:
    """Two captured tables with contract files: one additive, the other pinned."""
    for name in POLICIES:
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
        source.sql(f"INSERT INTO {name} VALUES (1, 'one'), (2, 'two')")
    folder = tmp_path / "contracts"
    folder.mkdir()
    with source.connected() as connection:
        live = read_live_tables(connection)
    for name, policy in POLICIES.items():
        made = draft(live["public", name], source=SOURCE, name=name, owner="team:tests").document
        made["x-cdc"] |= policy
        (folder / f"{name}.json").write_text(document_text(made))
    source.overrides["contracts_dir"] = folder
    return source


def captured(desk: SourceUnderTest) -> None:
    """As a new process does it: with the contracts as they are in force by now."""
    desk.tables[:] = contracts_in_force(desk.settings)
    desk.catch_up()


def taken_in(desk: SourceUnderTest, spark: SparkSession) -> Workspace:
    """What has landed, taken through every layer by the contracts in force."""
    workspace = Workspace.open(desk.settings)
    windows = desk.store.windows()
    for layer in (raw, deduped):
        layer.materialize(workspace, spark, SOURCE, windows, "run")
    for contract in workspace.contracts:
        net_changes.materialize(workspace, spark, contract, windows, "run")
        dimensions.update(workspace, spark, contract, "run")
        history.materialize(workspace, spark, contract, "run")
    return workspace


def contract_of(workspace: Workspace, name: str) -> TableContract:
    return next(each for each in workspace.contracts if each.name == name)


def rows(workspace: Workspace, spark: SparkSession, name: str, *, past: bool = False) -> list[Row]:
    contract = contract_of(workspace, name)
    snapshot = (workspace.history(contract) if past else workspace.dimension(contract)).open()
    found = snapshot.read(spark, snapshot.all_files())
    place = ["id", "_cdc_valid_from_position"] if past else ["id"]
    return found.orderBy(*place).collect()


def columns(found: list[Row], *names: str) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in names) for row in found]


def test_schema_changes_go_through_to_dimension_and_history(
    desk: SourceUnderTest, spark: SparkSession
) -> None:
    captured(desk)
    taken_in(desk, spark)
    desk.sql(
        "ALTER TABLE tickets ADD priority text DEFAULT 'low', ADD size int",
        "ALTER TABLE agents ADD nick text",
        "INSERT INTO tickets VALUES (3, 'three', 'high', 30)",
        "INSERT INTO agents VALUES (3, 'three', 'iii')",
        "UPDATE tickets SET v = v WHERE id = 1",
        "UPDATE tickets SET size = 20 WHERE id = 2",
    )
    captured(desk)
    workspace = taken_in(desk, spark)
    assert contract_of(workspace, "tickets").version == "1.2.0"
    assert contract_of(workspace, "agents").column_names == ("id", "v")
    current = rows(workspace, spark, "tickets")
    assert columns(current, "id", "v", "priority", "size") == [
        (1, "one", "low", None),
        (2, "two", "low", 20),
        (3, "three", "high", 30),
    ], "what the default gave rows without an event is known, and what landed before is there"
    assert all(not row["_cdc_unresolved"] for row in current)
    past = rows(workspace, spark, "tickets", past=True)
    assert columns(past, "id", "size", "_cdc_opened_by", "_cdc_closed_by") == [
        (1, None, "r", None),
        (2, None, "r", "u"),
        (2, 20, "u", None),
        (3, 30, "c", None),
    ], "an update that changes nothing opens no version"
    checks = schemas_as_contracted(workspace, SOURCE, [each.name for each in workspace.contracts])
    assert checks["tickets"].passed and checks["tickets"].numbers["schema_changes"] == 2
    assert not checks["agents"].passed and "nick" in checks["agents"].summary

    desk.sql(
        "ALTER TABLE tickets ALTER size TYPE bigint", "UPDATE tickets SET size = 5000000000 WHERE id = 3"
    )
    for contract in workspace.contracts:
        write(desk.home_folder, contract, propose(desk.settings, workspace, contract, every=False))
    captured(desk)
    workspace = taken_in(desk, spark)
    versions = {each.name: each.version for each in workspace.contracts}
    assert versions == {"tickets": "1.3.0", "agents": "1.1.0"}
    found = columns(rows(workspace, spark, "tickets"), "id", "size")
    assert found == [(1, None), (2, 20), (3, 5_000_000_000)]
    assert columns(rows(workspace, spark, "agents"), "id", "nick") == [(1, None), (2, None), (3, "iii")]
    sizes = columns(rows(workspace, spark, "tickets", past=True), "id", "size")
    assert sizes == [(1, None), (2, None), (2, 20), (3, 30), (3, 5_000_000_000)], "it keeps its history"
    changes = judged_changes(workspace, SOURCE)
    assert [(each.change.table, each.change.kind, each.asks) for each in changes] == [
        ("agents", "column_added", False),
        ("tickets", "column_added", False),
        ("tickets", "column_added", False),
        ("tickets", "column_widened", False),
    ]
    learned = json.loads((desk.home_folder / "learned" / f"{SOURCE}.json").read_text())
    assert learned["tables"].keys() == {"tickets"}


@pytest.mark.parametrize("alter", ["DROP size", "RENAME size TO magnitude"])
def test_a_learned_column_that_is_gone_leaves_the_contract_and_the_table_can_be_read(
    desk: SourceUnderTest, alter: str
) -> None:
    captured(desk)
    desk.sql("ALTER TABLE tickets ADD size int")
    captured(desk)
    assert contract_of(Workspace.open(desk.settings), "tickets").column_names == ("id", "v", "size")
    desk.sql(f"ALTER TABLE tickets {alter}")
    captured(desk)
    workspace = Workspace.open(desk.settings)
    contract = contract_of(workspace, "tickets")
    write(desk.home_folder, contract, propose(desk.settings, workspace, contract, every=False))
    workspace = Workspace.open(desk.settings)
    contract = contract_of(workspace, "tickets")
    assert "size" not in contract.column_names
    assert propose(desk.settings, workspace, contract, every=False).steps == ()
    SnapshotRequests(desk.store.folder).write("tickets", "its schema changed")
    captured(desk)
    assert ParkedTables(desk.store.folder, 1).all() == {}
    assert not any(each.asks for each in judged_changes(workspace, SOURCE))
