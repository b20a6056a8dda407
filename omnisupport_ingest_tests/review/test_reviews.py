"""Reviewing quarantine: what is released becomes true, what is discarded stays withheld; both are noted."""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import content_checks
from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake.ledger import LedgerUnreadable
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.events.event_ref import EventRef, EventRefRefused
from omnisupport_ingest.layers.removed import BEGUN, RAW, Removal
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.retention.removing import _rows
from omnisupport_ingest.review.deciding import (
    Decided,
    ReviewIncomplete,
    ReviewRefused,
    decide,
    decide_undecided,
)
from omnisupport_ingest.review.quarantined import Filter, Quarantined, quarantined
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
    events,
)
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers
from omnisupport_ingest_tests.waiting import PATIENCE

INSERT = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})])
OTHER = Commit(10, 1, [Change("c", 1, {"title": "another", "body": "text"})])
UNREADABLE = "{not an image"


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path / "told")


def run(story: Story, spark: SparkSession, windows: Sequence[str] = (FIRST, SECOND)) -> None:
    run_layers(story.workspace, spark, windows)


def held(story: Story, **where: Any) -> list[Quarantined]:
    ledger = ReviewLedger.open(story.workspace, SOURCE)
    return quarantined(story.workspace, SOURCE, ledger, Filter(**where))


def review(
    story: Story, decision: str, *events: EventRef, by: str = "ana", why: str = "looked at"
) -> Decided:
    return decide(story.workspace, SOURCE, decision, events, reviewer=by, why=why)


def live(story: Story, spark: SparkSession) -> list[tuple[Any, ...]]:
    shown = story.workspace.dimension(story.contract).open()
    rows = shown.read(spark, shown.all_files()).where("NOT _cdc_is_deleted").orderBy("id").collect()
    return [(row["id"], row["title"], row["body"], list(row["_cdc_unresolved"] or ())) for row in rows]


def counts(story: Story, window: str = FIRST) -> tuple[int, int, int, int]:
    """raw, deduped, duplicates, quarantined."""
    state = story.workspace.deduped(SOURCE).open().state(window)
    assert state is not None
    found = state.checkpoint
    assert found.raw == found.deduped + found.duplicates + found.quarantined
    return found.raw, found.deduped, found.duplicates, found.quarantined


def content(story: Story, window: str = FIRST) -> str:
    state = story.workspace.deduped(SOURCE).open().state(window)
    assert state is not None
    return state.checkpoint.content_hash


def titled(story: Story, spark: SparkSession, title: str) -> EventRef:
    """The quarantined event that sets ``title``."""
    table = story.workspace.quarantine(SOURCE).open()
    (row,) = table.read(spark, table.all_files()).where(f"after LIKE '%\"{title}\"%'").collect()
    return EventRef.of(row["epoch"], row["commit_lsn"], row["ordinal"], row["event_hash"])


@dataclass(frozen=True)
class Collided:
    """A story of a collision that every layer has taken in; the two events, of one position."""

    story: Story
    one: EventRef
    another: EventRef


@pytest.fixture(scope="module")
def collided(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Collided:
    """Two contents at one position, an update above them that left a column out, and another window."""
    story = Story(tmp_path_factory.mktemp("collided") / "told")
    story.land(INSERT)
    story.land_again(OTHER)
    story.land(Commit(20, 2, [Change("u", 1, {"title": "three"}, unchanged=("body",))]))
    story.land(Commit(30, 61, [Change("c", 2, {"title": "two", "body": None})]))
    run(story, spark)
    return Collided(story, titled(story, spark, "one"), titled(story, spark, "another"))


@pytest.fixture
def collision(story: Story, collided: Collided) -> tuple[EventRef, EventRef]:
    """``story`` continues a copy of ``collided``."""
    folder, told = folder_of(story), collided.story
    shutil.rmtree(folder)
    shutil.copytree(folder_of(told), folder)
    story.workspace = open_workspace(folder)
    story.store = story.workspace.landing(SOURCE)
    story._ends = dict(told._ends)
    return collided.one, collided.another


def folder_of(story: Story) -> Path:
    return story.workspace.home.path.parent


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event_hash", "digits"),
    [(0x00AB34CD56EF7890, "00ab34cd56ef7890"), (-1, "f" * 16), (-(2**63), "8" + "0" * 15)],
)
def test_an_id_is_read_as_it_is_written(event_hash: int, digits: str):
    event = EventRef.of(1, 0x16B3748, -4, event_hash)
    assert str(event) == f"1:0/16B3748:-4#{digits}"
    assert EventRef.parse(str(event)) == event


@pytest.mark.parametrize(
    "text", ["", "1:0/A:4", "1:0/A:4#xyz", "1:0/A:4#00ab34cd56ef789", "4#00ab34cd56ef7890"]
)
def test_what_is_no_id_is_refused(text: str):
    with pytest.raises(EventRefRefused, match="is not the id of an event"):
        EventRef.parse(text)


# --- from quarantine to the dimension ------------------------------------------------------


def test_an_event_that_no_contract_describes_is_released_though_its_image_is_left_out(story, spark):
    """Where another table has a policy for personal data, quarantine has no image of it."""
    protected = copy.deepcopy(CONTRACT)
    protected["x-cdc"]["pii"] = {"title": {"policy": "drop", "note": "A test."}}
    story.write_contract(protected)
    story.workspace = open_workspace(folder_of(story))
    ends = [Lsn(end) for end in (0, 10, 11)]
    for before, end, commit in zip(ends[:-1], ends[1:], (INSERT, OTHER), strict=True):
        drafts = [each._replace(source_table="drafts") for each in events(commit)]
        story._seal(drafts, StreamSpan(before, end, end, end, 1, START, START))
    run(story, spark, (FIRST,))
    assert {(row.reason, row.table) for row in held(story)} == {("collision", "public.drafts")}
    review(story, "release", held(story)[0].event)
    run(story, spark, (FIRST,))
    assert counts(story) == (2, 1, 0, 1)


@pytest.mark.slow
def test_a_released_event_makes_its_window_stale_and_is_accepted_by_the_replay(story, spark, collision):
    one, another = collision
    assert counts(story) == (3, 1, 0, 2)
    assert live(story, spark) == [(1, "three", None, ["body"]), (2, "two", None, [])]
    assert pending_windows(story.workspace, SOURCE).windows == ()
    before, untouched = content(story), content(story, SECOND)
    assert [(row.reason, row.state) for row in held(story)] == [("collision", "open")] * 2

    decided = review(story, "release", one)
    assert decided.windows == [FIRST]
    assert [each.event for each in decided.beside] == [another]
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    states = {row.event: (row.state, row.waits) for row in held(story)}
    assert states == {one: ("released", True), another: ("open", False)}
    assert not checks.no_collisions(story.workspace, SOURCE).passed

    run(story, spark)
    assert counts(story) == (3, 2, 0, 1)
    assert live(story, spark) == [(1, "three", "text", []), (2, "two", None, [])]
    assert content(story) != before
    assert content(story, SECOND) == untouched
    assert pending_windows(story.workspace, SOURCE).windows == ()
    assert [(row.event, row.state, row.waits) for row in held(story)] == [(another, "open", False)]
    assert content_checks.no_unresolved_cells(story.workspace, spark, story.contract).passed
    assert checks.counts_add_up(story.workspace, SOURCE).passed


@pytest.mark.slow
def test_the_check_of_collisions_is_green_once_each_was_reviewed_and_judged_again(story, spark, collision):
    one, another = collision
    review(story, "release", one)
    run(story, spark)
    assert not checks.no_collisions(story.workspace, SOURCE).passed
    review(story, "discard", another)
    assert not checks.no_collisions(story.workspace, SOURCE).passed, "the lake does not show it yet"
    run(story, spark)
    found = checks.no_collisions(story.workspace, SOURCE)
    assert (found.passed, found.numbers) == (True, {"quarantined_collision": 1})

    # A third content at that position is for a person again.
    story.land_again(Commit(10, 1, [Change("c", 1, {"title": "third", "body": "text"})]))
    run(story, spark)
    assert not checks.no_collisions(story.workspace, SOURCE).passed
    assert live(story, spark)[0] == (1, "three", "text", [])


def test_a_discarded_event_stays_in_quarantine_and_stays_a_withheld(story, spark, collision):
    before = content(story)
    review(story, "discard", *collision)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    run(story, spark)
    assert counts(story) == (3, 1, 0, 2)
    assert content(story) == before
    assert live(story, spark)[0] == (1, "three", None, ["body"])
    assert [row.state for row in held(story)] == ["discarded"] * 2
    assert pending_windows(story.workspace, SOURCE).windows == ()
    assert checks.no_collisions(story.workspace, SOURCE).passed
    assert not content_checks.no_unresolved_cells(story.workspace, spark, story.contract).passed


@pytest.mark.slow
def test_a_discarded_event_is_never_accepted_though_its_contract_is_loosened(story, spark):
    withheld = [(key, None, None, ["title", "body"]) for key in (1, 2)]
    changes = [("c", 1, "much longer than twenty"), ("c", 2, "longer than any contract allows" * 9)]
    story.land(Commit(10, 1, [Change(op, key, {"title": title, "body": None}) for op, key, title in changes]))
    run(story, spark, (FIRST,))
    review(story, "discard", held(story)[0].event)
    run(story, spark, (FIRST,))
    looser = copy.deepcopy(CONTRACT)
    looser["properties"]["title"]["maxLength"] = 100
    story.write_contract(looser)
    story.workspace = open_workspace(folder_of(story))
    run(story, spark, (FIRST,))
    row, other = held(story)
    assert (row.reason, row.detector, row.state) == ("discarded_event", "review_ledger", "discarded")
    assert (other.reason, other.state) == ("row_rule", "open")
    assert (counts(story), live(story, spark)) == ((2, 0, 0, 2), withheld)
    # A day later just as many events wait, although a discarded one has another reason now.
    found = checks.quarantine_not_rising(story.workspace, SOURCE, datetime.now(UTC) + checks.RISES_WITHIN)
    assert (found.passed, found.numbers) == (True, {"events": 1})

    review(story, "release", row.event)
    run(story, spark, (FIRST,))
    assert (held(story), counts(story)) == ([other], (2, 1, 0, 1))
    # The contract would accept it now without a release.
    review(story, "discard", row.event)
    run(story, spark, (FIRST,))
    assert [each.reason for each in held(story)] == ["discarded_event", "row_rule"]
    assert (counts(story), live(story, spark)) == ((2, 0, 0, 2), withheld)


@pytest.mark.slow
def test_a_discard_of_a_copy_leaves_the_event_accepted(story, spark, tmp_path):
    table = default_decision_table().read_text()
    strict = tmp_path / "strict.csv"
    strict.write_text(
        table.replace("duplicate_position,dedupe_key,dedupe", "duplicate_position,dedupe_key,quarantine")
    )
    workspace = story.workspace
    story.workspace = replace(workspace, decisions=load_decision_table(strict))
    story.land(INSERT)
    story.land_again(INSERT)
    run(story, spark, (FIRST,))
    (row,) = held(story)
    assert row.reason == "duplicate_position"
    review(story, "discard", row.event)
    run(story, spark, (FIRST,))
    assert [(each.reason, each.state) for each in held(story)] == [("duplicate_position", "discarded")]
    assert counts(story) == (2, 1, 0, 1)
    # Without the copy, nobody can discard what was accepted without a release.
    story.workspace = workspace
    run(story, spark, (FIRST,))
    assert counts(story) == (2, 1, 1, 0)
    with pytest.raises(ReviewRefused, match="it is accepted, in window"):
        review(story, "discard", row.event)


@pytest.mark.slow
def test_the_last_decision_counts_and_the_ledger_keeps_all(story, spark, collision):
    one, another = collision
    review(story, "discard", one, by="ana", why="a test row")
    run(story, spark)
    review(story, "release", one, by="bo", why="no, it is real")
    run(story, spark)
    assert live(story, spark)[0] == (1, "three", "text", [])
    # It has left quarantine, and can be taken back all the same, and that too.
    review(story, "discard", one, by="cy", why="the wrong one")
    review(story, "release", one, by="cy", why="nobody has judged it yet")
    assert pending_windows(story.workspace, SOURCE).windows == (), "the window was judged by these decisions"
    review(story, "discard", one, by="cy", why="it was a test row")
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    run(story, spark)
    assert live(story, spark)[0] == (1, "three", None, ["body"])
    review(story, "release", another)
    with pytest.raises(ReviewRefused, match="stands at the same position with other content"):
        review(story, "release", one)
    run(story, spark)
    assert counts(story) == (3, 2, 0, 1)

    started = datetime.now(UTC)
    history = ReviewLedger.open(story.workspace, SOURCE).history(one)
    assert [(each.decision, each.reviewer, each.why) for each in history] == [
        ("discard", "ana", "a test row"),
        ("release", "bo", "no, it is real"),
        ("discard", "cy", "the wrong one"),
        ("release", "cy", "nobody has judged it yet"),
        ("discard", "cy", "it was a test row"),
    ]
    assert [each.sequence for each in history] == [1, 2, 3, 4, 5]
    assert all(each.reviewed_at <= started and each.reason == "collision" for each in history)
    assert history[0].reviewed_at < history[1].reviewed_at < history[2].reviewed_at


def test_a_repeated_decision_writes_nothing(story, spark, collision):
    one, another = collision
    review(story, "discard", one)
    version = DeltaTable(str(story.workspace.reviews(SOURCE).folder)).version()
    again = review(story, "discard", one, by="bo", why="once more")
    assert (again.recorded, [each.reviewer for each in again.unchanged]) == ((), ["ana"])
    assert DeltaTable(str(story.workspace.reviews(SOURCE).folder)).version() == version
    both = review(story, "discard", one, another)
    assert [each.event for each in both.recorded] == [another]
    assert DeltaTable(str(story.workspace.reviews(SOURCE).folder)).version() == version + 1


def test_the_same_decisions_have_the_same_digest_whatever_led_to_them(story, spark, collision):
    one, _ = collision
    assert ReviewLedger.open(story.workspace, SOURCE).digest(FIRST) is None
    review(story, "release", one)
    first = ReviewLedger.open(story.workspace, SOURCE)
    assert first.of_window(FIRST) == {one.key: "release"}
    assert first.of_window(SECOND) == {}
    review(story, "discard", one)
    assert ReviewLedger.open(story.workspace, SOURCE).digest(FIRST) != first.digest(FIRST)
    review(story, "release", one, by="somebody else")
    again = ReviewLedger.open(story.workspace, SOURCE)
    assert again.digest(FIRST) == first.digest(FIRST)
    assert again.windows() == [FIRST]


@pytest.mark.slow
def test_a_rebuild_of_the_window_from_landing_keeps_the_decision(story, spark, collision):
    review(story, "release", collision[0])
    run(story, spark)
    shown = live(story, spark)
    lake = story.workspace.home.lake / SOURCE
    for table in ("raw_cdc_staging", "deduped_events", "quarantine", "net_changes", "dim_notes"):
        shutil.rmtree(lake / table)
    run(story, spark)
    assert live(story, spark) == shown
    assert counts(story) == (3, 2, 0, 1)


# --- what is refused -----------------------------------------------------------------------------


def refused(story: Story, decision: str, *events: EventRef) -> str:
    with pytest.raises(ReviewRefused) as error:
        review(story, decision, *events)
    assert not ReviewLedger.open(story.workspace, SOURCE).reviews
    return str(error.value)


@pytest.mark.slow
def test_a_row_that_breaks_its_contract_cannot_be_released_only_discarded(story, spark):
    story.land(Commit(10, 1, [Change("c", 1, {"title": "much longer than twenty", "body": None})]))
    run(story, spark)
    (row,) = held(story)
    assert (row.reason, row.rules) == ("row_rule", ("title:max_length",))
    told = refused(story, "release", row.event)
    assert "It breaks its contract (public.notes: title:max_length)" in told
    assert "Fix: Change the contract of public.notes" in told
    assert "much longer" not in told
    review(story, "discard", row.event)
    run(story, spark)
    assert [each.state for each in held(story)] == ["discarded"]


@pytest.mark.slow
def test_a_row_that_waits_for_its_contract_cannot_be_released_either(story, spark):
    story.write_contract(CONTRACT | {"x-cdc": CONTRACT["x-cdc"] | {"evolution": "block"}})
    story.workspace = open_workspace(folder_of(story))
    story.land(Commit(10, 1, [Change("c", 1, {"title": "new", "body": None, "more": None})]))
    run(story, spark)
    (row,) = held(story)
    assert (row.reason, row.rules) == ("schema_mismatch", ("more:unknown_column",))
    message = refused(story, "release", row.event)
    assert "which says block (public.notes: more:unknown_column)" in message
    assert (
        "Fix: Let the contract follow: omnisupport-ingest contracts propose public.notes --write" in message
    )
    review(story, "discard", row.event)


def test_an_event_that_breaks_its_contract_besides_cannot_be_released_for_another_reason(story, spark):
    story.land(Commit(10, 1, [Change("c", 1, {"title": "much longer than twenty", "body": None})]))
    story.land_again(INSERT)
    run(story, spark)
    broken, sound = (titled(story, spark, title) for title in ("much longer than twenty", "one"))
    assert {row.reason for row in held(story)} == {"collision"}
    assert "It breaks its contract" in refused(story, "release", broken)
    assert review(story, "release", sound).windows == [FIRST]


@pytest.mark.slow
def test_an_unreadable_event_and_one_without_a_window_cannot_be_released(story, spark):
    story.land(Commit(10, 1, [Change("c", None, {"title": "one"})]))
    story.land(Commit(20, -90_000, [Change("d", 1)]))
    run(story, spark)
    malformed, out_of_range = held(story)
    assert (malformed.reason, out_of_range.reason) == ("malformed_image", "out_of_range")
    assert "Its row image or its key cannot be read." in refused(story, "release", malformed.event)
    assert "has no window in this lake" in refused(story, "release", out_of_range.event)
    both = refused(story, "release", malformed.event, out_of_range.event)
    assert both.startswith("2 of 2 events cannot be released, so nothing was recorded:")
    assert pending_windows(story.workspace, SOURCE).windows == ()

    review(story, "discard", malformed.event, out_of_range.event)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST, "out-of-range")
    run(story, spark)
    assert [row.state for row in held(story)] == ["discarded", "discarded"]
    assert pending_windows(story.workspace, SOURCE).windows == ()


def test_of_a_collision_one_event_can_be_released(story, spark, collision):
    one, another = collision
    told = refused(story, "release", one, another)
    assert f"{another} stands at the same position with other content" in told
    review(story, "release", one, by="ana")
    for replayed in (False, True):
        if replayed:
            run(story, spark)
        with pytest.raises(ReviewRefused) as error:
            review(story, "release", another, by="bo")
        assert f"{one} stands at the same position" in str(error.value)
        assert "was released by ana" in str(error.value)
        assert f"quarantine discard {one}" in str(error.value)
    review(story, "discard", one)
    assert review(story, "release", another).windows == [FIRST]


def test_one_event_that_cannot_be_released_holds_back_the_whole_command(story, spark, collision):
    unknown = EventRef.of(1, 999, 0, 5)
    told = refused(story, "release", collision[0], unknown)
    assert told.startswith("1 of 2 events cannot be released, so nothing was recorded:")
    assert "desk has no such event" in told


def test_an_event_that_is_no_longer_in_quarantine_is_told_where_it_is(story, spark, collision):
    one, _ = collision
    table = story.workspace.deduped(SOURCE).open()
    (row, _) = table.read(spark, table.all_files()).orderBy("commit_lsn").collect()
    accepted = EventRef.of(row["epoch"], row["commit_lsn"], row["ordinal"], row["event_hash"])
    for decision in ("release", "discard"):
        told = refused(story, decision, accepted)
        assert f"it is accepted, in window {FIRST} of desk/deduped_events" in told
    review(story, "release", one)
    run(story, spark)
    assert [each.event for each in review(story, "release", one).unchanged] == [one]


@pytest.mark.parametrize(("by", "why"), [("", "because"), ("ana", "  ")])
def test_a_decision_without_who_or_why_is_refused(story, by: str, why: str):
    with pytest.raises(ReviewIncomplete):
        review(story, "discard", EventRef.of(1, 10, 0, 5), by=by, why=why)
    assert not story.workspace.reviews(SOURCE).exists


# --- crashes, concurrency, damage ----------------------------------------------------------------

_RELEASE = """
import sys
from pathlib import Path
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.layers.events.event_ref import EventRef
from omnisupport_ingest_tests.recovery.pipeline import open_workspace
event = EventRef.parse(sys.argv[2])
decide(open_workspace(Path(sys.argv[1])), "desk", "release", [event], reviewer="ana", why="ok")
"""


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "times", "recorded"),
    [
        # The table is made once, and what is recorded is not written again.
        ("lake.table.after@review_ledger", 1, False),
        ("lake.commit.after@review_ledger", 1, True),
        *(
            (point, times, False)
            for times in (1, 3)
            for point in ("lake.ledger.before", "lake.ledger.after", "lake.commit.before@review_ledger")
        ),
    ],
)
def test_killed_while_deciding_loses_nothing_that_was_recorded(
    story, spark, collision, point: str, times: int, recorded: bool
):
    one, _ = collision
    command = [sys.executable, "-c", _RELEASE, str(folder_of(story)), str(one)]
    for _ in range(times):
        died = subprocess.run(command, env={**os.environ, VARIABLE: point}, check=False)
        assert died.returncode == -signal.SIGKILL
    assert bool(ReviewLedger.open(story.workspace, SOURCE).reviews) is recorded
    assert pending_windows(story.workspace, SOURCE).windows == ((FIRST,) if recorded else ())
    subprocess.run(command, check=True)
    assert len(ReviewLedger.open(story.workspace, SOURCE).reviews) == 1
    run(story, spark)
    assert live(story, spark)[0] == (1, "three", "text", [])
    assert counts(story) == (3, 2, 0, 1)


def _compete(folder: Path, event: str, start: Any, results: Any) -> None:
    workspace = open_workspace(folder)
    start.wait()
    try:
        decided = decide(
            workspace, SOURCE, "release", [EventRef.parse(event)], reviewer=event[-4:], why="race"
        )
        results.put((event, len(decided.recorded)))
    except ReviewRefused:
        results.put((event, "refused"))


def _race(folder: Path, events: Sequence[EventRef]) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(len(events)), context.Queue()
    racers = [context.Process(target=_compete, args=(folder, str(event), start, results)) for event in events]
    for racer in racers:
        racer.start()
    told = dict(results.get(timeout=PATIENCE) for _ in racers)
    for racer in racers:
        racer.join()
    return told


@pytest.mark.slow
def test_two_people_who_release_both_events_of_a_collision_at_once_release_one(story, spark, collision):
    told = _race(folder_of(story), collision)
    assert sorted(map(str, told.values())) == ["1", "refused"]
    (kept,) = ReviewLedger.open(story.workspace, SOURCE).reviews
    assert told[str(kept.event)] == 1
    run(story, spark)
    assert counts(story) == (3, 2, 0, 1)


@pytest.mark.slow
def test_releases_of_several_events_at_once_are_all_recorded(story, spark):
    story.land(INSERT, Commit(20, 2, [Change("c", 2, {"title": "two"})]))
    story.land(Commit(30, 3, [Change("d", 3)]), epoch=2)
    late = [Commit(40 + n, 4 + n, [Change("c", 10 + n, {"title": f"t{n}", "body": "b"})]) for n in range(3)]
    story.land(*late, epoch=1)
    run(story, spark)
    rows = held(story, reason="older_epoch")
    assert len(rows) == 3
    assert not checks.epochs_in_order(story.workspace, SOURCE).passed
    assert set(_race(folder_of(story), [row.event for row in rows]).values()) == {1}
    ledger = ReviewLedger.open(story.workspace, SOURCE)
    assert sorted(each.event for each in ledger.reviews) == sorted(row.event for row in rows)
    assert [each.sequence for each in ledger.reviews] == [1, 2, 3]
    run(story, spark)
    assert held(story) == []
    assert checks.epochs_in_order(story.workspace, SOURCE).passed


def test_the_ledger_cannot_be_changed_and_is_for_its_owner_alone(story, spark, collision):
    review(story, "discard", *collision)
    ledger = story.workspace.reviews(SOURCE)
    with pytest.raises(DeltaError):
        DeltaTable(str(ledger.folder)).delete()
    assert stat.S_IMODE(ledger.folder.stat().st_mode) == 0o700
    (file,) = ledger.folder.glob("*.parquet")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ledger.folder not in {table.folder for table in story.workspace.tables()}


def test_a_damaged_ledger_stops_judging_instead_of_forgetting_decisions(story, spark, collision):
    review(story, "release", collision[0])
    (file,) = story.workspace.reviews(SOURCE).folder.glob("*.parquet")
    file.write_bytes(b"")
    check = (
        "import sys; from pathlib import Path;"
        "from omnisupport_ingest.layers.reviews import ReviewLedger;"
        "from omnisupport_ingest_tests.recovery.pipeline import open_workspace;"
        "ReviewLedger.open(open_workspace(Path(sys.argv[1])), 'desk')"
    )
    done = subprocess.run(
        [sys.executable, "-c", check, str(folder_of(story))], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert LedgerUnreadable.__name__ in done.stderr
    assert file.name in done.stderr


# --- rising --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_quarantine_that_rises_names_its_reasons_until_the_events_are_discarded(story, spark, collision):
    first = datetime.now(UTC)

    def rising(at: datetime) -> tuple[bool, dict[str, int | float]]:
        found = checks.quarantine_not_rising(story.workspace, SOURCE, at)
        return found.passed, found.numbers

    assert rising(first) == (False, {"events": 2, "more_collision": 2})
    assert rising(first + checks.RISES_WITHIN) == (True, {"events": 2})

    story.land(Commit(40, 4, [Change("c", 4, {"title": "much longer than twenty", "body": None})]))
    run(story, spark)
    since_then = checks.quarantine_not_rising(story.workspace, SOURCE, first + checks.RISES_WITHIN)
    assert (since_then.passed, since_then.numbers) == (False, {"events": 3, "more_row_rule": 1})
    assert "row_rule 1 (+1)" in since_then.summary
    assert rising(datetime.now(UTC)) == (False, {"events": 3, "more_collision": 2, "more_row_rule": 1})

    (broken,) = held(story, reason="row_rule")
    review(story, "discard", broken.event)
    assert rising(first + checks.RISES_WITHIN) == (True, {"events": 2})
    run(story, spark)
    assert rising(first + checks.RISES_WITHIN) == (True, {"events": 2})
    assert rising(datetime.now(UTC) + checks.RISES_WITHIN) == (True, {"events": 2})


def test_a_quarantine_that_is_not_there_does_not_rise(story):
    assert checks.quarantine_not_rising(story.workspace, SOURCE, datetime.now(UTC)).passed


def test_a_decision_on_an_accepted_event_of_a_sealed_window_is_refused(
    story: Story, spark: SparkSession, collision: tuple[EventRef, EventRef]
) -> None:
    one, another = collision
    review(story, "release", one)
    run(story, spark, [FIRST])
    removal = Removal(RAW, FIRST, START, 1, 1, 1, "raw is kept for P10D", "test", datetime.now(UTC))
    story.workspace.removals(SOURCE).append(lambda _: _rows([removal], BEGUN))
    for event, decision in ((one, "discard"), (another, "discard"), (another, "release")):
        with pytest.raises(ReviewRefused, match=f"Window {FIRST} of {SOURCE} is sealed"):
            review(story, decision, event)
    assert review(story, "release", one).recorded == (), "it was released before"


def test_what_somebody_decided_meanwhile_stays_where_only_the_undecided_are_decided(
    story: Story, collision: tuple[EventRef, EventRef]
) -> None:
    one, another = collision
    review(story, "release", one, by="eve")
    both = [one, another]
    done = decide_undecided(story.workspace, SOURCE, "discard", both, reviewer="ana", why="a bad delivery")
    assert [each.event for each in done.recorded] == [another]
    assert [(each.event, each.reviewer) for each in done.left] == [(one, "eve")]
    done = decide_undecided(story.workspace, SOURCE, "discard", both, reviewer="ana", why="a bad delivery")
    assert (done.recorded, len(done.left)) == ((), 2)
