"""Which rows of the source a repair reads again, and which of the lake it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.read.dimension_rows import DimensionRows
from omnisupport_ingest_tests.layers.notes import CONTRACT, LAKE, SOURCE, write_lake, write_source


def rows_of(folder: Path, *lake: dict[str, Any]) -> DimensionRows:
    files = [str(write_lake(folder / "lake.parquet", lake))] if lake else []
    return DimensionRows(CONTRACT, files, folder)


def same(rows: DimensionRows, *source: dict[str, Any]) -> bool:
    return rows.same(write_source(rows.scratch / "source.parquet", source))


def test_row_that_is_as_in_the_lake_is_not_read_again(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, LAKE)
    assert same(rows, SOURCE) and rows.unmet() == []


@pytest.mark.parametrize(
    ("lake", "source"),
    [
        pytest.param({}, {"title": "b"}, id="another value"),
        pytest.param({}, {"title": None}, id="null at the source"),
        pytest.param({"title": None}, {}, id="null in the lake"),
        pytest.param({"title": None, "_cdc_unresolved": ["title"]}, {"title": None}, id="not known"),
        pytest.param({"_cdc_unresolved": ["*"]}, {}, id="perhaps gone in the lake"),
        pytest.param({"_cdc_is_deleted": True}, {}, id="deleted in the lake"),
        pytest.param({"_cdc_exact": [("amount", "NaN")]}, {}, id="another exact text"),
        pytest.param({"_cdc_key": '["2"]', "id": 2}, {}, id="not in the lake"),
    ],
)
def test_row_that_is_not_surely_the_same_is_read_again(
    tmp_path: Path, lake: dict[str, Any], source: dict[str, Any]
) -> None:
    assert not same(rows_of(tmp_path, LAKE | lake), SOURCE | source)


def test_row_of_a_table_that_the_lake_does_not_have_is_read_again(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    assert not same(rows, SOURCE) and rows.unmet() == []


def test_chunk_without_rows_is_the_same(tmp_path: Path) -> None:
    assert same(rows_of(tmp_path, LAKE))


def test_living_rows_that_no_chunk_had_are_to_be_ended(tmp_path: Path) -> None:
    def row(number: int, **other: Any) -> dict[str, Any]:
        return LAKE | {"id": number, "_cdc_key": f'["{number}"]'} | other

    rows = rows_of(
        tmp_path,
        row(1),
        row(2, title="another"),
        row(3),
        row(4, _cdc_is_deleted=True),
        row(5, _cdc_is_deleted=True, _cdc_unresolved=["*"]),
        row(6),
    )
    assert same(rows, SOURCE)
    assert not same(rows, SOURCE | {"id": "2"})
    assert same(rows, SOURCE | {"id": "6"})
    assert rows.unmet() == ['["3"]', '["5"]']
