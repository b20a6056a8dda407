"""The command ``erase``: what is asked, what is told, and that no value is repeated."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import click
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.opening import key_named
from omnisupport_ingest.layers.erasures import ErasureLedger
from omnisupport_ingest_tests.cdc.lanes import CONTRACT as TWO_COLUMNS
from omnisupport_ingest_tests.cli.command import Done, command
from omnisupport_ingest_tests.cli.story_home import enter_copy
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers

SECRET = "Ada Lovelace"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """A row that had another key before, and was deleted, beside one that lives."""
    folder = tmp_path_factory.mktemp("erase") / "told"
    story = Story(folder)
    born = [Change("c", 41, {"title": SECRET, "body": SECRET}), Change("c", 7, {"title": "two", "body": "2"})]
    moved = [Change("d", 41), Change("c", 42, {"title": SECRET}, unchanged=("body",), moved_from=41)]
    story.land(Commit(10, 1, born), Commit(20, 61, [*moved, Change("d", 42)]))
    run_layers(open_workspace(folder), spark, [FIRST, SECOND])
    return folder


@pytest.fixture
def home(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_copy(whole, tmp_path, monkeypatch)


def erase(*arguments: str) -> Done:
    return command("erase", *arguments)


def recorded(home: Path) -> int:
    return len(ErasureLedger.open(open_workspace(home), SOURCE).erasures)


def test_erase_says_what_is_stale_and_what_still_holds_the_values(home: Path):
    done = erase("notes", "42", "--reason", "request 7", "--by", "ana")
    assert done.code == 0, done.err
    (certificate,) = (home / "home" / "certificates").iterdir()
    held = json.loads(certificate.read_text())["before"]
    # Three values of two events stand in three tables at least.
    assert (cells := sum(each["count"] for each in held)) >= 6
    assert done.out.splitlines() == [
        "Erasure recorded by ana: one row of public.notes, with 1 former key, 4 events in windows "
        f"{FIRST}, {SECOND}.",
        f"Stale now: windows {FIRST}, {SECOND}. Nothing runs on this home; judge them again by: "
        "omnisupport-ingest materialize",
        f"{cells} cells above raw can be read until then. Then give this command again: it deletes former "
        "versions of the tables.",
        "Landing and desk/raw_cdc_staging keep the values: they are the record.",
        f"Certificate (pending): {certificate}",
    ]
    assert recorded(home) == 2
    again = erase("public.notes", "id=42", "--reason", "once more", "--by", "bo")
    assert (again.code, recorded(home)) == (0, 2)
    first, second, *_, last = again.out.splitlines()
    assert last == f"Certificate (pending): {certificate}"
    assert first.startswith("Recorded before by ana, ") and first.endswith(": request 7")
    assert second.startswith("Nothing new was recorded for one row of public.notes")


def test_a_dry_run_records_nothing(home: Path):
    done = erase("notes", "42", "--dry-run")
    assert done.code == 0
    assert done.out == (
        f"To be erased: one row of public.notes, with 1 former key, 4 events in windows {FIRST}, {SECOND}. "
        "Nothing was recorded (--dry-run).\n"
    )
    assert recorded(home) == 0


def test_json_tells_the_same_to_a_program(home: Path):
    done = erase("notes", "42", "--reason", "request 7", "--by", "ana", "--json")
    told = json.loads(done.out)
    assert (told["table"], told["keys"], told["events"], told["dry_run"]) == ("public.notes", 2, 4, False)
    assert (told["stale_windows"], told["platform_runs"]) == ([FIRST, SECOND], False)
    assert told["not_touched"] == ["landing", "raw_cdc_staging"]
    certificate = json.loads(Path(told["certificate"]["file"]).read_text())
    assert (certificate["state"], certificate["asked"]["by"]) == (told["certificate"]["state"], "ana")
    hashed = {hashlib.sha256(f'["{key}"]'.encode()).hexdigest() for key in (41, 42)}
    assert {each["key_sha256"] for each in told["recorded"]} == hashed == {*certificate["keys_sha256"]}
    assert SECRET not in done.output


@pytest.mark.parametrize("options", [["--reason", "request 7"], ["--dry-run"]])
def test_what_must_not_be_erased_is_refused_with_the_fix(home: Path, options: list[str]):
    for key, problem in (("7", "lives at its source"), ("41", "its key was changed"), ("99", "no row with")):
        done = erase("notes", key, *options)
        assert done.code == 1
        assert problem in done.err and "Fix: " in done.err
        assert done.out == ""
    assert recorded(home) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["notes", "42"], "Give the reason with --reason"),
        (["letters", "42", "--dry-run"], "'letters' is the name of no table with a contract."),
        (["notes", "42", "43", "--dry-run"], "The key of public.notes is id. Write it as: id=VALUE"),
        (["notes", "42", "--source", "sales", "--dry-run"], "No contract names the source 'sales'"),
        (["notes", "42", "--reason", " "], "The reason is missing."),
    ],
)
def test_wrong_usage_is_told(home: Path, arguments: list[str], problem: str):
    done = erase(*arguments)
    assert done.code == 2
    assert problem in done.err
    assert recorded(home) == 0


def test_a_key_of_two_columns_is_told_in_any_order():
    assert key_named(TWO_COLUMNS, ["id=7", "lane=a=b"]) == ["a=b", "7"]
    for wrong in (["7", "8"], ["id=7"], ["id=7", "id=8"], ["id=7", "lane=1", "more=2"]):
        with pytest.raises(click.UsageError, match="Write it as: lane=VALUE id=VALUE"):
            key_named(TWO_COLUMNS, wrong)
