"""What a long look says: the stage, how far it is, the time left; nothing where it is over at once."""

from __future__ import annotations

import time

import pytest

from omnisupport_ingest import progress
from omnisupport_ingest.cli import long_look
from omnisupport_ingest.cli.long_look import LongLook, speaking
from omnisupport_ingest.progress import Stage


@pytest.mark.parametrize(
    ("stage", "now", "line"),
    [
        (Stage("waiting for the lake"), 40.0, "… waiting for the lake, 40 s so far"),
        (
            Stage("comparing t", 1, 4),
            40.0,
            "… comparing t (2 of 4), 40 s so far, about 90 s left",
        ),
        (
            Stage("writing t", share=lambda: 0.25),
            40.0,
            "… writing t, 25%, 40 s so far, about 90 s left",
        ),
        (Stage("writing t", share=lambda: -0.01), 40.0, "… writing t, 0%, 40 s so far"),
        (Stage("writing t", share=lambda: 1 / 0), 40.0, "… writing t, 40 s so far"),
    ],
    ids=["unknown", "the second of four", "a quarter", "not begun", "over"],
)
def test_a_line_says_what_how_far_and_how_long(stage: Stage, now: float, line: str) -> None:
    look = LongLook(0.0)
    look.heard(Stage(stage.what, 0, stage.of, stage.share), 10.0)
    if stage.done:
        look.heard(stage, 30.0)
    assert look.line(now) == line


def test_it_speaks_without_a_terminal_once_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with speaking():
        progress.reached("nothing much")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(long_look, "FIRST_AFTER", 0.05)
    monkeypatch.setattr(long_look, "EVERY", 0.05)
    with speaking():
        for _ in progress.each(["t", "agents"], "comparing {}".format):
            time.sleep(0.2)
    said = capsys.readouterr()
    assert said.out == "", "the result alone is on standard output"
    lines = said.err.splitlines()
    assert lines[0].startswith("… comparing t (1 of 2), 0 s so far")
    assert lines[-1].startswith("… comparing agents (2 of 2), 0 s so far, about 0 s left")


def test_nobody_hears_of_work_that_nobody_waits_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.each([1, 2], str)) == [1, 2]
    progress.reached("a run")
    assert capsys.readouterr() == ("", "")
