"""Commands that only look: they change nothing in the home, and no Spark is started for them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from omnisupport_ingest.runtime import spark as runtime_spark
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.cli.sample_home import SampleHome, files_in, land_another

LOOKING = (
    "status",
    "status --all --json",
    "ledger",
    "doctor",
    "report --json",
    "explain notes --key 1",
    "explain notes --key 3 --column body --json",
    "tail notes",
    "windows",
    "quarantine list",
    "landing list",
    "checkpoint show",
)


def contents(home: Path) -> dict[Path, str]:
    """Every file but SQLite's, which notes who looked, with a hash of its content."""
    return {
        each: hashlib.sha256((home / each).read_bytes()).hexdigest()
        for each in files_in(home)
        if (home / each).is_file() and "sqlite" not in each.name
    }


def test_what_only_looks_changes_nothing_and_starts_no_spark(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a command that only looks asked for Spark")

    land_another(sample_home)
    monkeypatch.setattr(runtime_spark, "session", refused)
    before = contents(sample_home.home)
    for each in LOOKING:
        done = command(*each.split())
        assert done.code in (0, 1), (each, done.output)
        assert contents(sample_home.home) == before, each
