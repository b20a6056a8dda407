"""Jobs on a cluster that wait, each time, for what the test does to it; run as a program of its own.

Tasks are functions of this program, so they travel to the executors by value, as the tests are not there.
Files of the folder ``said`` are how tasks and test speak to each other.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

import pyarrow as pa

import omnisupport_ingest
from omnisupport_ingest.lake.file_tasks import Output, made_by_tasks
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.lake.tables import NOON, W1, by_window, change

TWICE = "twice"
GO_ON = "go on"
ROWS = 40
TASKS = 4


def work(output: Output, number: int, said: str, rows: pa.Table) -> str:
    """Add ``rows``. The last task first waits until the test says ``GO_ON``; of that in the job ``TWICE`` the
    first attempt alone."""
    folder = Path(said)
    attempt = len(list(folder.glob(f"attempt-{number}-*")))
    (folder / f"attempt-{number}-{os.getpid()}").write_text(omnisupport_ingest.__file__)
    waits = number == TASKS - 1 and (attempt == 0 or not said.endswith(TWICE))
    deadline = time.monotonic() + 120
    while waits and not (folder / GO_ON).exists():
        if time.monotonic() > deadline:
            (folder / "gave up").touch()
            raise TimeoutError("nobody said to go on")
        time.sleep(0.05)
    output.add(rows)
    return str(len(rows))


def rows_of_test() -> pa.Table:
    return pa.table(
        {
            "window": [W1] * ROWS,
            "n": list(range(ROWS)),
            "at": pa.array([NOON] * ROWS, pa.timestamp("us", "UTC")),
        }
    )


def run(table: LakeTable, said: Path) -> None:
    """Write the rows by tasks and commit them, as a layer does."""
    said.mkdir(exist_ok=True)
    spark = classic_session(Settings())
    rows, share = rows_of_test(), ROWS // TASKS
    works = [
        partial(work, number=each, said=str(said), rows=rows.slice(each * share, share))
        for each in range(TASKS)
    ]
    snapshot = table.open()
    with made_by_tasks(spark, table, works, unit="u1", generation={W1: 1}) as made:
        assert made is not None
        snapshot.commit([change(W1, made.place().of(W1), ["b1"])])


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for job in sys.argv[2:]:
        run(by_window(root / job), root / f"said-{job}")
        (root / f"said-{job}" / "committed").touch()
