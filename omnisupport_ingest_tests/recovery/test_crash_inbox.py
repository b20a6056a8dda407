"""The watcher of the inbox dies at its failpoints; every file is landed once, or refused with a reason."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.settings import PREFIX
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.waiting import PATIENCE

SAMPLE = Path(__file__).parents[2] / "data" / "debezium_events" / "partner_tickets.jsonl"
SOURCE = "partner_desk"

COVERED = {"inbox.link", "inbox.unlink", "inbox.reason"}

_CASES = [
    pytest.param(*case, marks=() if case == ("inbox.link", "after", 1) else pytest.mark.crash)
    for case in itertools.product(sorted(COVERED), ("before", "after"), (1, 3))
]


def watch(home: Path, at: str = "") -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "land", "--watch", "--once"],
        env={**inherited, f"{PREFIX}HOME": str(home), f"{PREFIX}WINDOW": "minutes:1", VARIABLE: at},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.parametrize(("name", "moment", "times"), _CASES)
def test_every_file_ends_landed_once_or_refused_with_its_reason(
    tmp_path: Path, name: str, moment: str, times: int
) -> None:
    inbox = tmp_path / "home" / "inbox" / SOURCE
    inbox.mkdir(parents=True)
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        bad = name == "inbox.reason"
        target = inbox / f"{'bad' if bad else 'good'}-{arrived}.jsonl"
        if bad:
            target.write_text('{"neither": "one form"}\n')
        else:
            shutil.copyfile(SAMPLE, target)
        os.utime(target, (1, 1))
        arrived += 1

    arrive()
    for attempt in range(times):
        if attempt and (name, moment) == ("inbox.unlink", "after"):
            arrive()
        died = watch(tmp_path / "home", at=f"{name}.{moment}")
        assert died.returncode == -signal.SIGKILL, died.stderr
    watch(tmp_path / "home")

    assert [path for path in inbox.iterdir() if path.is_file()] == []
    if name == "inbox.reason":
        refused = {path.name for path in (inbox / "refused").iterdir() if not path.name.startswith(".")}
        files = {each for each in refused if not each.endswith(".reason.txt")}
        last = max(files, key=lambda each: (len(each), each))
        assert f"{last}.reason.txt" in refused
        assert (inbox / "refused" / f"{last}.reason.txt").read_text().strip()
        return
    store = LandingStore(Home.open(tmp_path / "home", WindowSize(1)).landing, SOURCE)
    # One content is one batch, however often it was taken.
    (batch,) = store.landed().batches
    store.verify(batch)
    assert {path.name.split(".jsonl")[0] for path in (inbox / "landed").iterdir()} == {
        f"good-{number}" for number in range(arrived)
    }
