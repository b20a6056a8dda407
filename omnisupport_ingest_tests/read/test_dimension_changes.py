"""Rows of a dimension as they change, from the log of a Delta table that is written without Spark."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pyarrow as pa
import pytest
from click.testing import CliRunner
from deltalake import DeltaTable, write_deltalake

from omnisupport_ingest.cdc.erasing import Span, key_hash
from omnisupport_ingest.cli.tail import _shown_changes, tail
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.layers.erasures import Erasure, ErasureLedger
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.dimension_changes import RowChange, changes_of, newest_version
from omnisupport_ingest.read.dimension_changes import last_changes as last_changes_up_to
from omnisupport_ingest_tests.layers.story import CONTRACT, Story

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
        ("_cdc_unresolved", pa.list_(pa.string())),
        ("_cdc_exact", pa.map_(pa.string(), pa.string())),
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


def last_changes(workspace: Workspace, contract: TableContract, count: int) -> list[RowChange]:
    newest = newest_version(workspace, contract)
    assert newest is not None
    return last_changes_up_to(workspace, contract, count, newest)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    story = Story(tmp_path)
    folder = story.workspace.dimension(story.contract).folder
    for rows in VERSIONS:
        write_deltalake(str(folder), pa.Table.from_pylist(rows, schema=COLUMNS), mode="overwrite")
    return story.workspace


def test_a_cell_that_is_not_known_or_that_its_type_cannot_hold_is_no_null(tmp_path: Path) -> None:
    story = Story(tmp_path)
    folder = story.workspace.dimension(story.contract).folder
    known = row(1, "one", 10) | {"body": "text", "_cdc_row_hash": 1}
    unknown = row(1, "one", 20) | {"_cdc_unresolved": ["body"], "_cdc_exact": [("title", "infinity")]}
    null = row(1, "two", 30)
    for rows in ([known], [unknown | {"title": None, "_cdc_row_hash": 2}], [null | {"_cdc_row_hash": 3}]):
        write_deltalake(str(folder), pa.Table.from_pylist(rows, schema=COLUMNS), mode="overwrite")
    (contract,) = story.workspace.contracts.all
    (first,) = changes_of(story.workspace, contract, 1) or ()
    assert first.before == {"title": "one", "body": "text"}
    assert (first.value("title"), first.unresolved) == ("infinity", {"body"})
    (second,) = changes_of(story.workspace, contract, 2) or ()
    assert (second.before, second.unresolved_before) == ({"title": "infinity"}, {"body"})


def test_a_change_is_of_when_it_was_committed_not_of_when_its_file_was_copied(workspace: Workspace) -> None:
    (contract,) = workspace.contracts.all
    entry = workspace.dimension(contract).folder / "_delta_log" / f"{4:020d}.json"
    before = last_changes(workspace, contract, 1)[0].at
    os.utime(entry, (0, 0))
    assert last_changes(workspace, contract, 1)[0].at == before
    assert before.year > 2000


def test_the_last_changes_of_a_version_are_its_highest_positions(workspace: Workspace) -> None:
    (contract,) = workspace.contracts.all
    (only,) = changes_of(workspace, contract, 1, most=1) or ()
    assert only.row["id"] in (2, 3)
    (ended,) = changes_of(workspace, contract, 4, most=1) or ()
    assert ended.kind == "purge"


def test_versions_before_a_policy_tell_no_plain_value(workspace: Workspace) -> None:
    (plain,) = workspace.contracts.all
    columns = tuple(replace(each, pii="mask") if each.name == "title" else each for each in plain.columns)
    contract = replace(plain, columns=columns)
    (update, insert) = changes_of(workspace, contract, 1) or ()
    assert (update.before, update.hidden) == ({}, {"title"})
    assert "title" not in insert.row
    assert insert.row["id"] == 3


def test_a_column_that_the_contract_dropped_is_not_told(workspace: Workspace) -> None:
    (plain,) = workspace.contracts.all
    contract = replace(plain, columns=tuple(each for each in plain.columns if each.name != "title"))
    (update, _) = changes_of(workspace, contract, 1) or ()
    assert "title" not in update.row


def test_an_erased_row_tells_nothing_but_its_key(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (contract,) = workspace.contracts.all
    erasure = Erasure(
        contract.schema, contract.table, key_hash('["2"]'), Span(None, (1, 30, 0)), (), "ana", "asked",
        datetime(2026, 1, 1, tzinfo=UTC), 1,
    )  # fmt: skip
    monkeypatch.setattr(ErasureLedger, "open", lambda *_: ErasureLedger((erasure,)))
    (update, insert) = changes_of(workspace, contract, 1) or ()
    assert (update.before, update.row.get("title"), update.row["id"]) == ({}, None, 2)
    assert update.hidden >= {"title", "body"}
    assert insert.row["title"] == "three"
    (again,) = changes_of(workspace, contract, 3) or ()
    assert (again.row["title"], again.before, again.hidden) == ("deux", {}, {"title"})


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
    newest = newest_version(workspace, contract)
    assert newest is not None and newest.number == 4
    assert [each.version for each in last_changes(workspace, contract, 3)] == [2, 3, 4]
    assert last_changes(workspace, contract, 0) == []
    assert len(last_changes(workspace, contract, 100)) == 7
    first = DeltaTable(str(table.folder), version=1).file_uris()[0]
    Path(first).unlink()
    assert changes_of(workspace, contract, 1) is None
    assert [each.version for each in last_changes(workspace, contract, 100)] == [3, 4]


def test_a_number_that_json_cannot_hold_is_text_and_nan_is_the_same_as_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path)
    ratio = {"type": ["number", "null"], "x-pg-type": "double precision", "description": "A ratio."}
    story.write_contract(CONTRACT | {"properties": CONTRACT["properties"] | {"ratio": ratio}})
    workspace = Workspace.open(story.workspace.settings)
    (contract,) = workspace.contracts.all
    folder = workspace.dimension(contract).folder
    for title, number in (("one", math.nan), ("uno", math.nan), ("due", math.inf)):
        rows = [row(1, title, 10) | {"ratio": number}]
        schema = COLUMNS.append(pa.field("ratio", pa.float64()))
        write_deltalake(str(folder), pa.Table.from_pylist(rows, schema=schema), mode="overwrite")
    _, uno, due = last_changes(workspace, contract, 3)
    assert (uno.before, list(due.before)) == ({"title": "one"}, ["title", "ratio"])
    assert _shown_changes(due, contract) == "title uno → due, ratio NaN → Infinity"
    monkeypatch.setattr("omnisupport_ingest.cli.tail.open_workspace", lambda: workspace)
    last = CliRunner(catch_exceptions=False).invoke(tail, ["notes", "-n", "1", "--json"]).stdout
    document = json.loads(last, parse_constant=pytest.fail)
    assert (document["before"]["ratio"], document["row"]["ratio"]) == ("NaN", "Infinity")


def test_what_is_committed_while_the_command_starts_is_printed_once(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (contract,) = workspace.contracts.all
    folder = str(workspace.dimension(contract).folder)

    def put(title: str, mode: Literal["overwrite", "append"] = "overwrite") -> None:
        write_deltalake(folder, pa.Table.from_pylist([row(1, title, 50)], schema=COLUMNS), mode=mode)

    def starting(*arguments: Any, **named: Any) -> Any:
        put("meanwhile")
        return last_changes_up_to(*arguments, **named)

    def later() -> Iterator[bool]:
        yield False
        put("later")
        yield False
        # Made anew, and as many versions as before.
        shutil.rmtree(folder)
        for _ in range(7):
            put("anew")
        yield False
        put("after")
        yield False
        yield True

    waits = later()
    stop = SimpleNamespace(wait=lambda _seconds: next(waits))
    monkeypatch.setattr("omnisupport_ingest.cli.tail.open_workspace", lambda: workspace)
    monkeypatch.setattr("omnisupport_ingest.cli.tail.last_changes", starting)
    monkeypatch.setattr("omnisupport_ingest.cli.tail.stop_on_signal", lambda: nullcontext(stop))
    done = CliRunner(catch_exceptions=False).invoke(tail, ["notes", "-n", "1", "--follow"])
    shown = [line.split("title ")[-1] for line in done.stdout.splitlines() if '["1"]' in line]
    assert shown == ["one → meanwhile", "meanwhile → later", "anew → after"]
    assert "dim_notes was made anew." in done.stderr


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
    assert [line.split()[2] for line in lines] == ["insert", "delete", "insert", "purge"]
    assert "title zwei → deux" in lines[2]
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d insert", lines[0])
    (last,) = run(tail, ["notes", "-n", "1", "--json"]).stdout.splitlines()
    document = json.loads(last)
    assert (document["change"], document["key"], document["version"]) == ("purge", '["3"]', 4)
    assert "_cdc_state" not in document["row"]


def test_a_line_shows_what_is_unresolved_and_nothing_that_a_terminal_acts_on(workspace: Workspace) -> None:
    (contract,) = workspace.contracts.all
    ((*_, change),) = (last_changes(workspace, contract, 4)[:3],)
    odd = replace(
        change,
        row=change.row | {"title": "a\x1b[2Jb", "_cdc_unresolved": ["body"]},
        before={"title": None, "body": "x"},
    )
    assert _shown_changes(odd, contract) == "title NULL → a�[2Jb, body x → (unresolved)"
    first = replace(odd, kind="insert", before={}, row={"title": "new"}, hidden=frozenset({"body"}))
    assert _shown_changes(first, contract) == "title new, body (not shown)"
