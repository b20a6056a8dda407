"""Net changes wait for their merge within stated bounds, and nothing else changes by it."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.cli.status import _source_document
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, DelayedMerge
from omnisupport_ingest.defs import keys
from omnisupport_ingest.defs.checkpoints import rebuild_materializations
from omnisupport_ingest.defs.metadata import dimension_metadata
from omnisupport_ingest.lake.checkpoint import MergeCost
from omnisupport_ingest.layers.dimension import delayed_merge, dimensions, net_changes
from omnisupport_ingest.layers.dimension.delayed_merge import scattered_writes, waiting_merge
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.read.dimension_rows import LakeBehind, PinnedDimensions
from omnisupport_ingest.read.export import Format, export
from omnisupport_ingest.read.overview import overview
from omnisupport_ingest.verify.proof import _merge_what_waits
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
from omnisupport_ingest_tests.layers.test_layers import state
from omnisupport_ingest_tests.recovery.traces import contents

KEYS = range(1, 41)
MANY = Commit(10, 1, [Change("c", number, {"title": f"t{number}", "body": "b"}) for number in KEYS])
TEN_MINUTES, HALF = "PT10M", 0.5


def document(age: str = TEN_MINUTES, share: float = HALF) -> dict:
    found = copy.deepcopy(CONTRACT)
    found["x-cdc"]["delayed_merge"] = {"max_age": age, "max_share": share}
    return found


def told(folder: Path, contract: dict) -> Story:
    story = Story(folder)
    story.write_contract(contract)
    story.workspace = Workspace.open(story.workspace.settings)
    return story


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    """Forty rows in ten files, by a contract that lets net changes wait."""
    story = told(tmp_path_factory.mktemp("delayed") / "told", document())
    story.land(MANY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dimensions, "ROWS_PER_FILE", 4)
        run(story, spark, FIRST)
    return story


@pytest.fixture
def story(waiting: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    monkeypatch.setattr(dimensions, "ROWS_PER_FILE", 4)
    return waiting.copied(tmp_path / "told")


def run(story: Story, spark: SparkSession, *windows: str, replay: bool = False) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    dimensions.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)


def changed(second: int, numbers: Iterable[int]) -> Commit:
    return Commit(
        10 * second, second, [Change("u", n, {"title": f"{second}"}, unchanged=("body",)) for n in numbers]
    )


def titles(story: Story, spark: SparkSession) -> set[str]:
    return {title for title, *_ in state(story, spark).values()}


def version(story: Story) -> int:
    return story.workspace.dimension(story.contract).open().version


def waits(story: Story):
    workspace, contract = story.workspace, story.contract
    state = workspace.dimension(contract).open().state("")
    return waiting_merge(contract, state, workspace.net_changes(contract).open())


def later(moment: timedelta) -> datetime:
    return datetime.now(UTC) + moment


class _Clock(datetime):
    """The clock of an update."""

    ahead = timedelta(0)

    @classmethod
    def now(cls, tz=None):
        return datetime.now(tz) + cls.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[_Clock]:
    monkeypatch.setattr(_Clock, "ahead", timedelta(0))
    monkeypatch.setattr(dimensions, "datetime", _Clock)
    return _Clock


def test_the_first_rows_are_shown_at_once_and_a_few_changes_wait(story: Story, spark: SparkSession) -> None:
    assert len(state(story, spark)) == 40
    before = version(story)
    story.land(changed(2, [3, 21]))
    run(story, spark, FIRST)
    assert version(story) == before
    assert "2" not in titles(story, spark)
    found = waits(story)
    assert found.rows == 2
    assert found.due - found.since == timedelta(minutes=10)
    assert abs(datetime.now(UTC) - found.since) < timedelta(minutes=1)


def test_without_the_setting_every_run_merges(tmp_path: Path, spark: SparkSession) -> None:
    story = told(tmp_path / "told", CONTRACT)
    story.land(MANY)
    run(story, spark, FIRST)
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    assert "2" in titles(story, spark)


def test_what_waits_is_pending_when_it_is_old_enough_and_the_run_asked_for_merges_all_of_it(
    story: Story, spark: SparkSession, clock: type[_Clock]
) -> None:
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    story.land(changed(62, [4]))
    run(story, spark, SECOND)
    workspace = story.workspace
    assert pending_windows(workspace, SOURCE, now=later(timedelta(minutes=9))).windows == ()
    windows = pending_windows(workspace, SOURCE, now=later(timedelta(minutes=10))).windows
    assert windows == (SECOND,)
    before = version(story)
    run(story, spark, *windows)
    assert version(story) == before
    clock.ahead = timedelta(minutes=10)
    run(story, spark, *windows)
    assert version(story) == before + 1
    assert {"2", "62"} <= titles(story, spark)
    assert waits(story) is None
    assert pending_windows(workspace, SOURCE, now=later(timedelta(hours=1))).nothing


def test_a_look_that_came_too_early_does_not_keep_a_later_one_from_finding_the_merge_due(
    story: Story, spark: SparkSession
) -> None:
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    for minutes, expected in ((1, ()), (11, (FIRST,)), (2, ())):
        found = pending_windows(story.workspace, SOURCE, now=later(timedelta(minutes=minutes)))
        assert found.windows == expected


def test_keys_up_to_the_share_wait_and_one_more_brings_all_of_them_in(
    story: Story, spark: SparkSession
) -> None:
    story.land(changed(2, range(1, 20)))
    run(story, spark, FIRST)
    assert "2" not in titles(story, spark)
    story.land(changed(3, [30]))
    run(story, spark, FIRST)
    rows = state(story, spark)
    assert [rows[n][0] for n in (1, 19, 30, 40)] == ["2", "2", "3", "t40"]


def test_no_more_files_wait_than_a_run_can_look_at(
    story: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delayed_merge, "WAITING_FILES", 1)
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    assert "2" not in titles(story, spark)
    story.land(changed(3, [4]))
    run(story, spark, FIRST)
    assert {"2", "3"} <= titles(story, spark)


@pytest.mark.parametrize(
    "change",
    [
        Commit(30, 3, [Change("t")]),
        Commit(30, 3, [Change("t"), Change("c", 1, {"title": "x", "body": None})]),
    ],
)
def test_a_truncate_is_shown_at_once_with_all_that_waited(
    story: Story, spark: SparkSession, change: Commit
) -> None:
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    story.land(change)
    run(story, spark, FIRST)
    rows = state(story, spark)
    assert rows[3] == ("2", "b", True, [])
    assert waits(story) is None


def test_the_end_of_a_snapshot_is_shown_at_once(story: Story, spark: SparkSession) -> None:
    read = Commit(30, 3, [Change("r", n, {"title": "read", "body": "b"}) for n in KEYS if n != 5])
    story.land_chunk(Commit(30, 3, read.changes[:10]))
    run(story, spark, FIRST)
    assert "read" not in titles(story, spark)
    story.land_boundary(read)
    run(story, spark, FIRST)
    rows = state(story, spark)
    assert rows[5][2] and rows[1][0] == "read"


def test_late_events_and_replays_are_shown_at_once(story: Story, spark: SparkSession) -> None:
    story.land(changed(62, [4]))
    run(story, spark, SECOND)
    assert "62" not in titles(story, spark)
    story.land_again(Commit(9, 1, [Change("c", 50, {"title": "late", "body": None})]))
    run(story, spark, FIRST, replay=True)
    assert {"62", "late"} <= titles(story, spark)
    assert waits(story) is None


@pytest.mark.slow
def test_delayed_merges_merges_at_once_and_a_rebuild_give_the_same_content(
    tmp_path: Path, spark: SparkSession, clock: type[_Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "ROWS_PER_FILE", 4)
    commits = [
        MANY,
        changed(2, [1, 9, 33]),
        Commit(30, 3, [Change("d", 9), Change("c", 77, {"title": "new", "body": None})]),
        Commit(40, 61, [Change("d", 33), Change("c", 34_000, {"title": "m"}, ("body",), moved_from=33)]),
        Commit(50, 62, [Change("c", 9, {"title": "back", "body": "again"})]),
        changed(63, [34_000, 77]),
    ]
    delayed = told(tmp_path / "delayed", document(share=0.9))
    at_once = told(tmp_path / "once", CONTRACT)
    updates = []
    for number, commit in enumerate(commits):
        for story in (delayed, at_once):
            story.land(commit)
            run(story, spark, *([FIRST] if commit.second < 60 else [FIRST, SECOND]))
        updates.append(version(delayed))
        if number == 3:
            clock.ahead += timedelta(minutes=11)
    assert len(set(updates)) < len(commits) - 1
    clock.ahead += timedelta(minutes=30)
    run(delayed, spark, SECOND)
    whole = told(tmp_path / "whole", document())
    shutil.copytree(delayed.store.folder, whole.store.folder, dirs_exist_ok=True)
    run(whole, spark, FIRST, SECOND)
    assert contents(delayed.workspace) == contents(at_once.workspace) == contents(whole.workspace)


def test_a_run_that_died_between_append_and_merge_leaves_what_the_next_merge_takes(
    story: Story, spark: SparkSession, clock: type[_Clock]
) -> None:
    workspace, contract = story.workspace, story.contract
    story.land(changed(2, [3]))
    for layer in (raw, deduped):
        layer.materialize(workspace, spark, SOURCE, [FIRST], "died")
    net_changes.materialize(workspace, spark, contract, [FIRST], "died")
    assert pending_windows(workspace, SOURCE).nothing
    clock.ahead = timedelta(minutes=11)
    (window,) = pending_windows(workspace, SOURCE, now=clock.now(UTC)).windows
    run(story, spark, window)
    assert state(story, spark)[3] == ("2", "b", False, [])


def test_closing_a_window_folds_files_that_still_wait(
    story: Story, spark: SparkSession, clock: type[_Clock]
) -> None:
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    story.land(changed(3, [3, 5]))
    story.clock = START + timedelta(hours=3)
    story.land(Commit(9000, 7300, [Change("m")]))
    run(story, spark, FIRST, "2026-01-01T1401")
    run(story, spark, FIRST)
    assert story.workspace.net_changes(story.contract).open().state(FIRST).closed
    assert waits(story) is not None
    clock.ahead = timedelta(minutes=11)
    run(story, spark, FIRST)
    rows = state(story, spark)
    assert (rows[3][0], rows[5][0]) == ("3", "3")


def test_another_delay_is_not_another_contract(tmp_path: Path) -> None:
    prints = {contract_of(each, tmp_path / "notes.json").fingerprint for each in (CONTRACT, document())}
    assert len(prints) == 1
    assert contract_of(document(), tmp_path / "n.json").delayed_merge == DelayedMerge(
        timedelta(minutes=10), 0.5
    )
    assert contract_of(document(), tmp_path / "n.json").merged_at_once.delayed_merge is None


@pytest.mark.parametrize(
    ("age", "share"),
    [("PT0S", 0.5), ("PT13H", 0.5), ("soon", 0.5), ("PT1M", 0), ("PT1M", 1.5)],
)
def test_bounds_that_bound_nothing_are_refused_by_name(tmp_path: Path, age: str, share: float) -> None:
    with pytest.raises(ContractError, match=r"x-cdc\.delayed_merge\.max_(age|share)"):
        contract_of(document(age, share), tmp_path / "notes.json")


def test_what_is_shown_of_a_table_that_waits_is_true_and_no_alarm(story: Story, spark: SparkSession) -> None:
    workspace, contract = story.workspace, story.contract
    cursor = workspace.dimension(contract).open().state("").checkpoint.cursor
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    told_of = {name: value.value for name, value in dimension_metadata(workspace, contract).items()}
    assert told_of["complete_to"] == cursor
    assert told_of["unmerged_rows"] == 1
    (table,) = [each for each in overview(workspace, SOURCE).tables if each.layer == "dimension"]
    assert table.waits == waits(story)
    assert (table.pending_windows, table.pending_batches) == (1, 1)
    (of_status,) = [
        each
        for each in _source_document(overview(workspace, SOURCE))["tables"]
        if each["layer"] == "dimension"
    ]
    assert of_status["merge_waits"]["due"] == table.waits.due.isoformat()
    assert of_status["recommended"] is None
    assert table.freshness is not None and table.freshness.unshown_batches == 1
    assert not [each for each in overview(workspace, SOURCE).tables if each.layer == "net_changes"]
    now = datetime(2026, 1, 1, 12, 0, 1, tzinfo=UTC)
    minutes = {14: True, 24: True, 26: False}
    fresh = {m: checks.tables_fresh(workspace, SOURCE, now + timedelta(minutes=m))["notes"] for m in minutes}
    assert {m: found.passed for m, found in fresh.items()} == minutes
    with dg.DagsterInstance.ephemeral() as instance:
        rebuild_materializations(instance, workspace)
        assert instance.get_materialized_partitions(keys.dimension_key(contract)) == {FIRST}


def test_who_reads_the_dimension_alone_is_told_what_it_lacks_or_has_it_merged(
    story: Story, spark: SparkSession, tmp_path: Path
) -> None:
    story.land(changed(2, [3]))
    run(story, spark, FIRST)
    done = export(story.workspace, story.contract, tmp_path / "notes.csv", Format.CSV)
    assert (done.pending_batches, done.complete_to) == (1, None)
    with pytest.raises(LakeBehind):
        PinnedDimensions(_of_source(story)).pin()
    pending = pending_windows(story.workspace.merging_at_once(), SOURCE)
    assert pending.windows == (FIRST,)
    _merge_what_waits(story.workspace, lambda: spark, [story.contract])
    assert "2" in titles(story, spark)
    PinnedDimensions(_of_source(story)).pin()


def test_a_gap_that_a_new_epoch_has_repaired_is_no_reason_not_to_compare_with_the_lake(
    story: Story, spark: SparkSession
) -> None:
    gone = story.land(changed(2, [3]))
    story.land(changed(3, [4]))
    (story.store.folder / "manifests" / f"{gone.batch_id}.json").unlink()
    with pytest.raises(LakeBehind, match="is missing from landing"):
        PinnedDimensions(_of_source(story)).pin()
    read = changed(4, [1])
    story.land_chunk(read, epoch=2)
    story.land_boundary(read, epoch=2)
    with pytest.raises(LakeBehind, match="has not taken in all"):
        PinnedDimensions(_of_source(story)).pin()
    run(story, spark, FIRST)
    _merge_what_waits(story.workspace, lambda: spark, [story.contract])
    PinnedDimensions(_of_source(story)).pin()


def _of_source(story: Story) -> Workspace:
    settings = story.workspace.settings.model_copy(update={"source": SOURCE})
    return Workspace(settings, story.workspace.home, story.workspace.contracts)


def test_an_update_notes_what_it_rewrote_for_how_many_keys(
    story: Story, spark: SparkSession, clock: type[_Clock]
) -> None:
    story.land(changed(2, [3, 21]))
    clock.ahead = timedelta(minutes=11)
    run(story, spark, FIRST)
    run(story, spark, FIRST)
    merges = story.workspace.dimension(story.contract).open().state("").checkpoint.merges
    assert merges == (MergeCost(keys=2, rows=40, files=2, held=10),)
    told_of = {n: v.value for n, v in dimension_metadata(story.workspace, story.contract).items()}
    assert (told_of["merge_files_share"], told_of["merge_keys_share"]) == (0.2, 0.05)


def test_status_recommends_the_delay_where_the_last_updates_rewrote_much_for_few_keys(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dimensions, "ROWS_PER_FILE", 4)
    monkeypatch.setattr(delayed_merge, "_LITTLE", 0.1)
    story = told(tmp_path / "told", CONTRACT)
    story.land(MANY)
    run(story, spark, FIRST)
    for second in range(2, 6):
        (table,) = [each for each in overview(story.workspace, SOURCE).tables if each.layer == "dimension"]
        assert (table.scattered is not None) == (second == 5)
        story.land(changed(second, [3, 14, 25]))
        run(story, spark, FIRST)
    (line,) = [
        each["recommended"]
        for each in _source_document(overview(story.workspace, SOURCE))["tables"]
        if each.get("recommended")
    ]
    assert "the last 4 updates rewrote 30% of the files for 7.500% of the keys" in line
    assert '"delayed_merge"' in line
    assert '"deletion_vectors": true' in line
    assert "rows_per_file" not in line
    with_vectors = copy.deepcopy(CONTRACT)
    with_vectors["x-cdc"]["deletion_vectors"] = True  # type: ignore[index]
    for followed in (document(), with_vectors):
        story.write_contract(followed)
        story.workspace = Workspace.open(story.workspace.settings)
        (table,) = [each for each in overview(story.workspace, SOURCE).tables if each.layer == "dimension"]
        assert table.scattered is None


SCATTERED, RECENT = MergeCost(100, 5_000_000, 90, 305), MergeCost(100, 5_000_000, 1, 305)


@pytest.mark.parametrize(
    ("merges", "found"),
    [
        ((), False),
        ((SCATTERED,) * 2, False),
        ((SCATTERED,) * 3, True),
        ((RECENT,) * 10, False),
        ((RECENT, RECENT, SCATTERED, SCATTERED, SCATTERED), True),
        ((SCATTERED, RECENT, RECENT, RECENT), False),
        ((MergeCost(900_000, 5_000_000, 305, 305),) * 3, False),
        ((MergeCost(1, 20_000, 1, 2),) * 10, False),
        ((MergeCost(0, 5_000_000, 305, 305),) * 10, False),
    ],
)
def test_writes_are_scattered_where_most_updates_rewrite_much_for_few_keys(
    merges: tuple[MergeCost, ...], found: bool
) -> None:
    assert (scattered_writes(merges) is not None) is found


IN_LARGE_FILES = MergeCost(330, 5_000_000, 58, 305)
IN_SMALL_FILES = MergeCost(330, 5_000_000, 70, 1220)


@pytest.mark.parametrize(
    ("merge", "found"),
    [
        (SCATTERED, True),
        (IN_LARGE_FILES, True),
        (IN_SMALL_FILES, None),
        (MergeCost(100, 5_000_000, 90, 1220), None),
        (MergeCost(100, 1_000_000, 80, 244), False),
        (MergeCost(1_000, 5_000_000, 305, 305), False),
        (MergeCost(100, 5_000_000, 15, 305), None),
    ],
)
def test_smaller_files_are_recommended_where_they_halve_what_is_rewritten(
    merge: MergeCost, found: bool | None
) -> None:
    told = scattered_writes((merge,) * 3)
    assert (None if told is None else told.rows_per_file == 4_096) is found
