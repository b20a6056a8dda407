"""Takes what has landed in a home through every layer, as a program of its own, on the Spark of its settings.

With a folder as its argument, the first task that has most of the events to fold says so there and waits
until the test says ``GO_ON``; how much memory that task and the driver needed is written there. Functions of
this program travel to the executors by value, as the tests are not there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from omnisupport_ingest.cdc import fold
from omnisupport_ingest.cdc.typed_fold import fold_typed
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.runtime.cluster_jobs import GO_ON

SOURCE = "support_desk"
HOT, HELD, GREW = "hot", "held", "grew"


def fold_when_told(
    batches: Iterable[pa.RecordBatch], *, said: str, many: int, **how: Any
) -> Iterator[pa.RecordBatch]:
    """Fold as ``fold_typed`` does. The first task with ``many`` events waits when it has all of them."""
    folder, held = Path(said), list(batches)
    has_many = sum(len(each) for each in held) >= many
    if has_many and not list(folder.glob(f"{HOT}-*")):
        (folder / f"{HOT}-{os.getpid()}").touch()
        deadline = time.monotonic() + 600
        while not (folder / GO_ON).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody said to go on")
            time.sleep(0.05)
    yield from fold_typed(held, **how)
    if has_many:
        (folder / HELD).write_text(str(memory("VmHWM")))


def memory(name: str) -> int:
    """Bytes of this process: now (``VmRSS``), or the most it ever had (``VmHWM``; Linux, proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith(f"{name}:")]
    return int(found.split()[1]) * 1024


def main(said: Path | None, many: int) -> None:
    settings = Settings(_env_file=None)
    workspace, spark = Workspace.open(settings), classic_session(settings)
    if said is not None:
        # `fold_events` gives this function to Spark.
        vars(fold)["fold_typed"] = partial(fold_when_told, said=str(said), many=many)
    before = memory("VmRSS")
    run_layers(workspace, spark, workspace.landing(SOURCE).windows(), SOURCE)
    if said is not None:
        (said / GREW).write_text(str(memory("VmHWM") - before))


if __name__ == "__main__":
    main(*((Path(sys.argv[1]), int(sys.argv[2])) if sys.argv[1:] else (None, 0)))
