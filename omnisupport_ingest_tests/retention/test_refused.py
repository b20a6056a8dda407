"""What retention keeps although it is old: what somebody may still ask of it, or what is its last copy."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.decision_table import CONTRACT_CHANGE, WAIT
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.layout import StagedFile, partition_in, unit_folder
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.sweep import sweepable
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.manifest import ChunkSpan
from omnisupport_ingest.landing.snapshot_plans import Search, SnapshotPlan, SnapshotPlans
from omnisupport_ingest.layers.events import deduped as layer
from omnisupport_ingest.layers.removed import LANDING, RAW, RecordLost, Removed
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.retention.plan import RetentionPlan, plan_retention
from omnisupport_ingest.retention.removing import Carried, carry_out
from omnisupport_ingest_tests.layers.story import FIRST, SOURCE, START, Change, Commit
from omnisupport_ingest_tests.layers.three_tables import TABLES, ThreeTables, commit

pytestmark = pytest.mark.quick

KEPT = {"landing": "P7D", "raw": "P10D"}
DAY = 24 * 3600


@pytest.fixture
def desk(tmp_path: Path) -> ThreeTables:
    """Three tables whose first window is closed and older than all of them keep raw."""
    desk = ThreeTables(tmp_path, retention=KEPT)
    desk.clock = START + timedelta(days=60)
    desk.land_of(1, *TABLES)
    desk.land_of(11 * DAY, "notes")
    desk.take_in("2026-01-12T1200", tables=["notes"])
    desk.take_in(FIRST, closed=True)
    assert pending_windows(desk.workspace, SOURCE).nothing
    return desk


def why(plan: RetentionPlan) -> set[str]:
    assert plan.doomed == (), "raw holds no events in this story, so nothing may go"
    return {each.why for each in plan.refused if each.window == FIRST}


def test_a_window_that_waits_to_be_judged_by_other_rules_keeps_everything(desk: ThreeTables) -> None:
    """The decision table lets it wait until somebody replays it, which needs its events."""
    assert why(plan_retention(desk.workspace, SOURCE)) == {"raw holds 0 of its 3 events"}
    document = json.loads((desk.contracts / "tags.json").read_text())
    document["properties"]["title"]["maxLength"] = 10
    (desk.contracts / "tags.json").write_text(json.dumps(document))
    desk.reopen()
    table = desk.workspace.decisions
    waits = replace(table.decisions[CONTRACT_CHANGE], action=WAIT)
    decisions = replace(table, decisions={**table.decisions, CONTRACT_CHANGE: waits})
    workspace = replace(desk.workspace, decisions=decisions)
    assert pending_windows(workspace, SOURCE).nothing
    assert why(plan_retention(workspace, SOURCE)) == {"work in it is pending, or it was made by other rules"}


def put_file(table: LakeTable, rows: int) -> Path:
    """Add a file of ``rows`` to the first window of ``table``."""
    snapshot = table.open()
    state = snapshot.state(FIRST)
    assert state is not None
    folders = "".join(f"/{name}=notes" for name in table.spec.partition_by[1:])
    path = f"{unit_folder(FIRST, 1, 'unit')}{folders}/part-0.parquet"
    file = table.folder / path
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table({"commit_lsn": pa.array(range(rows), pa.int64())}), file)
    count, stats = delta_stats(file)
    partition = partition_in(path, table.spec.partition_by)
    staged = StagedFile(path, FIRST, partition, count, file.stat().st_size, stats)
    snapshot.commit([WindowChange(FIRST, (staged,), (), state, replaces=False)])
    return file


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_landing_keeps_what_is_damaged_in_raw(desk: ThreeTables, harm: str) -> None:
    """The log of raw counts rows of files that somebody has deleted, or a disk has cut."""
    file = put_file(desk.workspace.raw(SOURCE), 3)
    plan = plan_retention(desk.workspace, SOURCE)
    assert [(each.layer, each.window) for each in plan.doomed] == [(LANDING, FIRST), (RAW, FIRST)]
    if harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-9])
    assert why(plan_retention(desk.workspace, SOURCE)) == {"raw holds 0 of its 3 events"}


def test_raw_keeps_what_the_deduped_events_have_lost(desk: ThreeTables) -> None:
    """They can be made again from raw, and from nothing else."""
    put_file(desk.workspace.raw(SOURCE), 3)
    deduped, net_changes = desk.workspace.deduped(SOURCE), desk.workspace.net_changes(desk.of("notes"))
    file = put_file(deduped, 3)
    state = net_changes.open().state(FIRST)
    assert state is not None
    commit(net_changes, [replace(state, inputs=(file.relative_to(deduped.folder).as_posix(),))])
    desk.show(desk.of("notes"))
    assert [each.layer for each in plan_retention(desk.workspace, SOURCE).doomed] == [LANDING, RAW]
    file.unlink()
    plan = plan_retention(desk.workspace, SOURCE)
    assert [each.layer for each in plan.doomed] == [LANDING]
    (refused,) = plan.refused
    assert (refused.layer, refused.why) == (RAW, "files of what was judged of it are gone from disk")


def test_a_file_that_the_deduped_events_share_frees_no_disk(desk: ThreeTables) -> None:
    """An ordinary file of raw is taken over into the deduped events as it is: by a link to it."""
    raw, deduped = desk.workspace.raw(SOURCE), desk.workspace.deduped(SOURCE)
    file = put_file(raw, 3)
    state = deduped.open().state(FIRST)
    assert state is not None
    commit(deduped, [replace(state, inputs=(file.relative_to(raw.folder).as_posix(),))])
    size = file.stat().st_size
    plan = plan_retention(desk.workspace, SOURCE)
    assert [(each.events, each.bytes) for each in plan.of(RAW)] == [(3, size)]
    (desk.workspace.home.path / "shared").hardlink_to(file)
    shared = plan_retention(desk.workspace, SOURCE)
    assert [(each.events, each.bytes) for each in shared.of(RAW)] == [(3, 0)]
    assert carry_out(desk.workspace, shared, removed_by="test")[-1] == Carried(RAW, 1, 1, 0)
    time.sleep(0.01)
    count, freed = sweepable(raw, timedelta(0))
    assert count and freed < size


def test_landing_keeps_the_stream_until_it_was_searched_for_rows_that_moved_during_a_snapshot(
    tmp_path: Path,
) -> None:
    """Capture does that once the stream has passed the snapshot; a new process would do it again."""
    desk = ThreeTables(tmp_path, retention=KEPT)
    for table in ("labels", "tags"):
        (desk.contracts / f"{table}.json").unlink()
    desk.reopen()
    desk.clock = START + timedelta(days=60)
    read = Commit(5, 1, [Change("r", 1, {"title": "one", "body": None})])
    chunk = desk.land_chunk(read).chunk
    assert chunk is not None
    plans, plan = SnapshotPlans(desk.store.folder), snapshot_plan(chunk)
    plans.write(plan)
    desk.land_boundary(read)
    desk.land_of(2, "notes")
    desk.land_of(11 * DAY, "notes")
    desk.take_in("2026-01-12T1200", tables=["notes"])
    desk.take_in(FIRST, tables=["notes"], closed=True)
    put_file(desk.workspace.raw(SOURCE), 3)

    def refused() -> list[str]:
        return [each.why for each in plan_retention(desk.workspace, SOURCE).refused]

    (why, _) = refused()
    assert why == "the snapshot of public.notes is not over: it may look into the stream again"
    search = Search.due([chunk])
    assert search == Search(Lsn(5), 1)
    plans.note_searched(plan, replace(search, chunks=2))
    assert refused()[0] == why, "another chunk was read since"
    plans.note_searched(plan, search)
    assert SnapshotPlans(desk.store.folder).searched(plan) == search
    assert refused() == []


def test_nothing_is_judged_from_less_than_raw_has_taken_though_no_record_says_what_left(
    desk: ThreeTables,
) -> None:
    """A ledger that is lost, or older than the lake, must not make of a sealed window an empty one."""
    file = put_file(desk.workspace.raw(SOURCE), 3)
    raw, deduped = desk.workspace.raw(SOURCE), desk.workspace.deduped(SOURCE)
    state = deduped.open().state(FIRST)
    assert state is not None
    commit(deduped, [replace(state, inputs=(file.relative_to(raw.folder).as_posix(),))])
    carry_out(desk.workspace, plan_retention(desk.workspace, SOURCE), removed_by="test")
    assert raw.open().files(FIRST) == () and Removed.open(desk.workspace, SOURCE).sealed == {FIRST}
    shutil.rmtree(desk.workspace.removals(SOURCE).folder)
    version = deduped.open().version
    with pytest.raises(RecordLost, match=f"{FIRST}.*0 of 3 events"):
        layer.materialize(desk.workspace, None, SOURCE, [FIRST], "run", replay=True)  # type: ignore[arg-type]
    assert deduped.open().version == version


def snapshot_plan(chunk: ChunkSpan) -> SnapshotPlan:
    """The plan of a snapshot of one ``chunk``."""
    return SnapshotPlan(
        snapshot_id=chunk.snapshot_id,
        epoch=1,
        table=chunk.table,
        reason="a test",
        planned_at=START,
        boundary_ordinal=-100,
        rows=100,
        by=("id",),
        types=("bigint",),
        bounds=(),
    )
