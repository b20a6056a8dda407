"""The note of what is known of a table is whole or the one before, and never an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omnisupport_ingest import failpoints
from omnisupport_ingest.home import Home
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import EQUAL, Moment, Verified, verified_of, write_verified
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.sources.postgres.source_under_test import contract

NOTES = contract("notes", ("id",))
AT = datetime(2026, 11, 24, 12, tzinfo=UTC)
NOTE = Verified("notes", EQUAL, AT, 5, 1, 0, "equal", 0.5, Moment(1, Lsn(77), AT), read=3)


def home_in(folder: Path) -> Home:
    return Home.open(folder / "home", WindowSize.parse("hourly"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    assert verified_of(home, NOTES) is None
    write_verified(home, NOTES, NOTE)
    assert verified_of(home, NOTES) == NOTE


def test_a_note_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    home = home_in(tmp_path)
    write_verified(home, NOTES, NOTE)
    (file,) = (home.path / "verified").rglob("*.json")
    file.write_text("{")
    assert verified_of(home, NOTES) is None


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before", "after"])
def test_killed_at_the_note_leaves_the_old_one_or_the_new_one(tmp_path: Path, moment: str) -> None:
    home = home_in(tmp_path)
    write_verified(home, NOTES, NOTE)
    program = (
        "import sys; from dataclasses import replace; from pathlib import Path;"
        "from omnisupport_ingest_tests.read.test_verified import NOTE, NOTES, home_in, write_verified;"
        "write_verified(home_in(Path(sys.argv[1])), NOTES, replace(NOTE, rows=6))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {failpoints.VARIABLE: f"home.verified.{moment}"},
    )
    assert done.returncode == -signal.SIGKILL
    found = verified_of(home, NOTES)
    assert found is not None and found.rows == (6 if moment == "after" else 5)
