"""Net changes of sealed windows lose superseded rows, and every table goes on as if they had kept them."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.retention.keeping import NET_CHANGES
from omnisupport_ingest.retention.old_files import sweep_old_files
from omnisupport_ingest.retention.plan import plan_retention
from omnisupport_ingest.retention.removing import carry_out
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.quarantined import quarantined
from omnisupport_ingest.windows import OUT_OF_RANGE
from omnisupport_ingest_tests.cli.command import command, environment
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
from omnisupport_ingest_tests.retention.test_killed import REMOVE, killed, opened
from omnisupport_ingest_tests.retention.test_story import (
    DAY,
    as_of_first,
    put,
    rows,
    run,
    shown,
    take_all,
    told,
)

KEPT = {"landing": "P7D", "raw": "P10D", "net_changes": "P10D"}
LATER = 20 * DAY


def apply(story: Story) -> dict[str, int]:
    """Retention, as often as it has something to do: what one call seals the next may thin. By layer."""
    windows: dict[str, int] = {}
    for _ in range(4):
        carried = carry_out(story.workspace, plan_retention(story.workspace, SOURCE), removed_by="test")
        if not carried:
            return windows
        for each in carried:
            windows[each.layer] = windows.get(each.layer, 0) + each.windows
    raise AssertionError("retention does not come to an end")


def held(workspace: Workspace, *windows: str) -> list[int]:
    """How many rows of net changes each window has."""
    snapshot = workspace.net_changes(workspace.contracts.of_source(SOURCE)[0]).open()
    return [sum(file.rows for file in snapshot.files(window)) for window in windows]


def everything(story: Story, spark) -> list[str]:  # type: ignore[no-untyped-def]
    """The rows of the dimension, but for when they landed."""
    table = story.workspace.dimension(story.contract).open()
    found = table.read(spark, table.all_files())
    names = [n for n in found.columns if n not in ("_cdc_ingested_at", "_cdc_batch_id", "_cdc_state")]
    return sorted(map(str, found.select(*(f"`{name}`" for name in names)).collect()))


def hashes(story: Story, spark) -> list[str]:  # type: ignore[no-untyped-def]
    """The content of dimension and history, both made again from nothing but what the layers above have."""
    whole = dimensions.update(story.workspace, spark, story.contract, "again", whole=True)
    again = history.materialize(story.workspace, spark, story.contract, "again", replay=True)
    return [whole.content_hash, again.content_hash]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory, spark) -> Story:  # type: ignore[no-untyped-def]
    """A story with two sealed windows, the second of which supersedes a row of the first, and a young one."""
    story = told(tmp_path_factory.mktemp("sealed"), KEPT)
    story.land(put(10, 1, "first", op="c"), put(11, 2, "second", id=2, op="c"), put(20, 61, "changed"))
    story.land(put(21, 62, "once", id=3, op="c"))
    story.land(put(30, LATER, "later", id=2))
    take_all(story, spark)
    history.materialize(story.workspace, spark, story.contract, "run")
    first = plan_retention(story.workspace, SOURCE)
    assert not first.rows
    told_why = {each.why for each in first.refused if each.layer == NET_CHANGES}
    assert told_why == {"raw has its events, and it may be judged again (public.notes)"}
    carry_out(story.workspace, first, removed_by="test")
    return story


def copied(story: Story, folder: Path) -> Story:
    """The same story in a home of its own."""
    copy = Story.__new__(Story)
    copy.__dict__.update(story.__dict__)
    shutil.copytree(story.workspace.settings.home, folder, symlinks=True)
    copy.workspace = opened(folder, story.contracts)
    copy.store = copy.workspace.landing(SOURCE)
    copy._ends = dict(story._ends)
    return copy


def test_superseded_rows_leave_and_dimension_history_and_as_of_made_again_are_what_they_were(
    sealed, tmp_path, spark
):
    story = copied(sealed, tmp_path / "home")
    before, dimension = hashes(story, spark), shown(story)
    old = str(as_of_first(story, spark))
    (planned,) = plan_retention(story.workspace, SOURCE).rows
    assert (planned.table, planned.windows, planned.files, planned.rows) == ("notes", (FIRST,), 1, 1)
    assert held(story.workspace, FIRST, SECOND) == [2, 2]
    state = story.workspace.net_changes(story.contract).open().state(FIRST)

    assert apply(story) == {NET_CHANGES: 1}
    assert held(story.workspace, FIRST, SECOND) == [1, 2]
    thinned = story.workspace.net_changes(story.contract).open().state(FIRST)
    assert state is not None and thinned is not None
    assert thinned.same_work(state) and thinned.checkpoint.content_hash == state.checkpoint.content_hash
    assert pending_windows(story.workspace, SOURCE).nothing
    assert dimensions.update(story.workspace, spark, story.contract, "run").content_hash == dimension
    assert hashes(story, spark) == before
    assert str(as_of_first(story, spark)) == old
    sweep_old_files(story.workspace, SOURCE)

    # What comes late for the window has it folded again from all of its events.
    story.land_again(put(35, 3, "never seen"))
    story.workspace = Workspace.open(story.workspace.settings)
    take_all(story, spark)
    assert held(story.workspace, FIRST) == [2]
    assert rows(story, spark)[1] == (None, ("title", "body"))
    made = story.workspace.net_changes(story.contract).open().state(FIRST)
    assert made is not None and made.carried == "" and made.checkpoint.keys_changed is None
    assert apply(story) == {}, "nothing supersedes the row that the late event is in"


def test_a_history_made_again_without_the_deduped_events_of_an_old_window_lacks_rows_that_live(
    sealed, tmp_path, spark
):
    """Why they are never removed by age: a version that is open today may have begun in any window."""
    story = copied(sealed, tmp_path / "home")
    deduped = story.workspace.deduped(SOURCE).open()
    state = deduped.state(SECOND)
    assert state is not None
    deduped.commit([WindowChange(SECOND, (), deduped.files(SECOND), state, replaces=False)])
    history.materialize(story.workspace, spark, story.contract, "again", replay=True)
    table = story.workspace.history(story.contract).open()
    versions = table.read(spark, table.all_files()).where("_cdc_valid_to IS NULL").collect()
    assert {row["id"] for row in versions} == {1, 2}
    assert rows(story, spark).keys() == {1, 2, 3}


def test_a_window_with_few_superseded_rows_is_not_written_again(tmp_path, spark):
    story = told(tmp_path, KEPT)
    story.land(*(put(10 + id, id, "first", id=id, op="c") for id in range(1, 4)), put(20, 61, "changed"))
    story.land(put(30, LATER, "later", id=9, op="c"))
    take_all(story, spark)
    assert NET_CHANGES not in apply(story)
    assert held(story.workspace, FIRST, SECOND) == [3, 1]


def test_rows_stay_below_an_event_that_may_still_be_released(tmp_path, spark):
    """A key change out of range would take its columns from just below itself."""
    story = told(tmp_path, KEPT)
    story.land(put(10, 1, "first", op="c"), Commit(15, 100 * DAY, [Change("d", 1)]))
    story.land(put(20, 61, "changed", op="c"), put(30, LATER, "later", id=2, op="c"))
    run(story, spark, [w for w in story.store.windows() if w != OUT_OF_RANGE], replay=False)
    take_all(story, spark)
    assert OUT_OF_RANGE in story.store.windows()
    assert NET_CHANGES not in apply(story)
    assert held(story.workspace, FIRST, SECOND) == [1, 1]


def test_rows_stay_while_a_window_between_waits_to_be_folded_by_another_contract(tmp_path, spark):
    """By the new contract its key change did not send every column, and takes one from the row below."""
    story = told(tmp_path, {each: KEPT[each] for each in ("landing", "raw")})
    whole = {"title": "first", "body": "text", "extra": "kept"}
    moved = Change("c", 5, {"title": "first", "body": "text"}, unchanged=("extra",), moved_from=1)
    story.land(Commit(10, 1, [Change("c", 1, whole)]), Commit(11, 61, [Change("d", 1), moved]))
    story.land(Commit(12, 121, [Change("c", 1, {**whole, "extra": "new"})]), put(30, LATER, "later", id=2))
    take_all(story, spark)
    apply(story)
    document = copy.deepcopy(CONTRACT)
    document["x-cdc"] |= {"retention": KEPT, "version": "1.1.0"}  # type: ignore[operator]
    document["properties"]["extra"] = CONTRACT["properties"]["body"]  # type: ignore[index]
    story.write_contract(document)
    story.workspace = Workspace.open(story.workspace.settings)
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST, THIRD], "run")
    assert NET_CHANGES not in apply(story)
    take_all(story, spark)
    table = story.workspace.dimension(story.contract).open()
    found = {row["id"]: row["extra"] for row in table.read(spark, table.all_files()).collect()}
    assert (found[5], found[1]) == ("kept", "new")


@pytest.mark.crash
@pytest.mark.parametrize(
    "point",
    [
        "lake.write.after@desk/net_changes/notes",
        "lake.place.after@desk/net_changes/notes",
        "lake.state.after",
        "lake.commit.before@net_changes",
        "lake.commit.after@net_changes",
    ],
)
def test_a_removal_killed_at_a_gate_changes_nothing_or_all_and_the_next_call_ends_it(
    sealed, tmp_path, spark, point
):
    story = copied(sealed, tmp_path / "home")
    before = shown(story)
    killed(REMOVE, point, tmp_path / "home", story.contracts)
    story.workspace = opened(tmp_path / "home", story.contracts)
    assert pending_windows(story.workspace, SOURCE).nothing
    apply(story)
    assert held(story.workspace, FIRST, SECOND) == [1, 2]
    whole = dimensions.update(story.workspace, spark, story.contract, "run", whole=True)
    assert whole.content_hash == before


def test_the_command_line_shows_what_would_leave(sealed, tmp_path):
    copied(sealed, tmp_path / "home")
    with environment(home=str(tmp_path / "home"), contracts_dir=str(sealed.contracts), window="minutes:1"):
        said = command("retention", "plan").out
        assert "net changes of notes, kept P10D: 1 superseded row to go" in said and FIRST in said
        assert "removed from net_changes: 1 window, 1 file" in command("retention", "apply", "--yes").out
        assert "superseded" not in command("retention", "plan").out


def transactions(chance: random.Random, lsns: Sequence[int], since: float, step: float) -> list[Commit]:
    """Random changes of a few keys: whole rows most, unsent columns, key changes, truncates, broken rules."""
    made = []
    for number, lsn in enumerate(lsns):
        changes: list[Change] = []
        for _ in range(chance.randint(1, 3)):
            id = chance.randint(1, 8)
            text = {"title": f"t{chance.randint(0, 99)}", "body": f"b{chance.randint(0, 99)}"}
            kind = chance.random()
            if kind < 0.25:
                changes.append(Change("c", id, text))
            elif kind < 0.65:
                changes.append(Change("u", id, text))
            elif kind < 0.77:
                changes.append(Change("u", id, {"title": text["title"]}, unchanged=("body",)))
            elif kind < 0.87:
                changes.append(Change("d", id))
            elif kind < 0.94:
                to = chance.choice([each for each in range(1, 9) if each != id])
                changes.append(Change("d", id))
                moved = {"title": text["title"]}
                changes.append(Change("c", to, moved, unchanged=("body",), moved_from=id))
            elif kind < 0.96:
                changes.append(Change("t"))
            else:
                changes.append(Change("u", id, {"title": "x" * 30, "body": "too long a title"}))
        made.append(Commit(lsn, since + number * step, changes))
    return made


def discard_all(story: Story, spark) -> None:  # type: ignore[no-untyped-def]
    """Every event that waits for a person is discarded, so that its window may be sealed."""
    waiting = quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))
    refs = [each.event for each in waiting if each.state == "open"]
    if refs:
        decide(story.workspace, SOURCE, "discard", refs, reviewer="ana", why="a test")
        story.workspace = Workspace.open(story.workspace.settings)
        take_all(story, spark)


@pytest.mark.drawn(1)
@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_events_replays_and_another_contract_give_what_they_give_where_all_rows_stayed(tmp_path, spark, seed):
    chance = random.Random(seed)
    old, young = (
        transactions(chance, range(10, 34), 1, 13),
        transactions(chance, range(40, 48), LATER, 25),
    )
    more, late = (
        transactions(chance, range(60, 68), LATER + 400, 25),
        transactions(chance, range(100, 103), 30, 60),
    )
    thin = told(tmp_path / "thin", KEPT)
    whole = told(tmp_path / "whole", {each: KEPT[each] for each in ("landing", "raw")})
    for story in (thin, whole):
        story.land(*old)
        story.land(*young)
        take_all(story, spark)
        discard_all(story, spark)
        assert (NET_CHANGES in apply(story)) is (story is thin)
    every = [w for w in whole.workspace.net_changes(whole.contract).open().windows() if w != OUT_OF_RANGE]
    assert sum(held(thin.workspace, *every)) < sum(held(whole.workspace, *every))
    assert hashes(thin, spark) == hashes(whole, spark)

    for story in (thin, whole):
        story.land(*more)
        take_all(story, spark)
        apply(story)
    assert everything(thin, spark) == everything(whole, spark)

    for story in (thin, whole):
        story.land_again(*late)
        story.workspace = Workspace.open(story.workspace.settings)
        take_all(story, spark)
        apply(story)
    assert everything(thin, spark) == everything(whole, spark)
    assert hashes(thin, spark) == hashes(whole, spark)

    # Another contract folds all windows again from their deduped events, which stay.
    for story in (thin, whole):
        retention = KEPT if story is thin else {each: KEPT[each] for each in ("landing", "raw")}
        document = {**CONTRACT, "x-cdc": {**CONTRACT["x-cdc"], "retention": retention, "version": "1.1.0"}}
        document["properties"] = {
            **CONTRACT["properties"],
            "body": {**CONTRACT["properties"]["body"], "maxLength": 500},
        }
        story.write_contract(document)
        story.workspace = Workspace.open(story.workspace.settings)
        take_all(story, spark)
    assert held(thin.workspace, *every) == held(whole.workspace, *every)
    assert everything(thin, spark) == everything(whole, spark)
    net_changes.materialize(thin.workspace, spark, thin.contract, every[-2:], "run", replay=True)
    assert hashes(thin, spark) == hashes(whole, spark)
