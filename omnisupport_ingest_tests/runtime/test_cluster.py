"""Spark on a real cluster of this machine: what a worker, a second copy of a task and a dead driver do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.standalone import WORKER, WorkerSize, start_standalone
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.lake.tables import by_window
from omnisupport_ingest_tests.runtime import cluster_jobs
from omnisupport_ingest_tests.runtime.cluster_jobs import GO_ON, TWICE
from omnisupport_ingest_tests.waiting import PATIENCE, until

WORKER_LOST, DRIVER_LOST = "worker_lost", "driver_lost"

_SPECULATES = """
# A task that is slower than the others is begun a second time.
spark.speculation true
spark.speculation.interval 100ms
spark.speculation.multiplier 1.01
spark.speculation.quantile 0.25
spark.speculation.minTaskRuntime 200ms
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Home, Settings]]:
    properties = tmp_path / "own.conf"
    properties.write_text(_SPECULATES)
    settings = Settings(
        home=tmp_path / "home", spark_driver_memory="512m", spark_properties=properties, _env_file=None
    )
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home) as supervisor:
        yield home, start_standalone(supervisor, settings, home, 2, WorkerSize(memory="512m"))


@pytest.mark.slow
def test_the_result_is_the_same_whatever_happens_to_tasks_workers_and_driver(
    cluster: tuple[Home, Settings], tmp_path: Path
) -> None:
    home, settings = cluster
    first = jobs(settings, tmp_path, TWICE, WORKER_LOST, DRIVER_LOST)
    try:
        # A task that runs twice: the second attempt answers, and the first still runs when that is committed.
        until(lambda: ended(first) or said(tmp_path, TWICE, "committed"))
        assert len(said(tmp_path, TWICE, "attempt-3-*")) == 2, output_of(tmp_path)
        (tmp_path / f"said-{TWICE}" / GO_ON).touch()
        assert_whole(tmp_path, TWICE)
        code = said(tmp_path, TWICE, "attempt-0-*")[0].read_text()
        assert ".zip/omnisupport_ingest" in code, "tasks run the package that the driver sent"

        # A worker with its executor is killed in the middle of a task.
        attempt, *_ = until(lambda: ended(first) or said(tmp_path, WORKER_LOST, "attempt-3-*"))
        kill_worker_of(home, int(attempt.name.rpartition("-")[2]))
        (tmp_path / f"said-{WORKER_LOST}" / GO_ON).touch()
        until(lambda: ended(first) or said(tmp_path, WORKER_LOST, "committed"))
        assert_whole(tmp_path, WORKER_LOST)

        # The driver is killed while its tasks run; the executor of that moment writes on, unseen.
        until(lambda: ended(first) or said(tmp_path, DRIVER_LOST, "attempt-3-*"))
        assert not said(tmp_path, DRIVER_LOST, "committed")
    finally:
        first.kill()
        first.wait()
    (tmp_path / f"said-{DRIVER_LOST}" / GO_ON).touch()
    assert by_window(tmp_path / DRIVER_LOST).open().windows() == []
    again = jobs(settings, tmp_path, DRIVER_LOST)
    assert again.wait(PATIENCE) == 0, output_of(tmp_path)
    assert_whole(tmp_path, DRIVER_LOST)


def jobs(settings: Settings, root: Path, *names: str) -> subprocess.Popen[bytes]:
    with (root / "jobs.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", cluster_jobs.__name__, str(root), *names],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **settings_environment(settings)},
            stdout=log,
            stderr=log,
        )


def ended(process: subprocess.Popen[bytes]) -> None:
    """Fail if the driver has ended: there is nothing to wait for."""
    assert process.poll() is None


def said(root: Path, job: str, pattern: str) -> list[Path]:
    return sorted((root / f"said-{job}").glob(pattern))


def kill_worker_of(home: Home, task: int) -> None:
    """Kill the worker whose executor runs the process ``task``, and the executor; the process goes on."""
    executor = next(each for each in psutil.Process(task).parents() if "java" in each.name())
    work_folder = executor.cwd()
    [name] = [each for each in map(WORKER.format, (1, 2)) if each in work_folder]
    os.kill(running_services(home.run)[name], signal.SIGKILL)
    executor.kill()


def output_of(root: Path) -> str:
    return (root / "jobs.log").read_text()[-3000:]


def assert_whole(root: Path, job: str) -> None:
    """The table has every row once, and every file that can be seen is of its version."""
    assert not said(root, job, "gave up"), "Spark itself tried again, not after a task that gave up"
    table = by_window(root / job)
    snapshot = table.open()
    rows = rows_of(snapshot.all_files(), arrow_schema(table.spec.schema, without=()))
    assert rows.sort_by("n")["n"].to_pylist() == list(range(cluster_jobs.ROWS))
    seen = {path.relative_to(table.folder).as_posix() for path in table.folder.rglob("*.parquet")}
    visible = {path for path in seen if not path.startswith(".") and "/part-" in path}
    assert visible == {file.path for file in snapshot.all_files()}
