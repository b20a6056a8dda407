"""The rows that the proof compares with: all of them or the same sample each time, as the log writes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.sources.postgres.slot.slot import consistent_snapshot
from omnisupport_ingest.sources.postgres.snapshot.comparison_rows import WrittenRows, write_rows_at
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


def written(
    source: SourceUnderTest, table: TableContract, path: Path, *, sample: int | None = None
) -> tuple[WrittenRows, list[dict[str, str | None]]]:
    with consistent_snapshot(source.dsn) as (_, snapshot):
        rows = write_rows_at(source.dsn, source.slot, snapshot, table, path, sample=sample)
    return rows, pq.read_table(path).to_pylist()


def test_a_sample_is_what_the_same_hash_chooses_in_the_lake(source: SourceUnderTest, tmp_path: Path) -> None:
    source.sql(
        "CREATE TABLE notes (id int, part text, PRIMARY KEY (id, part))",
        "INSERT INTO notes SELECT g, 'ä' || g % 3 FROM generate_series(1, 2000) g",
    )
    table = contract("notes", ["id", "part"], key=["id", "part"])
    told, rows = written(source, table, tmp_path / "rows.parquet", sample=100)
    assert (told.rows, told.live) == (2000, 2000)
    assert told.written == len(rows)
    assert 50 < len(rows) < 200
    keys = [f'["{number}","ä{number % 3}"]' for number in range(1, 2001)]
    chosen = duckdb.sql(
        "SELECT json_extract_string(key, '$[0]') AS id FROM (SELECT unnest($keys) AS key)"
        " WHERE substr(sha256(concat_ws(chr(31), json_extract_string(key, '$[0]'),"
        " json_extract_string(key, '$[1]'))), 1, 8) < $below",
        params={"keys": keys, "below": told.below},
    ).fetchall()
    assert {row["id"] for row in rows} == {number for (number,) in chosen}
    assert written(source, table, tmp_path / "again.parquet", sample=100)[0] == told


def test_a_small_table_is_read_whole(source: SourceUnderTest, tmp_path: Path) -> None:
    source.sql("CREATE TABLE notes (id int PRIMARY KEY)", "INSERT INTO notes VALUES (1), (2)")
    told, rows = written(source, contract("notes", ["id"]), tmp_path / "rows.parquet", sample=2)
    assert told == WrittenRows(rows=2, live=2, written=2, below=None)
    assert {row["id"] for row in rows} == {"1", "2"}


def test_softly_deleted_rows_are_not_counted_as_live(source: SourceUnderTest, tmp_path: Path) -> None:
    source.sql(
        "CREATE TABLE notes (id int PRIMARY KEY, gone timestamptz)",
        "INSERT INTO notes VALUES (1, NULL), (2, now())",
    )
    table = replace(contract("notes", ["id", "gone"]), soft_delete_column="gone")
    assert written(source, table, tmp_path / "rows.parquet")[0].live == 1


def test_rows_of_tables_that_inherit_are_not_the_parents(source: SourceUnderTest, tmp_path: Path) -> None:
    source.sql(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child () INHERITS (parent)",
        "INSERT INTO parent VALUES (1)",
        "INSERT INTO child VALUES (2)",
    )
    _, rows = written(source, contract("parent", ["id"]), tmp_path / "rows.parquet")
    assert [row["id"] for row in rows] == ["1"]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("boolean", "true", "t"),
        ("char(4)", "'ab'", "ab  "),
        ("text", "''", ""),
        ("text", "NULL", None),
        ("numeric", "'NaN'", "NaN"),
        ("timestamptz", "'infinity'", "infinity"),
    ],
)
def test_values_are_written_as_the_log_writes_them(
    source: SourceUnderTest, tmp_path: Path, kind: str, value: str, text: str | None
) -> None:
    source.sql(f"CREATE TABLE notes (id int PRIMARY KEY, v {kind})", f"INSERT INTO notes VALUES (1, {value})")
    table = replace(contract("notes", ["id"]), columns=(Column("id", "integer"), Column("v", kind)))
    _, rows = written(source, table, tmp_path / "rows.parquet")
    assert rows == [{"id": "1", "v": text}]
