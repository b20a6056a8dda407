"""One evaluation of a sensor on a real Dagster instance, in a process that may be killed in it.

``python -m omnisupport_ingest_tests.recovery.sensor_tick FOLDER SENSOR [CURSOR]`` prints the answer as JSON.
The cursor is written by whoever reads the answer, so a process killed on the way leaves the old one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import dagster as dg

from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest_tests.layers.story import SOURCE
from omnisupport_ingest_tests.recovery.pipeline import open_workspace
from omnisupport_ingest_tests.waiting import PATIENCE

FORWARD, LATE = f"wal_batches_{SOURCE}", f"late_arrivals_{SOURCE}"
"""The sensors of the story's source."""


@dataclass(frozen=True)
class Request:
    """A run that the sensor asks for."""

    run_key: str
    tags: dict[str, str]

    @property
    def windows(self) -> tuple[str, str]:
        """First and last window, both taken in."""
        return (
            self.tags["dagster/asset_partition_range_start"],
            self.tags["dagster/asset_partition_range_end"],
        )


@dataclass(frozen=True)
class Answer:
    """What an evaluation came to: requests, or why there are none; and the cursor to write."""

    requests: tuple[Request, ...]
    skipped: str | None
    cursor: str | None


def evaluate(folder: Path, instance: dg.DagsterInstance, name: str, cursor: str | None = None) -> Answer:
    """Evaluate the sensor ``name`` of the story in ``folder`` in this process."""
    workspace = open_workspace(folder)
    repository = build_definitions(workspace).get_repository_def()
    context = dg.build_sensor_context(instance, cursor=cursor, repository_def=repository)
    result = repository.get_sensor_def(name)(context, workspace=workspace)
    requests = tuple(Request(each.run_key, dict(each.tags)) for each in result.run_requests or ())
    return Answer(requests, result.skip_reason and result.skip_reason.skip_message, result.cursor)


def tick(
    folder: Path, *, cursor: str | None = None, failpoint: str = "", sensor: str = FORWARD
) -> Answer | int:
    """Evaluate the sensor in a process of its own; the exit code if that died."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, str(folder), sensor, *([cursor] if cursor else [])],
        env={**os.environ, VARIABLE: failpoint, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        return done.returncode
    found = json.loads(done.stdout)
    requests = tuple(Request(run_key, tags) for run_key, tags in found["requests"])
    return Answer(requests, found["skipped"], found["cursor"])


if __name__ == "__main__":
    with dg.DagsterInstance.get() as opened:
        answer = evaluate(Path(sys.argv[1]), opened, *sys.argv[2:4])
    requests = [(each.run_key, each.tags) for each in answer.requests]
    print(json.dumps({"requests": requests, "skipped": answer.skipped, "cursor": answer.cursor}))
