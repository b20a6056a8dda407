"""What a run is told on its command line, and what is said of it."""

from __future__ import annotations

import json

import pytest

from omnisupport_ingest.verify.runs import RunRequest
from omnisupport_ingest.windows import WindowRange

ONE, TWO = "2026-01-01T1200", "2026-01-01T1201"


@pytest.mark.parametrize(
    ("request_", "arguments"),
    [
        (RunRequest("desk", WindowRange(ONE, TWO)), []),
        (RunRequest("desk", WindowRange(ONE, TWO), cursor="batch"), ["--cursor", "batch"]),
        (
            RunRequest("desk", WindowRange(ONE, TWO), replay={"why": "a reason"}, tables=("notes",)),
            ["--replay", json.dumps({"why": "a reason"}), "--tables", json.dumps(["notes"])],
        ),
        (RunRequest("desk", WindowRange(ONE, TWO), tables=()), ["--tables", "[]"]),
    ],
    ids=["whole", "what is new", "a replay of one table", "no table has news"],
)
def test_a_request_is_handed_to_the_process_of_the_run(request_: RunRequest, arguments: list[str]) -> None:
    assert request_.arguments == ["desk", ONE, TWO, *arguments]


@pytest.mark.parametrize(("last", "span"), [(ONE, ONE), (TWO, f"{ONE} to {TWO}")])
def test_the_windows_of_a_request_are_named_once(last: str, span: str) -> None:
    assert RunRequest("desk", WindowRange(ONE, last)).span == span
