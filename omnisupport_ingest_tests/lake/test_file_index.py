"""The index of files says what Delta's library says of every version, and is never believed where it may be
wrong; a commit that is planned on it is one of Delta."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.lake import commit, delta, file_index, file_index_tables
from omnisupport_ingest.lake import table as lake_table
from omnisupport_ingest.lake.commit import CommitConflict, WindowChange, commit_actions
from omnisupport_ingest.lake.file_index import FileIndex
from omnisupport_ingest.lake.file_index_tables import NO_BOUNDS, Bounds
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.listing import Listing
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest_tests.lake.tables import NOON, W1, W2, by_window, change, place_without_spark, state

WINDOWS = [W1, W2, "2026-01-31T1100"]


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    plain = by_window(tmp_path)
    table = LakeTable(plain.root, replace(plain.spec, ordered_by="n"))
    table.open()
    return table


@pytest.fixture(autouse=True)
def _nothing_is_open() -> Iterator[None]:
    lake_table._opened.clear()
    yield
    lake_table._opened.clear()


def index_file(table: LakeTable) -> Path:
    return table.root / "desk" / "noted" / "files.sqlite"


def put(table: LakeTable, window: str, unit: str, number: int, *, replaces: bool = False) -> int:
    snapshot = table.open()
    generation = snapshot.version + 1 if replaces else 1
    staged = place_without_spark(table, window, unit, [number], generation=generation)
    held = snapshot.state(window)
    inputs = [*(held.inputs if held is not None and not replaces else ()), unit]
    return snapshot.commit([change(window, staged, inputs, generation=generation, replaces=replaces)])


Held = dict[str, tuple[tuple[LakeFile, ...], dict[str, Bounds]]]
"""By window, the files and their bounds."""


def by_library(table: LakeTable, version: int) -> Held:
    """What Delta's library says the table held at ``version``."""
    by = table.spec.partition_by
    listing = Listing(table.log, by, lambda: DeltaTable(str(table.folder), version=version))
    return {window: (listing.files(window), listing.bounds(window)) for window in listing.windows()}


def by_index(snapshot: TableSnapshot) -> Held:
    listing = snapshot._listing
    assert listing._indexed is not None
    found = {window: (listing.files(window), listing.bounds(window)) for window in listing.windows()}
    assert [file for of_window, _ in found.values() for file in of_window] == list(listing.all_files())
    assert listing.last_window() == max(found, default=None)
    assert listing._indexed is not None
    return found


@pytest.mark.parametrize("seed", range(3))
def test_snapshots_of_any_age_hold_what_their_version_holds_while_others_commit(
    table: LakeTable, seed: int
) -> None:
    chance, kept = random.Random(seed), [table.open()]
    for number in range(40):
        put(table, chance.choice(WINDOWS), f"u{number}", number, replaces=chance.random() < 0.3)
        if chance.random() < 0.2:
            lake_table._opened.clear()
        if chance.random() < 0.1:
            index_file(table).unlink()
        kept.append(table.open())
        assert by_index(kept[-1]) == by_library(table, kept[-1].version)
    for snapshot in kept:
        expected = {window: files for window, (files, _) in by_library(table, snapshot.version).items()}
        assert {window: snapshot._listing.files(window) for window in snapshot.windows()} == expected


def test_bounds_are_of_the_column_by_which_the_table_is_ordered_now(table: LakeTable) -> None:
    for number in (7, 9):
        put(table, W1, f"u{number}", number)
    assert {*table.open().bounds(W1).values()} == {(7, 7), (9, 9), NO_BOUNDS}
    lake_table._opened.clear()
    ordered_otherwise = LakeTable(table.root, replace(table.spec, ordered_by="window"))
    assert {*ordered_otherwise.open().bounds(W1).values()} == {NO_BOUNDS}
    lake_table._opened.clear()
    assert {*table.open().bounds(W1).values()} == {(7, 7), (9, 9), NO_BOUNDS}
    note = table.open().note("types")
    assert note is not None
    of_note = TableSnapshot.unopened(ordered_otherwise, note)
    assert of_note is not None and {*of_note.bounds(W1).values()} == {NO_BOUNDS}


def test_a_snapshot_that_is_older_than_the_list_tells_of_asks_the_library(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_index_tables, "_VERSIONS_KEPT", 3)
    put(table, W1, "a", 1)
    old = table.open()
    for number in range(6):
        put(table, W1, f"r{number}", number, replaces=True)
    assert (old._listing.files(W1), old.bounds(W1)) == by_library(table, old.version)[W1]
    with sqlite3.connect(index_file(table)) as db:
        (kept,) = db.execute("SELECT count(*) FROM file").fetchone()
    db.close()
    # Two of the newest version, and those of the three before it.
    assert kept == 2 * 4


def test_neither_a_snapshot_nor_its_commit_opens_the_table(
    table: LakeTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(table, W1, "a", 1)
    lake_table._opened.clear()
    opened: list[str] = []

    class Counting(DeltaTable):
        def __init__(self, folder: str, version: int | None = None) -> None:
            opened.append(folder)
            super().__init__(folder, version)

    for module in (delta, commit):
        monkeypatch.setattr(module, "DeltaTable", Counting)
    put(table, W2, "b", 2)
    assert table.open().windows() == [W1, W2]
    assert not opened


def entry(table: LakeTable, version: int) -> list[dict[str, object]]:
    """The actions of a log entry without what tells when and by which program it was made."""
    lines = (table.folder / "_delta_log" / f"{version:020d}.json").read_text().splitlines()
    found = []
    for line in map(json.loads, lines):
        ((kind, told),) = line.items()
        for name in ("timestamp", "engineInfo", "clientVersion", "deletionTimestamp", "lastUpdated"):
            told.pop(name, None)
        if kind == "add":
            told.pop("modificationTime")
        found.append({kind: {name: value for name, value in told.items() if value is not None}})
    return sorted(found, key=str)


def test_an_entry_says_what_the_library_would_have_said(tmp_path: Path) -> None:
    ours, theirs = by_window(tmp_path / "ours"), by_window(tmp_path / "theirs")
    for table in (ours, theirs):
        for number, replaces in enumerate((False, False, True)):
            snapshot = table.open()
            assert snapshot._indexed is not None
            if table is theirs:
                snapshot._indexed = None
            generation = 2 if replaces else 1
            staged = place_without_spark(table, W1, f"u é%{number}", [number], generation=generation)
            snapshot.commit(
                [change(W1, staged, [f"u{n}" for n in range(number + 1)], generation=generation,
                        replaces=replaces)]
            )  # fmt: skip
    for version in (1, 2, 3):
        assert entry(ours, version) == entry(theirs, version)
    assert DeltaTable(str(ours.folder)).transaction_version(ours.spec.app_id) == 3


def test_the_log_of_many_commits_has_checkpoints_and_other_readers_find_the_same(table: LakeTable) -> None:
    for number in range(105):
        put(table, WINDOWS[number % 3], f"u{number}", number, replaces=number % 5 == 0)
    last = json.loads((table.folder / "_delta_log" / "_last_checkpoint").read_text())
    assert last["version"] == 99
    handle = DeltaTable(str(table.folder))
    assert handle.version() == 105
    assert handle.transaction_version(table.spec.app_id) == 105
    assert by_index(table.open()) == by_library(table, 105)


def rows(window: str, number: int) -> pa.Table:
    at = pa.array([NOON], pa.timestamp("us", "UTC"))
    return pa.table({"window": [window], "n": [number], "at": at})


@pytest.mark.parametrize("foreign", ["an append", "a compaction", "a column", "a property", "removed rows"])
def test_what_other_programs_commit_is_listed_too(table: LakeTable, foreign: str) -> None:
    for number in range(3):
        put(table, W1, f"u{number}", number)
    handle = DeltaTable(str(table.folder))
    if foreign == "an append":
        write_deltalake(handle, rows("2026-01-31T 11%é", 9), mode="append")
    elif foreign == "a compaction":
        handle.optimize.compact()
    elif foreign == "a column":
        more = rows(W2, 9).append_column("more", pa.array(["x"]))
        write_deltalake(handle, more, mode="append", schema_mode="merge")
    elif foreign == "a property":
        handle.alter.set_table_properties({"delta.appendOnly": "true"})
    else:
        handle.delete("n = 1")
    snapshot = table.open()
    assert snapshot.version == DeltaTable(str(table.folder)).version()
    assert by_index(snapshot) == by_library(table, snapshot.version)
    put(table, W2, "after", 7)
    assert by_index(table.open()) == by_library(table, snapshot.version + 1)


def test_a_property_that_forbids_a_removal_is_respected(table: LakeTable) -> None:
    put(table, W1, "a", 1)
    DeltaTable(str(table.folder)).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(Exception, match="append"):
        put(table, W1, "b", 2, replaces=True)


@pytest.mark.parametrize("harm", ["gone", "garbage", "empty", "a row", "the note", "another format"])
def test_a_list_that_is_missing_or_damaged_is_made_anew(table: LakeTable, harm: str) -> None:
    for number in range(3):
        put(table, W1, f"u{number}", number)
    file = index_file(table)
    table.index.close()
    if harm == "gone":
        file.unlink()
    elif harm in ("garbage", "empty"):
        file.write_bytes(b"no database" * 1000 if harm == "garbage" else b"")
    else:
        sql = {
            "a row": "UPDATE file SET facts = replace(facts, '[', '[1')",
            "the note": "UPDATE listed SET note = replace(note, '3', '2')",
            "another format": "PRAGMA user_version = 99",
        }
        with sqlite3.connect(file) as db:
            db.execute(sql[harm])
        db.close()
    lake_table._opened.clear()
    snapshot, expected = table.open(), by_library(table, 3)
    held = snapshot._listing
    found = {window: (held.files(window), held.bounds(window)) for window in snapshot.windows()}
    assert found == expected
    lake_table._opened.clear()
    assert by_index(table.open()) == expected


def test_a_table_that_went_another_way_since_is_listed_anew(table: LakeTable) -> None:
    for number in range(3):
        put(table, W1, f"u{number}", number)
    stale = table.open()
    log = table.folder / "_delta_log"
    (log / f"{3:020d}.json").unlink()
    with pytest.raises(CommitConflict):
        stale.commit([WindowChange(W2, (), (), state(W2, ["x"]), replaces=True)])
    assert table.open().version == 2
    put(table, W2, "another", 4)
    assert by_index(table.open()) == by_library(table, 3)


def test_a_folder_that_may_not_be_written_is_done_without(table: LakeTable) -> None:
    put(table, W1, "a", 1)
    table.index.close()
    noted = index_file(table).parent
    for file in noted.iterdir():
        file.unlink()
    noted.rmdir()
    noted.write_text("no folder")
    lake_table._opened.clear()
    snapshot = table.open()
    assert snapshot._listing._indexed is None
    assert snapshot.windows() == [W1]
    put(table, W2, "b", 2)
    assert table.open().windows() == [W1, W2]


def test_a_child_goes_on_with_a_connection_of_its_own(table: LakeTable) -> None:
    put(table, W1, "a", 1)
    child = os.fork()
    if child == 0:
        try:
            put(table, W1, "b", 2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    put(table, W2, "c", 3)
    assert by_index(table.open()) == by_library(table, 3)


PROGRAM = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.lake import test_file_index as here
table = here.by_window(Path(sys.argv[1]))
for number in range(3):
    here.put(table, here.W1, f"k{number}", number)
"""


@pytest.mark.crash
@pytest.mark.parametrize(
    "point", [f"lake.listed.{when}:{n}" for when in ("before", "after") for n in (1, 2, 3, 4)]
)
def test_who_is_killed_while_listing_leaves_a_list_that_others_go_on_from(tmp_path: Path, point: str) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, VARIABLE: point}, check=False)
    assert killed.returncode == -9
    table = by_window(tmp_path)
    put(table, W2, "after", 9)
    snapshot = table.open()
    assert by_index(snapshot) == by_library(table, snapshot.version)


def test_a_commit_of_the_library_and_one_of_ours_on_one_version_meet(table: LakeTable) -> None:
    snapshot = table.open()
    commit_actions(snapshot.handle, [], folder=table.folder, app_id=table.spec.app_id, note={})
    with pytest.raises(CommitConflict, match="is at 1 now"):
        snapshot.commit([WindowChange(W2, (), (), state(W2, ["x"]), replaces=True)])


def test_a_snapshot_of_the_parent_lists_by_a_connection_of_the_child(table: LakeTable) -> None:
    put(table, W1, "a", 1)
    held = table.open()
    index = table.index
    locked, done = threading.Event(), threading.Event()

    def other() -> None:
        with index._lock:
            locked.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    locked.wait()
    child = os.fork()
    if child == 0:
        # What another thread of the parent held at the fork is never let go here.
        signal.alarm(10)
        found = (held.windows(), table.open().renewed().windows())
        os._exit(0 if found == ([W1], [W1]) and table.index is not index else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert status == 0


def test_threads_that_ask_for_many_sources_let_go_of_indexes_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_index, "_OPEN_FILES", 1)
    wait = threading.Barrier(2, timeout=2)

    class Together(dict[Path, FileIndex]):
        def __iter__(self) -> Iterator[Path]:
            keys = list(super().__iter__())
            if len(keys) > 1:
                # Both see the same first one.
                with contextlib.suppress(threading.BrokenBarrierError):
                    wait.wait()
            return iter(keys)

    monkeypatch.setattr(file_index, "_indexes", Together())
    file_index.index_of(tmp_path, "a/t")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: file_index.index_of(tmp_path, name), ["b/t", "c/t"]))
    assert len(found) == 2


def test_a_copy_of_pages_of_several_moments_is_not_believed(table: LakeTable, tmp_path: Path) -> None:
    windows = [f"2026-01-{day:02d}T{hour:02d}00" for day in (1, 2, 3) for hour in range(24)]
    main, log = index_file(table), index_file(table).with_name("files.sqlite-wal")

    def put_all(those: list[str]) -> None:
        for number, window in enumerate(those):
            put(table, window, f"u{window}", number)

    def checkpoint() -> None:
        with contextlib.closing(sqlite3.connect(main)) as db:
            assert db.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()[0] == 0

    put_all(windows[:20])
    checkpoint()
    copied = main.read_bytes()
    put_all(windows[20:-1])
    checkpoint()
    put_all(windows[-1:])
    home = tmp_path / "restored"
    shutil.copytree(table.root, home, ignore=shutil.ignore_patterns("files.sqlite*"))
    restored = by_window(home)
    index_file(restored).write_bytes(copied)
    index_file(restored).with_name(log.name).write_bytes(log.read_bytes())
    assert restored.open().windows() == windows
    lake_table._opened.clear()
    snapshot = restored.open()
    assert snapshot.windows() == windows
    assert by_index(snapshot) == by_library(restored, snapshot.version)


def test_a_list_that_ends_before_a_hole_in_the_log_is_made_anew(table: LakeTable) -> None:
    for number in range(3):
        put(table, W1, f"u{number}", number)
    table.index.close()
    before = index_file(table).read_bytes()
    for number in range(3, 8):
        put(table, W1, f"u{number}", number)
    table.index.close()
    lake_table._opened.clear()
    index_file(table).write_bytes(before)
    DeltaTable(str(table.folder)).create_checkpoint()
    # A clean-up of old entries was cut off: the one that the list knows is still there.
    for version in (4, 5):
        table.log.entry(version).unlink()
    assert put(table, W2, "new", 9) == 9
    assert set(by_library(table, 9)) == {W1, W2}
