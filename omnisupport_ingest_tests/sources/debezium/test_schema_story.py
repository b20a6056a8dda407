"""A table that changes in the middle of Debezium's events, through to its dimension; the contract follows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import asking, judged_changes
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import TS, customer, envelope

ID = {"type": "int64", "optional": False, "field": "id"}
EMAIL = {"type": "string", "optional": False, "field": "email"}
STATUS = {"type": "string", "optional": True, "field": "status"}


def column(name: str, kind: str, *, optional: bool = True, **more: Any) -> dict[str, Any]:
    return {"type": kind, "optional": optional, "field": name, **more}


def with_schema(columns: list[dict[str, Any]], number: int, **values: Any) -> dict[str, Any]:
    """The change number ``number``: an insert of a row with that key and ``columns``, their schema beside."""
    row = {each["field"]: values.get(each["field"]) for each in columns}
    row |= customer(number)
    after = {"type": "struct", "optional": True, "field": "after", "fields": columns}
    schema = {"type": "struct", "optional": False, "name": "t.Envelope", "fields": [after]}
    payload = envelope("c", row, lsn=1000 + number, order=1, ts=TS + number)
    return {"schema": schema, "payload": payload}


def followed(recorder: Recorder) -> None:
    """As a new process does it: with the contracts as they are in force by now."""
    old = recorder.workspace
    contracts = contracts_in_force(old.settings)
    recorder.workspace = Workspace(old.settings, old.home, contracts)
    recorder.inlet = replace(recorder.inlet, contracts=contracts)


def asked(recorder: Recorder) -> list[tuple[str, str | None]]:
    changes = asking(judged_changes(recorder.workspace, SOURCE), "customers")
    return [(each.change.kind, each.change.column) for each in changes]


def proposed(recorder: Recorder, *arguments: str) -> dict[str, Any]:
    settings = recorder.workspace.settings
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):
        done = command("contracts", "propose", "customers", "--write", "--json", *arguments)
    document: dict[str, Any] = json.loads(done.out)
    followed(recorder)
    return document


@pytest.mark.slow
def test_events_with_their_schemas_change_their_table_through_to_the_dimension(
    tmp_path: Path, spark: SparkSession
) -> None:
    recorder = Recorder(tmp_path, "customers", evolution="additive")
    columns = [ID, EMAIL, STATUS]
    recorder.land_values("1.jsonl", with_schema(columns, 1, status="a"))
    columns = [
        *columns,
        column("size", "int32"),
        column("paid", "boolean"),
        column("must", "string", optional=False),
    ]
    values = {"status": "b", "size": 5, "paid": True, "must": "m"}
    recorder.land_values("2.jsonl", with_schema(columns, 2, **values))
    followed(recorder)
    contract = recorder.contract("customers")
    assert (contract.version, contract.column("size").pg_type) == ("1.2.0", "integer")
    assert asked(recorder) == [("column_added", "must")], "what may not be NULL is for a person to say"
    recorder.run(spark)
    rows = recorder.state(spark, "customers")
    assert (rows[2,]["size"], rows[2,]["paid"]) == (5, True), "what landed before it was learned"
    assert {"paid", "size"} <= {*rows[1,]["_cdc_unresolved"]}, "nothing tells what it has in them"

    columns[3] = column("size", "int64")
    columns = [each for each in columns if each["field"] != "status"]
    recorder.land_values("3.jsonl", with_schema(columns, 3, size=5_000_000_000, must="m"))
    assert set(asked(recorder)) == {
        ("column_added", "must"), ("column_dropped", "status"), ("column_widened", "size"),
    }  # fmt: skip
    check = schemas_as_contracted(recorder.workspace, SOURCE, ["customers"])["customers"]
    assert not check.passed and "first row in 3.jsonl, line 1" in check.summary
    proposal = proposed(recorder)
    assert (proposal["version"], proposal["written"]) == ("2.0.0", True)
    assert asked(recorder) == []
    contract = recorder.contract("customers")
    assert contract.column("size").pg_type == "bigint"
    # What events say of the others is less than their contract does: they stay as they are.
    assert contract.column("updated_at").pg_type == "timestamptz"
    recorder.land_values("4.jsonl", with_schema(columns, 4, size=6, must="n"))
    recorder.run(spark)
    rows = recorder.state(spark, "customers")
    assert (rows[3,]["size"], rows[4,]["must"], rows[2,]["size"]) == (5_000_000_000, "n", 5)


def test_without_schemas_a_person_says_of_what_type_a_new_column_is(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    recorder.land_values("1.jsonl", envelope("c", customer(1, status="a"), lsn=1))
    recorder.land_values("2.jsonl", envelope("c", customer(2, size=1), lsn=2, ts=TS + 1))
    followed(recorder)
    assert asked(recorder) == [("column_dropped", "status"), ("column_added", "size")]
    proposal = proposed(recorder)
    assert proposal["for_a_person"] == [
        "size is new, and nothing tells its type: write it into the contract yourself."
    ]
    assert asked(recorder) == [("column_added", "size")]


def test_what_was_taken_back_asks_for_nothing_where_nothing_can_be_read_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    for number, more in enumerate(({"status": "a"}, {}, {"status": "b"}), 1):
        change = envelope("c", customer(number, **more), lsn=number, ts=TS + number)
        recorder.land_values(f"{number}.jsonl", change)
    followed(recorder)
    kinds = [each.change.kind for each in judged_changes(recorder.workspace, SOURCE)]
    assert kinds == ["column_dropped", "column_added"] and asked(recorder) == []
