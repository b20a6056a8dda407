"""``logs``: what a person sees of the logs of a home."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import Done, command, environment
from omnisupport_ingest_tests.waiting import PATIENCE


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    made = Home.open(tmp_path / "home", WindowSize.parse("minutes:1"))
    with environment(home=str(made.path), window="minutes:1"):
        yield made


def written(home: Home, component: str, text: str) -> Path:
    path = home.logs / f"{component}.log"
    path.write_text(text)
    return path


def logs(*arguments: str) -> Done:
    return command("logs", *arguments)


def test_home_without_logs_is_told_how_they_come_about(home: Home) -> None:
    none = logs()
    assert (none.code, none.out) == (0, "") and "omnisupport-ingest up" in none.err
    unknown = logs("--component", "capture")
    assert unknown.code == 2 and "There are no logs yet." in unknown.err


def test_last_lines_of_every_component_carry_its_name(home: Home) -> None:
    os.utime(written(home, "capture", "one\ntwo\nthree\n"), (1, 1))
    written(home, "dagster-daemon", "\x1b[32mfour\x1b[0m\n")
    told = logs("--lines", "2")
    assert told.code == 0 and told.err == ""
    assert told.out == "capture        | two\ncapture        | three\ndagster-daemon | four\n"
    assert logs("--component", "capture", "--lines", "1").out == "capture | three\n"
    unknown = logs("--component", "captur")
    assert unknown.code == 2 and "There are: capture, dagster-daemon." in unknown.err


def test_each_line_can_be_a_document(home: Home) -> None:
    written(home, "capture", 'one "quoted"\nError: It is away.\n')
    told = [json.loads(line) for line in logs("--json").out.splitlines()]
    assert told == [
        {"component": "capture", "line": 'one "quoted"'},
        {"component": "capture", "line": "Error: It is away."},
    ]
    assert [json.loads(line) for line in logs("--json", "--errors").out.splitlines()] == told[1:]


def test_errors_come_with_their_fix_and_none_is_said(home: Home) -> None:
    written(home, "capture", "Landed 1 changes\nError: It is away.\nFix: Start it.\nLanded 2 changes\n")
    assert logs("--errors").out == "capture | Error: It is away.\ncapture | Fix: Start it.\n"
    written(home, "capture", "Landed 1 changes\n")
    none = logs("--errors")
    assert none.out == "" and "There are no errors in capture." in none.err


@pytest.mark.parametrize("errors", [False, True])
def test_following_shows_what_is_written_next_also_by_a_new_component(home: Home, errors: bool) -> None:
    log = written(home, "capture", "Error: Old.\nFix: Nothing.\n")
    options = ["--follow", "--lines", "2"] + (["--errors"] if errors else [])
    process = subprocess.Popen(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "logs", *options],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        # It follows from before it shows what was there; earlier, nobody can tell what is new to it.
        old = [process.stdout.readline() for _ in range(2)]
        assert old == ["capture | Error: Old.\n", "capture | Fix: Nothing.\n"]
        with log.open("a") as file:
            file.write("Landed 1 changes\nError: New.\nFix: Nothing.\n")
        written(home, "land", "Error: It is new.\nFix: None.\n")
        shown: list[str] = []
        while not any("It is new." in line for line in shown):
            shown.append(process.stdout.readline())
        # A line that comes while the old ones are shown may be shown twice, but none is missed.
        seen = [line for line in dict.fromkeys(shown) if line.startswith("capture")]
        expected = [] if errors else ["capture | Landed 1 changes\n"]
        assert seen == [*expected, "capture | Error: New.\n", "capture | Fix: Nothing.\n"]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()
