"""The commits of the quarantine around that of ``deduped_events``: what comes, what stays, what leaves."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.commit import WindowChange, commit_actions, remove
from omnisupport_ingest.lake.layout import StagedFile
from omnisupport_ingest.lake.staging import StagedFiles
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest.layers.checkpoints import Identity
from omnisupport_ingest.layers.events import quarantine
from omnisupport_ingest.layers.events.quarantine_files import EventsGone, QuarantineFiles, gone_from_disk
from omnisupport_ingest_tests.lake.tables import W1, W2, state
from omnisupport_ingest_tests.waiting import PATIENCE

IDENTITY = Identity("quarantine", "desk", "run")
SCHEMA = StructType(
    [
        StructField("window", StringType(), False),
        StructField("reason", StringType()),
        StructField("event_hash", LongType(), False),
    ]
)


class Pair:
    """A table of deduped events that has states alone, and its quarantine."""

    def __init__(self, root: Path) -> None:
        self.deduped = LakeTable(root, TableSpec("desk/deduped_events", SCHEMA, ("window", "reason"), ""))
        self.table = LakeTable(root, TableSpec("desk/quarantine", SCHEMA, ("window", "reason"), ""))
        self.deduped.open()
        self.table.open()

    @property
    def next_version(self) -> int:
        """The version that the next commit of the deduped events makes."""
        return self.deduped.open().version + 1

    def stage(
        self, unit: str, hashes: list[int], *, window: str = W1, version: int | None = None
    ) -> StagedFiles:
        """Place a file of quarantined events as ``quarantine.stage`` does."""
        number = self.next_version if version is None else version
        path = f"{layout.unit_folder(window, number, unit)}/reason=row_rule/part-0.parquet"
        file = self.table.folder / path
        if not file.exists():
            file.parent.mkdir(parents=True)
            pq.write_table(pa.table({"event_hash": pa.array(hashes, pa.int64())}), file)
        rows, stats = delta_stats(file)
        partition = layout.partition_in(path, ("window", "reason"))
        return StagedFiles((StagedFile(path, window, partition, rows, file.stat().st_size, stats),))

    def add(self, staged: StagedFiles) -> None:
        quarantine.add(self.table, staged, IDENTITY)

    def name(self, *staged: StagedFiles, window: str = W1) -> None:
        """The commit of deduped events whose state names ``staged`` and nothing else."""
        paths = tuple(file.path for each in staged for file in each.files)
        named = replace(state(window, [str(self.next_version)]), companions=paths)
        self.deduped.open().commit([WindowChange(window, (), (), named, True)])

    def settle(self, *windows: str) -> None:
        quarantine.settle(self.deduped, self.table, windows or (W1,), IDENTITY)

    def lose(self) -> None:
        """Have the log of the quarantine lose its files, as the program of before could."""
        snapshot = self.table.open()
        actions = [remove(file) for file in snapshot.all_files()]
        commit_actions(
            snapshot.handle, actions, folder=self.table.folder, app_id=self.table.spec.app_id, note={}
        )

    @property
    def files(self) -> QuarantineFiles:
        found = QuarantineFiles.of_tables(self.deduped, self.table)
        assert found is not None
        return found

    @property
    def unsettled(self) -> list[str]:
        """The windows in which the log of the quarantine does not hold what it should."""
        files = self.files
        return [window for window in (W1, W2) if files.unsettled(window) is not None]

    @property
    def read(self) -> list[str]:
        """What readers of withheld events get."""
        return [file.path for file in self.files.all()]

    @property
    def held(self) -> list[str]:
        """What the log of the quarantine has."""
        return [file.path for file in self.table.open().all_files()]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def paths(*staged: StagedFiles) -> list[str]:
    return sorted(file.path for each in staged for file in each.files)


def judged(pair: Pair, unit: str, hashes: list[int]) -> StagedFiles:
    """A window that was judged to the end: its quarantine is added, named and settled."""
    staged = pair.stage(unit, hashes)
    pair.add(staged)
    pair.name(staged)
    pair.settle()
    return staged


def test_readers_see_one_judgement_before_and_the_other_after_the_commit_that_names_it(pair: Pair) -> None:
    before = judged(pair, "before", [1])
    after = pair.stage("after", [2])
    pair.add(after)
    assert (pair.read, pair.held) == (paths(before), paths(before, after))
    pair.settle()
    assert (pair.read, pair.held) == (paths(before), paths(before, after)), "it may yet be named"
    pair.name(after)
    assert (pair.read, pair.held) == (paths(after), paths(before, after))
    assert pair.unsettled == [W1]
    pair.settle()
    assert (pair.read, pair.held) == (paths(after), paths(after))
    assert pair.unsettled == []


def test_a_commit_only_adds(pair: Pair) -> None:
    before = judged(pair, "before", [1])
    pair.add(pair.stage("after", [2]))
    pair.add(StagedFiles(()))
    assert set(paths(before)) < set(pair.held)


def test_the_same_work_twice_changes_nothing(pair: Pair) -> None:
    staged = judged(pair, "unit", [1])
    version = pair.table.open().version
    pair.add(staged)
    pair.settle()
    assert pair.table.open().version == version


def test_what_a_lost_race_left_leaves_once_another_commit_has_taken_its_place(pair: Pair) -> None:
    before = judged(pair, "before", [1])
    slower = pair.stage("slower", [2])
    faster = pair.stage("faster", [3])
    pair.add(slower)
    pair.add(faster)
    pair.name(before, faster)
    pair.settle()
    assert pair.held == paths(before, faster)
    # The slower one comes only now: its own commit of the deduped events is refused.
    pair.add(slower)
    assert pair.unsettled == [W1]
    pair.settle()
    assert (pair.read, pair.held) == (paths(before, faster), paths(before, faster))


def test_a_named_file_that_the_log_lost_is_read_and_comes_back(pair: Pair) -> None:
    staged = judged(pair, "unit", [1])
    pair.lose()
    assert (pair.read, pair.held) == (paths(staged), [])
    assert pair.unsettled == [W1]
    pair.settle()
    assert (pair.read, pair.held) == (paths(staged), paths(staged))


def test_a_named_file_that_is_gone_is_an_error_with_its_fix_and_asks_for_another_judgement(
    pair: Pair,
) -> None:
    staged = judged(pair, "unit", [1])
    pair.lose()
    (pair.table.folder / paths(staged)[0]).unlink()
    with pytest.raises(EventsGone, match="judged anew from raw"):
        _ = pair.read
    pair.settle()
    assert pair.held == []
    assert gone_from_disk(pair.table, pair.deduped.open().state(W1))
    assert pair.unsettled == [W1]


def test_other_windows_stay_as_they_are(pair: Pair) -> None:
    other = pair.stage("other", [9], window=W2)
    pair.add(other)
    pair.name(other, window=W2)
    old = judged(pair, "old", [1])
    pair.name()
    pair.settle(W2)
    assert pair.held == paths(old, other)
    pair.settle(W1)
    assert pair.held == paths(other)


def test_nothing_leaves_a_window_whose_state_is_not_known(pair: Pair) -> None:
    staged = pair.stage("first", [1])
    pair.add(staged)
    pair.settle()
    assert pair.held == paths(staged)
    assert [file.path for file, _ in pair.files.shown()] == paths(staged)


def test_the_checkpoint_of_the_quarantine_counts_what_the_table_holds(pair: Pair) -> None:
    judged(pair, "before", [1, 2, 3])
    after = pair.stage("after", [4])
    pair.add(after)
    assert rows_of(pair) == 4
    pair.name(after)
    pair.settle()
    assert rows_of(pair) == 1


def rows_of(pair: Pair) -> int:
    found = pair.table.open().state(W1)
    assert found is not None
    assert found.checkpoint.rows == sum(file.rows for file in pair.table.open().files(W1))
    return found.checkpoint.rows


def _replays(root: Path, writer: int, rounds: int) -> None:
    """Replay the window again and again beside others, as a layer does."""
    from omnisupport_ingest.lake.commit import CommitConflict

    pair = Pair(root)
    for number in range(rounds):
        while True:
            snapshot = pair.deduped.open()
            staged = pair.stage(f"{writer}-{number}", [writer, number], version=snapshot.version + 1)
            pair.add(staged)
            named = replace(state(W1, [f"{writer}-{number}"]), companions=tuple(paths(staged)))
            try:
                snapshot.commit([WindowChange(W1, (), (), named, True)])
            except CommitConflict:
                continue
            break
        pair.settle()
        assert len(pair.read) == 1


@pytest.mark.slow
def test_two_writers_at_once_leave_exactly_what_the_last_state_names(tmp_path: Path) -> None:
    Pair(tmp_path)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_replays, args=(tmp_path, writer, 8)) for writer in range(2)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(PATIENCE)
        assert process.exitcode == 0
    pair = Pair(tmp_path)
    pair.settle()
    assert pair.held == pair.read and len(pair.read) == 1
