"""One task of Spark does the small works of a run; whatever becomes of it, the work is done."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.lake import standing_task
from omnisupport_ingest.lake.standing_task import ask, release


@pytest.fixture(autouse=True)
def none_stays():
    yield
    release()


def jobs(spark: SparkSession, group: str) -> int:
    return len(spark.sparkContext.statusTracker().getJobIdsForGroup(group))


def running(spark: SparkSession) -> int:
    return len(spark.sparkContext.statusTracker().getActiveJobsIds())


def soon(what: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether ``what`` comes true."""
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


def pid_to(file: Path) -> int:
    file.write_text(str(os.getpid()))
    return os.getpid()


def refuse(file: Path) -> int:
    raise ValueError(f"no work for {file.name}")


def leave(file: Path) -> int:
    os._exit(3)


def test_works_are_done_one_after_another_by_one_job_in_a_worker(tmp_path, spark):
    spark.sparkContext.setJobGroup("stays", "one run")
    with standing_task.standing_task(spark):
        done = [ask(spark, partial(pid_to, tmp_path / str(number))) for number in range(3)]
    assert len(set(done)) == 1
    assert done[0] not in (None, os.getpid())
    assert [(tmp_path / str(number)).read_text() for number in range(3)] == [str(done[0])] * 3
    assert jobs(spark, "stays") == 1


def test_outside_of_a_run_nothing_stays(tmp_path, spark):
    assert ask(spark, partial(pid_to, tmp_path / "never")) is None
    assert not (tmp_path / "never").exists()


def test_a_work_that_fails_is_not_done_and_the_next_one_is(tmp_path, spark):
    with standing_task.standing_task(spark):
        assert ask(spark, partial(refuse, tmp_path / "a")) is None
        assert ask(spark, partial(pid_to, tmp_path / "b")) is not None


def test_a_task_that_was_idle_for_too_long_is_followed_by_another(tmp_path, spark, monkeypatch):
    with standing_task.standing_task(spark):
        assert ask(spark, partial(pid_to, tmp_path / "a")) is not None
        standing_task._task.end()
        assert ask(spark, partial(pid_to, tmp_path / "b")) is not None


def test_a_task_that_is_asked_nothing_leaves_its_slot(tmp_path, spark, monkeypatch):
    """A step that finds nothing to do asks nothing, and its run may wait for another one after it."""
    monkeypatch.setattr(standing_task, "IDLE_SECONDS", 1.0)
    # Those of other tests may be ending still.
    assert soon(lambda: running(spark) == 0)
    with standing_task.standing_task(spark):
        assert soon(lambda: running(spark) == 1)
        assert soon(lambda: running(spark) == 0)
        assert ask(spark, partial(pid_to, tmp_path / "a")) is not None
        # Nor does one that has had its works.
        assert soon(lambda: running(spark) == 0)
        assert ask(spark, partial(pid_to, tmp_path / "b")) is not None


@pytest.mark.slow
def test_a_worker_that_dies_in_a_work_leaves_it_undone(tmp_path, spark):
    with standing_task.standing_task(spark):
        assert ask(spark, partial(leave, tmp_path / "a")) is None
        assert ask(spark, partial(pid_to, tmp_path / "b")) is not None


def test_a_larger_job_finds_the_slot_free(tmp_path, spark):
    with standing_task.standing_task(spark):
        assert ask(spark, partial(pid_to, tmp_path / "a")) is not None
        release()
        assert spark.range(10, numPartitions=4).count() == 10
        assert ask(spark, partial(pid_to, tmp_path / "b")) is not None
