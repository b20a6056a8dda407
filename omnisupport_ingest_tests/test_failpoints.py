"""A failpoint ends its process at the pass asked for, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from omnisupport_ingest.failpoints import VARIABLE

PASS_THREE_TIMES = """
from omnisupport_ingest import failpoints
for _ in range(3):
    failpoints.reached("here")
    print("passed", flush=True)
"""


@pytest.mark.parametrize(
    ("asked", "passes", "code"),
    [("", 3, 0), ("elsewhere", 3, 0), ("here", 0, -signal.SIGKILL), ("here:3", 2, -signal.SIGKILL)],
)
def test_process_dies_at_the_pass_asked_for(asked: str, passes: int, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PASS_THREE_TIMES],
        env={**os.environ, VARIABLE: asked},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("passed") == passes
    assert done.returncode == code
