"""The command ``quarantine``: what a reviewer sees, what stays hidden, and what a decision answers."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cli import quarantine as asking
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest_tests.cli.command import Done, command
from omnisupport_ingest_tests.cli.story_home import enter_copy
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers

SECRET = "much longer than twenty"
"""The value of a row, which must not be seen unasked."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    """Both contents of a collision, one event that breaks a rule, and an accepted one."""
    folder = tmp_path_factory.mktemp("quarantine") / "told"
    story = Story(folder)
    story.land(Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})]))
    story.land_again(Commit(10, 1, [Change("c", 1, {"title": "another", "body": None})]))
    story.land(Commit(20, 61, [Change("c", 2, {"title": SECRET}, unchanged=("body",)), Change("d", 3)]))
    run_layers(open_workspace(folder), spark, [FIRST, SECOND])
    return folder


@pytest.fixture
def home(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return enter_copy(whole, tmp_path, monkeypatch)


def quarantine(*arguments: str) -> Done:
    return command("quarantine", *arguments)


def document(*arguments: str) -> Any:
    done = quarantine(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def listed(*arguments: str) -> list[dict[str, Any]]:
    (source,) = document("list", *arguments)["sources"]
    return source["listed"]


def ids(*arguments: str) -> list[str]:
    return [each["id"] for each in listed(*arguments)]


def reviews(home: Path) -> tuple[Any, ...]:
    return ReviewLedger.open(open_workspace(home), SOURCE).reviews


# --- looking -------------------------------------------------------------------------------------


def test_list_says_why_each_event_is_there_and_shows_no_value(home: Path):
    done = quarantine("list")
    assert done.code == 0
    assert f"{SOURCE}: 3 events: 2 collision, 1 row_rule; 3 open." in done.out
    assert "row_rule (title:max_length)  open" in done.out
    assert f"public.notes, create, window {SECOND}, first seen 2026-01-01 12:05:00 UTC" in done.out
    assert "    from batch e000001-s-" in done.out
    assert SECRET not in done.output
    assert SECRET not in json.dumps(document("list"))


def test_list_chooses_by_reason_state_table_window_and_limit(home: Path):
    assert len(ids("--reason", "collision")) == 2
    assert len(ids("--window", SECOND)) == 1
    assert len(ids("--table", "notes")) == len(ids("--table", "public.notes")) == 3
    assert ids("--state", "discarded") == []
    assert len(ids("--limit", "1")) == 1
    (source,) = document("list", "--limit", "1")["sources"]
    assert (source["events"], source["by_reason"]) == (3, {"collision": 2, "row_rule": 1})
    assert "2 events not listed (--limit 0 lists all)." in quarantine("list", "--limit", "1").out
    (row,) = listed("--reason", "row_rule")
    assert (row["rules"], row["detector"], row["op"]) == (["title:max_length"], "contract", "c")
    assert (row["review_state"], row["waits_for_run"], row["review"]) == ("open", False, None)


@pytest.mark.parametrize(
    "arguments",
    [("list", "--reason"), ("discard", "--all", "--yes", "--reason", "why", "--quarantined-for")],
)
def test_a_reason_that_is_none_is_no_good_news(home: Path, arguments: tuple[str, ...]):
    done = quarantine(*arguments, "colision")
    assert (done.code, done.out) == (2, "")
    assert "'colision' is not one of" in done.err and "collision" in done.err


def test_show_prints_values_only_when_they_are_asked_for(home: Path):
    (event,) = ids("--reason", "row_rule")
    done = quarantine("show", event)
    assert done.code == 0
    assert SECRET not in done.output
    assert f"title: {len(SECRET)}" in done.out
    assert "not sent         body" in done.out
    assert "Values are not shown; --values prints them, personal data included." in done.out
    plain = document("show", event)
    assert plain["lengths"]["after"] == {"id": 1, "title": len(SECRET)}
    assert SECRET not in json.dumps(plain)

    assert SECRET in quarantine("show", event, "--values").out
    assert json.loads(document("show", event, "--values")["values"]["after"])["title"] == SECRET


def test_an_id_that_is_none_or_of_no_event_is_told_so(home: Path):
    assert quarantine("show", "1:0/A:0").code == 2
    done = quarantine("show", "1:0/3E7:0#00ab34cd56ef7890")
    assert (done.code, done.out) == (1, "")
    assert "desk has no such event" in done.err
    assert "Fix: Copy the id from `omnisupport-ingest quarantine list`" in done.err


def test_an_unknown_source_is_a_usage_error(home: Path):
    done = quarantine("list", "--source", "nobody")
    assert done.code == 2
    assert "There are: desk" in done.err


def test_looking_at_a_home_that_is_not_there_makes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "nowhere"))
    for arguments in (["list"], ["show", "1:0/A:0#00ab34cd56ef7890"]):
        assert quarantine(*arguments).code == 3
    assert not (tmp_path / "nowhere").exists()


# --- deciding ------------------------------------------------------------------------------------


def test_release_records_who_and_why_and_says_what_becomes_stale(home: Path, spark: SparkSession):
    one, another = ids("--reason", "collision")
    done = quarantine("release", one, "--reason", "checked with the desk")
    assert done.code == 0, done.err
    assert f"1 event of desk released by {getpass.getuser()}." in done.out
    assert f"Stale now: window {FIRST}. Nothing runs on this home; judge them again by: " in done.out
    assert "omnisupport-ingest materialize" in done.out
    assert f"1 event of the same positions still open: {another}." in done.out
    (review,) = reviews(home)
    assert (review.reviewer, review.why, review.decision) == (
        getpass.getuser(),
        "checked with the desk",
        "release",
    )
    (row,) = listed("--state", "released")
    assert (row["id"], row["waits_for_run"], row["review"]["why"]) == (one, True, "checked with the desk")

    run_layers(open_workspace(home), spark, [FIRST, SECOND])
    assert ids("--reason", "collision") == [another]
    shown = document("show", one)
    assert (shown["in_quarantine"], len(shown["reviews"])) == (False, 1)
    assert f"it is accepted, in window {FIRST}" in shown["now"]
    told = quarantine("show", one).out
    assert f"release by {getpass.getuser()}" in told
    assert "checked with the desk" in told


def test_release_that_is_refused_says_why_and_records_nothing(home: Path):
    (broken,) = ids("--reason", "row_rule")
    done = quarantine("release", broken, "--reason", "let it in", "--by", "ana")
    assert (done.code, done.out) == (1, "")
    assert "It breaks its contract (public.notes: title:max_length)" in done.err
    assert "Fix: Change the contract of public.notes if the rule is wrong" in done.err
    assert reviews(home) == ()
    done = quarantine("release", *ids("--reason", "collision"), "--reason", "both", "--by", "ana")
    assert done.code == 1
    assert "2 of 2 events cannot be released, so nothing was recorded" in done.err
    assert reviews(home) == ()


def test_a_decision_needs_a_reason_and_events(home: Path):
    (event,) = ids("--reason", "row_rule")
    assert quarantine("discard", event).code == 2
    assert quarantine("discard", event, "--reason", " ").code == 2
    assert quarantine("discard", "--reason", "why").code == 2
    assert quarantine("discard", event, "--all", "--reason", "why").code == 2
    assert quarantine("discard", event, "--table", "notes", "--reason", "why").code == 2
    assert reviews(home) == ()


def test_all_asks_first_and_takes_only_what_is_chosen(home: Path):
    chosen = ("--all", "--quarantined-for", "collision", "--reason", "a bad delivery", "--by", "ana")
    done = quarantine("discard", *chosen)
    assert done.code == 2
    assert "Discard 2 events of desk? Nobody can answer here: add --yes." in done.err
    assert reviews(home) == ()
    decided = document("discard", *chosen, "--yes")
    assert len(decided["recorded"]) == 2
    assert (decided["stale_windows"], decided["platform_runs"]) == ([FIRST], False)
    assert [each["by"] for each in decided["recorded"]] == ["ana", "ana"]
    assert len({review.sequence for review in reviews(home)}) == 1
    assert {row["review_state"] for row in listed("--reason", "collision")} == {"discarded"}
    assert quarantine("discard", *chosen, "--yes").code == 1
    again = quarantine("discard", *ids("--reason", "collision"), "--reason", "again")
    assert again.out == "2 events discarded before; nothing was written for that.\n"


def test_what_somebody_decides_while_all_is_asked_for_stays(home: Path, monkeypatch: pytest.MonkeyPatch):
    first, _ = ids("--reason", "collision")

    def answered(*_: object) -> None:
        assert quarantine("release", first, "--reason", "checked", "--by", "eve").code == 0

    monkeypatch.setattr(asking, "_confirm", answered)
    done = quarantine(
        "discard", "--all", "--quarantined-for", "collision", "--reason", "a bad delivery", "--by", "ana"
    )
    assert (done.code, "1 event decided meanwhile by eve." in done.out) == (0, True), done.output
    assert {(each.reviewer, each.decision) for each in reviews(home)} == {
        ("eve", "release"),
        ("ana", "discard"),
    }


def test_a_decision_that_overturns_an_earlier_one_names_it(home: Path):
    one, another = ids("--reason", "collision")
    assert quarantine("release", one, "--reason", "checked", "--by", "ana").code == 0
    done = quarantine("discard", one, another, "--reason", "both wrong", "--by", "bo")
    assert done.code == 0, done.err
    assert f"{one} before: released by ana on " in done.out
    assert f"{another} before" not in done.out
    again = document("release", one, "--reason", "right after all", "--by", "cy")
    assert [(each["id"], each["decision"], each["by"]) for each in again["overturned"]] == [
        (one, "discard", "bo")
    ]


def test_while_the_platform_runs_it_takes_the_stale_windows_in(home: Path):
    run_folder = open_workspace(home).home
    with HomeLock(run_folder, "up"):
        (run_folder.run / "dagster-daemon.pid").write_text(str(os.getpid()))
        decided = quarantine("discard", *ids("--reason", "row_rule"), "--reason", "test data")
    assert f"Stale now: window {SECOND}. The running platform judges them again by itself." in decided.out


def test_where_the_decision_table_says_wait_the_command_says_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    table = open_workspace(home).decisions.path
    text = Path(table).read_text()
    row = "review_decision,review_ledger,replay_window"
    assert row in text
    (tmp_path / "waits.csv").write_text(text.replace(row, "review_decision,review_ledger,wait"))
    monkeypatch.setenv("OMNISUPPORT_DECISION_TABLE", str(tmp_path / "waits.csv"))
    done = quarantine("discard", *ids("--reason", "row_rule"), "--reason", "test data")
    assert done.code == 0
    assert "until somebody replays them (omnisupport-ingest replay): the decision table says wait" in done.out


# --- beside it -----------------------------------------------------------------------------------


def test_what_was_discarded_is_no_warning_any_more(home: Path) -> None:
    def reasons() -> list[str]:
        found: list[str] = json.loads(command("status", "--json").out)["health"]["reasons"]
        return [each for each in found if "in quarantine" in each]

    assert reasons() == [f"3 events of {SOURCE} in quarantine"]
    first, *_ = ids("--reason", "collision")
    assert quarantine("discard", first, "--reason", "test").code == 0
    assert reasons() == [f"2 events of {SOURCE} in quarantine"]
    assert quarantine("discard", "--all", "--yes", "--reason", "test").code == 0
    assert reasons() == []


def test_an_event_of_another_source_is_found_there(home: Path) -> None:
    contracts = home / "contracts"
    [file] = contracts.glob("*.json")
    other = json.loads(file.read_text())
    other["x-cdc"] |= {"source": "elsewhere", "name": "other_notes"}
    (contracts / "other.json").write_text(json.dumps(other))
    event, *_ = ids("--source", SOURCE)
    done = quarantine("show", event, "--source", "elsewhere")
    assert done.code == 1 and f"It is in quarantine of {SOURCE}: add --source {SOURCE}" in done.err


def test_a_table_that_is_none_is_no_table_without_events(home: Path) -> None:
    done = quarantine("list", "--table", "nope")
    assert done.code == 2 and "'nope' is the name of no table" in done.err
    assert quarantine("list", "--table", "notes", "--reason", "too_late_arrival").code == 0
