"""A stretch of work looks at a table once; whatever was committed meanwhile is noticed by its own commit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from omnisupport_ingest.lake import ledger as lake_ledger
from omnisupport_ingest.lake import table as lake_table
from omnisupport_ingest.lake.commit import CommitConflict
from omnisupport_ingest.lake.ledger import Ledger
from omnisupport_ingest.lake.log_entry import put_entry
from omnisupport_ingest.lake.looks import Looks
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.snapshot import TableSnapshot
from omnisupport_ingest.lake.table import LakeTable, retrying
from omnisupport_ingest.layers.ledgers import retention_ledger
from omnisupport_ingest_tests.lake.tables import (
    W1,
    W2,
    by_window,
    change,
    numbers_in,
    place_without_spark,
    unpartitioned,
)


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    """The table of a stretch of work, which looks once."""
    made = by_window(tmp_path)
    made.open()
    return replace(made, looks=Looks())


@pytest.fixture(autouse=True)
def _nothing_is_open() -> Iterator[None]:
    lake_table._opened.clear()
    yield
    lake_table._opened.clear()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the log of a table, by the name of the question."""
    found: list[str] = []

    def count(where: object, name: str) -> None:
        original: Callable[..., object] = getattr(where, name)

        def counted(*arguments: object) -> object:
            found.append(name)
            return original(*arguments)

        monkeypatch.setattr(where, name, counted)

    count(TableSnapshot, "is_newest")
    count(LakeTable, "_indexed_version")
    count(lake_table, "is_delta")
    count(lake_ledger, "is_delta")
    return found


def put(snapshot: TableSnapshot, number: int, window: str = W1) -> int:
    staged = place_without_spark(snapshot.table, window, f"u{number}", [number])
    held = snapshot.state(window)
    inputs = [*(held.inputs if held is not None else ()), f"u{number}"]
    return snapshot.commit([change(window, staged, inputs)])


def rival_commits(table: LakeTable) -> None:
    """Another process commits, and this one does not know it."""
    newest = table.index.newest(table.log)
    assert newest is not None
    put_entry(table.log, newest, [], {})


def ask_all(table: LakeTable) -> set[int]:
    held = table.look()
    assert held is not None
    return {held.version, table.open().version, *(each.version for each in [table.opened()] if each)}


def test_a_table_is_looked_at_once_however_many_ask(table: LakeTable, asked: list[str]) -> None:
    assert ask_all(table) == {0}
    once = len(asked)
    for _ in range(5):
        assert ask_all(replace(table)) == {0}
    assert len(asked) == once
    without = replace(table, looks=None)
    for _ in range(5):
        ask_all(without)
    assert len(asked) >= once + 5


def test_a_table_that_is_not_there_is_looked_for_once(tmp_path: Path, asked: list[str]) -> None:
    looks = Looks()
    table, ledger = replace(unpartitioned(tmp_path), looks=looks), replace(decisions(tmp_path), looks=looks)
    for _ in range(5):
        assert table.look() is None
        assert not ledger.entries().num_rows
    assert asked.count("is_delta") == 2
    # Made by this process, whoever asked for it, it is there at once.
    unpartitioned(tmp_path).open()
    assert table.look() is not None
    assert table.open().version == 0
    assert table.look() is not None
    decisions(tmp_path).append(lambda _held: a_row(ledger))
    assert ledger.entries().num_rows == 1


def decisions(root: Path) -> Ledger:
    return retention_ledger(root, "desk")


def a_row(ledger: Ledger) -> pa.Table:
    schema = arrow_schema(ledger.spec.schema, without=("sequence",))
    return pa.table([pa.nulls(1, each.type) for each in schema], schema=schema)


def test_what_this_process_commits_counts_at_once_by_whatever_way(table: LakeTable) -> None:
    assert ask_all(table) == {0}
    assert put(table.open(), 1) == 1
    assert ask_all(table) == {1}
    assert put(replace(table, looks=None).open(), 2) == 2
    assert ask_all(table) == {2}
    snapshot = table.look()
    assert snapshot is not None
    assert put(snapshot, 3) == 3
    assert ask_all(table) == {3}


def test_a_commit_of_others_between_our_look_and_our_commit_is_noticed_and_planned_anew(
    table: LakeTable,
) -> None:
    put(table.open(), 1)
    assert ask_all(table) == {1}
    rival_commits(table)
    # The look is as old as it is, and says so.
    assert ask_all(table) == {1}
    with pytest.raises(CommitConflict, match=r"at version 1 .* at 2 now"):
        put(table.open(), 2)
    planned_on = []

    def attempt(snapshot: TableSnapshot) -> int:
        planned_on.append(snapshot.version)
        if len(planned_on) < 3:
            rival_commits(table)
        return put(snapshot, 3)

    assert retrying(attempt, table) == 5
    assert planned_on == [2, 3, 4]
    assert numbers_in(table) == [1, 3]


def test_who_plans_a_commit_reads_no_table_as_it_was_before_the_one_to_be_changed(
    table: LakeTable, tmp_path: Path
) -> None:
    below = replace(unpartitioned(tmp_path), looks=table.looks)
    below.open()
    assert ask_all(table) == {0}
    # Another process takes in more, and brings the table below up to date with it.
    rival_commits(table)
    rival_commits(below)

    def attempt(snapshot: TableSnapshot) -> tuple[int, int]:
        return snapshot.version, table.open().version

    assert retrying(attempt, below) == (1, 1)


def test_another_stretch_of_work_looks_anew_and_so_does_another_process(table: LakeTable) -> None:
    put(table.open(), 1, W2)
    assert ask_all(table) == {1}
    rival_commits(table)
    assert ask_all(replace(table, looks=Looks())) == {2}
    assert ask_all(pickle.loads(pickle.dumps(replace(table, spec=table.spec)))) == {2}
    assert ask_all(table) == {1}
