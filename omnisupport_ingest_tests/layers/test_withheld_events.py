"""A quarantined event withholds its columns from the fold, whatever ends or crosses a replay."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from omnisupport_ingest import failpoints
from omnisupport_ingest.cdc.fold import fold_events
from omnisupport_ingest.checks import lake_checks as checks
from omnisupport_ingest.lake.commit import commit_actions, remove
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.events.quarantine_files import EventsGone, named_anywhere
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.review.deciding import decide
from omnisupport_ingest.review.quarantined import Quarantined, quarantined
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
    events,
)
from omnisupport_ingest_tests.recovery.pipeline import run_layers

BORN = Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"})])
TOO_LONG = Commit(20, 2, [Change("u", 1, {"title": "x" * 21}, unchanged=("body",))])
"""It breaks a row rule. No later event carries its title, so only the quarantine knows of it."""


class Stopped(Exception):
    """A run was ended at a failpoint."""


class StopAt:
    """In place of a failpoint: runs ``then`` at the Nth pass of ``point`` on an object named ``of``."""

    def __init__(self, point: str, of: str, then: Any, passes: int = 1) -> None:
        self._point, self._of, self._then, self._left = point, of, then, passes

    def reached(self, point: str, of: object) -> None:
        if point != self._point or not str(of).endswith(self._of):
            return
        self._left -= 1
        if self._left == 0:
            self._then()


def stop() -> None:
    raise Stopped


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Story:
    story = Story(tmp_path_factory.mktemp("withheld") / "told")
    story.land(BORN, TOO_LONG)
    run_layers(story.workspace, spark, [FIRST])
    assert rows(story, spark) == [(1, None, "text", ["title"])]
    return story


@pytest.fixture
def story(told: Story, tmp_path: Path) -> Iterator[Story]:
    """A copy of ``told``: a window with one accepted and one quarantined event, in every layer."""
    yield told.copied(tmp_path / "told")
    failpoints._armed = None


def rows(story: Story, spark: SparkSession) -> list[tuple[Any, ...]]:
    """The rows of the dimension: id, title, body, unresolved columns."""
    shown = story.workspace.dimension(story.contract).open()
    found = shown.read(spark, shown.all_files()).orderBy("id").collect()
    return [(row["id"], row["title"], row["body"], list(row["_cdc_unresolved"] or ())) for row in found]


def replay(story: Story, spark: SparkSession) -> None:
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "replay", replay=True)


def publish(story: Story, spark: SparkSession, *, replay: bool = False) -> None:
    net_changes.materialize(story.workspace, spark, story.contract, [FIRST], "run", replay=replay)
    dimensions.update(story.workspace, spark, story.contract, "run")


def append(story: Story, spark: SparkSession, lsn: int, body: str) -> None:
    """An event that does not carry the title, through every layer."""
    story.land(Commit(lsn, 3, [Change("u", 1, {"body": body}, unchanged=("title",))]))
    run_layers(story.workspace, spark, [FIRST])


def assert_whole(story: Story, spark: SparkSession) -> None:
    """Nothing is pending, and the table of quarantine holds exactly the one file that the state names."""
    assert pending_windows(story.workspace, SOURCE).nothing
    assert in_table(story) == named(story) and len(named(story)) == 1
    assert [row.reason for row in held(story)] == ["row_rule"]
    sweep_all(story)
    assert [row.reason for row in held(story)] == ["row_rule"]


def catch_up(story: Story, spark: SparkSession) -> None:
    """What the sensor does: a run for as long as something is pending."""
    for _ in range(3):
        windows = pending_windows(story.workspace, SOURCE).windows
        if not windows:
            return
        run_layers(story.workspace, spark, windows)
    raise AssertionError(f"still pending: {windows}")


@pytest.mark.parametrize(
    ("point", "of"),
    [
        ("lake.commit.after", "desk/quarantine"),
        ("lake.commit.before", "desk/deduped_events"),
        ("lake.commit.after", "desk/deduped_events"),
    ],
)
def test_a_replay_that_ends_between_its_commits_loses_no_withheld_event(
    story: Story, spark: SparkSession, point: str, of: str
) -> None:
    failpoints._armed = StopAt(point, of, stop)
    with pytest.raises(Stopped):
        replay(story, spark)
    failpoints._armed = None
    publish(story, spark, replay=True)
    assert rows(story, spark) == [(1, None, "text", ["title"])]
    append(story, spark, 30, "more")
    assert rows(story, spark) == [(1, None, "more", ["title"])]
    catch_up(story, spark)
    assert_whole(story, spark)
    assert rows(story, spark) == [(1, None, "more", ["title"])]


def test_a_replay_crossed_by_an_append_loses_no_withheld_event(story: Story, spark: SparkSession) -> None:
    """The replay stands between its commits while another writer appends a second withheld event."""
    also_long = Commit(40, 4, [Change("c", 2, {"title": "y" * 21, "body": "two"})])

    def other() -> None:
        failpoints._armed = None
        story.land(also_long)
        run_layers(story.workspace, spark, [FIRST])
        assert rows(story, spark)[0] == (1, None, "text", ["title"])

    failpoints._armed = StopAt("lake.commit.before", "desk/deduped_events", other)
    replay(story, spark)
    catch_up(story, spark)
    assert pending_windows(story.workspace, SOURCE).nothing
    assert rows(story, spark)[0] == (1, None, "text", ["title"])
    assert [row.event.position.commit_lsn.value for row in held(story)] == [20, 40]
    assert in_table(story) == named(story)


@pytest.mark.quick
def test_an_append_crossed_by_a_replay_loses_no_withheld_event(story: Story, spark: SparkSession) -> None:
    """The append stands between its commits while another writer replays its window."""
    story.land(Commit(40, 4, [Change("c", 2, {"title": "y" * 21, "body": "two"})]))
    raw.materialize(story.workspace, spark, SOURCE, [FIRST], "run")

    def other() -> None:
        failpoints._armed = None
        replay(story, spark)
        publish(story, spark)

    failpoints._armed = StopAt("lake.commit.before", "desk/deduped_events", other)
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "append")
    publish(story, spark)
    assert pending_windows(story.workspace, SOURCE).nothing
    assert rows(story, spark)[0] == (1, None, "text", ["title"])
    assert [row.event.position.commit_lsn.value for row in held(story)] == [20, 40]
    assert in_table(story) == named(story)


def test_a_file_that_only_a_state_names_is_read_kept_by_sweep_and_taken_back(
    story: Story, spark: SparkSession
) -> None:
    """As an older program left it: its commit of the quarantine was not followed by that of the events."""
    forget(story)
    assert in_table(story) == set() and len(named(story)) == 1
    assert [row.reason for row in held(story)] == ["row_rule"]
    assert checks.no_collisions(story.workspace, SOURCE).numbers == {"quarantined_row_rule": 1}
    sweep_all(story)
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    publish(story, spark, replay=True)
    assert rows(story, spark) == [(1, None, "text", ["title"])]
    catch_up(story, spark)
    assert_whole(story, spark)


def test_a_window_whose_quarantine_is_gone_from_disk_is_named_and_judged_again(
    story: Story, spark: SparkSession
) -> None:
    forget(story)
    sweep(story.workspace.quarantine(SOURCE), timedelta(0))
    with pytest.raises(EventsGone, match="judged anew from raw"):
        held(story)
    with pytest.raises(EventsGone):
        publish(story, spark, replay=True)
    catch_up(story, spark)
    assert_whole(story, spark)
    assert rows(story, spark) == [(1, None, "text", ["title"])]


def test_a_review_that_was_judged_and_not_folded_is_pending(story: Story, spark: SparkSession) -> None:
    """Judged again, the window has the same batches in every layer, but other events."""
    (row,) = held(story)
    decide(story.workspace, SOURCE, "discard", [row.event], reviewer="ana", why="looked at")
    deduped.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    assert pending_windows(story.workspace, SOURCE).windows == (FIRST,)
    catch_up(story, spark)
    assert_whole(story, spark)


def forget(story: Story) -> None:
    """Have the log of the quarantine lose what the state of the window names."""
    table = story.workspace.quarantine(SOURCE)
    snapshot = table.open()
    (file,) = snapshot.all_files()
    handle = DeltaTable(str(table.folder))
    commit_actions(handle, [remove(file)], folder=table.folder, app_id=table.spec.app_id, note={})


def sweep_all(story: Story) -> None:
    """What the command does, for what was removed a moment ago too."""
    for table in story.workspace.tables():
        spare = named_anywhere(story.workspace, SOURCE) if table.spec.path.endswith("quarantine") else ()
        sweep(table, timedelta(0), spare=spare)


def held(story: Story) -> list[Quarantined]:
    return quarantined(story.workspace, SOURCE, ReviewLedger.open(story.workspace, SOURCE))


def in_table(story: Story) -> set[str]:
    """The files that the table of quarantine holds."""
    return {file.path for file in story.workspace.quarantine(SOURCE).open().all_files()}


def named(story: Story) -> set[str]:
    """The files that states of deduped events name."""
    return set(named_anywhere(story.workspace, SOURCE))


def test_withheld_events_are_folded_by_tasks_over_files_and_are_of_their_table_alone(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path / "told")
    other = copy.deepcopy(CONTRACT)
    other["x-cdc"]["table"] = "others"
    (story.contracts / "others.json").write_text(json.dumps(other))
    story.workspace = Workspace.open(story.workspace.settings)
    story.land(BORN)
    refused = [event._replace(source_table="others") for event in events(TOO_LONG)]
    lsn, moment = Lsn(TOO_LONG.lsn), START + timedelta(seconds=TOO_LONG.second)
    story._seal(refused, StreamSpan(Lsn(BORN.lsn), lsn, lsn, lsn, TOO_LONG.lsn, moment, moment))
    by_spark: list[str] = []

    def folded(events: Any, contract: Any, **options: Any) -> Any:
        by_spark.append(contract.name)
        return fold_events(events, contract, **options)

    monkeypatch.setattr(net_changes, "fold_events", folded)
    run_layers(story.workspace, spark, [FIRST])
    assert by_spark == []
    assert pending_windows(story.workspace, SOURCE).nothing
    counts = {
        each.name: sum(file.rows for file in story.workspace.net_changes(each).open().all_files())
        for each in story.workspace.contracts
    }
    assert counts == {"notes": 1, "others": 1}
