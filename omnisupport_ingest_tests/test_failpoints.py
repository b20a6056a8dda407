"""A failpoint ends its process at the pass asked for, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest_tests.waiting import PATIENCE

PASS_THREE_TIMES = """
from omnisupport_ingest.failpoints import failpoint
for number, of in enumerate(("raw", "dim_a", "dim_b")):
    with failpoint("here", of):
        print(f"done {number}", flush=True)
    print("passed", flush=True)
"""

KILLED = -signal.SIGKILL


def run(asked: str, script: str = PASS_THREE_TIMES) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, VARIABLE: asked},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(
    ("asked", "done", "passed", "code"),
    [
        ("", 3, 3, 0),
        ("elsewhere.after", 3, 3, 0),
        ("here.before", 0, 0, KILLED),
        ("here.after", 1, 0, KILLED),
        ("here.before:3", 2, 2, KILLED),
        ("here.after:3", 3, 2, KILLED),
        ("here.before@dim_", 1, 1, KILLED),
        ("here.after@dim_:2", 3, 2, KILLED),
        ("here.after@nothing", 3, 3, 0),
    ],
)
def test_process_dies_at_the_pass_asked_for(asked: str, done: int, passed: int, code: int) -> None:
    ended = run(asked)
    assert (ended.stdout.count("done"), ended.stdout.count("passed")) == (done, passed)
    assert ended.returncode == code


def test_an_effect_that_failed_is_not_taken_for_one_that_happened() -> None:
    script = """
from omnisupport_ingest.failpoints import failpoint
try:
    with failpoint("here"):
        raise OSError
except OSError:
    print("went on", flush=True)
"""
    ended = run("here.after", script)
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


@pytest.mark.parametrize("asked", ["here", "here.after:x", "here.during", "here.after@"])
def test_a_failpoint_that_can_never_be_reached_is_refused(asked: str) -> None:
    ended = run(asked)
    assert ended.returncode == 1
    assert f"{VARIABLE}={asked} is not" in ended.stderr
