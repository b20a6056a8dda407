"""The definition of a source says what its events do not; a wrong one names the place and the fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.contracts.sources import load_source
from omnisupport_ingest.sources.debezium.handling import Handling, NamedTable, handling_in_force, handling_of
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope

_SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def written(folder: Path, **told: Any) -> Path:
    path = folder / f"{told.get('name', SOURCE)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"$schema": _SCHEMA, "name": SOURCE, "kind": "files", "description": "d"} | told)
    )
    return path


def test_what_it_says_is_how_events_are_read(tmp_path: Path) -> None:
    told = {
        "tables": [{"pattern": "*users*", "schema": "app", "table": "users"}],
        "fields": {"op": "_kind"},
        "time_columns": ["updated_at", "deleted_at"],
        "order": "arrival",
        "bare_rows": True,
    }
    assert handling_of(load_source(written(tmp_path, events=told)).events) == Handling(
        tables=(NamedTable("*users*", "app", "users"),),
        fields={"op": "_kind"},
        time_columns=("updated_at", "deleted_at"),
        order="arrival",
        bare_rows=True,
    )


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"events": {"order": "guess"}}, "$.events.order"),
        ({"events": {"fields": {"operation": "x"}}}, "$.events.fields"),
        ({"events": {"tables": [{"pattern": "*"}]}}, "$.events.tables[0]"),
        ({"kind": "query", "connection": {"env": "X"}, "events": {}}, "events"),
    ],
)
def test_a_wrong_one_names_the_place(tmp_path: Path, told: dict[str, Any], place: str) -> None:
    with pytest.raises(ContractError) as refused:
        load_source(written(tmp_path, **told))
    assert place in refused.value.problem and refused.value.fix


def test_the_definition_of_another_kind_says_nothing_of_events(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    assert handling_in_force(recorder.workspace.settings, SOURCE) == Handling()
    written(tmp_path / "sources", kind="query", connection={"env": "X"})
    assert handling_in_force(recorder.workspace.settings, SOURCE) == Handling()


def test_land_reads_by_the_definition_and_tells_of_odd_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "customers")
    tables = [{"pattern": "export-*", "schema": "public", "table": "customers"}]
    written(tmp_path / "sources", events={"tables": tables})
    value = envelope("c", customer(1), order=1)
    del value["source"]["table"]
    lines = [json.dumps(each).encode() for each in (value, {"hello": "s3cret"})]
    path = recorder.file("export-1.jsonl", lines)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(tmp_path / "contracts"))
    monkeypatch.setenv("OMNISUPPORT_FIRST_WINDOW", "2026-11-20T14:00")
    told = ["land", str(path), "--source", SOURCE]
    refused = CliRunner().invoke(cli, [*told, "--odd-lines", "refuse"], standalone_mode=False)
    assert (refused.return_value, "line 2: it is neither" in refused.output) == (1, True)
    done = CliRunner().invoke(cli, told)
    assert done.exit_code == 0, done.output
    assert "1 line that cannot be read" in done.output and "line 2: it is neither" in done.output
    assert "s3cret" not in done.output
