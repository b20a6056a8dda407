"""What one task makes of the few events of a small run."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cdc.envelope import LANDED_TYPE, RAW_TYPE
from omnisupport_ingest.lake import one_task
from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.one_task import rows_of
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.stages.few_events import LandedFile, take_in_few

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
LANDED = arrow_schema(LANDED_TYPE, without=())
RAW = arrow_schema(RAW_TYPE, without=())
ARRIVAL = {
    "batch_id": "of the manifest",
    "data_file": "part-0.parquet",
    "window": "2026-11-21T12",
    "landed_at": NOON,
    "watermark_before": None,
    "newest_epoch_before": 0,
    "file_name": None,
}
EVENT = {
    "epoch": 1,
    "commit_lsn": 7,
    "ordinal": 0,
    "op": "c",
    "source_ts": NOON,
    "source_schema": "public",
    "source_table": "tickets",
    "key": '["1"]',
    "after": '{"id":"1"}',
    "batch_id": "of the file",
}


def test_a_landed_file_of_an_earlier_version_has_null_where_it_lacks_a_column(tmp_path: Path) -> None:
    new = ("misplaced", "file_row", "envelope")
    pq.write_table(pa.Table.from_pylist([EVENT], schema=LANDED), tmp_path / "whole.parquet")
    earlier = pa.Table.from_pylist([EVENT], schema=LANDED).drop_columns(list(new))
    pq.write_table(earlier, tmp_path / "earlier.parquet")
    whole, found = (
        take_in_few([LandedFile(str(tmp_path / f"{name}.parquet"), ARRIVAL)]) for name in ("whole", "earlier")
    )
    assert found is not None and found.schema == RAW and found.equals(whole)
    [row] = found.to_pylist()
    assert (row["window"], row["landed_at"], row["batch_id"]) == ("2026-11-21T12", NOON, "of the file")
    assert row["event_hash"] is not None


def test_a_file_of_a_table_that_has_gained_a_column_since_has_null_there(tmp_path: Path) -> None:
    path = tmp_path / "part-0.parquet"
    pq.write_table(pa.table({"n": pa.array([1, 2], pa.int32())}), path)
    file = LakeFile("part-0.parquet", str(path), "w1", (("window", "w1"), ("of", None)), 2, 1)
    schema = pa.schema(
        [("window", pa.string()), ("of", pa.string()), ("n", pa.int64()), ("new", pa.string())]
    )
    assert rows_of([file], schema).to_pylist() == [
        {"window": "w1", "of": None, "n": number, "new": None} for number in (1, 2)
    ]


def test_no_files_are_no_rows() -> None:
    made = take_in_few([])
    assert made is not None and made.equals(RAW.empty_table())


def test_events_that_are_few_and_small_on_disk_but_large_in_memory_are_not_for_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "part-0.parquet"
    rows = [EVENT | {"after": f"{number}" + "x" * 50_000} for number in range(100)]
    pq.write_table(pa.Table.from_pylist(rows, schema=LANDED), path, compression="zstd")
    assert take_in_few([LandedFile(str(path), ARRIVAL)]) is not None
    monkeypatch.setattr(one_task, "_MOST_BYTES_HELD", 20 * path.stat().st_size)
    assert take_in_few([LandedFile(str(path), ARRIVAL)]) is None
