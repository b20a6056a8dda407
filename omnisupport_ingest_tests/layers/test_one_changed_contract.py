"""After a change of one table's contract only that table is made again; no other table is written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.defs.metadata import checkpoint_metadata
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.standing_task import standing_task
from omnisupport_ingest.lake.state import WindowState
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest_tests.layers.story import FIRST, SECOND, SOURCE, START, Change, Commit
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables
from omnisupport_ingest_tests.recovery.pipeline import open_workspace

LONG = "a title that is far too long"
OTHERS = ("labels", "notes")
SIZE = {"type": ["integer", "null"], "x-pg-type": "integer", "description": "Size.", "default": None}
Edit = Callable[[dict[str, Any]], object]


def learned(document: dict[str, Any]) -> None:
    document["properties"]["size"] = SIZE


def stricter(document: dict[str, Any]) -> None:
    document["properties"]["title"]["maxLength"] = 2


def laxer(document: dict[str, Any]) -> None:
    document["properties"]["title"]["maxLength"] = 40


def dropped(document: dict[str, Any]) -> None:
    document["x-cdc"]["pii"] = {"title": {"policy": "drop", "note": "Personal."}}


def hashed(document: dict[str, Any]) -> None:
    document["x-cdc"]["pii"] = {"title": {"policy": "hash", "note": "Personal."}}


@pytest.fixture
def desk(tmp_path: Path) -> ThreeTables:
    """Three tables with events in the first window. In the second one, ``tags`` has none."""
    desk = ThreeTables(tmp_path)
    desk.land_of(1, *TABLES)
    desk.land_of(2, *TABLES)
    desk.land_of(61, *OTHERS)
    return desk


def changed(desk: ThreeTables, edit: Edit, table: str = "tags") -> None:
    """Change the contract of ``table``."""
    path = desk.contracts / f"{table}.json"
    document = json.loads(path.read_text())
    edit(document)
    document["x-cdc"]["version"] = "2.0.0"
    path.write_text(json.dumps(document))


def run(
    desk: ThreeTables,
    spark: SparkSession,
    *,
    every: bool = False,
    replay: bool = False,
    histories: bool = False,
) -> Workspace:
    """Do what is pending, as the ingest job does. ``every``: visit every table. ``histories``: make these
    too."""
    workspace = open_workspace(desk.contracts.parent)
    pending = pending_windows(workspace, SOURCE)
    windows = [FIRST, SECOND] if replay else pending.windows
    with standing_task(spark):
        for layer in (raw, deduped):
            layer.materialize(workspace, spark, SOURCE, windows, "run", replay=replay)
        for contract in workspace.contracts.of_source(SOURCE):
            if every or replay or contract.name in pending.tables:
                dimensions.materialize(workspace, spark, contract, windows, "run", replay=replay)
    for contract in workspace.contracts.of_source(SOURCE) if histories else ():
        history.materialize(workspace, spark, contract, "run")
    return workspace


def tables_of(workspace: Workspace, *names: str) -> list[LakeTable]:
    """The net changes, dimensions and histories (if there are any) of the tables called ``names``."""
    contracts = [each for each in workspace.contracts.of_source(SOURCE) if each.name in names]
    kinds = (workspace.net_changes, workspace.dimension, workspace.history)
    return [table for each in contracts for kind in kinds if (table := kind(each)).exists]


def states_of_net_changes(workspace: Workspace) -> list[WindowState]:
    """Those of the other tables, of the first window."""
    folded = [table for table in tables_of(workspace, *OTHERS) if "net_changes" in table.spec.path]
    states = [table.open().state(FIRST) for table in folded]
    return [each for each in states if each is not None]


def versions_of_dimensions(workspace: Workspace) -> list[int]:
    """Those of the other tables."""
    contracts = [each for each in workspace.contracts.of_source(SOURCE) if each.name in OTHERS]
    return [workspace.dimension(each).open().version for each in contracts]


def files_of(table: LakeTable) -> dict[str, tuple[int, int, int]]:
    """The data files of ``table`` by path, each with what tells whether it was written again."""
    found = {}
    for file in table.open().all_files():
        stat = Path(file.uri).stat()
        found[file.path] = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


def events_of(workspace: Workspace, *names: str) -> dict[str, tuple[int, int, int]]:
    """As ``files_of``, of the deduped events of the tables called ``names``."""
    found = files_of(workspace.deduped(SOURCE))
    return {
        path: file for path, file in found.items() if any(f"source_table={each}/" in path for each in names)
    }


def state_of(workspace: Workspace, window: str = FIRST) -> WindowState:
    state = workspace.deduped(SOURCE).open().state(window)
    assert state is not None
    return state


def contents(workspace: Workspace) -> dict[str, object]:
    """The counts and content hashes of all windows of all tables."""
    found: dict[str, object] = {}
    for table in (workspace.deduped(SOURCE), *tables_of(workspace, *TABLES)):
        snapshot = table.open()
        for window in snapshot.windows():
            if (state := snapshot.state(window)) is not None:
                done = state.checkpoint
                counts = (done.raw, done.deduped, done.duplicates, done.quarantined, dict(done.scenarios))
                found[f"{table.spec.path} {window}"] = (done.content_hash, counts if window else None)
    return found


def assert_as_a_replay_makes_it(desk: ThreeTables, spark: SparkSession, workspace: Workspace) -> None:
    before = contents(workspace)
    assert contents(run(desk, spark, replay=True)) == before


@pytest.mark.parametrize(
    ("edit", "every"),
    [pytest.param(learned, True, marks=pytest.mark.quick), (stricter, False), (hashed, False)],
)
def test_only_the_table_is_made_again_and_only_in_windows_with_its_events(
    desk: ThreeTables, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, edit: Edit, every: bool
) -> None:
    """Also where a run visits the other tables, as where another event of theirs has landed."""
    monkeypatch.setenv("TESTS_PII_KEY", "5" * 64)
    monkeypatch.setenv("OMNISUPPORT_PII_KEYS", "2026a=env:TESTS_PII_KEY")
    before = run(desk, spark, histories=every)
    kept, own = events_of(before, *OTHERS), events_of(before, "tags")
    versions = [table.open().version for table in tables_of(before, *OTHERS)]
    later = state_of(before, SECOND)
    assert len(kept) == 4 and len(own) == 1
    changed(desk, edit)
    pending = pending_windows(open_workspace(desk.contracts.parent), SOURCE)
    assert pending.tables == ("tags",)
    after = run(desk, spark, every=every, histories=every)
    assert events_of(after, *OTHERS) == kept
    assert not own.keys() & events_of(after, "tags").keys()
    assert [table.open().version for table in tables_of(after, *OTHERS)] == versions
    assert state_of(after, SECOND) == later
    state = state_of(after)
    assert state.generation > state_of(before, SECOND).generation
    shown = checkpoint_metadata(state.checkpoint)
    assert shown["made_again"].value == "public.tags"
    dimension = next(each for each in tables_of(after, "tags") if each.spec.path.endswith("dim_tags"))
    state_of_tags = dimension.open().state(WHOLE_TABLE)
    assert state_of_tags is not None and state_of_tags.generation > 1
    assert pending_windows(after, SOURCE).nothing
    assert_as_a_replay_makes_it(desk, spark, after)
    assert state_of(after).checkpoint.made_again == (), "a replay makes all tables again"


def test_a_quarantine_file_of_other_tables_stays(desk: ThreeTables, spark: SparkSession) -> None:
    run(desk, spark)
    desk.land_of(3, *OTHERS, title=LONG)
    before = run(desk, spark)
    held, kept = files_of(before.quarantine(SOURCE)), events_of(before, *OTHERS)
    versions = [table.open().version for table in tables_of(before, *OTHERS)]
    assert len(held) == 1
    changed(desk, stricter)
    after = run(desk, spark, every=True)
    assert state_of(after).checkpoint.quarantined == 4
    assert held.items() < files_of(after.quarantine(SOURCE)).items()
    assert events_of(after, *OTHERS) == kept
    # They note the quarantine file of the other table.
    net_changes, dimension = tables_of(after, "labels")
    assert dimension.open().version == versions[1]
    assert len(net_changes.open().all_files()) == 3
    assert pending_windows(after, SOURCE).nothing
    assert_as_a_replay_makes_it(desk, spark, after)


def test_a_quarantine_file_of_several_tables_is_written_anew_and_nothing_is_folded_for_that(
    desk: ThreeTables, spark: SparkSession
) -> None:
    desk.land_of(3, "labels", "tags", title=LONG)
    before = run(desk, spark, histories=True)
    kept = events_of(before, *OTHERS)
    files = [files_of(table) for table in tables_of(before, *OTHERS)]
    shown = versions_of_dimensions(before)
    (quarantined,) = files_of(before.quarantine(SOURCE))
    changed(desk, laxer)
    pending = pending_windows(open_workspace(desk.contracts.parent), SOURCE)
    assert pending.tables == TABLES, "they note the new quarantine file"
    after = run(desk, spark, histories=True)
    assert state_of(after).checkpoint.quarantined == 1
    assert quarantined not in files_of(after.quarantine(SOURCE))
    assert events_of(after, *OTHERS) == kept
    assert [files_of(table) for table in tables_of(after, *OTHERS)] == files
    assert [state.generation for state in states_of_net_changes(after)] == [1, 1]
    assert versions_of_dimensions(after) == shown
    assert pending_windows(after, SOURCE).nothing
    assert_as_a_replay_makes_it(desk, spark, after)


def test_events_that_landed_meanwhile_are_added_to_what_stays(desk: ThreeTables, spark: SparkSession) -> None:
    before = run(desk, spark)
    kept = events_of(before, *OTHERS)
    changed(desk, learned)
    desk.land_of(4, *TABLES)
    after = run(desk, spark)
    assert kept.items() < events_of(after, *OTHERS).items()
    folded = states_of_net_changes(after)
    assert [(state.generation, state.checkpoint.rows) for state in folded] == [(1, 3), (1, 3)]
    assert state_of(after).checkpoint.deduped == 9
    assert pending_windows(after, SOURCE).nothing
    assert_as_a_replay_makes_it(desk, spark, after)


def test_copies_are_counted_as_before_and_new_ones_make_the_window_again(
    desk: ThreeTables, spark: SparkSession
) -> None:
    """A copy may change the verdict on an event that a file holds."""
    written = Commit(1000, 5, [Change("c", 1, {"title": "t", "body": None})])
    desk.land(written)
    desk.land_again(written)
    before = run(desk, spark)
    kept = events_of(before, *OTHERS)
    changed(desk, learned)
    after = run(desk, spark)
    assert events_of(after, *OTHERS) == kept and state_of(after).checkpoint.duplicates == 1
    changed(desk, stricter)
    desk.land_again(written)
    again = run(desk, spark)
    done = state_of(again).checkpoint
    assert (done.duplicates, done.made_again) == (2, ())
    assert not {each for each in kept if FIRST in each} & events_of(again, *OTHERS).keys()
    assert_as_a_replay_makes_it(desk, spark, again)


def test_a_closed_window_keeps_its_compacted_files_and_stays_closed(
    desk: ThreeTables, spark: SparkSession
) -> None:
    run(desk, spark)
    desk.land_of(4, *TABLES)
    run(desk, spark)
    desk.clock = START + timedelta(hours=2)
    desk.land_of(65 * 60, "notes")
    run(desk, spark)
    before = run(desk, spark)
    kept, state = events_of(before, *OTHERS), state_of(before)
    assert state.closed and state.compacted_units
    versions = [table.open().version for table in tables_of(before, *OTHERS)]
    changed(desk, learned)
    after = run(desk, spark, every=True)
    assert events_of(after, *OTHERS) == kept and state_of(after).closed
    now = state_of(after).compacted_units
    assert now == {
        path: names for path, names in state.compacted_units.items() if "source_table=tags" not in path
    }
    assert [table.open().version for table in tables_of(after, *OTHERS)] == versions
    assert pending_windows(after, SOURCE).nothing


def test_a_window_that_another_program_wrote_to_is_made_again_whole(
    desk: ThreeTables, spark: SparkSession
) -> None:
    workspace = run(desk, spark)
    before = state_of(workspace).checkpoint
    deltalake.DeltaTable(str(workspace.deduped(SOURCE).folder)).delete("source_table = 'notes'")
    changed(desk, learned)
    after = state_of(run(desk, spark, every=True)).checkpoint
    assert (after.content_hash, after.deduped) == (before.content_hash, before.deduped)
    assert after.made_again == ()


def test_a_table_of_the_same_name_without_a_contract_is_made_again(
    desk: ThreeTables, spark: SparkSession
) -> None:
    """Both share their files, and the first policy of the source changes what no contract describes."""
    desk.land_of(3, "other.labels")
    before = run(desk, spark)
    kept, shared = events_of(before, "notes"), events_of(before, "labels")
    changed(desk, dropped)
    after = run(desk, spark)
    assert events_of(after, "notes") == kept
    assert not {each for each in shared if FIRST in each} & events_of(after, "labels").keys()
    assert state_of(after).checkpoint.made_again == ("other.labels", "public.labels", "public.tags")
    assert_as_a_replay_makes_it(desk, spark, after)
