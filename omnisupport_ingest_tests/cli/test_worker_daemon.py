"""Spark's workers are forks of a process that has imported what their tasks need; they import none of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.cli import worker_daemon

_JOB = """
import sys
from pathlib import Path
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

def told(batches):
    import os
    import pyarrow as pa
    imported = "omnisupport_ingest.layers.dimension.fold_tasks" in sys.modules
    program = Path(f"/proc/{os.getppid()}/cmdline").read_text()
    for batch in batches:
        yield pa.RecordBatch.from_pydict({"told": [f"{imported} {'cli.worker_daemon' in program}"]})

spark = classic_session(Settings(home=Path(sys.argv[1]), _env_file=None))
print(*(row.told for row in spark.range(0, 2, 1, 2).mapInArrow(told, "told string").collect()), sep="\\n")
spark.stop()
"""


@pytest.mark.quick
def test_no_thread_runs_after_the_imports_that_a_fork_would_lose() -> None:
    code = f"from {worker_daemon.__name__} import import_tasks; print(import_tasks())"
    # As Spark starts its daemon.
    given = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.quick
def test_where_a_thread_runs_the_daemon_of_pyspark_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(worker_daemon, "import_tasks", lambda: ["pool"])
    monkeypatch.setattr(os, "execv", lambda _program, command: started.append(command))
    monkeypatch.setattr(worker_daemon.daemon, "manager", lambda: None)
    monkeypatch.setattr(sys, "argv", ["daemon", "pyspark.worker"])
    worker_daemon.main()
    assert started == [[sys.executable, "-m", "pyspark.daemon", "pyspark.worker"]]


@pytest.mark.full
def test_a_worker_has_what_its_tasks_need_before_it_is_sent_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _JOB, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert told.split("\n")[:2] == ["True True", "True True"]
