"""Ledgers that are damaged or not ours: what is wrong is named, and what is right says what it said."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from omnisupport_ingest.lake.ledger import Ledger, LedgerUnreadable
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table_spec import TableSpec
from omnisupport_ingest.layers.erasures import ErasureLedger
from omnisupport_ingest.layers.ledgers import ERASURE_TYPE, REVIEW_TYPE
from omnisupport_ingest.layers.reviews import ReviewLedger
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import ODD_TEXTS, in_time

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)
REVIEW: dict[str, Any] = {
    "epoch": 1,
    "commit_lsn": 100,
    "ordinal": 2,
    "event_hash": 77,
    "identity_hash": None,
    "window": "2026-11-01T1200",
    "source_schema": "public",
    "source_table": "notes",
    "reason": "collision",
    "decision": "release",
    "reviewer": "ana",
    "why": "looked at",
    "reviewed_at": NOON,
    "sequence": 1,
}
ERASURE: dict[str, Any] = {
    "source_schema": "public",
    "source_table": "notes",
    "key_hash": "0" * 64,
    "after": None,
    "through": {"epoch": 1, "commit_lsn": 100, "ordinal": 2},
    "windows": ["2026-11-01T1200"],
    "erased_by": "ana",
    "why": "request 7",
    "erased_at": NOON,
    "sequence": 1,
}
KINDS: dict[str, tuple[T.StructType, dict[str, Any], Any]] = {
    "reviews": (REVIEW_TYPE, REVIEW, ReviewLedger),
    "erasures": (ERASURE_TYPE, ERASURE, ErasureLedger),
}
SECRET = "s3cret value"


def odd(kind: pa.DataType) -> st.SearchStrategy[pa.Scalar]:
    """Values that a file may hold in a column of ``kind``, ours or not."""
    if pa.types.is_struct(kind):
        parts = {field.name: odd(field.type) for field in kind}
        made = st.fixed_dictionaries(parts).map(
            lambda found: pa.scalar({name: each.as_py() for name, each in found.items()}, kind)
        )
        return st.just(pa.scalar(None, kind)) | made
    if pa.types.is_list(kind):
        items = st.lists(odd(kind.value_type).map(lambda each: each.as_py()), max_size=3)
        return st.just(pa.scalar(None, kind)) | items.map(lambda found: pa.scalar(found, kind))
    if pa.types.is_timestamp(kind):
        # Not by way of a date: there are more times than dates.
        whole = (
            st.none()
            | st.sampled_from((0, -1, 2**62, -(2**62), 2**63 - 1))
            | st.integers(-(2**63), 2**63 - 1)
        )
        return whole.map(lambda at: pa.scalar(at, pa.int64()).cast(kind))
    if pa.types.is_integer(kind):
        high = 2 ** (kind.bit_width - 1) - 1
        whole = st.none() | st.sampled_from((0, -1, high, -high - 1)) | st.integers(-high - 1, high)
        return whole.map(lambda number: pa.scalar(number, kind))
    texts = st.none() | st.sampled_from([*ODD_TEXTS, SECRET, "accept"]) | st.text(max_size=20)
    return texts.map(lambda text: pa.scalar(text, kind))


def table_of(kind: str, rows: int) -> pa.Table:
    columns, row, _ = KINDS[kind]
    told = [{**row, "sequence": number} for number in range(1, rows + 1)]
    return pa.Table.from_pylist(told, schema=arrow_schema(columns, without=()))


@st.composite
def spoilt(draw: st.DrawFn, kind: str) -> tuple[pa.Table, int]:
    """A ledger of three rows with an odd value in one of them, and its number."""
    table, row = table_of(kind, 3), draw(st.integers(0, 2))
    name = draw(st.sampled_from(table.column_names))
    column = table[name].combine_chunks()
    values = [column.slice(number, 1) for number in range(3)]
    found = draw(odd(column.type))
    values[row] = one(found)
    return table.set_column(table.column_names.index(name), name, pa.concat_arrays(values)), row


def one(found: pa.Scalar) -> pa.Array:
    if isinstance(found, pa.TimestampScalar):
        return pa.array([found.value], pa.int64()).cast(found.type)
    return pa.array([found.as_py()], found.type)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(400))
@given(data=st.data())
def test_a_row_that_nobody_of_ours_wrote_is_named_or_says_something(kind: str, data: st.DataObject) -> None:
    table, row = data.draw(spoilt(kind))
    with in_time():
        try:
            ledger = KINDS[kind][2].of_entries(table)
        except LedgerUnreadable as refused:
            sequence = table["sequence"][row].as_py()
            assert f"Decision {sequence} in " in refused.problem and refused.fix
            assert SECRET not in str(refused)
        else:
            # What it says can be judged by, and the other rows are all there.
            held = ledger.reviews if kind == "reviews" else ledger.erasures
            assert len(held) == 3
            for window in {"2026-11-01T1200", *(table.column_names)}:
                ledger.digest(window)
            if kind == "reviews":
                assert set(ledger.of_window("2026-11-01T1200").values()) <= {"release", "discard"}
                assert ledger.windows() is not None
            else:
                spans = [span for of_key in ledger.in_force().spans.values() for span in of_key]
                assert spans and all(span.holds(span.through) or span.after is not None for span in spans)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_as_we_write_them_are_taken(kind: str) -> None:
    ledger = KINDS[kind][2].of_entries(table_of(kind, 3))
    assert ledger.digest("2026-11-01T1200") is not None


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ledger, Path, bytes]:
    """A ledger of one decision, its file, and what is in it."""
    spec = TableSpec("desk/review_ledger", REVIEW_TYPE, (), "Decided.")
    ledger = Ledger(tmp_path_factory.mktemp("lake"), spec)
    ledger.append(lambda _: table_of("reviews", 1).drop_columns(["sequence"]))
    (file,) = ledger.folder.glob("*.parquet")
    return ledger, file, file.read_bytes()


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(at=0.999, byte=1, cut=False)
@example(at=0.0, byte=0, cut=True)
@given(at=st.floats(0, 1, exclude_max=True), byte=st.integers(1, 255), cut=st.booleans())
def test_a_file_of_a_ledger_with_one_bit_that_is_another_is_named(
    written: tuple[Ledger, Path, bytes], at: float, byte: int, cut: bool
) -> None:
    ledger, file, content = written
    place = int(at * len(content))
    flipped = bytes([content[place] ^ byte])
    file.write_bytes(content[:place] + (b"" if cut else flipped + content[place + 1 :]))
    from omnisupport_ingest.lake.ledger import _read

    _read.cache_clear()
    with in_time(), pytest.raises(LedgerUnreadable) as refused:
        ledger.entries()
    assert str(file) in str(refused.value)
    file.write_bytes(content)
    _read.cache_clear()
    assert ReviewLedger.of_entries(ledger.entries()).windows() == ["2026-11-01T1200"]


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10_000, b'{"add": 1}\n', b"\xff\xfe\n"])
def test_a_log_of_a_ledger_that_cannot_be_read_is_named_and_not_taken_for_an_empty_one(
    tmp_path: Path, content: bytes
) -> None:
    ledger = Ledger(tmp_path, TableSpec("desk/review_ledger", REVIEW_TYPE, (), "Decided."))
    ledger.append(lambda _: table_of("reviews", 1).drop_columns(["sequence"]))
    log = ledger.folder / "_delta_log"
    assert ledger.entries().num_rows == 1
    (log / f"{1:020d}.json").write_bytes(content)
    with in_time(), pytest.raises(LedgerUnreadable) as refused:
        ledger.entries()
    assert str(ledger.folder) in str(refused.value)
