"""Which runs ``status`` names: all that go on, the started ones first, then the newest that have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from omnisupport_ingest.cli.status_health import _of_platform
from omnisupport_ingest.cli.status_platform import platform_document, platform_facts
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, HomeLock
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize


def told(*states: str, everything: bool = False) -> list[str]:
    """The lines about runs, each by its state."""
    runs = [
        {"job": "take", "run_id": f"{number:08}", "status": state, "began": None, "ended": None}
        | {"going_on": state in ("STARTED", "QUEUED")}
        for number, state in enumerate(states)
    ]
    platform: dict[str, Any] = {"running": False, "sensors": [], "runs": runs, "checks": None}
    (text,) = [text for label, text in platform_facts(platform, everything=everything) if label == "runs"]
    return [line.split(" ", 2)[-1] for line in text.splitlines()]


def test_runs_that_go_on_hide_no_other_and_ended_ones_follow() -> None:
    assert told("STARTED", "STARTED", "QUEUED", "QUEUED", "SUCCESS", "SUCCESS", "SUCCESS", "SUCCESS") == [
        *["started"] * 2,
        *["queued"] * 2,
        *["succeeded"] * 3,
    ]


def test_of_a_long_queue_the_rest_is_counted() -> None:
    lines = told("STARTED", *["QUEUED"] * 40, "SUCCESS")
    assert lines[:10] == ["started", *["queued"] * 9]
    assert lines[10:] == ["more that go on (--all)", "succeeded"]
    assert len(told("STARTED", *["QUEUED"] * 40, "SUCCESS", everything=True)) == 42


def test_a_daemon_that_hangs_breaks_the_platform() -> None:
    """Nothing else would tell of it: what it does not take in is not late before the service level is."""
    nothing = {"checks": None, "failed_runs": None, "sensors": None}
    assert list(_of_platform({**nothing, "daemon_hangs": False})) == []
    (found,) = _of_platform({**nothing, "daemon_hangs": True})
    assert (found.kind, found.broken) == ("daemon", True)


def test_records_that_cannot_be_read_are_a_problem_of_their_own(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize(60))
    assert platform_document(Settings(_env_file=None), home, None)["records_unread"] == []  # type: ignore[call-arg]
    away = Settings(dagster_pg_url=SecretStr("postgresql://me@127.0.0.1:1/dagster"), _env_file=None)  # type: ignore[call-arg]
    (found,) = _of_platform(platform_document(away, home, None))
    assert found.kind == "records"
    assert found.hides == ("run ", "sensor ", "check ")


@pytest.mark.parametrize(
    ("command", "running"),
    [("up", True), ("demo", True), (DAEMON_HOLDS, True), ("materialize", False), ("home copy", False)],
)
def test_the_platform_runs_while_something_takes_in_what_lands(
    command: str, running: bool, tmp_path: Path
) -> None:
    settings = Settings(_env_file=None)  # type: ignore[call-arg]
    home = Home.open(tmp_path / "home", WindowSize(60))
    with HomeLock(home, command):
        platform = platform_document(settings, home, None)
    assert platform["running"] is running
    ((_, line), *_) = platform_facts(platform, everything=False)
    if running:
        assert platform["held_by"] is None and line.startswith("running")
    else:
        assert line.startswith(f"not running: `{command}` (process ") and line.endswith(" has the home")
    assert platform_document(settings, home, None)["held_by"] is None
