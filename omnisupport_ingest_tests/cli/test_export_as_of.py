"""``as-of`` as a person calls it: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest_tests.cli.command import Done, command, environment
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers

READ = Commit(5, 0, [])
TOLD = (
    Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"}), Change("c", 2, {"title": "two"})]),
    Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",)), Change("d", 2)]),
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """The folder of a story that is in every layer, but for its last batch."""
    folder = tmp_path_factory.mktemp("as_of") / "told"
    story = Story(folder)
    story.land_chunk(READ)
    story.land_boundary(READ)
    story.land(*TOLD)
    story.land_idle(40)
    run_layers(open_workspace(folder), spark, [FIRST])
    story.land(Commit(50, 3, [Change("d", 1)]))
    story.land_idle(60)
    return folder


@pytest.fixture(autouse=True)
def settings(told: Path) -> Iterator[None]:
    with environment(home=str(told / "home"), contracts_dir=str(told / "contracts"), source=SOURCE):
        yield


def document(*arguments: str) -> dict[str, object]:
    done = command("as-of", *arguments, "--json")
    assert done.code == 0, done.output
    return json.loads(done.out)


def test_it_tells_the_position_that_it_came_to_and_the_rows() -> None:
    done = command("as-of", "0/14", "--table", "notes")
    assert done.code == 0, done.output
    assert done.out.splitlines() == [
        "desk as it was before 1:0/15:0 (epoch 1).",
        "table  rows  softly deleted",
        "notes     1               1",
    ]


def test_a_time_between_two_commits_is_all_of_the_first_and_nothing_of_the_second() -> None:
    assert document("2026-01-01T12:00:01.500Z") == {
        "source": SOURCE,
        "epoch": 1,
        "below_position": "1:0/14:0",
        "below_lsn": "0/14",
        "tables": {
            "notes": {"rows": 2, "deleted_rows": 0, "rows_unresolved": 1, "path": None, "bytes": None}
        },
    }
    assert document("2026-01-01T13:00:01.500+01:00")["below_position"] == "1:0/14:0"


def test_rows_whose_values_are_not_known_are_told_beside_the_answer() -> None:
    done = command("as-of", "1:0/A:2")
    assert "1 row with unresolved values" in done.err


def test_files_are_written_for_their_owner_alone(tmp_path: Path) -> None:
    out = tmp_path / "then"
    found = document("0/A", "--table", "desk.notes", "--out", str(out))
    file = out / "notes.csv"
    assert found["tables"]["notes"]["path"] == str(file)  # type: ignore[index]
    assert file.read_text().splitlines() == [
        "id,title,body,_cdc_unresolved",
        '1,one,text,""',
        "2,two,,body",
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in out.iterdir()] == ["notes.csv"]


def test_deleted_rows_come_along_where_they_are_asked_for(tmp_path: Path) -> None:
    document("0/14", "--out", str(tmp_path), "--format", "jsonl", "--include-deleted")
    rows = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    assert {row["id"]: row["_cdc_is_deleted"] for row in rows} == {1: False, 2: True}


def test_rows_that_a_killed_read_left_are_removed(told: Path, tmp_path: Path) -> None:
    left = told / "home" / "run" / "as-of-999999999-left"
    left.mkdir(parents=True)
    document("0/14", "--out", str(tmp_path))
    assert not left.exists()
    assert not list((told / "home" / "run").glob("as-of-*"))


def refused(*arguments: str) -> Done:
    done = command("as-of", *arguments)
    assert done.out == ""
    return done


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("yesterday",), 2, "is no time"),
        (("2026-01-01T12:00:00",), 2, "has no time zone"),
        (("16/XYZ",), 2, "is no time"),
        (("0/14", "--table", "nothing"), 2, "is the name of no table with a contract"),
        (("0/14", "--out", "/nowhere/then"), 2, "/nowhere is not a folder"),
        (("1:0/14:0", "--epoch", "1"), 2, "--epoch goes with an LSN only"),
        (("2026-01-01T11:00:00Z",), 1, "its history there starts at 0/5"),
        (("2027-01-01T00:00:00Z",), 1, "may still come"),
        (("0/64",), 1, "must pass 0/65"),
        (("0/14", "--epoch", "3"), 2, "in epoch 3"),
        (("0/14", "--format", "csv"), 2, "--format goes with --out"),
        (("0/37",), 1, "Not in the lake yet: "),
    ],
)
def test_what_cannot_be_told_is_refused_with_the_fix(
    arguments: tuple[str, ...], code: int, words: str
) -> None:
    done = refused(*arguments)
    assert (done.code, words in done.err) == (code, True), done.err
    assert code == 2 or "Fix: " in done.err


def test_a_home_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with environment(home=str(tmp_path / "nowhere")):
        assert refused("0/14").code == 3
    assert not (tmp_path / "nowhere").exists()
