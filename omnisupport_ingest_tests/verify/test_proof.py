"""What a comparison leaves behind when it is killed, and that the next one removes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from omnisupport_ingest.verify.proof import _remove_left_behind


def test_rows_that_a_killed_comparison_left_are_removed_and_those_of_a_living_one_kept(
    tmp_path: Path,
) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, living = tmp_path / f"proof-{ended.pid}-abc", tmp_path / f"proof-{os.getpid()}-abc"
    for folder in (left, living):
        folder.mkdir()
        (folder / "customers.parquet").write_bytes(b"rows")
    (tmp_path / "spark-connect.json").touch()
    _remove_left_behind(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == [living.name, "spark-connect.json"]
