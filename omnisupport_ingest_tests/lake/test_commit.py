"""Commits of one table: the same work once, two writers, replaced windows, states that last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from omnisupport_ingest.lake.commit import NOTE, CommitConflict, StagedFileMissing
from omnisupport_ingest.lake.schema import SchemaChanged
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest_tests.lake.tables import (
    NOON,
    SCHEMA,
    W1,
    W2,
    by_window,
    change,
    numbers_in,
    place_without_spark,
    state,
)
from omnisupport_ingest_tests.waiting import PATIENCE


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    table = by_window(tmp_path)
    table.open()
    return table


def append(table: LakeTable, window: str, unit: str, numbers: list[int]) -> int:
    """Do the unit unless the window holds it, as a layer does; any number of processes at once."""

    def plan_and_commit(snapshot: TableSnapshot) -> int:
        before = snapshot.state(window)
        inputs = before.inputs if before else ()
        if unit in inputs:
            return snapshot.version
        staged = place_without_spark(table, window, unit, numbers)
        return snapshot.commit([change(window, staged, [*inputs, unit])])

    return retrying(plan_and_commit, table, attempts=60)


def test_the_same_unit_twice_changes_nothing(table: LakeTable) -> None:
    version = append(table, W1, "u1", [1, 2, 3])
    staged = place_without_spark(table, W1, "u1", [1, 2, 3])
    again = change(W1, staged, ["u1"], run_id="another run")
    assert table.open().commit([again]) == version
    assert table.open().version == version
    assert numbers_in(table) == [1, 2, 3]


def test_one_commit_changes_many_windows(table: LakeTable) -> None:
    units = {W1: [1, 2], W2: [3]}
    version = table.open().commit(
        [change(w, place_without_spark(table, w, "u", numbers), ["u"]) for w, numbers in units.items()]
    )
    snapshot = table.open()
    assert (version, snapshot.version, snapshot.windows()) == (1, 1, [W1, W2])
    assert [(file.window, file.rows) for file in snapshot.all_files()] == [(W1, 2), (W2, 1)]
    note = DeltaTable(str(table.folder)).history(1)[0][NOTE]
    assert note["run_id"] == "run" and [entry["window"] for entry in note["windows"]] == [W1, W2]


def test_the_second_of_two_commits_on_one_version_is_refused(table: LakeTable) -> None:
    first, second = table.open(), table.open()
    first.commit([change(W1, place_without_spark(table, W1, "a", [1]), ["a"])])
    with pytest.raises(CommitConflict, match=r"version 0 .* at 1 now"):
        second.commit([change(W2, place_without_spark(table, W2, "b", [2]), ["b"])])
    assert numbers_in(table) == [1]


def test_a_replacement_planned_before_an_append_is_refused(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    stale = table.open()
    append(table, W1, "b", [2])
    staged = place_without_spark(table, W1, "c", [3], generation=2)
    with pytest.raises(CommitConflict):
        stale.commit([change(W1, staged, ["c"], generation=2, replaces=True)])
    assert numbers_in(table) == [1, 2]


def test_a_plan_made_before_another_program_wrote_is_refused(table: LakeTable) -> None:
    stale = table.open()
    write_deltalake(
        str(table.folder),
        pa.table({"window": [W1], "n": [9], "at": pa.array([NOON], pa.timestamp("us", "UTC"))}),
        mode="append",
    )
    with pytest.raises(CommitConflict):
        stale.commit([change(W1, place_without_spark(table, W1, "a", [1]), ["a"])])


def test_of_threads_that_commit_at_once_one_wins_each_version_and_all_finish(table: LakeTable) -> None:
    together = threading.Barrier(2)
    refused = []

    def once(name: str, number: int) -> None:
        snapshot = table.open()
        staged = place_without_spark(table, W1, name, [number])
        together.wait()
        try:
            snapshot.commit([change(W1, staged, [name])])
        except CommitConflict:
            refused.append(name)

    with ThreadPoolExecutor(2) as threads:
        for _ in threads.map(once, ["x", "y"], [100, 200]):
            pass
    assert len(refused) == 1
    lost = {"x": 100, "y": 200}[refused[0]]
    with ThreadPoolExecutor(4) as threads:
        done = [threads.submit(append, table, W1, f"u{n}", [n]) for n in (*range(6), lost)]
    assert len({future.result() for future in done}) == 7
    assert numbers_in(table) == sorted([*range(6), 100, 200])


PROCESS = """
import sys
from pathlib import Path
from omnisupport_ingest_tests.lake import test_commit
table = test_commit.by_window(Path(sys.argv[1]))
for n in range(int(sys.argv[2]), int(sys.argv[3])):
    test_commit.append(table, test_commit.W1, f"u{n}", [n])
"""


def process(root: Path, first: int, end: int, failpoint: str = "") -> subprocess.Popen[bytes]:
    """A process that appends the units ``first`` to ``end - 1`` to W1."""
    arguments = [sys.executable, "-c", PROCESS, str(root), str(first), str(end)]
    environment = {**os.environ, "OMNISUPPORT_FAILPOINT": failpoint}
    return subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE)


def test_processes_that_append_at_once_lose_nothing_and_double_nothing(table: LakeTable) -> None:
    # The ranges overlap: units 5 to 9 are done by both, as after a restart beside a slow old run.
    running = [process(table.root, 0, 10), process(table.root, 5, 15)]
    for each in running:
        _, errors = each.communicate(timeout=PATIENCE)
        assert each.returncode == 0, errors.decode()[-2000:]
    assert numbers_in(table) == list(range(15))
    final = table.open().state(W1)
    assert final is not None and sorted(final.inputs) == sorted(f"u{n}" for n in range(15))


def test_work_that_died_after_its_commit_is_not_done_again(table: LakeTable) -> None:
    died = process(table.root, 0, 3, failpoint="lake.commit.after:2")
    died.communicate(timeout=PATIENCE)
    assert died.returncode == -signal.SIGKILL
    assert numbers_in(table) == [0, 1]
    for n in range(3):
        append(table, W1, f"u{n}", [n])
    assert numbers_in(table) == [0, 1, 2]


def test_a_replaced_window_loses_exactly_what_it_held(table: LakeTable) -> None:
    append(table, W1, "a", [1, 2])
    append(table, W1, "b", [3])
    append(table, W2, "c", [4])
    staged = place_without_spark(table, W1, "a", [2], generation=2)
    table.open().commit([change(W1, staged, ["a"], generation=2, replaces=True)])
    snapshot = table.open()
    assert numbers_in(table) == [2, 4]
    assert snapshot.state(W1) == state(W1, ["a"], generation=2)
    assert snapshot.state(W2) == state(W2, ["c"])


def test_one_file_of_a_window_can_be_swapped(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    append(table, W1, "b", [2])
    snapshot = table.open()
    old = [
        file for file in snapshot.files(W1) if file.path == place_without_spark(table, W1, "a", [1])[0].path
    ]
    staged = place_without_spark(table, W1, "compacted", [10])
    snapshot.commit([change(W1, staged, ["a", "b"], remove=old)])
    assert numbers_in(table) == [2, 10]


def test_a_state_alone_can_be_rewritten(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    table.open().commit([change(W1, [], ["a", "b"], run_id="second")])
    assert table.open().state(W1) == state(W1, ["a", "b"], run_id="second")
    version = table.open().commit([change(W1, [], ["a", "b"], run_id="second")])
    assert version == table.open().version == 2
    table.open().commit([change(W1, [], ["a"])])
    assert table.open().state(W1) == state(W1, ["a"]), "a state may come back"
    assert numbers_in(table) == [1]


def test_states_survive_a_checkpoint_of_the_log(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    append(table, W1, "b", [2])
    DeltaTable(str(table.folder)).create_checkpoint()
    for entry in (table.folder / "_delta_log").glob("*.json"):
        if not entry.name.endswith("2.json"):
            entry.unlink()
    snapshot = table.open()
    assert snapshot.state(W1) == state(W1, ["a", "b"])
    append(table, W1, "c", [3])
    assert numbers_in(table) == [1, 2, 3]


def test_a_window_that_another_program_compacted_has_no_state_and_can_be_replaced(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    append(table, W1, "b", [2])
    DeltaTable(str(table.folder)).optimize.compact()
    snapshot = table.open()
    assert snapshot.state(W1) is None
    assert [file.rows for file in snapshot.files(W1)] == [2]
    staged = place_without_spark(table, W1, "rebuilt", [1, 2], generation=2)
    snapshot.commit([change(W1, staged, ["a", "b"], generation=2, replaces=True)])
    assert numbers_in(table) == [1, 2]
    assert table.open().state(W1) == state(W1, ["a", "b"], generation=2)


def test_a_staged_file_that_is_gone_is_not_committed(table: LakeTable) -> None:
    snapshot = table.open()
    staged = place_without_spark(table, W1, "a", [1])
    (table.folder / staged[0].path).unlink()
    with pytest.raises(StagedFileMissing, match="it is gone"):
        snapshot.commit([change(W1, staged, ["a"])])
    assert table.open().version == 0


def test_statistics_let_readers_skip_files(table: LakeTable) -> None:
    append(table, W1, "a", [1, 5])
    append(table, W1, "b", [7, 9])
    listed = pa.table(DeltaTable(str(table.folder)).get_add_actions(flatten=True)).to_pylist()
    bounds = {(file["min.n"], file["max.n"], file["null_count.n"]) for file in listed if file["num_records"]}
    assert bounds == {(1, 5, 0), (7, 9, 0)}


def test_openers_of_a_table_that_is_not_there_make_one(tmp_path: Path) -> None:
    for attempt in range(10):
        root = tmp_path / str(attempt)
        with ThreadPoolExecutor(4) as threads:
            opened = list(threads.map(lambda root: by_window(root).open(), [root] * 4))
        assert {(snapshot.version, snapshot.table_id) for snapshot in opened} == {(0, opened[0].table_id)}
        assert by_window(root).folder.stat().st_mode & 0o077 == 0


def test_a_table_partitioned_otherwise_is_refused(table: LakeTable) -> None:
    spec = TableSpec(table.spec.path, SCHEMA, ("window", "source_table"), "events")
    with pytest.raises(SchemaChanged, match="partitioned by window, not by window, source_table"):
        LakeTable(table.root, spec).open()


def test_reading_states_starts_no_jvm(table: LakeTable) -> None:
    append(table, W1, "a", [1])
    program = (
        PROCESS.split("for n")[0] + "table.open().state(test_commit.W1)\nprint('pyspark' in sys.modules)"
    )
    program += "\nfrom pyspark import SparkContext\nprint(SparkContext._gateway)"
    done = subprocess.run([sys.executable, "-c", program, str(table.root)], capture_output=True, check=True)
    assert done.stdout.split()[-1] == b"None"
