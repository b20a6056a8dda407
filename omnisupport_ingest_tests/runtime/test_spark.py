"""What Spark's Python workers are started with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.runtime.spark import workers_environment
from omnisupport_ingest.settings import Settings

_HELD_TWICE = """
import resource, time
import pyarrow as pa

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [pa.array(range(1_000)).cast(pa.int64()).take(pa.array([0] * 200_000)) for _ in range(40)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
again = []
for _ in range(5):
    time.sleep(0.1)
    again.append(faults())
print(sum(again))
"""


@pytest.mark.full
def test_a_worker_keeps_the_memory_that_it_will_need_again(tmp_path: Path) -> None:
    # Other tests of this process may have put a worker's environment into its own.
    usual = {name: value for name, value in os.environ.items() if not name.startswith("MIMALLOC_")}
    plainly, kept = (
        int(
            subprocess.run(
                [sys.executable, "-c", _HELD_TWICE],
                env=usual | {"ARROW_DEFAULT_MEMORY_POOL": "mimalloc"} | given,
                check=True,
                capture_output=True,
            ).stdout
        )
        for given in ({}, workers_environment(Settings(home=tmp_path)))
    )
    assert kept * 4 < plainly
