"""Rows of a dimension as they change, from the log of a Delta table that is written without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from omnisupport_ingest.cli.tail import tail
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.dimension_changes import changes_of, last_changes, newest_version
from omnisupport_ingest_tests.layers.story import Story

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("title", pa.string()),
        ("body", pa.string()),
        ("_cdc_key", pa.string()),
        ("_cdc_epoch", pa.int32()),
        ("_cdc_commit_lsn", pa.int64()),
        ("_cdc_ordinal", pa.int64()),
        ("_cdc_is_deleted", pa.bool_()),
        ("_cdc_row_hash", pa.int64()),
        ("_cdc_state", pa.string()),
    ]
)


def row(id: int, title: str, lsn: int, *, deleted: bool = False) -> dict[str, Any]:
    return {
        "id": id,
        "title": title,
        "body": None,
        "_cdc_key": json.dumps([str(id)]),
        "_cdc_epoch": 1,
        "_cdc_commit_lsn": lsn,
        "_cdc_ordinal": 0,
        "_cdc_is_deleted": deleted,
        "_cdc_row_hash": hash((id, title, lsn, deleted)),
        "_cdc_state": "nobody reads it",
    }


VERSIONS = (
    [row(1, "one", 10), row(2, "two", 10)],
    [row(1, "one", 10), row(2, "zwei", 20), row(3, "three", 20)],
    [row(1, "one", 10), row(2, "zwei", 30, deleted=True), row(3, "three", 20)],
    [row(1, "one", 10), row(2, "deux", 40), row(3, "three", 20)],
    [row(1, "one", 10), row(2, "deux", 40)],
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    story = Story(tmp_path)
    folder = story.workspace.dimension(story.contract).folder
    for rows in VERSIONS:
        write_deltalake(str(folder), pa.Table.from_pylist(rows, schema=COLUMNS), mode="overwrite")
    return story.workspace


def told(workspace: Workspace, version: int) -> list[tuple[str, int, dict[str, Any]]]:
    (contract,) = workspace.contracts.all
    changes = changes_of(workspace, contract, version)
    assert changes is not None
    return [(each.kind, each.row["id"], each.before) for each in changes]


def test_each_version_tells_the_rows_that_it_changed_and_no_others(workspace: Workspace) -> None:
    assert told(workspace, 0) == [("insert", 1, {}), ("insert", 2, {})]
    assert told(workspace, 1) == [("update", 2, {"title": "two"}), ("insert", 3, {})]
    assert told(workspace, 2) == [("delete", 2, {})]
    assert told(workspace, 3) == [("insert", 2, {"title": "zwei"})]
    assert told(workspace, 4) == [("purge", 3, {})]


def test_the_last_changes_end_where_files_were_swept(workspace: Workspace) -> None:
    (contract,) = workspace.contracts.all
    table = workspace.dimension(contract)
    assert newest_version(workspace, contract) == 4
    assert [each.version for each in last_changes(workspace, contract, 3)] == [2, 3, 4]
    assert last_changes(workspace, contract, 0) == []
    assert len(last_changes(workspace, contract, 100)) == 7
    first = DeltaTable(str(table.folder), version=1).file_uris()[0]
    Path(first).unlink()
    assert changes_of(workspace, contract, 1) is None
    assert [each.version for each in last_changes(workspace, contract, 100)] == [3, 4]


def test_the_command_prints_a_line_for_each_change(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = workspace.settings
    for name, value in (
        ("HOME", settings.home),
        ("WINDOW", settings.window),
        ("CONTRACTS_DIR", settings.contracts_dir),
        ("SOURCE", "desk"),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", str(value))
    run = CliRunner(catch_exceptions=False).invoke
    lines = run(tail, ["notes", "-n", "4"]).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["insert", "delete", "insert", "purge"]
    assert "title zwei → deux" in lines[2]
    (last,) = run(tail, ["notes", "-n", "1", "--json"]).stdout.splitlines()
    document = json.loads(last)
    assert (document["change"], document["key"], document["version"]) == ("purge", '["3"]', 4)
    assert "_cdc_state" not in document["row"]
