"""Rows of a file that few others come to: put in order and parted stretch by stretch, or row by row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from omnisupport_ingest.cdc import columnar
from omnisupport_ingest.lake import key_files
from omnisupport_ingest.lake.key_files import KeyOrder


def rows(keys: list[int | None], first: int = 0) -> pa.Table:
    texts = [{"text": f"{first + place}"} for place in range(len(keys))]
    return pa.table(
        {"id": pa.array(keys, pa.int64()), "said": pa.array(texts, pa.struct([("text", pa.string())]))}
    )


@pytest.mark.parametrize("most", [0, 3, 1_000])
def test_rows_are_put_in_order_of_their_key_and_keep_it_among_equals(most, monkeypatch):
    monkeypatch.setattr(key_files, "_MOST_STRETCHES", most)
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
        assert columnar.kept_where(held, kept).equals(held.filter(pa.array(kept)))
    assert columnar.kept_where(rows([]), np.zeros(0, np.bool_)).num_rows == 0
