"""The notebook that queries the lake: whole, without outputs, and every cell runs on a small lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.layers.histories import history
from omnisupport_ingest_tests.layers.story import FIRST, Change, Commit, Story
from omnisupport_ingest_tests.recovery.pipeline import run_layers

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "query.ipynb"
OURS = {
    ".omnisupport/lake/support_desk": "home/lake/desk",
    "tickets": "notes",
    "status": "title",
    "channel": "body",
}
"""What the notebook calls tables and columns, and what this test's lake has."""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    folder = tmp_path_factory.mktemp("notebook")
    story = Story(folder)
    snapshot = Commit(5, 0, [])
    story.land_chunk(snapshot)
    story.land_boundary(snapshot)
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"}), Change("c", 2, {"title": "two"})]),
        Commit(20, 2, [Change("u", 1, {"title": "uno", "body": "text", "mood": "glad"}), Change("d", 2)]),
        # Its create was never seen, so what it does not carry is not known.
        Commit(30, 3, [Change("u", 3, {"title": "three"}, unchanged=("body",))]),
    )
    story.land_idle(40)
    run_layers(story.workspace, spark, [FIRST])
    history.materialize(story.workspace, spark, story.contract, "run")
    return folder


def document() -> Any:
    return json.loads(NOTEBOOK.read_text())


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in document()["cells"] if cell["cell_type"] == kind]


def test_the_notebook_is_one_of_format_4_without_outputs() -> None:
    found = document()
    assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in found["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in found["cells"]:
        code = cell["cell_type"] == "code"
        more = {"outputs", "execution_count"} if code else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | more
        assert not code or (cell["outputs"], cell["execution_count"]) == ([], None)


def test_what_the_notebook_links_to_is_there() -> None:
    linked = [part.partition(")")[0] for text in sources("markdown") for part in text.split("](")[1:]]
    assert linked
    assert [link for link in linked if not (NOTEBOOK.parent / link.partition("#")[0]).is_file()] == []


def test_every_cell_of_the_notebook_runs(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lake / "contracts")  # As Jupyter does, which starts in the notebook's folder.
    seen: dict[str, Any] = {}
    for number, code in enumerate(sources("code")):
        for theirs, ours in OURS.items():
            code = code.replace(theirs, ours)
        exec(compile(code, f"{NOTEBOOK.name}, code cell {number}", "exec"), seen)

    assert seen["by_title"].fetchall() == [("three", 1), ("uno", 1)]
    assert seen["counted"].rows() == [("three", 1), ("uno", 1)]
    assert [row[:2] for row in seen["deleted"].project("id, title").fetchall()] == [(2, "two")]
    assert seen["unresolved"].fetchall() == [(3, ["body"])]
    assert [row[:3] for row in seen["versions"].project("id, title, _cdc_opened_by").fetchall()] == [
        (1, "one", "c"),
        (1, "uno", "u"),
    ]
    # Just below the last commit, which brought row 3; halfway through, both rows of the first commit live.
    assert seen["below"].project("id, title").fetchall() == [(1, "uno")]
    assert sorted(seen["then"].project("id, title").fetchall()) == [(1, "one"), (2, "two")]
    assert seen["unnamed"].fetchall() == [("mood",)]
    assert seen["events"].fetchall() == [(10, "c", "1", "text"), (20, "u", "1", "text")]
    assert seen["bodys"].rows() == [("text", "c", 1), ("text", "u", 1)]
