"""A column of another type: the next run takes a wider one, any other waits for a person, alone."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from deltalake import DeltaTable
from pyspark.sql.types import StructField, StructType

from omnisupport_ingest import failpoints
from omnisupport_ingest.checks.lake_checks import tables_complete
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.model import Column, UnknownTable
from omnisupport_ingest.contracts.spark_types import spark_type
from omnisupport_ingest.lake.schema import Retyped, SchemaChanged, delta_schema
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.type_changes import ask_for, other_types, waits
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.storage.s3_server import S3Server

FIRST_ROWS = Commit(10, 1, [Change("c", key, {"n": str(key), "body": "text"}) for key in (1, 2, 3)])
ANOTHER_WINDOW = Commit(20, 61, [Change("u", 1, {"n": "-7"}, unchanged=("body",)), Change("d", 2)])
WIDE = Commit(30, 62, [Change("u", 3, {"n": str(2**40)}, unchanged=("body",))])


def of_type(pg_type: str, json_type: str = "integer") -> dict:
    document = copy.deepcopy(CONTRACT)
    del document["properties"]["title"]
    document["properties"]["n"] = {"type": [json_type, "null"], "x-pg-type": pg_type, "description": "N."}
    return document


def told(folder: Path, document: dict) -> Story:
    story = Story(folder)
    return under(story, document)


def under(story: Story, document: dict) -> Story:
    """The same home under another contract."""
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    return story


def run(story: Story, spark, *windows: str) -> None:
    """One run of every layer over ``windows``, as a job makes it."""
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run")
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run")
    dimensions.update(story.workspace, spark, story.contract, "run")
    history.materialize(story.workspace, spark, story.contract, "run")


def shown(story: Story, spark) -> dict[int, object]:
    snapshot = story.workspace.dimension(story.contract).open()
    rows = snapshot.read(spark, snapshot.all_files()).where("NOT _cdc_is_deleted").collect()
    return {row["id"]: row["n"] for row in rows}


def hashes(story: Story) -> list[str]:
    """The content of every window of the dimension, and of the dimension and the history."""
    found = []
    for table in (story.workspace.net_changes, story.workspace.dimension, story.workspace.history):
        snapshot = table(story.contract).open()
        found += [snapshot.state(window).checkpoint.content_hash for window in snapshot.windows()]
    return found


def test_wider_type_is_taken_by_the_next_run_and_is_what_a_lake_made_under_it_is(
    tmp_path: Path, spark
) -> None:
    story = told(tmp_path / "grown", of_type("integer"))
    story.land(FIRST_ROWS)
    story.land(ANOTHER_WINDOW)
    run(story, spark, FIRST, SECOND)
    before = DeltaTable(str(story.workspace.dimension(story.contract).folder))
    under(story, of_type("bigint"))
    assert waits(story.workspace, story.contract) is None
    assert set(pending_windows(story.workspace, SOURCE).windows) == {FIRST, SECOND}
    story.land(WIDE)
    # Of one window only: the table is remade as a whole all the same, and never seen in part.
    run(story, spark, SECOND)
    assert shown(story, spark) == {1: -7, 3: 2**40}
    assert other_types(story.workspace, story.contract) == {}
    now = DeltaTable(before.table_uri)
    assert now.metadata().id == before.metadata().id
    assert {str(field.type) for field in now.schema().fields if field.name == "n"} == {
        'PrimitiveType("long")'
    }
    assert sorted(now.to_pyarrow_table(columns=["n"])["n"].to_pylist()) == [-7, 2, 2**40]
    run(story, spark, FIRST, SECOND)
    assert pending_windows(story.workspace, SOURCE).nothing
    made = told(tmp_path / "made", of_type("bigint"))
    for commit in (FIRST_ROWS, ANOTHER_WINDOW, WIDE):
        made.land(commit)
    run(made, spark, FIRST, SECOND)
    assert hashes(made) == hashes(story)


def test_other_type_waits_for_a_person_stays_as_it_was_and_is_asked_for_by_nobody(
    tmp_path: Path, spark
) -> None:
    story = told(tmp_path, of_type("text", "string"))
    story.land(FIRST_ROWS)
    run(story, spark, FIRST)
    assert shown(story, spark) == {1: "1", 2: "2", 3: "3"}
    under(story, of_type("integer"))
    files = DeltaTable(str(story.workspace.dimension(story.contract).folder)).file_uris()
    for layer in (net_changes, history):
        arguments = ([FIRST], "run") if layer is net_changes else ("run",)
        with pytest.raises(SchemaChanged, match=r"n \(string on disk, integer by its contract\)") as waiting:
            layer.materialize(story.workspace, spark, story.contract, *arguments)
        assert "contracts retype notes" in waiting.value.fix
    with pytest.raises(SchemaChanged):
        dimensions.update(story.workspace, spark, story.contract, "run")
    assert DeltaTable(str(story.workspace.dimension(story.contract).folder)).file_uris() == files
    # The layers above have the other tables' events to take, so they are asked for, and it is not.
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    assert pending_windows(story.workspace, SOURCE).nothing
    check = tables_complete(story.workspace, SOURCE)["notes"]
    assert not check.passed and "contracts retype notes" in check.summary
    ask_for(story.workspace, story.contract)
    assert waits(story.workspace, story.contract) is None
    assert not pending_windows(story.workspace, SOURCE).nothing
    run(story, spark, FIRST)
    assert shown(story, spark) == {1: 1, 2: 2, 3: 3}
    assert pending_windows(story.workspace, SOURCE).nothing
    # What was asked for was that contract alone.
    under(story, of_type("boolean", "boolean"))
    assert waits(story.workspace, story.contract) is not None


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b'{"contract": 1}', b"[1]"])
def test_record_that_cannot_be_read_asks_for_nothing(tmp_path: Path, content: bytes) -> None:
    story = told(tmp_path, of_type("text", "string"))
    story.workspace.net_changes(story.contract).open()
    under(story, of_type("integer"))
    ask_for(story.workspace, story.contract)
    assert waits(story.workspace, story.contract) is None
    (story.workspace.home.lake / SOURCE / "retyped" / f"{story.contract.name}.json").write_bytes(content)
    assert waits(story.workspace, story.contract) is not None


def test_each_request_of_one_machine_counts_on_another_with_the_same_bucket(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_STORAGE", s3.place())
    here, there = (told(tmp_path / name, of_type("text", "string")) for name in ("here", "there"))
    here.workspace.net_changes(here.contract).open()
    for document in (of_type("integer"), of_type("boolean", "boolean")):
        under(here, document)
        under(there, document)
        assert waits(there.workspace, there.contract) is not None
        ask_for(here.workspace, here.contract)
        assert waits(there.workspace, there.contract) is None


def test_command_names_what_is_made_again_and_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = told(tmp_path, of_type("text", "string"))
    story.workspace.net_changes(story.contract).open()
    monkeypatch.setenv("OMNISUPPORT_HOME", str(story.workspace.home.path))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(story.contracts))
    monkeypatch.setenv("OMNISUPPORT_WINDOW", "minutes:1")

    def retype(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["contracts", "retype", *arguments], standalone_mode=False)

    assert "have the types of its contract" in retype("notes").output
    under(story, of_type("integer"))
    assert waits(story.workspace, story.contract) is not None
    assert isinstance(retype("notes").exception, click.Abort), "nobody has said yes"
    assert waits(story.workspace, story.contract) is not None
    done = retype("notes", "--yes")
    assert "desk/net_changes/notes: n (string on disk, integer by its contract)" in done.output, (
        done.exception
    )
    assert waits(story.workspace, story.contract) is None
    assert isinstance(retype("nots").exception, UnknownTable)


@pytest.mark.parametrize("point", ["lake.retype.before", "lake.retype.after"])
def test_what_is_asked_for_is_asked_for_whole_or_not_at_all(tmp_path: Path, point: str) -> None:
    program = (
        "from pathlib import Path; from omnisupport_ingest_tests.layers import test_retyped as t;"
        f"story = t.told(Path({str(tmp_path)!r}), t.of_type('integer'));"
        "t.ask_for(story.workspace, story.contract)"
    )
    environment = os.environ | {failpoints.VARIABLE: point}
    died = subprocess.run([sys.executable, "-c", program], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    notes = list((tmp_path / "home" / "lake").rglob("notes.json"))
    assert len(notes) == (point == "lake.retype.after")


@pytest.mark.parametrize(
    ("narrow", "wide"),
    [
        ("smallint", "integer"),
        ("smallint", "bigint"),
        ("integer", "bigint"),
        ("integer", "double precision"),
        ("real", "double precision"),
        ("numeric(10,2)", "numeric(12,2)"),
        ("numeric(10,2)", "numeric(14,4)"),
        ("integer", "numeric(12,2)"),
        ("bigint", "numeric(19,0)"),
    ],
)
def test_which_types_hold_every_value_of_which(narrow: str, wide: str) -> None:
    assert _retyped(narrow, wide).widens and not _retyped(wide, narrow).widens


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bigint", "double precision"),
        ("numeric(10,2)", "numeric(10,4)"),
        ("bigint", "numeric(18,0)"),
        ("text", "integer"),
        ("integer", "text"),
        ("date", "timestamp"),
        ("integer[]", "text[]"),
        ("boolean", "smallint"),
    ],
)
def test_which_types_do_not(before: str, after: str) -> None:
    assert not _retyped(before, after).widens


def test_length_of_a_text_is_no_type_of_the_lake() -> None:
    assert _lake_type("varchar(10)") == _lake_type("varchar(20)") == _lake_type("text")


def _retyped(before: str, after: str) -> Retyped:
    return Retyped("n", _lake_type(before), _lake_type(after))


def _lake_type(pg_type: str) -> str:
    column = StructField("n", spark_type(Column("n", pg_type)))
    found = json.loads(delta_schema(StructType([column])).to_json())["fields"][0]["type"]
    return found if isinstance(found, str) else json.dumps(found)
