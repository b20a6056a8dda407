"""Erasing a row: its values leave everything that people query, for good, and nothing else changes."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks, history_checks, window_checks
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.integrity import sha256_of
from omnisupport_ingest.layers.erasures import ErasureLedger, ErasuresLost
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.read.export import Format, export
from omnisupport_ingest.read.replay_preview import preview_replay
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.erasing import (
    Erased,
    ErasureIncomplete,
    ErasureRefused,
    erase,
    key_text,
    look_up,
)
from omnisupport_ingest.review.row_certificate import erase_row
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    THIRD,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers
from omnisupport_ingest_tests.review.test_reviews import titled

PERSON = "Ada Lovelace"
"""In every value of the row that is to be erased."""

BORN = Commit(
    10,
    1,
    [
        Change("c", 1, {"title": PERSON, "body": f"{PERSON} wrote"}),
        Change("c", 2, {"title": "two", "body": "2"}),
    ],
)
RENAMED = Commit(20, 61, [Change("u", 1, {"title": f"{PERSON} K."}, unchanged=("body",))])
GONE = Commit(30, 62, [Change("d", 1)])


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "told")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """A row of two windows that was deleted, beside one that lives; every layer holds both."""
    story = Story(tmp_path_factory.mktemp("erasure") / "told")
    for commit in (BORN, RENAMED, GONE):
        story.land(commit)
    run(story, spark)
    return story


@pytest.fixture
def deleted(story: Story, told: Story) -> Story:
    """``story`` continues a copy of ``told``."""
    folder, other = story.workspace.home.path.parent, told.workspace.home.path.parent
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    story.workspace = open_workspace(folder)
    story.store = story.workspace.landing(SOURCE)
    story._ends = dict(told._ends)
    return story


def run(story: Story, spark: SparkSession, windows: Sequence[str] = (FIRST, SECOND)) -> None:
    run_layers(story.workspace, spark, windows)
    history.materialize(story.workspace, spark, story.contract, "run")


def erased(story: Story, key: int = 1) -> Erased:
    return erase(story.workspace, story.contract, key_text([str(key)]), erased_by="ana", why="request 7")


def refused(story: Story, key: int = 1) -> str:
    with pytest.raises(ErasureRefused) as error:
        erased(story, key)
    assert not ErasureLedger.open(story.workspace, SOURCE).erasures
    return str(error.value)


def queried(story: Story) -> list[LakeTable]:
    """Every table but raw."""
    raw = story.workspace.raw(SOURCE).folder
    return [table for table in story.workspace.tables() if table.folder != raw]


def holding(story: Story, text: str = PERSON) -> set[str]:
    """The tables of which a file that the newest version names, data or state, has ``text`` in a value."""
    found = set()
    for table in [*queried(story), story.workspace.raw(SOURCE)]:
        for uri in table.open().handle.file_uris():
            content = pq.read_table(uri, partitioning=None)
            told = repr(content.to_pylist()) + repr(content.schema.metadata)
            if text in told or text.encode() in Path(uri).read_bytes():
                found.add(table.spec.path.removeprefix(f"{SOURCE}/"))
    return found


def on_disk(story: Story, text: str = PERSON) -> list[Path]:
    """The data files below the tables that people query, of whatever version, that have ``text``."""
    files = [file for table in queried(story) for file in table.folder.rglob("*.parquet")]
    return [file for file in files if text in repr(pq.read_table(file, partitioning=None).to_pylist())]


def shown(story: Story, spark: SparkSession) -> dict[int, tuple[Any, ...]]:
    table = story.workspace.dimension(story.contract).open()
    rows = table.read(spark, table.all_files()).collect()
    return {
        row["id"]: (row["title"], row["body"], row["_cdc_is_deleted"], sorted(row["_cdc_unresolved"] or ()))
        for row in rows
    }


def hashes(story: Story) -> dict[str, str]:
    found = {}
    for table in queried(story):
        snapshot = table.open()
        for window in snapshot.windows():
            state = snapshot.state(window)
            assert state is not None
            found[f"{table.spec.path} {window}"] = state.checkpoint.content_hash
    return found


def assert_counts_add_up(story: Story, *windows: str) -> None:
    for window in windows:
        state = story.workspace.deduped(SOURCE).open().state(window)
        assert state is not None
        counts = state.checkpoint
        assert counts.raw == counts.deduped + counts.duplicates + counts.quarantined > 0


def assert_checks_pass(story: Story, spark: SparkSession) -> None:
    explained = window_checks.replays_explained(story.workspace, SOURCE)
    assert explained.passed, explained.summary
    for check in (content_checks.no_unresolved_cells, content_checks.meets_contract):
        found = check(story.workspace, spark, story.contract)
        assert found.passed, found.summary
    for compare in (history_checks.open_rows_are_current_state, history_checks.versions_do_not_overlap):
        found = compare(story.workspace, spark, story.contract)
        assert found.passed, found.summary


# --- what is erased ------------------------------------------------------------------------------


def test_the_values_of_an_erased_row_are_in_no_file_that_people_query(deleted: Story, spark: SparkSession):
    everywhere = holding(deleted)
    assert everywhere == {
        "raw_cdc_staging",
        "deduped_events",
        "net_changes/notes",
        "dim_notes",
        "history/dim_notes_history",
    }
    done = erased(deleted)
    assert (done.keys, done.events, done.windows) == (1, 3, (FIRST, SECOND))
    assert done.stale_windows == [FIRST, SECOND]
    assert pending_windows(deleted.workspace, SOURCE).windows == (FIRST, SECOND)
    preview = preview_replay(deleted.workspace, spark, SOURCE, [FIRST, SECOND], [deleted.contract])
    run(deleted, spark)

    assert holding(deleted) == {"raw_cdc_staging"}
    assert shown(deleted, spark) == {
        1: (None, None, True, ["body", "title"]),
        2: ("two", "2", False, []),
    }
    assert pending_windows(deleted.workspace, SOURCE).nothing
    assert_counts_add_up(deleted, FIRST, SECOND)
    assert_checks_pass(deleted, spark)
    assert not preview.changes_nothing
    assert on_disk(deleted)
    for table in queried(deleted):
        sweep(table, timedelta(0))
    assert not on_disk(deleted)
    for window in (FIRST, SECOND):
        state = deleted.workspace.net_changes(deleted.contract).open().state(window)
        assert state is not None
        assert (state.checkpoint.changed_by, state.checkpoint.keys_changed) == (("erasure",), 1)
        judged = deleted.workspace.deduped(SOURCE).open().state(window)
        assert judged is not None and judged.checkpoint.changed_by == ("erasure",)


def test_the_same_command_sweeps_and_certifies_what_is_gone_and_what_remains(
    deleted: Story, spark: SparkSession, tmp_path: Path
):
    home, exported = deleted.workspace.home.path, tmp_path / "notes.csv"
    export(deleted.workspace, deleted.contract, exported, Format.CSV)
    held = {path for path in everything(home) if PERSON.encode() in content_of(path)}
    record = {path for path in held if {"landing", "raw_cdc_staging"} & {*path.parts}}
    tables = {"deduped_events", "net_changes/notes", "dim_notes", "history/dim_notes_history"}

    path, pending = certificate(deleted)
    assert (pending["state"], pending["asked"]["why"]) == ("pending", "request 7")
    assert {each["place"].removeprefix(f"{SOURCE}/") for each in pending["before"]} == tables
    assert {home / each["path"] for each in pending["before"]} == held - record
    assert all(each["sha256"] == sha256_of(home / each["path"]) for each in pending["before"])
    # BORN and RENAMED have three values beside the key, and so have the versions that they made.
    counts = {each["place"].partition("/")[2]: 0 for each in pending["before"]}
    for each in pending["before"]:
        counts[each["place"].partition("/")[2]] += each["count"]
    assert counts == {
        "deduped_events": 3,
        "net_changes/notes": 3,
        "dim_notes": 2,
        "history/dim_notes_history": 4,
    }
    assert {each["what"] for each in pending["remains"]} >= {"cells that can be read"}
    assert on_disk(deleted)

    run(deleted, spark)
    again, done = certificate(deleted)
    assert (again, done["state"]) == (path, "incomplete"), "landing and raw have the values"
    assert (done["asked"], done["before"]) == (pending["asked"], pending["before"])
    assert [(each["path"], each["sha256"], each["count"]) for each in done["after"]] == [
        (each["path"], None, 0) for each in pending["before"]
    ]
    assert {f"{SOURCE}/{each}" for each in tables} <= {
        each.rpartition("/g0")[0].partition("/window=")[0] for each in done["swept"]
    }
    assert {home / each["path"] for each in done["record"]} == record
    assert all(each["sha256"] == sha256_of(home / each["path"]) for each in done["record"])
    remains = {each["what"]: each["where"] for each in done["remains"]}
    assert remains["images in landing and raw"] == sorted(each["path"] for each in done["record"])
    assert remains["exports that were written before"] == [str(exported)]
    # Every byte of the home, and every decoded value.
    assert {path for path in everything(home) if PERSON.encode() in content_of(path)} == record
    assert "cells that can be read" not in remains and PERSON not in path.read_text()
    assert '["1"]' not in path.read_text() and path.stat().st_mode & 0o777 == 0o600
    assert shown(deleted, spark)[2] == ("two", "2", False, [])

    exported.write_text("edited")
    told = {each["what"]: each["where"] for each in certificate(deleted)[1]["remains"]}
    [changed] = told["exports that are not what was written, or not there any more"]
    assert changed.startswith(f"{exported} (SHA-256 ") and "exports that were written before" not in told


def test_a_contract_that_came_after_the_windows_were_judged_leaves_the_certificate_as_complete_as_it_is(
    deleted: Story, spark: SparkSession
):
    erased(deleted)
    run(deleted, spark)
    other = copy.deepcopy(CONTRACT)
    other["x-cdc"]["table"] = "places"
    (deleted.contracts / "places.json").write_text(json.dumps(other))
    deleted.workspace = open_workspace(deleted.workspace.home.path.parent)
    run_layers(deleted.workspace, spark)
    assert pending_windows(deleted.workspace, SOURCE).nothing
    _, done = certificate(deleted)
    assert "windows that wait to be judged" not in {each["what"] for each in done["remains"]}
    assert done["state"] == "incomplete"


def test_the_certificate_names_events_whose_key_could_not_be_read(deleted: Story, spark: SparkSession):
    erased(deleted)
    deleted.land(Commit(40, 63, [Change("u", None, {"title": PERSON, "body": "whose?"})]))
    run(deleted, spark)
    _, done = certificate(deleted)
    [where] = [
        each["where"]
        for each in done["remains"]
        if each["what"] == "events in quarantine whose key could not be read"
    ]
    [file] = where
    assert file.startswith(f"lake/{SOURCE}/quarantine/")
    assert PERSON.encode() in content_of(deleted.workspace.home.path / file)


def certificate(story: Story) -> tuple[Path, dict[str, Any]]:
    """Erase the row once more: the certificate, and what it says."""
    key = key_text(["1"])
    _, told = erase_row(story.workspace, story.contract, key, erased_by="ana", why="request 7")
    return told.path, json.loads(told.path.read_text())


def everything(home: Path) -> list[Path]:
    return [path for path in home.rglob("*") if path.is_file()]


def content_of(path: Path) -> bytes:
    """The bytes of a file, and the values that they stand for."""
    if path.suffix != ".parquet":
        return path.read_bytes()
    table = pq.read_table(path, partitioning=None)
    return path.read_bytes() + repr((table.to_pylist(), table.schema.metadata)).encode()


def test_the_ledger_knows_who_and_why_and_no_key(deleted: Story):
    erased(deleted)
    (entry,) = ErasureLedger.open(deleted.workspace, SOURCE).erasures
    assert (entry.erased_by, entry.why, entry.windows) == ("ana", "request 7", (FIRST, SECOND))
    assert entry.key_hash == hashlib.sha256(b'["1"]').hexdigest()
    assert (entry.span.after, entry.span.through) == (None, (1, 30, 0))
    # The command was killed before it wrote a certificate: who asked first has asked.
    _, told = erase_row(deleted.workspace, deleted.contract, key_text(["1"]), erased_by="bob", why="again")
    asked = json.loads(told.path.read_text())["asked"]
    assert (asked["by"], asked["why"]) == ("ana", "request 7")
    (file,) = deleted.workspace.erasures(SOURCE).folder.glob("*.parquet")
    entries = repr(pq.read_table(file).to_pylist())
    assert PERSON not in entries and '["1"]' not in entries


@pytest.mark.slow
def test_erased_once_more_nothing_is_written(deleted: Story, spark: SparkSession):
    assert look_up(deleted.workspace, deleted.contract, key_text(["1"])).before == ()
    first = erased(deleted)
    again = erased(deleted)
    run(deleted, spark)
    later = erased(deleted)
    assert again.before == later.before == first.recorded
    assert (again.recorded, later.recorded) == ((), ())
    assert (later.events, later.windows) == (first.events, first.windows)
    assert pending_windows(deleted.workspace, SOURCE).nothing


@pytest.mark.slow
def test_a_rebuild_from_landing_erases_the_same(deleted: Story, spark: SparkSession):
    erased(deleted)
    run(deleted, spark)
    before = hashes(deleted)
    for table in [*queried(deleted), deleted.workspace.raw(SOURCE)]:
        shutil.rmtree(table.folder)
    run(deleted, spark)
    assert hashes(deleted) == before
    assert holding(deleted) == {"raw_cdc_staging"}


@pytest.mark.slow
def test_late_events_of_an_erased_row_are_erased_in_whatever_window(deleted: Story, spark: SparkSession):
    erased(deleted)
    run(deleted, spark)
    deleted.land_again(BORN)
    deleted.land_again(Commit(25, 121, [Change("u", 1, {"title": f"late {PERSON}"}, unchanged=("body",))]))
    run(deleted, spark, (FIRST, SECOND, THIRD))
    assert holding(deleted) == {"raw_cdc_staging"}
    assert shown(deleted, spark)[1] == (None, None, True, ["body", "title"])
    assert_counts_add_up(deleted, FIRST, SECOND, THIRD)
    assert_checks_pass(deleted, spark)


def test_events_that_have_landed_and_are_not_judged_are_erased_with_the_row(
    deleted: Story, spark: SparkSession
):
    deleted.land_again(Commit(25, 121, [Change("u", 1, {"title": f"late {PERSON}"}, unchanged=("body",))]))
    done = erased(deleted)
    assert (done.windows, done.stale_windows) == ((FIRST, SECOND), [FIRST, SECOND, THIRD])
    run(deleted, spark, (FIRST, SECOND, THIRD))
    assert holding(deleted) == {"raw_cdc_staging"}


@pytest.mark.slow
def test_a_later_row_of_the_same_key_is_not_touched(deleted: Story, spark: SparkSession):
    erased(deleted)
    deleted.land(Commit(40, 63, [Change("c", 1, {"title": "another", "body": "new"})]))
    run(deleted, spark)
    assert shown(deleted, spark)[1] == ("another", "new", False, [])
    assert holding(deleted) == {"raw_cdc_staging"}
    assert_checks_pass(deleted, spark)
    with pytest.raises(ErasureRefused, match="lives at its source"):
        erased(deleted)


@pytest.mark.slow
def test_former_keys_of_the_row_are_erased_with_it(story: Story, spark: SparkSession):
    moves = [
        Change("d", 1),
        Change("c", 3, {"title": f"{PERSON} 3"}, unchanged=("body",), moved_from=1),
    ]
    story.land(BORN, Commit(20, 61, moves))
    back = [Change("d", 3), Change("c", 4, {"title": f"{PERSON} 4"}, unchanged=("body",), moved_from=3)]
    story.land(Commit(30, 62, back), Commit(40, 63, [Change("d", 4)]))
    # The first key of the row is another row's by now.
    story.land(Commit(50, 64, [Change("c", 1, {"title": "one", "body": "1"})]))
    run(story, spark)
    assert "its key was changed" in refused(story, 3)
    done = erased(story, 4)
    assert (done.keys, done.events) == (3, 6)
    run(story, spark)
    assert holding(story) == {"raw_cdc_staging"}
    assert shown(story, spark)[4] == (None, None, True, ["body", "title"])
    assert shown(story, spark)[1] == ("one", "1", False, [])
    assert_checks_pass(story, spark)


@pytest.mark.slow
def test_a_key_change_that_a_person_decided_against_is_none(story: Story, spark: SparkSession):
    def moved(old: int, title: str) -> Commit:
        return Commit(20, 61, [Change("d", 1), Change("c", 3, {"title": title, "body": "3"}, moved_from=old)])

    story.land(BORN)
    story.land(moved(1, "decided against"))
    story.land_again(moved(2, "released"))
    run(story, spark)
    assert "its key was changed" in refused(story, 1)
    released = titled(story, spark, "released")
    decide(story.workspace, SOURCE, "release", [released], reviewer="ana", why="looked at")
    run(story, spark)
    assert erased(story, 1).keys == 1


@pytest.mark.slow
def test_a_row_that_left_its_key_keeps_what_it_took_along(story: Story, spark: SparkSession):
    moves = [Change("d", 1), Change("c", 3, {"title": "moved"}, unchanged=("body",), moved_from=1)]
    first = [Change("c", 1, {"title": "one", "body": "taken along"})]
    story.land(Commit(10, 1, first), Commit(20, 2, moves))
    story.land(Commit(30, 61, [Change("c", 1, {"title": PERSON, "body": PERSON})]))
    story.land(Commit(40, 62, [Change("d", 1)]))
    run(story, spark)
    done = erased(story)
    assert (done.keys, done.events, done.windows) == (1, 2, (SECOND,))
    run(story, spark)
    assert holding(story) == {"raw_cdc_staging"}
    assert shown(story, spark)[3] == ("moved", "taken along", False, [])
    assert_checks_pass(story, spark)


@pytest.mark.slow
def test_what_a_truncate_ended_can_be_erased(story: Story, spark: SparkSession):
    story.land(BORN, RENAMED, Commit(30, 62, [Change("t")]))
    story.land(Commit(40, 63, [Change("c", 2, {"title": "two", "body": "2"})]))
    run(story, spark)
    assert "lives at its source" in refused(story, 2)
    (entry,) = erased(story).recorded
    assert entry.span.through == (1, 30, 0)
    run(story, spark)
    assert holding(story) == {"raw_cdc_staging"}
    assert shown(story, spark)[2] == ("two", "2", False, [])


@pytest.mark.slow
def test_a_quarantined_event_loses_its_values_and_keeps_its_name(story: Story, spark: SparkSession):
    story.land(BORN)
    # In a window of its own, against the order of the log.
    story.land(Commit(20, 61, [Change("u", 1, {"title": f"{PERSON} {'x' * 20}", "body": PERSON})]))
    story.land(Commit(30, 2, [Change("d", 1)]))
    run(story, spark)

    def quarantined() -> list[Any]:
        table = story.workspace.quarantine(SOURCE).open()
        return table.read(spark, table.all_files()).collect()

    (before,) = quarantined()
    assert "quarantine" in holding(story)
    erased(story)
    run(story, spark)
    (after,) = quarantined()
    assert holding(story) == {"raw_cdc_staging"}
    assert (after["event_hash"], after["rules"]) == (before["event_hash"], before["rules"])
    assert json.loads(after["after"]) == {"id": "1"}
    assert after["unchanged"] == ["body", "title"]
    assert_counts_add_up(story, FIRST, SECOND)
    assert_checks_pass(story, spark)


def test_a_lost_ledger_stops_judging_instead_of_bringing_the_values_back(
    deleted: Story, spark: SparkSession, tmp_path: Path
):
    erased(deleted)
    run(deleted, spark)
    ledger = deleted.workspace.erasures(SOURCE).folder
    ledger.rename(tmp_path / "lost")
    with pytest.raises(ErasuresLost, match="what was erased would come back") as error:
        run(deleted, spark)
    assert str(ledger) in str(error.value)
    assert holding(deleted) == {"raw_cdc_staging"}
    (tmp_path / "lost").rename(ledger)
    run(deleted, spark)
    assert holding(deleted) == {"raw_cdc_staging"}


# --- what is refused -----------------------------------------------------------------------------


def test_a_row_that_lives_is_refused(deleted: Story):
    told = refused(deleted, 2)
    assert "lives at its source" in told
    assert "Fix: Delete the row at the source" in told


def test_an_unknown_key_is_refused_without_being_repeated(deleted: Story):
    told = refused(deleted, 4711)
    assert "has no row with that key" in told
    assert "4711" not in told


def test_a_row_that_is_only_marked_as_deleted_is_refused(story: Story, spark: SparkSession):
    marks = {**CONTRACT, "x-cdc": {**CONTRACT["x-cdc"], "events": {"soft_delete_column": "body"}}}  # type: ignore[dict-item]
    story.write_contract(marks)
    story.workspace = open_workspace(story.workspace.home.path.parent)
    story.land(BORN)
    run(story, spark, (FIRST,))
    assert shown(story, spark)[1][2] is True
    assert "only marked as deleted (body)" in refused(story)


@pytest.mark.slow
def test_a_row_whose_end_is_in_doubt_is_refused(story: Story, spark: SparkSession):
    story.land(BORN, GONE)
    story.land_again(Commit(30, 62, [Change("d", 2)]))
    run(story, spark)
    assert "an event of it is in quarantine" in refused(story)


@pytest.mark.slow
def test_a_row_that_moved_to_another_key_is_refused(story: Story, spark: SparkSession):
    moves = [Change("d", 1), Change("c", 3, {"title": "3"}, unchanged=("body",), moved_from=1)]
    story.land(BORN, Commit(20, 61, moves))
    run(story, spark)
    told = refused(story)
    assert "its key was changed" in told
    assert "history/dim_notes_history" in told
    assert "lives at its source" in refused(story, 3)


@pytest.mark.parametrize(("by", "why"), [("", "because"), ("ana", "  ")])
def test_an_erasure_without_who_or_why_is_refused(deleted: Story, by: str, why: str):
    with pytest.raises(ErasureIncomplete):
        erase(deleted.workspace, deleted.contract, key_text(["1"]), erased_by=by, why=why)
    assert not deleted.workspace.erasures(SOURCE).exists
