"""The compiled hash of rows is the one that DuckDB computes, for columns of every type."""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from decimal import Decimal
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.cdc import row_hashes as hashing
from omnisupport_ingest.cdc.row_hashes import row_hashes
from omnisupport_ingest.compiled import compiled_hashes

pytestmark = pytest.mark.skipif(compiled_hashes is None, reason="installed without a C compiler")

TEXTS = st.text(max_size=80) | st.text('"\\/\b\f\n\r\t\x00\x01\x1f\x7fé€😀', max_size=20)
WHOLE = st.integers(-(1 << 63), (1 << 63) - 1)
MOMENTS = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC))
VALUES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.string(), TEXTS),
    (pa.bool_(), st.booleans()),
    (pa.int16(), st.integers(-(1 << 15), (1 << 15) - 1)),
    (pa.int32(), st.integers(-(1 << 31), (1 << 31) - 1)),
    (pa.int64(), WHOLE),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.decimal128(20, 3), st.integers(-(10**19), 10**19).map(lambda n: Decimal(n).scaleb(-3))),
    (pa.date32(), st.dates(date(1, 1, 1), date(9999, 12, 31))),
    (pa.timestamp("us", tz="UTC"), MOMENTS),
    (pa.timestamp("us"), MOMENTS.map(lambda each: each.replace(tzinfo=None))),
    (pa.timestamp("ms", tz="UTC"), MOMENTS.map(lambda each: each.replace(microsecond=0))),
    (pa.timestamp("us"), st.sampled_from([(1 << 63) - 1, 1 - (1 << 63), 0])),
    (pa.binary(), st.binary(max_size=20)),
    (pa.list_(pa.string()), st.lists(TEXTS | st.none(), max_size=3)),
    (pa.list_(pa.int64()), st.lists(WHOLE, max_size=3)),
    (pa.list_(pa.int64()), st.just([])),
    (
        pa.map_(pa.string(), pa.string()),
        st.dictionaries(TEXTS, TEXTS, max_size=3).map(lambda d: list(d.items())),
    ),
    (pa.map_(pa.string(), pa.string()), st.just([])),
]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A table of a few columns, whose arrays may begin anywhere in their buffers."""
    before, count, after = draw(st.integers(0, 9)), draw(st.integers(0, 20)), draw(st.integers(0, 2))
    columns = {}
    for number in range(draw(st.integers(1, 5))):
        kind, values = draw(st.sampled_from(VALUES))
        total = before + count + after
        held = draw(
            st.lists(values if draw(st.booleans()) else values | st.none(), min_size=total, max_size=total)
        )
        columns[f'c"{number}'] = pa.array(held, kind).slice(before, count)
    return pa.table(columns)


@given(tables())
def test_the_hash_is_that_of_the_query(rows: pa.Table) -> None:
    found = row_hashes(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashing, "compiled_hashes", None)
        assert found.tolist() == row_hashes(rows).tolist()


def md5_starts(texts: list[str]) -> list[int]:
    sums = (hashlib.md5(f'["{each}"]'.encode(), usedforsecurity=False).digest() for each in texts)
    return [int.from_bytes(each[:8], "little", signed=True) for each in sums]


def test_it_is_the_md5_sum_of_a_text_of_any_length() -> None:
    texts = ["x" * size for size in range(300)]
    assert row_hashes(pa.table({"a": texts})).tolist() == md5_starts(texts)


@given(st.randoms(use_true_random=False), st.integers(1, 400))
def test_short_and_long_texts_are_summed_side_by_side(rng: Random, count: int) -> None:
    sizes = (
        rng.choice((rng.randrange(3), rng.randrange(200), 5_000, 200_000 * (rng.random() < 0.02)))
        for _ in range(count)
    )
    texts = [rng.choice("abc") * int(size) for size in sizes]
    assert row_hashes(pa.table({"a": texts})).tolist() == md5_starts(texts)


@given(st.lists(WHOLE | st.integers(-120, 120) | st.integers(0, 18).map(lambda n: 10**n), min_size=1))
def test_whole_numbers_are_written_as_python_writes_them(numbers: list[int]) -> None:
    assert row_hashes(pa.table({"a": pa.array(numbers, pa.int64())})).tolist() == md5_starts(
        [str(each) for each in numbers]
    )


@pytest.mark.parametrize(
    "column",
    [
        ("x", 0, None, None, None),
        ("n", 0, np.zeros(1, np.int64), None, None),
        ("n", 1, np.zeros(2, np.int64), None, None),
        ("n", -1, np.zeros(9, np.int64), None, None),
        ("n", 1 << 62, np.zeros(9, np.int64), None, None),
        ("n", 0, np.zeros(20, np.uint8)[1:17], None, None),
        ("t", 0, np.zeros(2, np.int32), b"", None),
        ("t", 0, np.array([0, 1, 2], np.int32), b"a", None),
        ("t", 0, np.array([0, 1, 0], np.int32), b"a", None),
        ("t", 0, np.array([-1, 1, 1], np.int32), b"a", None),
        ("t", 0, np.array([0, 1, 1], np.int32), None, None),
        ("c", 7, None, b"a", b"\xff"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: Any) -> None:
    assert compiled_hashes is not None
    with pytest.raises(ValueError, match=r"does not fit its rows|not within its column"):
        compiled_hashes.hash_rows(2, (column,))


def test_what_is_no_column_is_refused() -> None:
    assert compiled_hashes is not None
    for columns in (("a",), ((1, 2),), (("n", 0, "text", None, None),), [()]):
        with pytest.raises(TypeError):
            compiled_hashes.hash_rows(1, columns)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of rows"):
        compiled_hashes.hash_rows(-1, ())
