"""Work of minutes does not keep the slots of the shared Spark from runs that somebody waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.spark_connect import start_spark_connect
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = [pytest.mark.full, pytest.mark.slow]

_PATIENCE = 5 * PATIENCE
"""What has a lower priority gets a tenth of a core while other tests run."""

_APART = """
import json, os
from omnisupport_ingest.runtime.spark import is_apart, session, session_apart
from omnisupport_ingest.settings import Settings

def niceness(rows):
    import pyarrow as pa
    for _ in rows:
        yield pa.RecordBatch.from_pydict({"nice": [os.nice(0)]})

spark = session_apart(Settings())
of_workers = spark.range(1).mapInArrow(niceness, "nice long").first()["nice"]
same = session(Settings()) is spark is session_apart(Settings())
print(json.dumps([is_apart(), type(spark).__module__, spark.conf.get("spark.master"), of_workers, same]))
spark.stop()
"""

_KEPT = """
import json, os
from omnisupport_ingest.runtime.spark import is_apart, session, session_apart
from omnisupport_ingest.settings import Settings
shared = session(Settings())
print(json.dumps([session_apart(Settings()) is shared, is_apart(), os.nice(0)]))
"""

_KILLED = """
import json, os, signal, sys
import psutil
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.runtime.spark_errors import SparkGone, named_spark_errors
from omnisupport_ingest.settings import Settings

def kill_java(rows):
    [java] = [each for each in psutil.Process().parents() if each.name() == "java"]
    java.kill()
    yield from rows

settings = Settings()
try:
    with named_spark_errors(settings):
        session(settings).range(1).mapInArrow(kill_java, "id long").count()
except SparkGone as gone:
    print(json.dumps(gone.problem), flush=True)
os._exit(0)
"""

_IN_TURN = """
import json, sys, time
from pathlib import Path
from threading import Thread
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import Settings
folder = sys.argv[1]

def long(rows):
    import time, uuid
    from pathlib import Path
    (Path(folder) / uuid.uuid4().hex).touch()
    time.sleep(1)
    yield from rows

def short(rows):
    yield from rows

spark = session(Settings())
spark.range(1).mapInArrow(short, "id long").count()
begun = Thread(target=lambda: spark.range(0, 10, 1, 10).mapInArrow(long, "id long").count())
begun.start()
while len(list(Path(folder).iterdir())) < 2:
    time.sleep(0.01)
spark.range(0, 1, 1, 1).mapInArrow(short, "id long").count()
print(json.dumps(len(list(Path(folder).iterdir()))))
begun.join()
"""


_LONG = """
import json, sys
import dagster as dg
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.defs import checks, history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import is_apart
from omnisupport_ingest.settings import Settings
checks.LONG_ROWS = history.LONG_ROWS = int(sys.argv[2])
job = build_definitions(Workspace.open(Settings())).resolve_job_def(sys.argv[1])
with dg.DagsterInstance.ephemeral() as instance:
    made = job.execute_in_process(instance=instance)
print(json.dumps([made.success, is_apart()]))
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """Those of a home with a warm server."""
    found = Settings(home=tmp_path_factory.mktemp("apart") / "home", spark_driver_memory="1g")
    home = Home.open(found.home, found.window_size)
    with Supervisor(home) as supervisor:
        start_spark_connect(supervisor, found, home)
        yield found


def said(settings: Settings, program: str, *arguments: str) -> object:
    """What ``program`` prints as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | settings_environment(settings),
        capture_output=True,
        text=True,
        check=False,
        timeout=_PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: object = json.loads(done.stdout)
    return found


def test_long_work_beside_a_warm_server_has_a_jvm_of_one_slot_and_lower_priority(settings: Settings) -> None:
    lower = os.nice(0) + 10
    assert said(settings, _APART) == [True, "pyspark.sql.session", "local[1]", lower, True]


def test_a_process_keeps_the_session_that_it_has_opened_first(settings: Settings) -> None:
    assert said(settings, _KEPT) == [True, False, os.nice(0)]


@pytest.mark.parametrize(
    ("job", "limit", "apart"),
    [("history_support_desk", 0, True), ("audit_support_desk", 0, True), ("history_support_desk", 1, False)],
)
def test_a_run_that_nobody_waits_for_stays_apart_if_its_rows_are_as_many_as_the_limit(
    settings: Settings, job: str, limit: int, apart: bool
) -> None:
    assert said(settings, _LONG, job, str(limit)) == [True, apart]


def test_without_a_server_there_is_nothing_to_stay_apart_from(tmp_path: Path) -> None:
    alone = Settings(home=tmp_path / "home", spark_driver_memory="1g")
    Home.open(alone.home, alone.window_size)
    assert said(alone, _APART) == [False, "pyspark.sql.session", "local[2]", os.nice(0), True]


def test_where_the_spark_of_a_process_is_killed_it_is_named_and_not_the_log_of_a_server(
    tmp_path: Path,
) -> None:
    alone = Settings(home=tmp_path / "home", spark_driver_memory="1g")
    Home.open(alone.home, alone.window_size)
    assert "this process had started" in str(said(alone, _KILLED))


def test_a_short_job_takes_the_next_free_slot_before_the_tasks_of_one_that_began_earlier(
    settings: Settings, tmp_path: Path
) -> None:
    begun = said(settings, _IN_TURN, str(tmp_path))
    assert isinstance(begun, int)
    assert begun < 10
