"""Superseded rows stay where a window of the table was not folded as the contract folds it, or is damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cdc.columnar import POSITION
from omnisupport_ingest.lake.commit import WindowChange
from omnisupport_ingest.lake.file_rows import BYTES_OF_A_BATCH
from omnisupport_ingest.lake.layout import LakeFile, StagedFile, partition_in, unit_folder
from omnisupport_ingest.lake.stats import delta_stats
from omnisupport_ingest.processes import ProcessIdentity
from omnisupport_ingest.retention import superseded_rows as superseded_rows_of_table
from omnisupport_ingest.retention.superseded_rows import (
    NeverJudgedAgain,
    SupersededRows,
    remove_superseded,
    superseded_rows,
)
from omnisupport_ingest_tests.layers.story import CONTRACT, FIRST, SECOND, START, THIRD
from omnisupport_ingest_tests.layers.three_tables import ThreeTables, commit

pytestmark = pytest.mark.quick

KEPT = {"landing": "P7D", "raw": "P10D", "net_changes": "P10D"}
SEALED = NeverJudgedAgain(frozenset((FIRST, SECOND, THIRD)), {})
COLUMNS = ("_cdc_position", "_cdc_first", "_cdc_alive", "_cdc_vouched")


def put_row(desk: ThreeTables, window: str, lsn: int, more: Mapping[str, str]) -> Path:
    """Add the row of a key that one event of the position ``lsn`` made, all columns known, to ``window``."""
    table = desk.workspace.net_changes(desk.of("notes"))
    snapshot = table.open()
    state = snapshot.state(window)
    assert state is not None
    path = f"{unit_folder(window, 1, 'unit')}/part-0.parquet"
    file = table.folder / path
    file.parent.mkdir(parents=True)
    at = pa.array([{"epoch": 1, "commit_lsn": lsn, "ordinal": 0}], POSITION)
    columns = {
        **{name: pa.array([text]) for name, text in more.items()},
        "_cdc_kind": pa.array(["key"]),
        "_cdc_key": pa.array(['["1"]']),
        **dict.fromkeys(COLUMNS, at),
        "_cdc_doubt": pa.nulls(1, POSITION),
        "_cdc_moved_from_key": pa.nulls(1, pa.string()),
        "_cdc_unresolved": pa.array([[]], pa.list_(pa.string())),
    }
    pq.write_table(pa.table(columns), file)
    count, stats = delta_stats(file)
    staged = StagedFile(
        path, window, partition_in(path, table.spec.partition_by), count, file.stat().st_size, stats
    )
    snapshot.commit([WindowChange(window, (staged,), (), state, replaces=False)])
    return file


def told(folder: Path, second: str = "notes", columns: Sequence[str] = ()) -> ThreeTables:
    """Three windows, all closed; the row of the first is superseded by that of the third. The second has an
    event of the table ``second``. ``columns``: further columns of the contract."""
    desk = ThreeTables(folder, retention=KEPT)
    if columns:
        text = CONTRACT["properties"]["title"]  # type: ignore[index]
        document = json.loads((desk.contracts / "notes.json").read_text())
        document["properties"] |= dict.fromkeys(columns, text)
        (desk.contracts / "notes.json").write_text(json.dumps(document))
        desk.reopen()
    desk.land_of(1, "notes")
    desk.land_of(61, second)
    desk.land_of(121, "notes")
    desk.take_in(FIRST, SECOND, THIRD, closed=True)
    for window, lsn in ((FIRST, 10), (THIRD, 30)):
        put_row(desk, window, lsn, dict.fromkeys(columns, "text"))
    return desk


def planned(desk: ThreeTables) -> SupersededRows | None:
    return superseded_rows(desk.workspace, desk.of("notes"), SEALED, START + timedelta(days=60))[0]


@pytest.mark.parametrize("columns", [(), ("filename",), ("Path", "window_of")])
def test_columns_of_a_contract_may_have_any_name(tmp_path: Path, columns: tuple[str, ...]) -> None:
    desk = told(tmp_path, columns=columns)
    found = planned(desk)
    assert found is not None and found.windows == (FIRST,)
    assert remove_superseded(desk.workspace, desk.of("notes"), SEALED, found, "run")[0] == 1
    snapshot = desk.workspace.net_changes(desk.of("notes")).open()
    assert (snapshot.files(FIRST), len(snapshot.files(THIRD))) == ((), 1)
    assert planned(desk) is None


@pytest.mark.parametrize(
    ("state", "second", "leave"),
    [
        ({"versions": ("contract:other",)}, "notes", False),
        ({"versions": ("contract:other",)}, "tags", True),
        ({"batches": ()}, "notes", False),
        ({"batches": ()}, "tags", True),
    ],
)
def test_rows_stay_below_events_that_the_table_has_yet_to_fold(
    tmp_path: Path, state: Mapping[str, Any], second: str, leave: bool
) -> None:
    """A contract with one more column finds that a key change did not send it; so does a table that comes
    back to events of windows that were sealed without it."""
    desk = told(tmp_path, second)
    net_changes = desk.workspace.net_changes(desk.of("notes"))
    before = net_changes.open().state(SECOND)
    assert before is not None and planned(desk) is not None
    commit(net_changes, [replace(before, **state)])
    assert (planned(desk) is not None) is leave


def test_rows_stay_below_a_file_that_is_gone_from_disk(tmp_path: Path) -> None:
    """It may say that a key change took the row away."""
    desk = told(tmp_path)
    file = put_row(desk, SECOND, 20, {})
    assert planned(desk) is not None
    file.unlink()
    assert planned(desk) is None


def test_windows_without_a_row_of_the_table_are_no_fault(tmp_path: Path) -> None:
    desk = ThreeTables(tmp_path, retention=KEPT)
    desk.land_of(1, "tags")
    desk.take_in(FIRST, closed=True)
    assert planned(desk) is None


def test_wide_rows_are_written_again_within_bounded_memory(tmp_path: Path) -> None:
    """Half a megabyte on disk, for one text is in every row: 200 MB of rows."""
    count = 20_000
    keys = [f'["{number}"]' for number in range(count)]
    text = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int8()), ["x" * 10_000])
    held = tmp_path / "held.parquet"
    pq.write_table(pa.table({"_cdc_key": keys, "body": text.cast(pa.string())}), held)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    file = LakeFile("held.parquet", str(held), FIRST, (("window", FIRST),), count, held.stat().st_size)
    pa.set_memory_pool(pool)
    try:
        superseded_rows_of_table._write(tmp_path / "draft", file, pa.array(keys[::2]))
    finally:
        pa.set_memory_pool(before)
    (written,) = (tmp_path / "draft").rglob("*.parquet")
    assert (
        pq.read_table(written, columns=["_cdc_key"], partitioning=None)["_cdc_key"].to_pylist() == keys[1::2]
    )
    assert (pool.max_memory() or 0) < 6 * BYTES_OF_A_BATCH


def test_keys_that_a_killed_search_left_on_disk_are_removed_by_the_next(tmp_path: Path) -> None:
    """They are beside the home's other scratch files, under the name of their process; a key may be a
    person's."""
    desk, seen = told(tmp_path), list[Path]()
    run = desk.workspace.home.run
    left = run / f"superseded-{ProcessIdentity(999_999_999).text}-left"
    left.mkdir(parents=True)
    (left / "rows.duckdb").write_text("keys")
    with pytest.MonkeyPatch.context() as patch:
        find = superseded_rows_of_table.find_superseded
        patch.setattr(
            superseded_rows_of_table,
            "find_superseded",
            lambda *given: (seen.extend(run.glob("superseded-*/rows.duckdb")), find(*given)),
        )
        assert planned(desk) is not None
    (own,) = seen
    assert own.parent.name.startswith(f"superseded-{ProcessIdentity.current().text}-")
    assert not [*run.glob("superseded-*")]
