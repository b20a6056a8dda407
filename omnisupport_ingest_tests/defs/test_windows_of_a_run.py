"""Runs that name windows which are not there: each fails with a sentence, and no table records anything."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import dagster as dg
import pytest

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs.direct_run import StepFailure, step_failure
from omnisupport_ingest.windows import KEY_FORMAT
from omnisupport_ingest_tests.layers.story import SOURCE, Story

START, END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"
NOW = datetime.now(UTC)
EARLY, LATE = ((NOW - timedelta(minutes=minutes)).strftime(KEY_FORMAT) for minutes in (6, 3))
AHEAD = [(NOW + timedelta(hours=hours)).strftime(KEY_FORMAT) for hours in (5, 6)]
BEFORE = (NOW - timedelta(days=3)).strftime(KEY_FORMAT)


def refused(story: Story, job: str, tags: dict[str, str]) -> StepFailure:
    """Why the run failed; it made no table."""
    with dg.DagsterInstance.ephemeral() as instance:
        wanted = build_definitions(story.workspace).resolve_job_def(f"{job}_{SOURCE}")
        run = wanted.execute_in_process(instance=instance, tags=tags, raise_on_error=False)
    failures = [event for event in run.all_events if event.event_type is dg.DagsterEventType.STEP_FAILURE]
    assert not run.get_asset_materialization_events()
    assert not run.success and len(failures) == 1
    return step_failure(failures[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("job", "first", "last", "problem", "fix"),
    [
        ("replay", *AHEAD, f"{AHEAD[0]!r} is not a window", "first window"),
        ("ingest", *AHEAD, f"{AHEAD[0]!r} is not a window", "first window"),
        ("replay", EARLY, AHEAD[0], f"{AHEAD[0]!r} is not a window", "first window"),
        ("replay", LATE, EARLY, "ends before it begins", f"{EARLY} to {LATE}"),
        ("replay", BEFORE, LATE, f"{BEFORE!r} is not a window", "first window"),
    ],
    ids=["ahead of the clock", "of new batches", "partly ahead", "reversed", "before the first"],
)
def test_a_run_over_windows_that_are_not_there_fails(
    recent_story: Story, job: str, first: str, last: str, problem: str, fix: str
) -> None:
    failure = refused(recent_story, job, {START: first, END: last})
    assert problem in failure.problem and fix in failure.fix


@pytest.mark.full
@pytest.mark.parametrize("job", ["replay", "ingest"])
def test_a_run_without_a_partition_fails(recent_story: Story, job: str) -> None:
    failure = refused(recent_story, job, {})
    assert failure.problem == f"The run names no window of {SOURCE}: it was launched without a partition."
    assert "Materialize" in failure.fix
