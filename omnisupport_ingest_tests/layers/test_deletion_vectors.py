"""A dimension whose contract says deletion vectors, beside one of the same rows without."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, TableContract
from omnisupport_ingest.lake.checkpoint import Checkpoint
from omnisupport_ingest.lake.key_files import is_fresh
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.sweep import sweep
from omnisupport_ingest.layers.dimension import dimensions, net_changes, tidying
from omnisupport_ingest.layers.dimension.tidying import FRESH_GENERATIONS
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.review.erasing import erase, key_text
from omnisupport_ingest_tests.layers.story import (
    CONTRACT,
    FIRST,
    SECOND,
    SOURCE,
    START,
    Change,
    Commit,
    Story,
)
from omnisupport_ingest_tests.layers.test_layers import state

ROWS = 400
MANY = Commit(10, 1, [Change("c", n, {"title": f"t{n}", "body": f"b{n}"}) for n in range(1, ROWS + 1)])


class Two:
    """The same changes in two homes: ``marking`` has deletion vectors in its contract, ``plain`` has not."""

    def __init__(self, folder: Path, spark: SparkSession, purge: str | None = None) -> None:
        self.spark = spark
        self.marking, self.plain = Story(folder / "marking"), Story(folder / "plain")
        self.vectors = True
        self._lsn = 10
        document = copy.deepcopy(CONTRACT)
        document["x-cdc"]["events"] = {"soft_delete_column": None, "purge_deleted_after": purge}  # type: ignore[index]
        for story in (self.marking, self.plain):
            story.write_contract(document)
            story.workspace = Workspace.open(story.workspace.settings)
            story.clock = START + timedelta(days=60)
            story.land(MANY)
        self.run()

    def copied(self, folder: Path) -> Two:
        """Both homes, copied to ``folder`` to be gone on with."""
        other = copy.copy(self)
        other.marking, other.plain = (
            story.copied(folder / name) for name, story in (("marking", self.marking), ("plain", self.plain))
        )
        return other

    def contract_of(self, story: Story) -> TableContract:
        vectors = self.vectors and story is self.marking
        contract: TableContract = replace(story.contract, rows_per_file=100, deletion_vectors=vectors)
        return contract

    def land(self, *changes: Change, second: float = 2) -> None:
        self._lsn += 10
        for story in (self.marking, self.plain):
            story.land(Commit(self._lsn, second, changes))

    def run(self, window: str = FIRST, *, replay: bool = False) -> None:
        for story in (self.marking, self.plain):
            for layer in (raw, deduped):
                layer.materialize(story.workspace, self.spark, SOURCE, [window], "run", replay=replay)
            contract = self.contract_of(story)
            net_changes.materialize(story.workspace, self.spark, contract, [window], "run", replay=replay)
            dimensions.update(story.workspace, self.spark, contract, "run")
        self.agree()

    def agree(self) -> None:
        assert self.checkpoint(self.marking).content_hash == self.checkpoint(self.plain).content_hash
        assert self.checkpoint(self.marking).rows == self.checkpoint(self.plain).rows
        assert state(self.marking, self.spark) == state(self.plain, self.spark)
        waiting = [pending_windows(story.workspace, SOURCE).windows for story in (self.marking, self.plain)]
        assert waiting[0] == waiting[1]

    def checkpoint(self, story: Story) -> Checkpoint:
        found = story.workspace.dimension(self.contract_of(story)).open().state("")
        assert found is not None
        return found.checkpoint

    @property
    def files(self) -> dict[str, LakeFile]:
        """The files of the dimension with deletion vectors, by path."""
        table = self.marking.workspace.dimension(self.contract_of(self.marking))
        return {file.path: file for file in table.open().all_files()}

    @property
    def dead(self) -> int:
        """Rows that are marked as deleted, which the checkpoint must know."""
        dead = sum(file.stored_rows - file.rows for file in self.files.values())
        marked = self.checkpoint(self.marking).marked
        fresh = [file for path, file in self.files.items() if is_fresh(path)]
        told = (marked.dead, marked.fresh_files, marked.fresh_rows) if marked is not None else (0, 0, 0)
        assert told == (dead, len(fresh), sum(file.rows for file in fresh))
        return dead


def document(value: object) -> dict[str, Any]:
    found = copy.deepcopy(CONTRACT)
    found["x-cdc"]["deletion_vectors"] = value  # type: ignore[index]
    return found


def test_the_setting_is_off_by_default_and_is_not_another_contract(tmp_path: Path) -> None:
    on, off, plain = (
        contract_of(each, tmp_path / "notes.json") for each in (document(True), document(False), CONTRACT)
    )
    assert [each.deletion_vectors for each in (on, off, plain)] == [True, False, False]
    assert (on.fingerprint, on.judged_by) == (plain.fingerprint, plain.judged_by)


@pytest.mark.parametrize("value", ["true", 1, None])
def test_a_setting_that_is_neither_true_nor_false_is_refused_by_name(tmp_path: Path, value: object) -> None:
    with pytest.raises(ContractError, match=r"x-cdc\.deletion_vectors"):
        contract_of(document(value), tmp_path / "notes.json")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Two:
    return Two(tmp_path_factory.mktemp("two"), spark)


@pytest.fixture
def two(filled: Two, tmp_path: Path) -> Two:
    return filled.copied(tmp_path)


def update(*numbers: int, title: str = "new") -> list[Change]:
    return [Change("u", number, {"title": title}, unchanged=("body",)) for number in numbers]


def test_an_update_of_keys_anywhere_writes_one_small_file_and_no_other(two: Two) -> None:
    before = two.files
    assert len(before) == 4
    two.land(*update(3, 150, 399))
    two.run()
    (new,) = two.files.keys() - before.keys()
    assert before.keys() <= two.files.keys()
    assert (is_fresh(new), two.files[new].rows, two.dead) == (True, 3, 3)
    assert state(two.marking, two.spark)[150] == ("new", "b150", False, [])


def test_rows_of_fresh_files_are_marked_too_and_new_keys_and_deletes_agree(two: Two) -> None:
    for number in range(3):
        two.land(
            *update(3, 200, title=f"n{number}"),
            Change("d", 10 + number),
            Change("c", 500 + number, {"title": "c", "body": None}),
        )
        two.run()
    assert two.dead >= 5
    assert sum(file.rows for file in two.files.values()) == ROWS + 3


def test_a_key_change_agrees(two: Two) -> None:
    two.land(*update(7, 8))
    two.run()
    two.land(Change("d", 7), Change("c", 700, {"title": "moved"}, unchanged=("body",), moved_from=7))
    two.run()
    assert state(two.marking, two.spark)[700] == ("moved", "b7", False, [])


@pytest.mark.slow
def test_many_updates_keep_fresh_files_few_and_rewrite_ranges_with_much_waste(two: Two) -> None:
    first = two.files
    for number in range(FRESH_GENERATIONS + 3):
        two.land(*update(1 + number, 101 + number, 201, 301 + number % 2, title=f"n{number}"))
        two.run()
        assert sum(map(is_fresh, two.files)) <= FRESH_GENERATIONS
    assert len(first.keys() - two.files.keys()) < 4, "one update rewrites some ranges only"


@pytest.mark.slow
def test_a_replay_late_events_a_truncate_and_a_rebuild_agree(two: Two) -> None:
    two.land(*update(3, 150), second=61)
    two.run(SECOND)
    two.run(FIRST, replay=True)
    # A late event of the first window, below what the second has.
    two.land(*update(3, 77, title="late"))
    two.run()
    two.land(*update(9, 160), second=62)
    two.run(SECOND)
    assert two.dead
    two.run(SECOND, replay=True)
    two.land(*update(10, 170), second=63)
    two.run(SECOND)
    two.land(Change("t"), Change("c", 5, {"title": "x", "body": None}), second=64)
    two.run(SECOND)
    two.land(*update(5, title="y"), second=65)
    two.run(SECOND)
    content = two.checkpoint(two.plain).content_hash
    contract = two.contract_of(two.marking)
    again = dimensions.update(two.marking.workspace, two.spark, contract, "rebuild", whole=True)
    assert again.content_hash == content
    assert two.dead == 0


@pytest.mark.slow
def test_a_truncate_reaches_rows_where_all_files_are_fresh(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("DENSE", "WASTE", "TOO_MUCH_WASTE"):
        monkeypatch.setattr(tidying, limit, 100)
    two.land(*update(*range(1, ROWS + 1)))
    two.run()
    assert all(map(is_fresh, two.files))
    two.land(Change("t"))
    two.run()
    assert state(two.marking, two.spark)[1][2], "it is deleted"


@pytest.mark.slow
def test_the_setting_switched_off_brings_all_rows_home_by_the_next_update(two: Two) -> None:
    two.land(*update(3, 150, 399))
    two.run()
    two.vectors = False
    two.run()
    assert any(map(is_fresh, two.files)), "nothing is due without news"
    two.land(*update(4))
    two.run()
    assert two.dead == 0
    assert not any(map(is_fresh, two.files))
    two.vectors = True
    two.land(*update(4, 300))
    two.run()
    assert two.dead == 2


PERSON = "Ada Lovelace"


def holding(two: Two) -> set[str]:
    """The files below the dimension, of whatever version, that have ``PERSON`` in a row, dead or alive."""
    folder = two.marking.workspace.dimension(two.contract_of(two.marking)).folder
    return {
        str(file.relative_to(folder))
        for file in folder.rglob("*.parquet")
        if PERSON in repr(pq.read_table(file, partitioning=None).to_pylist())
    }


@pytest.mark.slow
def test_an_erased_row_is_in_no_file_of_the_new_version_dead_or_alive(two: Two) -> None:
    for number in range(3):
        two.land(*update(42, 200, title=f"{PERSON} {number}"))
        two.land(
            *update(42, title=f"{PERSON[:3]} {number}"), Change("u", 300, {"title": PERSON[:20], "body": "x"})
        )
        two.land(*update(300, title="other"))
        two.run()
    two.land(Change("d", 42), *update(200, title="two hundred"))
    two.land(*update(43, 201))
    two.run()
    assert any(path in two.files for path in holding(two))
    for story in (two.marking, two.plain):
        erase(story.workspace, story.contract, key_text(["42"]), erased_by="ana", why="request")
    two.run()
    dim = two.marking.workspace.dimension(two.contract_of(two.marking))
    of_key = {
        path
        for path in two.files
        for row in pq.read_table(dim.folder / path, partitioning=None).to_pylist()
        if row["id"] == 42 and (PERSON[:3] in repr(row) or "b42" in repr(row))
    }
    assert of_key == set()
    sweep(dim, timedelta(0))
    left = [
        row
        for file in dim.folder.rglob("*.parquet")
        for row in pq.read_table(file, partitioning=None).to_pylist()
        if row.get("id") == 42
    ]
    assert [(row["title"], row["body"]) for row in left] == [(None, None)]


@pytest.mark.slow
def test_purged_rows_are_in_no_file_of_the_new_version(tmp_path: Path, spark: SparkSession) -> None:
    two = Two(tmp_path, spark, purge="P30D")
    two.land(*update(3, title=PERSON), *update(150))
    two.run()
    two.land(Change("d", 3), *update(151))
    two.run()
    assert len([path for path in holding(two) if path in two.files]) > 0
    two.land(*update(5), second=32 * 24 * 3600)
    two.run("2026-02-02T1200")
    assert 3 not in state(two.marking, spark)
    assert not [path for path in holding(two) if path in two.files]
