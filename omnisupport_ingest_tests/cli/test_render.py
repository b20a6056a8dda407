"""What people read: numbers and times in one way, lines that a pipe sees at a fixed width, nothing cut."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import click
import pytest

from omnisupport_ingest.cli import render


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "run", "0 runs"), (1, "batch", "1 batch"), (2, "batch", "2 batches"), (1234, "row", "1,234 rows")],
)
def test_counts_have_their_noun_in_the_right_number(number: int, noun: str, text: str) -> None:
    assert render.counted(number, noun) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1024, "1 kB"), (5 * 1024**2, "5 MB"), (3 * 1024**3, "3.0 GB")],
)
def test_sizes_have_the_unit_that_fits(number: int, text: str) -> None:
    assert render.size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7199, "120 min"), (7200, "2 h"), (200000, "2 days")],
)
def test_a_duration_has_the_largest_unit_that_it_has_twice(seconds: float, text: str) -> None:
    assert render.span(seconds) == text


def test_a_moment_ahead_of_the_clock_is_not_ago() -> None:
    assert render.ago(datetime.now(UTC) + timedelta(minutes=5)) == "0 s ago"


def test_a_clock_is_utc_whatever_the_zone_it_came_in() -> None:
    at = datetime(2026, 1, 31, 9, tzinfo=timezone(timedelta(hours=2)))
    assert render.clock(at) == render.clock(at.isoformat()) == "2026-01-31 07:00:00 UTC"
    assert render.clock(None) == "none"


def test_the_first_names_are_shown_and_the_others_counted() -> None:
    assert render.some(["a", "b"], most=2) == "a, b"
    assert render.some(["a", "b", "c"], most=2) == "a, b and 1 more"


LONG = "/a/path/" + "x" * 120


def test_a_label_and_its_text_wrap_beside_each_other_and_no_name_is_cut(
    capsys: pytest.CaptureFixture[str],
) -> None:
    render.facts([("state", "RUNNING " + "word " * 40), ("home", LONG), ("two", "one\ntwo")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("state        RUNNING word") and max(map(len, lines[:3])) <= render.WIDTH
    assert lines[1].startswith(" " * 13 + "word")
    assert lines[-3:] == ["home         " + LONG, "two          one", " " * 13 + "two"]


def test_a_table_wider_than_the_page_keeps_its_cells_whole(capsys: pytest.CaptureFixture[str]) -> None:
    render.table(["file", "rows"], [[LONG, "1,000"], ["b", "2"]], right=["rows"])
    title, first, second = capsys.readouterr().out.splitlines()
    assert LONG in first and first.endswith("1,000")
    assert title.endswith("rows") and second.endswith("    2")


def test_text_with_brackets_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    render.facts([("key", "[bold]1[/bold] :smile:")])
    render.table(["key"], [["[red]1[/red]"]])
    out = capsys.readouterr().out
    assert "[bold]1[/bold] :smile:" in out and "[red]1[/red]" in out


def test_json_of_a_name_that_is_no_text_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    render.echo_json({"file": "caf\u00e9"})
    assert "caf\u00e9" in capsys.readouterr().out
    render.echo_json({"file": os.fsdecode(b"\xff")})
    assert "\\udcff" in capsys.readouterr().out


_SHOW = """
from omnisupport_ingest.cli import render
render.facts([("state", "RUNNING since today"), ("text", "word " * 40)])
render.heading("heading")
"""


def test_a_terminal_gets_its_width_and_colours_and_a_pipe_gets_neither() -> None:
    piped = subprocess.run([sys.executable, "-c", _SHOW], capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    assert 90 < max(map(len, piped.splitlines())) <= render.WIDTH
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "70", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    subprocess.run([sys.executable, "-c", _SHOW], stdout=theirs, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "\x1b[1;32mRUNNING" in shown
    assert max(map(len, click.unstyle(shown).splitlines())) <= 70


def test_the_help_of_a_group_has_every_command_with_its_whole_sentence() -> None:
    @click.group(cls=render.Commands)
    def group() -> None:
        """A group."""

    sentence = "Do something that takes more words than a column of forty-five characters has room for."

    @group.command(help=f"{sentence} And more.")
    def one() -> None: ...

    @group.command(hidden=True)
    def two() -> None: ...

    told = " ".join(group.get_help(click.Context(group)).split())
    assert f"one {sentence}" in told and "And more" not in told and "two" not in told
