"""A contract says how many rows a file of its dimension and history has, and nothing else changes by it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, TableContract
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.layers.dimension import dimensions, net_changes, update_tasks
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SOURCE, Change, Commit, Story

MANY = Commit(10, 1, [Change("c", number, {"title": f"t{number}", "body": "b"}) for number in range(1, 41)])


def document(rows: object) -> dict:
    found = copy.deepcopy(CONTRACT)
    found["x-cdc"]["rows_per_file"] = rows
    return found


def test_the_size_of_files_is_read_and_is_not_another_contract(tmp_path: Path) -> None:
    small, plain = (contract_of(each, tmp_path / "notes.json") for each in (document(2048), CONTRACT))
    assert (small.rows_per_file, plain.rows_per_file) == (2048, None)
    assert (small.fingerprint, small.judged_by) == (plain.fingerprint, plain.judged_by)


@pytest.mark.parametrize("rows", [0, -1, 1023, 131_073, 2048.5, "2048", None, True])
def test_a_size_that_makes_no_sense_is_refused_by_name(tmp_path: Path, rows: object) -> None:
    with pytest.raises(ContractError, match=r"x-cdc\.rows_per_file"):
        contract_of(document(rows), tmp_path / "notes.json")


@pytest.fixture
def story(tmp_path: Path, spark: SparkSession) -> Story:
    """Forty rows in one file of the dimension and one of the history."""
    story = Story(tmp_path)
    story.land(MANY)
    run(story, spark, story.contract)
    assert [rows_of(story), rows_of(story, of_history=True)] == [[40], [40]]
    return story


def run(story: Story, spark: SparkSession, contract: TableContract) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, contract, [FIRST], "run")
    dimensions.update(story.workspace, spark, contract, "run")
    history.materialize(story.workspace, spark, contract, "run")


def rows_of(story: Story, *, of_history: bool = False) -> list[int]:
    """The rows of each file, in the order of the keys."""
    table = story.workspace.history if of_history else story.workspace.dimension
    handle = table(story.contract).open().handle
    listed = handle.get_add_actions(flatten=True)
    found = zip(listed["min.id"].to_pylist(), listed["num_records"].to_pylist(), strict=True)
    return [rows for low, rows in sorted(each for each in found if each[0] is not None)]


def content(story: Story) -> list[str]:
    tables = (story.workspace.dimension(story.contract), story.workspace.history(story.contract))
    states = [table.open().state("") for table in tables]
    return [state.checkpoint.content_hash for state in states if state is not None]


def changed(second: int, *numbers: int) -> Commit:
    return Commit(
        10 * second, second, [Change("u", n, {"title": f"{second}"}, unchanged=("body",)) for n in numbers]
    )


def test_another_size_makes_nothing_again_and_the_next_updates_write_files_of_it(
    story: Story, spark: SparkSession
) -> None:
    workspace, small = story.workspace, replace(story.contract, rows_per_file=4)
    versions = [table(story.contract).open().version for table in (workspace.dimension, workspace.history)]
    assert pending_windows(workspace, SOURCE).windows == ()
    run(story, spark, small)
    assert versions == [table(small).open().version for table in (workspace.dimension, workspace.history)]
    story.land(changed(2, 17))
    run(story, spark, small)
    assert (rows_of(story), sum(rows_of(story, of_history=True))) == ([4] * 10, 41)
    assert len(rows_of(story, of_history=True)) == 10


@pytest.mark.parametrize("few", [True, False])
def test_small_files_are_joined_where_an_update_touches_them_and_the_content_is_that_of_any_size(
    story: Story, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    if not few:
        for layer in (update_tasks, history):
            monkeypatch.setattr(layer, "are_few", lambda files: False)
    plain, other = story.contract, Story(tmp_path / "other")
    other.land(MANY)
    run(other, spark, plain)
    sizes = []
    for second, rows_per_file, number in ((2, 4, 17), (3, 4, 3), (4, 16, 17), (5, 16, 40), (6, 64, 40)):
        for each in (story, other):
            each.land(changed(second, number))
        run(story, spark, replace(plain, rows_per_file=rows_per_file))
        run(other, spark, plain)
        sizes.append(rows_of(story))
        assert content(story) == content(other)
    assert sizes == [[4] * 10, [4] * 10, [4] * 4 + [16] + [4] * 2, [4] * 4 + [16, 8], [40]]
    assert rows_of(other) == [40]


def test_an_update_of_another_size_takes_no_files_that_one_of_this_size_placed_and_did_not_commit(
    story: Story, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces other files than they were made from: rows of those would be gone."""
    plain, other = story.contract, Story(tmp_path / "other")
    small = replace(plain, rows_per_file=4)
    other.land(MANY)
    for second in (2, 3):
        for each in (story, other):
            each.land(changed(second, 17))
        if second == 2:
            run(story, spark, small)
    run(other, spark, plain)
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, [FIRST], "run")
    net_changes.materialize(story.workspace, spark, plain, [FIRST], "run")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for update in (dimensions.update, history.materialize):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(TableSnapshot, "commit", killed)
            update(story.workspace, spark, small, "run")
    run(story, spark, replace(plain, rows_per_file=16))
    assert [sum(rows_of(story)), sum(rows_of(story, of_history=True))] == [40, 42]
    assert content(story) == content(other)
