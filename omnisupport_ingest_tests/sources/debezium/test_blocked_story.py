"""Two tables come as Debezium's events under ``block``: one changes and waits for its contract, the other
goes on. Once the contract follows, all is as if it had known the change from the start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.layers.events import deduped
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.schema_changes import asking, judged_changes
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.test_schema_story import followed
from omnisupport_ingest_tests.sources.debezium.told import TS, envelope, schema_of

HOUR = 3_600_000


def event(number: int, op: str, table: str, window: int = 0, **row: Any) -> dict[str, Any]:
    """The event ``number`` of the log, with its schema beside; texts are nullable, and ``id`` is an integer.
    ``window``: hours after the first."""
    change = envelope(op, row, lsn=1000 + number, order=1, ts=TS + window * HOUR + number, table=table)
    return {
        "schema": schema_of(change, {name: TEXT if name != "id" else ID for name in row}),
        "payload": change,
    }


ID, TEXT = {"type": "int32", "optional": False}, {"type": "string"}
BIG = {"big": "b"}

FILES = (
    (
        event(1, "c", "toasty", id=1, **BIG, small="one"),
        event(2, "c", "toasty", id=2, **BIG, small="two"),
        event(3, "c", "gen", id=1, a=None),
    ),
    (
        event(4, "u", "toasty", 1, id=1, **BIG, small="one", priority="high"),
        event(5, "c", "toasty", 1, id=3, **BIG, small="three", priority="low"),
        event(6, "d", "toasty", 1, id=2),
        event(7, "c", "gen", 1, id=2, a=None),
    ),
    (
        event(8, "u", "toasty", 1, id=1, **BIG, small="uno", priority="low"),
        event(9, "d", "gen", 1, id=1),
    ),
)
"""Files as they land. ``toasty`` gets the column ``priority`` with the second one."""


def quarantined(recorder: Recorder, spark: SparkSession) -> list[tuple[str, str, list[str]]]:
    """The events in quarantine, in order: key, reason and rules."""
    table = recorder.workspace.quarantine(SOURCE)
    if not table.exists:
        return []
    snapshot = table.open()
    rows = snapshot.read(spark, snapshot.all_files()).orderBy("epoch", "commit_lsn", "ordinal").collect()
    return [(row["key"], row["reason"], row["rules"]) for row in rows]


def asked(recorder: Recorder) -> list[str]:
    changes = asking(judged_changes(recorder.workspace, SOURCE), "toasty")
    return [f"{each.what}: {each.edit}" for each in changes]


def taken_in(recorder: Recorder, spark: SparkSession) -> None:
    recorder.run(spark)
    for each in recorder.workspace.contracts:
        history.materialize(recorder.workspace, spark, each, "run")


def versions(recorder: Recorder, spark: SparkSession) -> list[dict[str, Any]]:
    """The history of ``toasty``, without when and how its events landed."""
    snapshot = recorder.workspace.history(recorder.contract("toasty")).open()
    frame = snapshot.read(spark, snapshot.all_files())
    frame = frame.drop(*(name for name in frame.columns if "landed" in name or "batch" in name))
    rows = frame.orderBy("id", "_cdc_valid_from_position").collect()
    return [row.asDict(recursive=True) for row in rows]


def proposed(recorder: Recorder) -> dict[str, Any]:
    settings = recorder.workspace.settings
    with environment(home=str(settings.home), contracts_dir=str(settings.contracts_dir)):
        done = command("contracts", "propose", "toasty", "--write", "--json")
    document: dict[str, Any] = json.loads(done.out)
    followed(recorder)
    return document


def knowing(recorder: Recorder, documents: Path) -> None:
    """Give ``recorder`` the contracts of ``documents``, as if they had been so from the start."""
    old = recorder.workspace
    for path in documents.glob("*.json"):
        document = json.loads(path.read_text())
        document["x-cdc"]["evolution"] = "pinned"
        (recorder.folder / "contracts" / path.name).write_text(json.dumps(document))
    contracts = load_contracts(recorder.folder / "contracts")
    recorder.workspace = Workspace(old.settings, old.home, contracts)
    followed(recorder)


@pytest.mark.slow
def test_a_table_that_changes_waits_for_its_contract_alone_and_misses_nothing(
    tmp_path: Path, spark: SparkSession
) -> None:
    recorder = Recorder(tmp_path / "own", "toasty", "gen", evolution="block")
    for number, file in enumerate(FILES, 1):
        recorder.land_values(f"{number}.jsonl", *file)
        taken_in(recorder, spark)
        followed(recorder)
    added = ["priority:unknown_column"]
    waiting = [(key, "schema_mismatch", added) for key in ('["1"]', '["3"]', '["1"]')]
    assert quarantined(recorder, spark) == waiting
    (change,) = asked(recorder)
    assert change.startswith(
        "column added: priority text: omnisupport-ingest contracts propose toasty --write"
    )
    rows, others = recorder.state(spark, "toasty"), recorder.state(spark, "gen")
    assert {"big", "small"} <= {*rows[1,]["_cdc_unresolved"]} and rows[2,]["_cdc_is_deleted"]
    assert [others[key,]["_cdc_is_deleted"] for key in (1, 2)] == [True, False], "the other table goes on"

    policy = proposed(recorder)["document"]["x-cdc"]
    assert (policy["version"], policy["optional_columns"]) == ("1.1.0", ["priority"])
    assert asked(recorder) == []
    taken_in(recorder, spark)
    assert quarantined(recorder, spark) == [], "rows from before lack the column, and do not wait for that"
    rows = recorder.state(spark, "toasty")
    assert [rows[key,]["priority"] for key in (1, 3)] == ["low", "low"] and rows[1,]["small"] == "uno"

    other = Recorder(tmp_path / "other", "toasty", "gen")
    knowing(other, recorder.folder / "contracts")
    for number, file in enumerate(FILES, 1):
        other.land_values(f"{number}.jsonl", *file)
        taken_in(other, spark)
    assert other.state(spark, "toasty") == rows
    assert versions(other, spark) == versions(recorder, spark)

    recorder.land_values("4.jsonl", event(10, "c", "toasty", 2, id=4, **BIG, priority="low"))
    followed(recorder)
    taken_in(recorder, spark)
    assert quarantined(recorder, spark) == [('["4"]', "schema_mismatch", ["small:missing_column"])]
    assert proposed(recorder)["document"]["x-cdc"]["optional_columns"] == ["priority", "small"]
    taken_in(recorder, spark)
    assert quarantined(recorder, spark) == [], "rows from before have the column that is gone"
    rows = recorder.state(spark, "toasty")
    assert {key: rows[key,]["priority"] for key in (1, 3, 4)} == {1: "low", 3: "low", 4: "low"}
    windows = recorder.inlet.store.windows()
    before = deduped_rows(recorder, spark)
    deduped.materialize(recorder.workspace, spark, SOURCE, windows, "again", replay=True)
    assert deduped_rows(recorder, spark) == before and quarantined(recorder, spark) == []


def deduped_rows(recorder: Recorder, spark: SparkSession) -> list[int]:
    snapshot = recorder.workspace.deduped(SOURCE).open()
    rows = snapshot.read(spark, snapshot.all_files()).select("event_hash").collect()
    return sorted(row["event_hash"] for row in rows)
