"""Spark's Python workers as forks of a process that has imported what their tasks need.

A Spark on this machine starts this program (``spark.python.daemon.module``) in the place of PySpark's own
daemon. That one leaves every import to its workers, because some libraries start threads, which a fork loses.
So each worker spends most of a second of processor time on imports: at the first job, and again whenever
Spark has ended the workers that were idle for a minute. Here the threads are looked for: where an import
started one that a fork would lose, PySpark's own daemon takes over.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys

from pyspark import daemon

from omnisupport_ingest.runtime.fork_server import threads_in_the_way

_TASKS = (
    "pyspark.worker",
    "omnisupport_ingest.layers.event_tasks",
    "omnisupport_ingest.layers.event_copies",
    "omnisupport_ingest.layers.fold_tasks",
    "omnisupport_ingest.layers.updating_files",
    "omnisupport_ingest.lake.standing_task",
    "omnisupport_ingest.cdc.updating",
)
"""The worker's program, and the modules of the work that tasks are sent."""


def import_tasks() -> list[str]:
    """Import what tasks need; return the names of threads that a fork would lose."""
    for name in _TASKS:
        importlib.import_module(name)
    return threads_in_the_way()


def main() -> None:
    """Serve Spark until it closes this process's input."""
    # Spark reads the port from the standard output, so nothing else may be written there.
    if threads := import_tasks():
        sys.stderr.write(f"Workers import for themselves, as threads run here: {', '.join(threads)}.\n")
        os.execv(sys.executable, [sys.executable, "-m", daemon.__name__, *sys.argv[1:]])  # noqa: S606 - PySpark's
    # What is shared with the workers stays shared: the collector writes into no page of it.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
