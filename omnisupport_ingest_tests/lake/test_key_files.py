"""Rows of a file that few others come to: put in order and parted stretch by stretch, or row by row."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake import Schema as DeltaSchema
from deltalake.transaction import AddAction
from pyspark.sql.types import IntegerType, LongType, ShortType, StringType, StructField, StructType

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.lake import key_files
from omnisupport_ingest.lake.key_files import FileRange, KeyFile, KeyOrder, range_numbers, ranges_of
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.lake.table_spec import TableSpec


def rows(keys: list[int | None], first: int = 0) -> pa.Table:
    texts = [{"text": f"{first + place}"} for place in range(len(keys))]
    return pa.table(
        {"id": pa.array(keys, pa.int64()), "said": pa.array(texts, pa.struct([("text", pa.string())]))}
    )


@pytest.mark.parametrize("most", [0, 3, 1_000])
def test_rows_are_put_in_order_of_their_key_and_keep_it_among_equals(most, monkeypatch):
    monkeypatch.setattr(key_files, "_MAX_RUNS", most)
    rng = np.random.default_rng(7)
    for count in (0, 1, 2, 40):
        held = rows(list(range(0, 2 * count, 2)))
        came = rows([*rng.integers(-3, 2 * count + 3, 7).tolist(), None], first=100)
        both = pa.concat_tables([held, came])
        found = KeyOrder("id", whole_numbers=True).sort(both)
        told = [(row["id"], row["said"]["text"]) for row in both.to_pylist()]
        lowest = -(2**63)
        expected = sorted(told, key=lambda pair: lowest if pair[0] is None else pair[0])
        assert [(row["id"], row["said"]["text"]) for row in found.to_pylist()] == expected
        assert found["id"].num_chunks <= 1


@pytest.mark.parametrize("most", [0, 3, 1_000])
def test_the_rows_that_stay_are_those_of_a_filter(most, monkeypatch):
    monkeypatch.setattr(columnar, "_MOST_STRETCHES", most)
    rng = np.random.default_rng(8)
    for share in (0.0, 0.1, 0.5, 1.0):
        held = rows(list(range(50)))
        kept = rng.random(50) < share
        assert columnar.filter_slices(held, kept).equals(held.filter(pa.array(kept)))
    assert columnar.filter_slices(rows([]), np.zeros(0, np.bool_)).num_rows == 0


@pytest.mark.parametrize(
    ("rows_together", "found"),
    [
        (0, [[9], [3], [4], [2], [30]]),
        (8, [[9], [3, 4], [2], [30]]),
        (9, [[9], [3, 4, 2], [30]]),
        (100, [[9, 3, 4, 2, 30]]),
    ],
)
def test_small_files_side_by_side_have_one_range(rows_together, found):
    files = [KeyFile(f"f{low}", f"/f{low}", low, count) for low, count in enumerate((9, 3, 4, 2, 30))]
    ranges = ranges_of(files, rows_together=rows_together)
    assert [[file.rows for file in each.files] for each in ranges] == found
    assert [each.start for each in ranges[1:]] == [each.end for each in ranges[:-1]]
    for low, file in enumerate(files):
        (number,) = range_numbers(np.array([low]), ranges)
        assert file in ranges[number].files


def test_a_cut_parts_a_range_of_several_files_and_both_parts_know_all_of_them():
    files = [KeyFile(f"f{low}", f"/f{low}", low, 2) for low in (0, 10, 20)]
    ranges = ranges_of(files, [15], rows_together=4)
    assert [(each.start, each.end, [file.lowest for file in each.files]) for each in ranges] == [
        (None, 15, [0, 10]),
        (15, 20, [0, 10]),
        (20, None, [20]),
    ]
    assert ranges_of([], [5]) == [FileRange(None, 5), FileRange(5, None)]


@pytest.mark.parametrize("of_type", [pa.int16(), pa.int32(), pa.int64()])
def test_a_row_whose_key_is_no_number_leaves_its_file_a_lowest_key_that_delta_reads(of_type, tmp_path):
    order, kind = KeyOrder("id", whole_numbers=True), pa.schema([("id", of_type)])
    held = [pa.table({"id": keys}, kind) for keys in ([None, -5], [-1, 3])]
    written = [file for each in held for file in key_files.write_rows(each, order, tmp_path)]
    spark_type = {pa.int16(): ShortType(), pa.int32(): IntegerType(), pa.int64(): LongType()}[of_type]
    spec = TableSpec(
        "desk/dimension", StructType([StructField("id", spark_type)]), (), "rows", ordered_by="id"
    )
    ours = made_by_delta(tmp_path, spec, written, kind)
    files = key_files.files_by_kind(ours.open(), order).ordered
    assert files is not None
    assert [file.path for file in files] == [file.name for file in written]
    places = range_numbers(order.values(pa.concat_tables(held)), ranges_of(files))
    assert places.tolist() == [0, 0, 1, 1]


def made_by_delta(
    root: Path, spec: TableSpec, files: list[key_files.WrittenFile], kind: pa.Schema
) -> LakeTable:
    ours = LakeTable(root, spec)
    table = DeltaTable.create(str(ours.folder), DeltaSchema.from_arrow(kind))
    added = [AddAction(file.name, file.bytes, {}, 0, True, file.stats) for file in files]
    table.create_write_transaction(added, "append", table.schema(), [])
    return ours


def test_bounds_of_a_column_behind_the_32nd_come_from_the_log(tmp_path):
    order, names = KeyOrder("_cdc_key", whole_numbers=False), [f"c{number}" for number in range(40)]
    kind = pa.schema([*(pa.field(name, pa.int64()) for name in names), pa.field("_cdc_key", pa.string())])
    rows = pa.table({name: [1, 2, 3] for name in names} | {"_cdc_key": ["a", "b", "ü"]}, kind)
    files = key_files.write_rows(rows, order, tmp_path, rows_per_file=1)
    fields = [*(StructField(name, LongType()) for name in names), StructField("_cdc_key", StringType())]
    spec = TableSpec("desk/dimension", StructType(fields), (), "rows", ordered_by="_cdc_key")
    ours = made_by_delta(tmp_path, spec, files, kind)
    found = key_files.files_by_kind(ours.open(), order).ordered
    assert found is not None and [file.lowest for file in found] == ["a", "b", "ü"]


@pytest.mark.parametrize(
    ("of_type", "stats"),
    [
        (pa.decimal128(10, 0), {"minValues": {"id": 1}, "maxValues": {"id": 2}}),
        (pa.int64(), {"minValues": {"id": True}, "maxValues": {"id": True}}),
        (pa.int64(), {"minValues": {"id": 1}}),
        (pa.int64(), {}),
    ],
)
def test_bounds_that_another_program_wrote_otherwise_are_not_believed(of_type, stats, tmp_path):
    order, kind = KeyOrder("id", whole_numbers=True), pa.schema([("id", of_type)])
    file = key_files.WrittenFile("a.parquet", 2, 9, json.dumps({"numRecords": 2} | stats))
    spec = TableSpec(
        "desk/dimension", StructType([StructField("id", LongType())]), (), "rows", ordered_by="id"
    )
    ours = made_by_delta(tmp_path, spec, [file], kind)
    # A file whose statistics cannot be read is asked for its rows.
    pq.write_table(pa.table({"id": pa.nulls(2, of_type)}), ours.folder / file.name)
    assert key_files.files_by_kind(ours.open(), order).ordered is None
