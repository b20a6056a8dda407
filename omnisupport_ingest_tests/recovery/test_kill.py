"""The pipeline's process is killed at one step after another, and ends as if nothing had happened."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import finish, kill_when, open_workspace, run_layers, start
from omnisupport_ingest_tests.recovery.traces import Moment, contents, tables, traces

INSERT = Commit(
    10, 1, [Change("c", 1, {"title": "one", "body": "long"}), Change("c", 2, {"title": "two", "body": "B2"})]
)
UPDATE = Commit(20, 2, [Change("u", 1, {"title": "uno"}, unchanged=("body",))])
TOO_LONG = Commit(25, 3, [Change("u", 2, {"title": "x" * 21}, unchanged=("body",))])
MOVE = Commit(30, 61, [Change("d", 1), Change("c", 9, {"title": "uno"}, unchanged=("body",), moved_from=1)])
DELETE = Commit(40, 62, [Change("d", 2)])
INSERT_AGAIN = Commit(60, 63, [Change("c", 2, {"title": "again", "body": None})])
OTHER_UPDATE = Commit(20, 2, [Change("u", 1, {"title": "other"}, unchanged=("body",))])
LATER_UPDATE = Commit(70, 64, [Change("u", 9, {"title": "nine"}, unchanged=("body",))])


def tell_first_half(story: Story) -> None:
    """Both windows, with an event that breaks a row rule."""
    story.land(INSERT, UPDATE, TOO_LONG)
    story.land(MOVE, DELETE)


def tell_second_half(story: Story) -> None:
    """The first batch delivered again, a collision with it, and new events of the second window."""
    story.land_again(INSERT, UPDATE, TOO_LONG)
    story.land_again(OTHER_UPDATE)
    story.land(INSERT_AGAIN, LATER_UPDATE)


@dataclass(frozen=True)
class Death:
    """A kill: the failpoint that asks for it (none: from outside), and where it must strike.

    From outside the process has a JVM of its own, which dies in the middle of its write.
    """

    failpoint: str | None
    table: str
    moment: Moment


# The quarantine is written after the accepted events of deduped, and committed before them.
FIRST_HALF = [
    Death(None, "raw", Moment.WRITING),
    Death(None, "deduped", Moment.WRITING),
    Death("lake.place.after@quarantine", "quarantine", Moment.PLACED),
    Death("lake.commit.after@quarantine", "quarantine", Moment.COMMITTED),
    Death(None, "net_changes", Moment.WRITING),
    Death("lake.write.after@net_changes", "net_changes", Moment.WRITING),
    Death("lake.commit.after@dim_", "dim", Moment.COMMITTED),
]
SECOND_HALF = [
    Death("lake.commit.after@quarantine", "quarantine", Moment.COMMITTED),
    Death("lake.place.after@net_changes", "net_changes", Moment.PLACED),
]
OTHERS_OF_FIRST_HALF = [
    # Where one task writes its files itself, nothing in the draft says that all are there.
    Death("lake.write.after@raw", "raw", Moment.WRITING),
    Death("lake.place.after@raw", "raw", Moment.PLACED),
    Death("lake.commit.after@raw", "raw", Moment.COMMITTED),
    Death("lake.write.after@deduped", "deduped", Moment.WRITING),
    Death("lake.place.after@deduped", "deduped", Moment.PLACED),
    Death("lake.write.after@quarantine", "quarantine", Moment.WRITING),
    Death("lake.commit.after@deduped", "deduped", Moment.COMMITTED),
]
OTHERS_OF_SECOND_HALF = [
    Death("lake.commit.after@net_changes", "net_changes", Moment.COMMITTED),
    Death("lake.write.after@dim_", "dim", Moment.WRITING),
    Death("lake.place.after@dim_", "dim", Moment.PLACED),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession):
    """The contents of a home that went the same way and was never killed."""
    story = Story(tmp_path_factory.mktemp("undisturbed") / "told")
    tell_first_half(story)
    run_layers(story.workspace, spark)
    tell_second_half(story)
    run_layers(story.workspace, spark)
    found = contents(story.workspace)
    assert all(content.rows for content in found.values())
    return found


def die(folder: Path, death: Death, remote: str | None) -> None:
    """Run the pipeline until it is killed, and check that it was, where it was meant to be."""
    workspace = open_workspace(folder)
    before = traces(workspace)
    process = start(folder, failpoint=death.failpoint or "", remote=remote)
    if death.failpoint is None:
        staging = dict(tables(workspace))[death.table].folder / ".staging"
        code = kill_when(process, lambda: any(staging.glob("*")))
    else:
        code = finish(process)
    assert code == -signal.SIGKILL, (folder / "pipeline.log").read_text()[-2000:]
    after = traces(workspace)
    reached = {name: after[name].since(before[name]) for name in after}
    # A JVM outlives its process by a moment, in which it may finish the write.
    possible = {death.moment} | ({Moment.STAGED} if death.failpoint is None else set())
    assert reached[death.table] in possible, reached
    names = list(reached)
    for later in names[names.index(death.table) + 1 :]:
        # The accepted events are written before the quarantined ones, and committed after them.
        written = (death.table, later) == ("quarantine", "deduped")
        expected = {None, Moment.WRITING, Moment.PLACED} if written else {None}
        assert reached[later] in expected, reached


@pytest.mark.drawn(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first_half", "second_half"),
    [
        pytest.param(FIRST_HALF, SECOND_HALF, id="each-layer-once"),
        pytest.param(OTHERS_OF_FIRST_HALF, OTHERS_OF_SECOND_HALF, id="every-other-step"),
    ],
)
def test_a_pipeline_killed_at_many_steps_ends_as_one_that_never_was(
    tmp_path, undisturbed, warm, first_half, second_half
):
    folder = tmp_path / "told"
    story = Story(folder)
    tell_first_half(story)
    for death in first_half:
        die(folder, death, warm if death.failpoint else None)
    tell_second_half(story)
    for death in second_half:
        assert pending_windows(open_workspace(folder), SOURCE).windows
        die(folder, death, warm)
    process = start(folder, remote=warm)
    assert finish(process) == 0, (folder / "pipeline.log").read_text()[-2000:]
    workspace = open_workspace(folder)
    assert contents(workspace) == undisturbed
    assert pending_windows(workspace, SOURCE).windows == ()
    for _, table in tables(workspace):
        sweep(table, timedelta(0))
    assert contents(workspace) == undisturbed
    assert not any(trace.unfinished | trace.finished for trace in traces(workspace).values())
