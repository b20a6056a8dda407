"""Erasures reach sealed windows: their events are rewritten, and all tables above follow."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.cdc.erasing import Erasures
from omnisupport_ingest.checks.lake_checks import counts_add_up
from omnisupport_ingest.contracts.subject_keys import FILE, SubjectKeys
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.events.quarantine_files import QuarantineFiles
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.removed import Removed
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.erasing import key_text
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.review.row_certificate import erase_row
from omnisupport_ingest.review.sealed_windows import _ErasedValues, erase_in_sealed_windows
from omnisupport_ingest.review.subject_erasure import SubjectErased, erase_subject, look_up_subject
from omnisupport_ingest.sources.encrypting import EncryptedLanding
from omnisupport_ingest_tests.cdc.test_decrypting import ENCRYPTED
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit, Story
from omnisupport_ingest_tests.retention.test_killed import killed, opened
from omnisupport_ingest_tests.retention.test_story import DAY, rows, take_all
from omnisupport_ingest_tests.review.test_subject_erasure import document

TOO_LONG = "Ada, longer than the contract allows"

ERASE = """
import sys
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.row_certificate import erase_row
from omnisupport_ingest.review.subject_erasure import erase_subject
from omnisupport_ingest.settings import Settings
home, contracts, key = sys.argv[1:4]
settings = Settings(home=home, contracts_dir=contracts, window="minutes:1", _env_file=None)
workspace = Workspace.open(settings)
(contract,) = workspace.contracts.of_source("desk")
erase = erase_subject if key == '["1"]' else erase_row
erase(workspace, contract, key, erased_by="ana", why="request 7")
"""


def with_spark(story: Story, spark: SparkSession) -> None:
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    history.materialize(story.workspace, spark, story.contract, "run")


def stored(story: Story) -> LandingStore:
    home = story.workspace.home
    landing = EncryptedLanding(SOURCE, SubjectKeys(home.path / FILE), lambda: [story.contract])
    return LandingStore(home.landing, SOURCE, as_landed=landing, divisions_as_landed=landing.divisions)


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Rows 1 and 2 live, row 3 has ended, and an event of row 1 was discarded; their window is sealed."""
    story, contract = Story(tmp_path_factory.mktemp("sealed")), document()
    contract["x-cdc"]["retention"] = {"landing": "P7D", "raw": "P10D"}
    story.write_contract(contract)
    story.workspace = Workspace.open(story.workspace.settings)
    story.store, story.clock = stored(story), START + timedelta(days=60)
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": "one", "body": "Ada"})]),
        Commit(11, 2, [Change("c", 2, {"title": "two", "body": "Eve"})]),
        Commit(12, 3, [Change("c", 3, {"title": "three", "body": "Bob"})]),
        Commit(13, 4, [Change("u", 1, {"title": TOO_LONG, "body": "Ada withheld"})]),
        Commit(14, 5, [Change("u", 1, {"title": "one again", "body": "Ada"})]),
        Commit(15, 6, [Change("d", 3)]),
    )
    story.land(Commit(30, 11 * DAY, [Change("c", 4, {"title": "four", "body": "Kim"})]))
    with_spark(story, spark)
    (row,) = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    decide(story.workspace, SOURCE, "discard", [row.event], reviewer="ana", why="looked at")
    with_spark(story, spark)
    carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
    assert Removed.open(story.workspace, SOURCE).sealed == {FIRST}
    return story


@pytest.fixture
def story(sealed: Story, tmp_path: Path) -> Story:
    return sealed.copied(tmp_path / "copy")


def events(story: Story) -> str:
    """All that the newest versions of the two tables of events hold of the sealed window."""
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None and files.deduped is not None
    held = (*files.deduped.files(FIRST), *files.of(FIRST))
    return str([pq.ParquetFile(file.uri).read().to_pylist() for file in held])


def in_lake(story: Story, text: str) -> list[str]:
    """The data files of the lake, of former versions too, that have ``text``."""
    found = []
    for file in (story.workspace.home.lake).rglob("*.parquet"):
        if text in str(pq.ParquetFile(file).read().to_pylist()):
            found.append(str(file))
    return found


def erased(story: Story) -> SubjectErased:
    return erase_subject(story.workspace, story.contract, key_text(["1"]), erased_by="ana", why="request 7")


def test_a_subject_is_erased_from_sealed_windows_and_all_tables_above_follow(
    story: Story, spark: SparkSession
) -> None:
    assert look_up_subject(story.workspace, story.contract, key_text(["1"])).cells > 0
    first = erased(story)
    assert (first.complete, first.waiting, first.sealed) == (False, (FIRST,), ())
    assert "Ada" not in events(story).replace(TOO_LONG, "")
    assert "Eve" in events(story) and "Bob" in events(story)
    with_spark(story, spark)
    done = erased(story)
    assert (done.complete, done.cells) == (True, 0), done.remains
    assert in_lake(story, "'Ada'") == [] == in_lake(story, "Ada withheld")
    shown = rows(story, spark)
    assert {row: shown[row] for row in (1, 2, 4)} == {
        1: ("one again", ()),
        2: ("two", ()),
        4: ("four", ()),
    }
    assert counts_add_up(story.workspace, SOURCE).passed
    assert pending_windows(story.workspace, SOURCE).nothing
    state = story.workspace.deduped(SOURCE).open().state(FIRST)
    assert state is not None and state.checkpoint.changed_by == ("destroyed key",)
    # A rebuild from what is left gives the same.
    again = history.materialize(story.workspace, spark, story.contract, "run", replay=True)
    assert in_lake(story, "'Ada'") == [] and again.rows


def test_an_older_file_of_keys_is_noticed_and_the_repeated_command_names_the_sealed_window_again(
    story: Story,
) -> None:
    keys = story.workspace.subjects.path
    older = keys.read_bytes()
    erased(story)
    state = story.workspace.deduped(SOURCE).open().state(FIRST)
    keys.write_bytes(older)
    erase_in_sealed_windows(story.workspace, SOURCE)
    assert story.workspace.deduped(SOURCE).open().state(FIRST) == state
    erased(story)
    destroyed = story.workspace.subjects.destroyed_by_window(SOURCE)
    assert state is not None and f"subject_keys:{destroyed[FIRST]}" in state.versions


@pytest.mark.crash
@pytest.mark.parametrize("key", ["1", "3"], ids=["subject", "row"])
@pytest.mark.parametrize(
    "point",
    [
        "lake.place.before@deduped_events",
        "lake.commit.before@quarantine",
        "lake.commit.after@quarantine",
        "lake.commit.before@deduped_events",
        "lake.commit.after@deduped_events",
    ],
)
def test_a_command_killed_at_a_failpoint_is_ended_by_the_next(story: Story, point: str, key: str) -> None:
    if key == "3" and "@quarantine" in point:
        pytest.skip("no event of this row is in quarantine")
    home, name = story.workspace.home.path, key_text([key])
    killed(ERASE, point, home, story.contracts, name)
    story.workspace = opened(home, story.contracts)
    if key == "1":
        assert not erased(story).complete
    else:
        row = erase_row(story.workspace, story.contract, name, erased_by="bob", why="again")[1]
        assert row.pending
        document = json.loads(row.path.read_text())
        assert document["asked"]["by"] == "ana" and FIRST in document["windows"]
    assert ("Bob" if key == "3" else "Ada withheld") not in events(story)
    files = QuarantineFiles.newest(story.workspace, SOURCE)
    assert files is not None and files.unsettled(FIRST) is None
    version = story.workspace.deduped(SOURCE).open().version
    erase_in_sealed_windows(story.workspace, SOURCE)
    assert story.workspace.deduped(SOURCE).open().version == version


def test_what_landed_plain_goes_whole_with_its_line_and_columns_that_nobody_named(tmp_path: Path) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    keys.destroy([each.id for each in keys.keys_of([("desk", "person", "2")])])
    contract = replace(ENCRYPTED, source="desk")
    images = [{"id": each, "owner": "Ada", "email": "ada@example.org"} for each in ("1", "2")]
    rows = pa.table(
        {
            "op": ["c"] * 2,
            "source_schema": [contract.schema] * 2,
            "source_table": [contract.table] * 2,
            "key": ['["1"]', '["2"]'],
            "identity": pa.array([None, None], pa.string()),
            "before": pa.array([None, None], pa.string()),
            "after": [json.dumps(each, separators=(",", ":")) for each in images],
            "envelope": [json.dumps({"op": "c", "after": each}) for each in images],
        }
    )
    left = _ErasedValues("desk", [contract], Erasures(), keys).removed(rows)
    assert left is not None
    kept, erased = left.to_pylist()
    assert kept == rows.to_pylist()[0]
    assert json.loads(erased["after"]) == {"id": "2", "owner": None, "email": None}
    assert erased["envelope"] is None


UNREAD = {
    "an image that cannot be read": ('["2"]', "Ada {", None),
    "a line": ('["1"]', None, json.dumps({"op": "d", "before": {"id": 2, "email": "Ada"}})),
    "a key": ('["2"]', None, "Ada; a line that cannot be read"),
}


@pytest.mark.parametrize(("key", "after", "line"), UNREAD.values(), ids=UNREAD.keys())
def test_what_only_a_key_or_a_line_says_to_be_of_the_subject_goes_too(
    tmp_path: Path, key: str, after: str | None, line: str | None
) -> None:
    keys = SubjectKeys(tmp_path / "keys" / "subjects.sqlite")
    keys.destroy([each.id for each in keys.keys_of([("desk", "person", "2")])])
    contract = replace(ENCRYPTED, source="desk")
    row = {"op": "u", "source_schema": contract.schema, "source_table": contract.table, "key": key}
    row |= {"identity": None, "before": None, "after": after, "envelope": line}
    rows = pa.Table.from_pylist([row], schema=pa.schema([(name, pa.string()) for name in row]))
    left = _ErasedValues("desk", [contract], Erasures(), keys).removed(rows)
    assert left is not None and left.to_pylist() == [row | {"after": None, "envelope": None}]
