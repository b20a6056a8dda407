"""A replay that comes to the same rows touches no row above: not of the dimension, not of the history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import deltalake
import pytest
from pyspark.sql import Row, SparkSession

from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.dimension.shown_net_changes import newer_windows, shows
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.erasing import erase, key_text
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, THIRD, Change, Commit, Story

NAMED = {"title": "t", "body": "b"}


@pytest.fixture
def told(tmp_path: Path, spark: SparkSession) -> Story:
    """Three windows. In the second a row has changed its key, and there is an event in quarantine."""
    story = Story(tmp_path / "told")
    story.land(Commit(10, 1, [Change("c", number, NAMED) for number in range(1, 9)]))
    story.land(
        Commit(20, 61, [Change("d", 3), Change("c", 30, {"title": "m"}, ("body",), moved_from=3)]),
        Commit(21, 62, [Change("u", 4, {"title": "x" * 21, "body": "b"}), Change("d", 5)]),
    )
    run(story, spark, FIRST, SECOND)
    story.land(Commit(22, 63, [Change("u", 6, {"title": "six", "body": "b"})]))
    story.land(Commit(30, 121, [Change("d", 4), Change("d", 6)]))
    run(story, spark, SECOND, THIRD)
    return story


def run(story: Story, spark: SparkSession, *windows: str, replay: bool = False) -> None:
    for layer in (raw, deduped):
        layer.materialize(story.workspace, spark, SOURCE, windows, "run", replay=replay)
    dimensions.materialize(story.workspace, spark, story.contract, windows, "run", replay=replay)
    history.materialize(story.workspace, spark, story.contract, "run")


def held(table: LakeTable) -> tuple[int | None, dict[str, int]]:
    """How far ``table`` is in the layer above, and its data files by path, with their times."""
    snapshot = table.open()
    state = snapshot.state(WHOLE_TABLE)
    assert state is not None
    files = {file.path: Path(file.uri).stat().st_mtime_ns for file in snapshot.all_files()}
    return state.checkpoint.upstream_version, files


def never(*_: object, **__: object) -> NoReturn:
    raise AssertionError("rows were made again")


@pytest.fixture
def no_rows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Whoever makes rows of a dimension or a history fails."""
    for layer in (dimensions, history):
        monkeypatch.setattr(layer, "update_files", never)
    monkeypatch.setattr(history, "differing", never)
    return monkeypatch


def test_nothing_is_made_again_and_the_tables_note_that(
    told: Story, spark: SparkSession, no_rows: pytest.MonkeyPatch
) -> None:
    dimension, versions = (told.workspace.dimension(told.contract), told.workspace.history(told.contract))
    _, rows = held(dimension)
    _, rows_of_history = held(versions)
    run(told, spark, SECOND, replay=True)
    above, deduped_events = told.workspace.net_changes(told.contract).open(), told.workspace.deduped(SOURCE)
    replayed = above.state(SECOND)
    assert replayed is not None and replayed.generation > 1 and replayed.checkpoint.changed_by == ()
    # Else the next look would read the log from there again, and make every row anew once files are swept.
    assert held(dimension) == (above.version, rows)
    assert held(versions) == (deduped_events.open().version, rows_of_history)


def test_a_window_that_was_replayed_alone_is_shown(told: Story, spark: SparkSession) -> None:
    net_changes.materialize(told.workspace, spark, told.contract, [SECOND], "run", replay=True)
    state = told.workspace.dimension(told.contract).open().state(WHOLE_TABLE)
    assert newer_windows(state, told.workspace.net_changes(told.contract).open()) == frozenset()


def test_a_table_that_has_not_noted_it_is_visited_for_that(told: Story, spark: SparkSession) -> None:
    """As after a crash: what tells that it came to the same goes with files that are swept."""
    net_changes.materialize(told.workspace, spark, told.contract, [SECOND], "run", replay=True)
    above, dimension = (told.workspace.net_changes(told.contract), told.workspace.dimension(told.contract))
    state = dimension.open().state(WHOLE_TABLE)
    assert state is not None and not shows(state, above.open(), told.contract)
    dimensions.update(told.workspace, spark, told.contract, "run")
    state = dimension.open().state(WHOLE_TABLE)
    assert state is not None and shows(state, above.open(), told.contract)


@pytest.mark.parametrize("changed", ["dimension", "history"])
def test_rows_that_another_program_deleted_of_the_table_itself_come_back(
    told: Story, spark: SparkSession, changed: str
) -> None:
    table = getattr(told.workspace, changed)(told.contract)
    before = ids(table, spark)
    deltalake.DeltaTable(str(table.folder)).delete("id = 8")
    run(told, spark, FIRST, replay=True)
    assert ids(table, spark) == before


@pytest.mark.parametrize("changed", ["net_changes", "deduped"])
def test_rows_that_another_program_deleted_come_back(told: Story, spark: SparkSession, changed: str) -> None:
    """Its loss was taken in by the tables above; no state of ours says that there was one."""
    dimension, versions = (told.workspace.dimension(told.contract), told.workspace.history(told.contract))
    before = [ids(table, spark) for table in (dimension, versions)]
    where = {
        "net_changes": (told.workspace.net_changes(told.contract), "id = 8"),
        "deduped": (told.workspace.deduped(SOURCE), """key = '["8"]'"""),
    }
    table, rows = where[changed]
    deltalake.DeltaTable(str(table.folder)).delete(rows)
    told.land(Commit(40, 125, [Change("c", 40, {"title": "n", "body": "b"})]))
    run(told, spark, THIRD)
    run(told, spark, FIRST, replay=True)
    assert [ids(table, spark) for table in (dimension, versions)] == [sorted([*each, 40]) for each in before]


def test_what_landed_since_is_shown(told: Story, spark: SparkSession) -> None:
    told.land(Commit(31, 64, [Change("u", 8, {"title": "late", "body": "b"})]))
    run(told, spark, SECOND, replay=True)
    assert {row.id: row.title for row in rows_of(told.workspace.dimension(told.contract), spark)}[8] == "late"
    assert "late" in {row.title for row in rows_of(told.workspace.history(told.contract), spark)}


def test_other_rules_or_batches_above_make_other_rows(told: Story) -> None:
    """Also where no hash of an event tells, as of values that are hidden by another key. The contract of
    another table is no such rule."""
    above = told.workspace.deduped(SOURCE).open().state(SECOND)
    assert above is not None
    others = (
        replace(above, versions=(*above.versions, "pii_key:2")),
        replace(above, versions=(*above.versions, f"contract:{told.contract.name}:2")),
        replace(above, batches=above.batches[:1]),
    )
    digests = {net_changes._digest(each, told.contract) for each in (above, *others)}
    assert len(digests) == 4
    of_another = replace(above, versions=(*above.versions, "contract:another:2"))
    assert net_changes._digest(of_another, told.contract) in digests
    state = told.workspace.net_changes(told.contract).open().state(SECOND)
    assert state is not None and state.made_from in digests
    assert not state.same_rows(replace(state, made_from=net_changes._digest(others[0], told.contract)))


def test_a_window_of_an_earlier_version_is_made_again_in_full(
    told: Story, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state does not say what the layer above held."""
    with monkeypatch.context() as patched:
        patched.setattr(net_changes, "_digest", lambda *_: "")
        run(told, spark, SECOND, replay=True)
    monkeypatch.setattr(dimensions, "update_files", never)
    with pytest.raises(AssertionError, match="made again"):
        run(told, spark, SECOND, replay=True)


def test_erased_values_leave_the_dimension(told: Story, spark: SparkSession) -> None:
    """The events of the window are the same ones, and what they are judged by is not."""
    dimension = told.workspace.dimension(told.contract)
    assert [row.body for row in rows_of(dimension, spark) if row.id == 6] == ["b"]
    erase(told.workspace, told.contract, key_text(["6"]), erased_by="ana", why="request")
    told.workspace = Workspace.open(told.workspace.settings)
    run(told, spark, FIRST, SECOND, replay=True)
    erased = [row for row in rows_of(told.workspace.dimension(told.contract), spark) if row.id == 6]
    assert [(row.title, row.body) for row in erased] == [(None, None)]


def ids(table: LakeTable, spark: SparkSession) -> list[int]:
    return sorted(row.id for row in rows_of(table, spark))


def rows_of(table: LakeTable, spark: SparkSession) -> list[Row]:
    snapshot = table.open()
    return snapshot.read(spark, snapshot.all_files()).collect()
