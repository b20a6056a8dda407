"""A second command on the same home is refused, by name of the first."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeInUse, HomeLock, holder
from omnisupport_ingest.windows import WindowSize

pytestmark = pytest.mark.full

_HOLDER = """
import sys
from pathlib import Path
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.windows import WindowSize
with HomeLock(Home.open(Path(sys.argv[1]), WindowSize.parse("hourly")), "up"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_holder_is_told_who_the_first_is_until_it_is_gone(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"))
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(home.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(HomeInUse) as told, HomeLock(home, "demo"):
        pass
    assert f"`up` (process {other.pid}" in told.value.problem
    assert f"kill {other.pid}" in told.value.fix

    other.kill()
    other.communicate()
    with HomeLock(home, "demo"):
        pass


def test_a_command_that_looks_for_a_moment_does_not_keep_another_from_starting(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"))
    with HomeLock(home, "up"):
        pass
    # As `holder` does it: shared, and only for as long as the look takes.
    descriptor = os.open(home.run / "supervisor.lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    end_of_look = threading.Timer(0.2, os.close, (descriptor,))
    end_of_look.start()
    try:
        with HomeLock(home, "up"):
            assert holder(home) is not None
    finally:
        end_of_look.join()
