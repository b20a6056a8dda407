"""``windows`` and ``replay``: what a person is told of windows, and what a replay by hand does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.checks import window_checks
from omnisupport_ingest.cli import replay as replay_command
from omnisupport_ingest.cli.replay import ReplayRequest
from omnisupport_ingest.definitions import window_partitions
from omnisupport_ingest.defs.keys import raw_key
from omnisupport_ingest.runtime.dagster_home import write_dagster_home
from omnisupport_ingest.verify.runs import FinishedRun
from omnisupport_ingest.windows import OUT_OF_RANGE, WindowRange
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.cli.story_home import enter
from omnisupport_ingest_tests.layers import story as stories
from omnisupport_ingest_tests.layers.story import SOURCE, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_layers
from omnisupport_ingest_tests.waiting import PATIENCE

START = datetime.now(UTC).replace(second=0, microsecond=0) - timedelta(hours=5)
"""Not long ago: Dagster counts every window since the first one."""

FIRST, NEWEST = (f"{START + timedelta(hours=hours):%Y-%m-%dT%H%M}" for hours in (0, 3))


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    environment = dict(os.environ)
    monkeypatch.setattr(stories, "START", START)
    story = Story(tmp_path / "told")
    story.clock = START + timedelta(hours=4)
    enter(tmp_path / "told", monkeypatch)
    story.land_file(put(10, 1, "first"), put(90, 3 * 3600, "newest", id=9))
    yield story
    # A command that starts Dagster sets variables for the rest of its process.
    os.environ.clear()
    os.environ.update(environment)


def put(lsn: int, second: float, title: str, *, id: int = 1) -> Commit:
    return Commit(lsn, second, [Change("c", id, {"title": title, "body": "text"})])


def take(story: Story, spark: SparkSession, *windows: str) -> None:
    run_layers(open_workspace(story.contracts.parent), spark, list(windows))


def lines(*arguments: str) -> dict[str, dict[str, object]]:
    (source,) = json.loads(command("windows", "--json", *arguments).out)
    return {line["window"]: line for line in source["windows"]}


def test_windows_tells_open_closing_and_late_ones_apart(story, spark):
    assert {name: line["stand"] for name, line in lines().items()} == {FIRST: "closing", NEWEST: "open"}
    take(story, spark, FIRST, NEWEST)
    story.land_file(put(11, 30, "late", id=2))
    line = lines()[FIRST]
    assert (line["stand"], line["late_events"], line["late_batches"], line["pending"]) == ("late", 1, 1, True)
    shown = command("windows", "--late").out
    assert FIRST in shown
    assert NEWEST not in shown
    assert "first" not in shown, "no values"
    assert list(lines("--late")) == [FIRST]
    assert command("windows", "--limit", "-3").code == 2


def test_check_is_red_while_late_events_wait_and_names_the_replay(story, spark):
    take(story, spark, FIRST, NEWEST)
    workspace = open_workspace(story.contracts.parent)
    assert window_checks.windows_settled(workspace, SOURCE).passed
    story.land_file(put(11, 30, "late", id=2))
    finding = window_checks.windows_settled(open_workspace(story.contracts.parent), SOURCE)
    assert not finding.passed
    assert f"replay --source {SOURCE} --from {FIRST}" in finding.summary
    assert window_checks.replays_explained(workspace, SOURCE).passed


def test_source_that_no_contract_names_is_refused_with_the_known_ones(story):
    refused = command("windows", "--source", "elsewhere")
    assert refused.code == 2
    assert SOURCE in refused.err


def test_replay_needs_a_reason(story):
    refused = command("replay", "--from", FIRST)
    assert refused.code == 2
    assert "--reason" in refused.err


def test_replay_of_windows_that_nothing_landed_in_names_those_that_have(story):
    empty = f"{START + timedelta(hours=1):%Y-%m-%dT%H%M}"
    refused = command("replay", "--from", empty, "--dry-run")
    assert refused.code == 1
    assert f"The nearest that received events: {FIRST}, {NEWEST}." in refused.err


def test_replay_of_a_window_that_is_none_is_refused(story):
    refused = command("replay", "--from", "2026-01-01 12:00", "--dry-run")
    assert refused.code == 2, "as for every other argument"
    assert "is not a window" in refused.err
    refused = command("quarantine", "list", "--window", "yesterday")
    assert refused.code == 2
    assert "is not a window" in refused.err
    named = datetime.strptime(FIRST, "%Y-%m-%dT%H%M") + timedelta(seconds=30)
    assert command("quarantine", "list", "--window", named.isoformat()).code == 0


@pytest.mark.slow
def test_dry_run_tells_what_the_replay_then_does(story, spark, warm, monkeypatch: pytest.MonkeyPatch):
    take(story, spark, FIRST, NEWEST)
    same = answer("replay", "--from", FIRST, "--dry-run", "--json")
    assert (same["events"], same["tables"]) == (1, [{"table": "notes", "keys_changed": {}, "keys": {}}])
    # That one has started a Spark of its own; what follows need not wait for another.
    for name, value in pgbench.on(warm).items():
        monkeypatch.setenv(name, value)
    story.land_file(put(11, 30, "late", id=2))
    before = lines()
    told = answer("replay", "--from", FIRST, "--to", NEWEST, "--dry-run", "--json")
    assert lines() == before, "nothing was committed"
    assert (told["windows"], told["events"], told["accepted"]) == ([FIRST, NEWEST], 3, 3)
    changed = {"table": "notes", "keys_changed": {FIRST: 1}, "keys": {FIRST: ['["2"]']}}
    assert told["tables"] == [changed]
    done = answer("replay", "--from", FIRST, "--reason", "ticket 4711", "--json")
    assert [each["outcome"] for each in done["windows"]] == ["1 key changed, by late events"]
    assert lines()[FIRST]["stand"] == "closed"
    again = answer("replay", "--from", FIRST, "--reason", "to be sure", "--table", "notes", "--json")
    assert [each["outcome"] for each in again["windows"]] == ["no change"]


def answer(*arguments: str) -> dict[str, list[dict[str, object]]]:
    """What the command prints, run as a process: one has a single session of Spark, and ours is in use."""
    done = subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


class CountedRuns:
    """In place of a pass over a home: remembers the runs that it is asked for."""

    def __init__(self) -> None:
        self.runs: list[WindowRange] = []

    def prepare(self) -> None:
        pass

    def replay(
        self, source: str, windows: WindowRange, tags: Mapping[str, str], table: str | None
    ) -> FinishedRun:
        self.runs.append(windows)
        return FinishedRun(f"run {len(self.runs)}", source, windows.first, windows.last, 0)


def test_replay_of_scattered_windows_is_one_run_over_what_is_empty_between_them(story):
    middle, far = (f"{START + timedelta(minutes=minutes):%Y-%m-%dT%H%M}" for minutes in (20, 22))
    story.land_file(put(20, 20 * 60, "middle", id=3))
    story.land_file(put(21, 22 * 60, "far", id=4))
    workspace = story.workspace
    request = ReplayRequest(workspace, SOURCE, [FIRST, middle, far, NEWEST], ())
    counted = CountedRuns()
    done = replay_command._carry_out(counted, request, "why")  # type: ignore[arg-type]
    # Between the last two lie more than two hours without an event.
    assert counted.runs == [WindowRange(FIRST, far), WindowRange(NEWEST, NEWEST)]
    assert len(done["runs"]) == 2


def test_replay_under_the_platform_asks_for_a_backfill_of_as_few_runs(story, monkeypatch: pytest.MonkeyPatch):
    """Dagster makes one run of each gapless range of a backfill's windows."""
    middle = f"{START + timedelta(minutes=4):%Y-%m-%dT%H%M}"
    story.land_file(put(20, 4 * 60, "middle", id=3))
    workspace = story.workspace
    write_dagster_home(workspace.settings, workspace.home)
    request = ReplayRequest(workspace, SOURCE, [FIRST, middle], ())
    backfill_id = replay_command._launch(request, "why")
    with dg.DagsterInstance.get() as instance:
        data = instance.get_backfills()[0].asset_backfill_data
        assert instance.get_backfills()[0].backfill_id == backfill_id
    windows = data.target_subset.get_partitions_subset(raw_key(SOURCE))
    assert windows.get_partition_key_ranges(window_partitions(workspace.grid)) == [
        dg.PartitionKeyRange(FIRST, middle)
    ]


@pytest.mark.parametrize("bound", ["--from", "--to"])
def test_no_range_of_windows_begins_or_ends_with_the_events_that_have_none(story: Story, bound: str) -> None:
    other = "--to" if bound == "--from" else "--from"
    done = command(
        "replay", "--source", SOURCE, bound, OUT_OF_RANGE, other, FIRST, "--reason", "r", "--dry-run"
    )
    assert done.code == 2
    assert "with every window" in done.output
