"""All layers of one home in a process of its own, for tests that kill it.

``python -m omnisupport_ingest_tests.recovery.pipeline FOLDER`` takes the windows of the told story in
``FOLDER`` through every layer, with ``replay`` behind it all over again, with ``judge`` from
``deduped_events`` on, on a warm server where ``OMNISUPPORT_SPARK_REMOTE`` names one and on a classic
session otherwise, and dies where ``OMNISUPPORT_FAILPOINT`` says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from pyspark.sql import SparkSession

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake.standing_task import standing_task
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import session
from omnisupport_ingest.settings import PREFIX, Settings
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE

REMOTE = f"{PREFIX}SPARK_REMOTE"
TIMEOUT_SECONDS = 180
WINDOWS = (FIRST, SECOND)


def open_workspace(folder: Path) -> Workspace:
    """The workspace of the story that was told in ``folder``."""
    settings = Settings(
        home=folder / "home",
        contracts_dir=folder / "contracts",
        window="minutes:1",
        spark_driver_memory="1g",
        _env_file=None,
    )
    return Workspace.open(settings)


def run_layers(
    workspace: Workspace,
    spark: SparkSession,
    windows: Sequence[str] = WINDOWS,
    source: str = SOURCE,
    *,
    replay: bool = False,
    judge: bool = False,
    run_id: str = "run",
) -> None:
    """Take ``windows`` from landing to the dimensions, as one run of the ingest job does: its small works are
    done by the task that stays, but those of a replay.

    ``judge``: as a replay that does not begin at landing, but has raw's events judged again.
    """
    with nullcontext() if replay or judge else standing_task(spark):
        raw.materialize(workspace, spark, source, windows, run_id, replay=replay)
        deduped.materialize(workspace, spark, source, windows, run_id, replay=replay or judge)
        for contract in workspace.contracts.of_source(source):
            dimensions.materialize(workspace, spark, contract, windows, run_id, replay=replay)


def start(
    folder: Path,
    *,
    failpoint: str = "",
    remote: str | None = None,
    replay: bool = False,
    judge: bool = False,
) -> subprocess.Popen[str]:
    """The pipeline of ``folder`` as a process; its standard error goes to ``pipeline.log`` there.

    ``remote`` is the address of a warm server; without one the process has a JVM of its own.
    """
    asked = ["replay"] * replay + ["judge"] * judge
    environment = {**os.environ, VARIABLE: failpoint} | ({REMOTE: remote} if remote else {})
    with (folder / "pipeline.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name, str(folder), *asked],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            text=True,
        )


def finish(process: subprocess.Popen[str]) -> int:
    """Wait for the end of ``process``; a negative code is the signal that ended it."""
    try:
        return process.wait(TIMEOUT_SECONDS)
    finally:
        process.kill()


def kill_when(process: subprocess.Popen[str], seen: Callable[[], bool]) -> int:
    """SIGKILL ``process`` as soon as ``seen`` is true; its code, also if it ended before that."""
    give_up = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and not seen():
        assert time.monotonic() < give_up, "the moment to kill never came"
        time.sleep(0.002)
    process.kill()
    return process.wait()


if __name__ == "__main__":
    opened = open_workspace(Path(sys.argv[1]))
    asked = sys.argv[2:]
    run_layers(opened, session(opened.settings), replay="replay" in asked, judge="judge" in asked)
