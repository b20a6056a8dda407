"""A second command on the same home is refused, by name of the first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeInUse, HomeLock
from omnisupport_ingest.windows import WindowSize

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
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(home.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(HomeInUse) as told, HomeLock(home, "demo"):
        pass
    assert f"`up` (process {holder.pid}" in told.value.problem
    assert f"kill {holder.pid}" in told.value.fix

    holder.kill()
    holder.communicate()
    with HomeLock(home, "demo"):
        pass
