"""The content hash of a set of rows, whatever files they lie in."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.lake.contenthash import ContentHash, hash_of_files
from omnisupport_ingest_tests.examples import examples

ROWS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30)


def written(folder: str, parts: list[list[int]]) -> list[Path]:
    paths = [Path(folder) / f"{number}.parquet" for number in range(len(parts))]
    for path, part in zip(paths, parts, strict=True):
        pq.write_table(pa.table({"h": pa.array(part, pa.int64())}), path, row_group_size=7)
    return paths


@settings(max_examples=examples(40), deadline=None)
@given(rows=ROWS, data=st.data())
def test_the_hash_does_not_depend_on_order_or_files(rows: list[int], data: st.DataObject) -> None:
    shuffled = data.draw(st.permutations(rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    bounds = [0, *cuts, len(rows)]
    parts = [list(shuffled[a:b]) for a, b in pairwise(bounds)]
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as many:
        assert hash_of_files(written(one, [rows]), "h") == hash_of_files(written(many, parts), "h")


@given(rows=ROWS)
def test_the_hash_is_count_sum_and_exclusive_or(rows: list[int]) -> None:
    parity = 0
    for row in rows:
        parity ^= row % 2**64
    expected = ContentHash(len(rows), sum(rows) % 2**64, parity)
    assert ContentHash.of(np.array(rows, dtype=np.int64)) == expected


@given(rows=ROWS, extra=st.integers(-(2**63), 2**63 - 1))
def test_a_row_more_is_another_hash(rows: list[int], extra: int) -> None:
    whole = ContentHash.of(np.array(rows, dtype=np.int64))
    more = ContentHash.of(np.array([*rows, extra], dtype=np.int64))
    assert str(whole) != str(more)
    assert whole + ContentHash.of(np.array([extra], dtype=np.int64)) == more


def test_no_files_and_empty_files_are_alike(tmp_path: Path) -> None:
    assert (
        hash_of_files([], "h")
        == hash_of_files(written(str(tmp_path), [[], []]), "h")
        == ContentHash.parse("0" * 48)
    )


def test_a_row_without_a_hash_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"h": pa.array([1, None], pa.int64())}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"1 rows of .*a\.parquet have no h"):
        hash_of_files([tmp_path / "a.parquet"], "h")
