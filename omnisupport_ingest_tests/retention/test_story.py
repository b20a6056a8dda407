"""One story on real tables: landing is trimmed, a window sealed, and what arrives for it is withheld."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.checks.lake_checks import counts_add_up
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.event_files import EventFiles
from omnisupport_ingest.layers.removed import (
    BEGUN,
    DONE,
    GIVEN_UP,
    LANDING,
    RAW,
    Present,
    Removal,
    Removed,
    WindowSealed,
    refuse_sealed,
)
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.read.as_of import Reading
from omnisupport_ingest.read.overview import overview
from omnisupport_ingest.read.window_list import Stand, window_list
from omnisupport_ingest.retention import removing
from omnisupport_ingest.retention.forecast import disk_forecast
from omnisupport_ingest.retention.plan import Judged, plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.retention.rules import Answer
from omnisupport_ingest.review.erasing import key_text
from omnisupport_ingest.review.row_certificate import RowCertificate, erase_row
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
)

DAY = 24 * 3600
LAST = "2026-01-09T1200"
"""The window of an event that is committed eight days after the first."""


def told(folder: Path, retention: dict[str, str]) -> Story:
    story = Story(folder)
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"]["retention"] = retention
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    story.store = story.workspace.landing(SOURCE)
    story.clock = START + timedelta(days=60)
    return story


def put(lsn: int, second: float, title: str, *, id: int = 1, op: str = "u") -> Commit:
    return Commit(lsn, second, [Change(op, id, {"title": title, "body": "text"})])


def run(story: Story, spark, windows, *, replay: bool) -> None:  # type: ignore[no-untyped-def]
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    net_changes.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
    dimensions.update(story.workspace, spark, story.contract, "run")


def take_all(story: Story, spark) -> None:  # type: ignore[no-untyped-def]
    """Rounds of the sensors until nothing is pending; a round that changes nothing is a fault."""
    for _ in range(5):
        pending = pending_windows(story.workspace, SOURCE)
        if pending.nothing:
            return
        for windows, replay in ((pending.windows, False), (pending.late_windows, True)):
            if windows:
                run(story, spark, windows, replay=replay)
    raise AssertionError(f"still pending: {pending_windows(story.workspace, SOURCE)}")


def damaged(store: LandingStore, expected: Callable[[LandedPart], bool] = lambda _: True) -> int:
    """How many data files `landing verify` finds damaged. (A told source has no record of its epoch.)"""
    return sum(each.kind == "file" for each in check_landing(store, expected).damage)


def shown(story: Story) -> str:
    """The content hash of the dimension."""
    state = story.workspace.dimension(story.contract).open().state(WHOLE_TABLE)
    assert state is not None
    return state.checkpoint.content_hash


def rows(story: Story, spark) -> dict[int, tuple[str | None, tuple[str, ...]]]:  # type: ignore[no-untyped-def]
    table = story.workspace.dimension(story.contract).open()
    found = table.read(spark, table.all_files()).collect()
    return {row["id"]: (row["title"], tuple(row["_cdc_unresolved"] or ())) for row in found}


def test_old_windows_lose_landing_then_raw_and_the_dimension_stays_what_it_was(tmp_path, spark):
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    story.land(put(10, 1, "first", op="c"), put(20, 61, "second"))
    story.land(put(30, 8 * DAY, "a week on"))
    take_all(story, spark)
    before = shown(story)

    plan = plan_retention(story.workspace, SOURCE)
    assert [(each.layer, each.window, each.events) for each in plan.doomed] == [
        (LANDING, FIRST, 1),
        (LANDING, SECOND, 1),
    ]
    assert not Removed.open(story.workspace, SOURCE).removals, "a plan changes nothing"
    carried = carry_out(story.workspace, plan, removed_by="test")
    assert [(each.layer, each.windows, each.files) for each in carried] == [(LANDING, 2, 2)]
    assert carry_out(story.workspace, plan, removed_by="test") == []
    assert len([*story.store.folder.joinpath("data").rglob("*.parquet")]) == 1

    removed = Removed.open(story.workspace, SOURCE)
    present = Present(story.store, removed)
    assert damaged(story.store, present.has) == 0
    assert damaged(story.store) == 2
    assert pending_windows(story.workspace, SOURCE).nothing

    assert shown(story) == before
    # Raw is the record: a replay starts there, another version of the logic does not empty it.
    run(story, spark, (FIRST,), replay=True)
    replayed = story.workspace.deduped(SOURCE).open().state(FIRST)
    assert replayed is not None and replayed.generation > 1
    assert replayed.checkpoint.replaced_hash == replayed.checkpoint.content_hash
    assert shown(story) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "VERSIONS", ("logic:other",))
        assert raw.materialize(story.workspace, spark, SOURCE, (FIRST,), "again")[0].rows == 1
        # Only the window that landing has whole is made again for it.
        assert pending_windows(story.workspace, SOURCE).windows == (LAST,)

    # Ten days on, raw goes too; the younger windows stay whole.
    story.land(put(40, 11 * DAY, "later", id=2, op="c"))
    take_all(story, spark)
    before = shown(story)
    at = Workspace.open(story.workspace.settings)
    plan = plan_retention(at, SOURCE)
    assert {(each.layer, each.window) for each in plan.of(RAW)} == {(RAW, FIRST), (RAW, SECOND)}
    held = disk_forecast(at, story.clock)
    carry_out(at, plan, removed_by="test")
    assert not plan_retention(at, SOURCE).doomed
    left = disk_forecast(at, story.clock)
    assert 0 < left.layers["raw"] < held.layers["raw"] and left.layers["deduped"] == held.layers["deduped"]
    soon = disk_forecast(at, START + timedelta(days=1))
    assert soon.per_day is not None and soon.per_day > 0
    assert soon.days == pytest.approx(soon.free / soon.per_day, rel=1e-3)
    assert at.raw(SOURCE).open().files(FIRST) == ()
    assert pending_windows(story.workspace, SOURCE).nothing
    stands = {line.window: line.stand for line in window_list(story.workspace, SOURCE).windows}
    assert (stands[FIRST], stands[SECOND]) == (Stand.SEALED, Stand.SEALED)
    with pytest.raises(WindowSealed, match=f"{FIRST}.*left raw"):
        refuse_sealed(story.workspace, SOURCE, [FIRST])
    assert counts_add_up(story.workspace, SOURCE).passed
    lacking = {each.pending_windows for each in overview(story.workspace, SOURCE).tables}
    assert lacking == {0, None}
    assert rows(story, spark)[1] == ("a week on", ())
    old = {row["id"]: row["title"] for row in as_of_first(story, spark)}
    assert old == {1: "first"}

    # Neither a replay nor another decision table makes anything of a sealed window again.
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, (FIRST,), "again", replay=True)
    assert shown(story) == before
    assert rows(story, spark)[1] == ("a week on", ())

    # A copy of what is known there is withheld and changes nothing; a new event is unresolved, not lost.
    story.land_again(put(10, 1, "first", op="c"))
    story.land_again(put(15, 2, "never seen", id=3, op="c"))
    take_all(story, spark)
    state = story.workspace.deduped(SOURCE).open().state(FIRST)
    assert state is not None
    assert (state.checkpoint.deduped, state.checkpoint.quarantined) == (1, 2)
    assert dict(state.checkpoint.scenarios)["too_late_arrival"] == 2
    assert rows(story, spark)[1] == ("a week on", ())
    assert rows(story, spark)[3][1], "nobody knows what is in the row"
    assert pending_windows(story.workspace, SOURCE).late_windows == ()


def test_what_a_sealed_window_withholds_reaches_the_life_that_a_key_change_ended(tmp_path, spark):
    """Events from both sides of the key change come in one batch: the lower one must not be hidden."""
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    moved = [Change("d", 1), Change("c", 4, {"title": "moved"}, ("body",), moved_from=1)]
    story.land(put(10, 1, "first", op="c"), Commit(14, 5, moved), put(20, 9, "taken again", op="c"))
    story.land(put(30, 11 * DAY, "later", id=2, op="c"))
    take_all(story, spark)
    while doomed := plan_retention(story.workspace, SOURCE):
        if not carry_out(story.workspace, doomed, removed_by="test"):
            break
    assert FIRST in Removed.open(story.workspace, SOURCE).sealed
    assert rows(story, spark)[4] == ("moved", ())

    story.workspace = Workspace.open(story.workspace.settings)
    story.land_again(put(12, 3, "never seen"), put(22, 11, "never seen"))
    take_all(story, spark)
    assert rows(story, spark)[1] == (None, ("title", "body"))
    assert rows(story, spark)[4] == ("moved", ("body",))

    before = shown(story)
    net_changes.materialize(story.workspace, spark, story.contract, (FIRST,), "again", replay=True)
    dimensions.update(story.workspace, spark, story.contract, "again", whole=True)
    assert shown(story) == before


def as_of_first(story: Story, spark):  # type: ignore[no-untyped-def]
    """The state below the second event, as ``as_of`` folds it; the story has no snapshot that it asks for."""
    files = EventFiles.newest(story.workspace, SOURCE)
    assert files is not None
    reading = Reading((story.contract,), Position(1, Lsn(15), 0), files)
    return reading.table(spark, story.contract).collect()


def test_retention_refuses_what_waits_and_keeps_what_no_contract_gives_up(tmp_path, spark):
    story = told(tmp_path, {"landing": "P7D"})
    story.land(put(10, 1, "first", op="c"))
    story.land(put(30, 8 * DAY, "a week on"))
    refused = plan_retention(story.workspace, SOURCE).refused
    assert [(each.window, each.answer, each.why) for each in refused] == [
        (FIRST, Answer.REFUSED, "it is not closed")
    ]
    take_all(story, spark)
    assert [each.window for each in plan_retention(story.workspace, SOURCE).doomed] == [FIRST]


def test_a_row_is_erased_and_certified_before_and_after_retention_has_sealed_its_windows(tmp_path, spark):
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    story.land(put(10, 1, "first", op="c"), put(11, 2, "another", id=3, op="c"))
    story.land(Commit(20, 61, [Change("d", 1), Change("d", 3)]))
    take_all(story, spark)

    def certificate(id: int = 1) -> RowCertificate:
        at = Workspace.open(story.workspace.settings)
        return erase_row(at, story.contract, key_text([str(id)]), erased_by="ana", why="request 7")[1]

    assert certificate().state == "pending"
    take_all(story, spark)
    assert certificate().state == "incomplete", "landing and raw have the values"

    story.land(put(40, 11 * DAY, "later", id=2, op="c"))
    take_all(story, spark)
    at = Workspace.open(story.workspace.settings)
    carry_out(at, plan_retention(at, SOURCE), removed_by="test")
    assert {*Removed.open(at, SOURCE).of(RAW)} == {FIRST, SECOND}
    done = certificate()
    assert (done.state, done.cells) == ("complete", 0)
    # Retention had removed the files from raw, not from the disk; the command swept them.
    files = (at.home.lake / SOURCE / "raw_cdc_staging").rglob("*.parquet")
    shown = [str(pq.read_table(each, partitioning=None).to_pydict()) for each in files]
    assert shown and not any('"first"' in each for each in shown)
    assert "images in landing and raw" not in {each["what"] for each in done.remains}
    # The other row is erased too: the sealed windows are rewritten from themselves.
    assert certificate(3).state == "pending"
    assert rows(story, spark)[3][0] == "another"
    take_all(story, spark)
    done = certificate(3)
    assert (done.state, done.cells) == ("complete", 0)
    assert rows(story, spark)[3] == (None, ("title", "body"))
    assert rows(story, spark)[2] == ("later", ())
    assert counts_add_up(story.workspace, SOURCE).passed


@pytest.mark.parametrize("begun", [False, True], ids=["before it begins", "after it has begun"])
def test_an_erasure_after_the_plan_keeps_the_window_from_being_sealed_with_the_values(
    tmp_path, spark, monkeypatch, begun
):
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    story.land(put(10, 1, "first", op="c"), Commit(20, 2, [Change("d", 1)]))
    story.land(put(30, 61, "other", id=2, op="c"), put(40, 11 * DAY, "later", id=3, op="c"))
    take_all(story, spark)
    at = Workspace.open(story.workspace.settings)
    plan = plan_retention(at, SOURCE)
    assert {(each.layer, each.window) for each in plan.doomed} == {
        (layer, window) for layer in (LANDING, RAW) for window in (FIRST, SECOND)
    }

    def erase() -> None:
        erase_row(at, story.contract, key_text(["1"]), erased_by="ana", why="request 7")

    if begun:
        # The erasure is recorded between the look at the ledger and the one before the commit of raw.
        may_leave = Judged.may_leave

        def erased_now(judged: Judged, layer: str, window: str) -> bool:
            may = may_leave(judged, layer, window)
            if (layer, window) == (RAW, SECOND):
                erase()
            return may

        monkeypatch.setattr(Judged, "may_leave", erased_now)
    else:
        erase()
    carried = {each.layer: each.windows for each in carry_out(at, plan, removed_by="test")}
    assert carried == ({LANDING: 2, RAW: 1} if begun else {LANDING: 1, RAW: 1})
    removed = Removed.open(at, SOURCE)
    assert (removed.sealed, removed.unfinished) == ({SECOND}, ())
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    assert rows(story, spark)[1][0] is None
    at = story.workspace
    carry_out(at, plan_retention(at, SOURCE), removed_by="test")
    assert Removed.open(at, SOURCE).sealed == {FIRST, SECOND}
    assert erase_row(at, story.contract, key_text(["1"]), erased_by="ana", why="r")[1].state == "complete"


def test_a_removal_that_was_given_up_is_done_only_if_it_was_begun_again(tmp_path):
    workspace = told(tmp_path, {"landing": "P7D", "raw": "P10D"}).workspace
    removal = Removal(
        RAW, FIRST, START, 1, 1, 1, why="old", removed_by="test", removed_at=START + timedelta(days=20)
    )
    found = []
    for step in (BEGUN, GIVEN_UP, DONE, BEGUN, DONE, BEGUN):
        workspace.removals(SOURCE).append(lambda _, step=step: removing._rows([removal], step))
        removed = Removed.open(workspace, SOURCE)
        found.append((len(removed.removals), len(removed.unfinished)))
    # The last one: a removal that is begun is not done because an earlier one was.
    assert found == [(1, 1), (0, 0), (0, 0), (1, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("when", ["before the commit", "during the commit"])
def test_a_removal_that_another_process_gives_up_meanwhile_is_left_or_recorded(
    tmp_path, spark, monkeypatch, when
):
    story = told(tmp_path, {"landing": "P7D", "raw": "P10D"})
    story.land(put(10, 1, "first", op="c"), put(20, 61, "second", id=2, op="c"))
    story.land(put(30, 11 * DAY, "later", id=3, op="c"))
    take_all(story, spark)
    at = Workspace.open(story.workspace.settings)

    def give_up() -> None:
        begun = Removed.open(at, SOURCE).of(RAW)[FIRST]
        at.removals(SOURCE).append(lambda _: removing._rows([begun], GIVEN_UP))

    if when == "before the commit":
        checked = removing._Remover._without_reopened

        def given_up_next(remover, removals):
            left = checked(remover, removals)
            if left:
                give_up()
            return left

        monkeypatch.setattr(removing._Remover, "_without_reopened", given_up_next)
    else:
        emptied = removing._emptied

        def given_up_then(snapshot, judged, window):
            if window == FIRST:
                give_up()
            return emptied(snapshot, judged, window)

        monkeypatch.setattr(removing, "_emptied", given_up_then)
    carried = {each.layer: each.windows for each in carry_out(at, plan_retention(at, SOURCE), removed_by="a")}
    monkeypatch.undo()
    removed, kept = Removed.open(at, SOURCE), bool(at.raw(SOURCE).open().files(FIRST))
    assert removed.unfinished == ()
    if when == "before the commit":
        assert kept and removed.sealed == {SECOND} and carried == {LANDING: 2, RAW: 1}
    else:
        # Its events are gone, and the record names them.
        assert not kept and removed.sealed == {FIRST, SECOND}
    carry_out(at, plan_retention(at, SOURCE), removed_by="a")
    assert Removed.open(at, SOURCE).sealed == {FIRST, SECOND}
    assert not at.raw(SOURCE).open().files(FIRST)
