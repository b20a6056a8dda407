"""Runs Spark's Python workers as forks of a process that has already imported what their tasks need.

Spark on this machine starts this program (``spark.python.daemon.module``) instead of PySpark's own daemon.
PySpark's daemon leaves every import to its workers, because some libraries start threads, which a fork loses.
So each worker spends most of a second of processor time on imports: at the first job, and again whenever
Spark has ended workers that were idle for a minute. This program checks for such threads: if an import has
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
    "omnisupport_ingest.layers.events.event_tasks",
    "omnisupport_ingest.layers.events.event_copies",
    "omnisupport_ingest.layers.dimension.fold_tasks",
    "omnisupport_ingest.layers.dimension.update_tasks",
    "omnisupport_ingest.lake.standing_task",
    "omnisupport_ingest.cdc.updating",
)
"""The worker's program, and the modules that tasks need."""


def import_tasks() -> list[str]:
    """Import what tasks need; return the names of threads that a fork would lose."""
    for name in _TASKS:
        importlib.import_module(name)
    return threads_in_the_way()


def main() -> None:
    """Serve Spark until it closes this process's input."""
    # Spark reads the port from standard output, so nothing else may be written there.
    if threads := import_tasks():
        sys.stderr.write(f"Workers import for themselves, as threads run here: {', '.join(threads)}.\n")
        os.execv(sys.executable, [sys.executable, "-m", daemon.__name__, *sys.argv[1:]])  # noqa: S606 - PySpark's
    # Memory that is shared with the workers stays shared: the garbage collector must not write to its pages.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
