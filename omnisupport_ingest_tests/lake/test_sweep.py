"""What is deleted as left over, and what is not: the young, the referenced, the just removed."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.lake import sweep as sweeping
from omnisupport_ingest.lake.delta import open_delta
from omnisupport_ingest.lake.sweep import sweep, sweep_replaced
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.read.holdings import left_over_files
from omnisupport_ingest_tests.lake.tables import W1, by_window, change, numbers_in, place_without_spark

DAY = timedelta(days=1)


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    table = by_window(tmp_path)
    table.open().commit([change(W1, place_without_spark(table, W1, "held", [1]), ["held"])])
    return table


def age(path: Path, by: timedelta) -> None:
    """Set ``path`` and all below it back in time."""
    then = time.time() - by.total_seconds()
    for each in (*path.rglob("*"), path):
        os.utime(each, (then, then))


def test_old_leftovers_go_and_what_the_table_holds_stays(table: LakeTable) -> None:
    orphan = place_without_spark(table, W1, "orphan", [2])[0].path
    leftover = table.folder / ".staging" / "dead"
    (leftover / f"window={W1}").mkdir(parents=True)
    age(table.folder, 2 * DAY)
    assert sweep(table, DAY) == [".staging/dead", str(Path(orphan).parent)]
    assert not leftover.exists() and not (table.folder / orphan).exists()
    assert numbers_in(table) == [1]
    assert sweep(table, DAY) == []


def test_young_leftovers_may_belong_to_a_running_writer_and_stay(table: LakeTable) -> None:
    orphan = place_without_spark(table, W1, "orphan", [2])
    (table.folder / ".staging" / "running").mkdir(parents=True)
    assert sweep(table, DAY) == []
    table.open().commit([change(W1, orphan, ["held", "orphan"])])
    assert numbers_in(table) == [1, 2]


def test_an_old_unit_that_a_writer_found_again_stays(table: LakeTable) -> None:
    orphan = table.folder / place_without_spark(table, W1, "orphan", [2])[0].path
    age(table.folder, 2 * DAY)
    os.utime(orphan.parent)  # as staging does when it finds the unit in its place
    assert sweep(table, DAY) == []


def test_files_that_a_commit_just_removed_stay_for_running_readers(table: LakeTable) -> None:
    age(table.folder, 2 * DAY)
    old = table.open().files(W1)[0]
    staged = place_without_spark(table, W1, "new", [5], generation=2)
    table.open().commit([change(W1, staged, ["new"], generation=2, replaces=True)])
    assert sweep(table, DAY) == []
    assert Path(old.uri).exists()


def test_what_another_table_needs_is_spared_with_its_whole_unit(table: LakeTable) -> None:
    needed, left = (place_without_spark(table, W1, unit, [2])[0].path for unit in ("needed", "left"))
    age(table.folder, 2 * DAY)
    assert sweep(table, DAY, spare={needed}) == [str(Path(left).parent)]
    assert (table.folder / needed).exists()


def test_a_file_that_a_killed_sweep_had_moved_aside_goes_with_the_next(table: LakeTable) -> None:
    aside = table.folder / ".staging" / "swept-state"
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(b"a state, which is no folder")
    age(table.folder, 2 * DAY)
    assert sweep(table, DAY) == [".staging/swept-state"]
    assert not aside.exists()


def test_a_file_that_a_killed_sweep_moved_aside_is_seen_as_a_data_file(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(table.folder / table.open().all_files()[0].path, table.folder / "stray.parquet")
    age(table.folder, 2 * DAY)

    def killed(_path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "_delete", killed)
    with pytest.raises(KeyboardInterrupt):
        sweep(table, DAY)
    ((path, _),) = left_over_files(table)
    assert path.startswith(".staging/swept-")


def test_a_table_that_was_never_made_needs_no_sweep(tmp_path: Path) -> None:
    assert sweep(by_window(tmp_path / "nowhere")) == []


def test_a_replaced_file_that_the_log_has_forgotten_goes_at_once_too(table: LakeTable) -> None:
    old = Path(table.open().files(W1)[0].uri)
    staged = place_without_spark(table, W1, "new", [5], generation=2)
    version = table.open().commit([change(W1, staged, ["new"], generation=2, replaces=True)])
    # Delta drops what it says of a removed file from checkpoints after a week.
    entry = table.folder / "_delta_log" / f"{version:020d}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "remove" in action:
            action["remove"]["deletionTimestamp"] -= int(30 * DAY / timedelta(milliseconds=1))
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
    open_delta(table.folder).create_checkpoint()
    age(table.folder, 30 * DAY)
    assert str(old.parent.relative_to(table.folder)) in sweep_replaced(table)
    assert not old.exists()
    assert numbers_in(table) == [5]


def test_what_no_commit_added_yet_stays_where_replaced_files_go_at_once(table: LakeTable) -> None:
    orphan = place_without_spark(table, W1, "orphan", [2])
    assert sweep_replaced(table) == []
    table.open().commit([change(W1, orphan, ["held", "orphan"])])
    assert numbers_in(table) == [1, 2]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_replaced_file_goes_from_a_unit_of_which_others_are_held(table: LakeTable, at_once: bool) -> None:
    first = place_without_spark(table, W1, "two", [1])[0]
    second = first.path.replace("part-0", "part-1")
    shutil.copyfile(table.folder / first.path, table.folder / second)
    both = (first, replace(first, path=second))
    table.open().commit([change(W1, both, ["two"], generation=2, replaces=True)])
    leaving = [file for file in table.open().files(W1) if file.path == second]
    version = table.open().commit([change(W1, (), ["one"], generation=3, remove=leaving)])
    age(table.folder, 2 * DAY)
    entry = table.folder / "_delta_log" / f"{version:020d}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "remove" in action:
            action["remove"]["deletionTimestamp"] -= int(2 * DAY / timedelta(milliseconds=1))
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
    assert second in (sweep_replaced(table) if at_once else sweep(table, DAY))
    assert not (table.folder / second).exists()
    assert numbers_in(table) == [1]
