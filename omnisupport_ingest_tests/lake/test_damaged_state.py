"""A damaged state counts as none, so that the window is made again, which takes it out of the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.lake import layout
from omnisupport_ingest.lake.state import FOOTER_KEY, StateFromNewerVersion
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest_tests.lake.tables import (
    W1,
    W2,
    by_window,
    change,
    numbers_in,
    place_without_spark,
    state,
)

DAMAGES = [
    pytest.param(lambda path: path.unlink(), id="missing"),
    pytest.param(lambda path: path.write_bytes(b""), id="empty"),
    pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-9]), id="truncated"),
    pytest.param(lambda path: path.write_bytes(b"PAR1" + bytes(500) + b"PAR1"), id="overwritten"),
]


@pytest.fixture
def table(tmp_path: Path) -> LakeTable:
    table = by_window(tmp_path)
    table.open().commit(
        [
            change(W1, place_without_spark(table, W1, "a", [1]), ["a"]),
            change(W2, place_without_spark(table, W2, "b", [2]), ["b"]),
        ]
    )
    return table


def state_of(table: LakeTable, window: str) -> Path:
    files = DeltaTable(str(table.folder)).file_uris()
    (found,) = [uri for uri in files if layout.is_state(uri) and f"window={window}/" in uri]
    return Path(found)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_window_with_a_damaged_state_is_made_again(
    table: LakeTable, damage: Callable[[Path], object]
) -> None:
    damage(state_of(table, W1))
    snapshot = table.open()
    assert snapshot.state(W1) is None
    assert [file.rows for file in snapshot.files(W1)] == [1], "which plans a replacement"
    assert snapshot.state(W2) == state(W2, ["b"])
    staged = place_without_spark(table, W1, "again", [1], generation=2)
    snapshot.commit([change(W1, staged, ["a"], generation=2, replaces=True)])
    assert table.open().state(W1) == state(W1, ["a"], generation=2)
    assert numbers_in(table) == [1, 2]
    read = duckdb.read_parquet(DeltaTable(str(table.folder)).file_uris())
    assert sorted(read.project("n").fetchall()) == [(1,), (2,)]


def test_a_damaged_state_is_warned_of_once_however_often_it_is_asked_for(
    table: LakeTable, caplog: pytest.LogCaptureFixture
) -> None:
    file = state_of(table, W1)
    file.write_bytes(b"")
    assert [table.look().state(W1), table.open().state(W1), table.open().state(W1)] == [None] * 3  # type: ignore[union-attr]
    assert [str(file) in each.getMessage() for each in caplog.records] == [True]


def test_a_window_without_rows_whose_state_is_damaged_begins_anew(tmp_path: Path) -> None:
    table = by_window(tmp_path)
    table.open().commit([change(W1, (), ["nothing in it"])])
    state_of(table, W1).write_bytes(b"")
    snapshot = table.open()
    assert (snapshot.state(W1), snapshot.files(W1)) == (None, ())
    snapshot.commit([change(W1, (), ["nothing in it"], run_id="again")])
    assert table.open().state(W1) == state(W1, ["nothing in it"], run_id="again")


def test_a_state_of_a_newer_version_is_no_damage(table: LakeTable) -> None:
    newer = state(W1, ["a"]).to_text().replace('version":1', 'version":99')
    schema = pa.schema([("n", pa.int64())]).with_metadata({FOOTER_KEY: newer.encode()})
    pq.write_table(schema.empty_table(), state_of(table, W1))
    with pytest.raises(StateFromNewerVersion, match="format version 99"):
        table.open().state(W1)
