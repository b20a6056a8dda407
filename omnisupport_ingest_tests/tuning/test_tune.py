"""``tune`` on a real capture: it measures, recommends and writes, and leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest_tests.cli.command import command, environment

pytestmark = [pytest.mark.full, pytest.mark.slow]


def test_it_measures_recommends_and_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = "# mine\nOMNISUPPORT_SLOT=a_slot_of_mine\nOTHER=1\n"
    (tmp_path / ".env").write_text(mine)
    # Nothing may reach the source of the settings: it would fail at once.
    with environment(source_dsn=f"host={tmp_path}/nowhere dbname=mine", home=str(tmp_path / "home")):
        held = dict(os.environ)
        done = command(
            *("tune", "--rate", "200", "--seconds", "2", "--interval", "0.3", "--size", "20000"),
            *("--most-batches", "20000", "--most-files", "90000", "--most-cpu", "400", "--write", "--json"),
        )
        assert dict(os.environ) == held
    assert done.code == 0, done.output
    found = json.loads(done.out)
    by_age, by_size = found["points"]
    assert found["recommended"] == {"OMNISUPPORT_BATCH_MAX_SECONDS": 0.3}
    assert by_age["events"] == by_size["events"] >= 400
    assert 0.3 < by_age["landing"]["p50"] <= by_age["landing"]["p95"] <= by_age["landing"]["p99"]
    assert by_size["events_per_batch"] < by_age["events_per_batch"]
    assert by_age["files"] == 2 * by_age["batches"]
    assert by_age["cpu"] > 0
    assert (tmp_path / ".env").read_text() == mine + "OMNISUPPORT_BATCH_MAX_SECONDS=0.3\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".env", "tune.svg"]
    assert not _working_in(tmp_path)


def _working_in(folder: Path) -> list[int]:
    """Processes of which a variable or the working folder lies in ``folder``, but this one."""
    found = []
    for each in psutil.process_iter():
        try:
            places = (each.cwd(), *each.environ().values())
        except psutil.Error:
            continue
        if each.pid != os.getpid() and any(place.startswith(str(folder)) for place in places):
            found.append(each.pid)
    return found
