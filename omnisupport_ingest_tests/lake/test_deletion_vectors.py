"""A deletion vector is Delta's: what is written is read again, by others too, and damage is named."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap64

from omnisupport_ingest.lake.deletion_vectors import (
    DeadRows,
    DeletionVector,
    VectorDamaged,
    dead_rows_of,
    live_mask,
    read_vector,
    write_vectors,
)
from omnisupport_ingest.lake.layout import WHOLE_TABLE, LakeFile
from omnisupport_ingest_tests.examples import examples

UNIT = "g0007-0123456789abcdef"

ROWS = st.one_of(
    st.lists(st.integers(0, 200_000), max_size=300),
    st.integers(0, 3_000).map(lambda count: list(range(count))),
    st.lists(st.integers(0, 2**40), max_size=20),
)


def numbers(rows: list[int]) -> np.ndarray:
    return np.array(sorted(set(rows)), np.int64)


@settings(max_examples=examples(60), deadline=None)
@given(many=st.lists(ROWS, min_size=1, max_size=6))
def test_what_is_written_is_read_again(tmp_path_factory, many: list[list[int]]) -> None:
    folder = tmp_path_factory.mktemp("table")
    dead = {f"{UNIT}/part-{n}.parquet": numbers(rows) for n, rows in enumerate(many)}
    vectors = write_vectors(folder, UNIT, dead)
    assert vectors == write_vectors(folder, UNIT, dead)
    for path, rows in dead.items():
        vector = DeletionVector.of_log(vectors[path].in_log())
        assert vector == vectors[path] and vector.cardinality == len(rows)
        np.testing.assert_array_equal(read_vector(folder, vector), rows)
    in_files = {vector.path for vector in vectors.values() if vector.path is not None}
    assert {str(file.relative_to(folder)) for file in folder.rglob("*.bin")} == in_files
    assert len(in_files) <= 1


def test_content_is_a_portable_bitmap_behind_a_length_and_before_a_checksum(tmp_path: Path) -> None:
    rows = np.arange(0, 5_000, 3)
    (vector,) = write_vectors(tmp_path, UNIT, {"a": rows}).values()
    assert vector.path is not None and vector.offset == 1
    content = (tmp_path / vector.path).read_bytes()
    assert content[0] == 1
    assert struct.unpack(">I", content[1:5]) == (vector.bytes,)
    bitmap = content[5 : 5 + vector.bytes]
    assert struct.unpack("<I", bitmap[:4]) == (1681511377,)
    assert list(BitMap64.deserialize(bitmap[4:])) == rows.tolist()
    assert content[5 + vector.bytes :] == struct.pack(">I", zlib.crc32(bitmap))


def test_vector_of_another_writer_is_read() -> None:
    # Rows of the protocol's example of an inline vector, in the portable form.
    text = "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    found = read_vector(Path("table"), DeletionVector("i", text, None, 44, 6))
    assert found.tolist() == [3, 4, 7, 11, 18, 29]


def test_form_that_nobody_writes_any_more_is_refused() -> None:
    # The protocol's own example has the magic number of the form before the portable one.
    text = "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"
    with pytest.raises(VectorDamaged, match="no Roaring bitmap of the portable form"):
        read_vector(Path("table"), DeletionVector("i", text, None, 40, 6))


def test_path_is_the_one_of_the_protocol() -> None:
    # Delta protocol, "JSON Example 1": random prefix "ab", then the UUID.
    vector = DeletionVector("u", "ab^-aqEH.-t@S}K{vb[*k^", 4, 40, 6)
    assert vector.path == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"


def damaged_at(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("at", "problem"), [(0, "another format"), (3, "that the log says"), (40, "checksum"), (-1, "checksum")]
)
def test_damaged_file_is_named(tmp_path: Path, at: int, problem: str) -> None:
    (vector,) = write_vectors(tmp_path, UNIT, {"a": np.arange(0, 5_000, 3)}).values()
    assert vector.path is not None
    damaged_at(tmp_path / vector.path, at)
    with pytest.raises(VectorDamaged, match=problem) as raised:
        read_vector(tmp_path, vector)
    assert vector.path in raised.value.problem


def test_cut_and_missing_files_are_named(tmp_path: Path) -> None:
    (vector,) = write_vectors(tmp_path, UNIT, {"a": np.arange(0, 5_000, 3)}).values()
    assert vector.path is not None
    file = tmp_path / vector.path
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(VectorDamaged, match=vector.path):
        read_vector(tmp_path, vector)
    file.unlink()
    with pytest.raises(VectorDamaged, match="is missing"):
        read_vector(tmp_path, vector)


@settings(max_examples=examples(200), deadline=None)
@given(text=st.text("0123456789abcxyzABC.-:+=^!/*?&<>()[]{}@%$# é", max_size=60), size=st.integers(0, 60))
def test_foreign_inline_text_is_read_or_refused(text: str, size: int) -> None:
    with pytest.raises(VectorDamaged):
        read_vector(Path("table"), DeletionVector("i", text, None, size, 1))


@pytest.mark.parametrize(
    "vector", [DeletionVector("x", "", 1, 4, 1), DeletionVector("u", "short", 1, 4, 1),
               DeletionVector("u", "~" * 20, 1, 4, 1), DeletionVector("p", "s3://b/v.bin", 1, 4, 1)]
)  # fmt: skip
def test_unknown_storage_is_refused(tmp_path: Path, vector: DeletionVector) -> None:
    with pytest.raises(VectorDamaged, match="in a way that we do not read"):
        read_vector(tmp_path, vector)


@settings(max_examples=examples(100), deadline=None)
@given(
    number=st.one_of(st.integers(-(2**70), 2**70), st.text(max_size=3), st.none()),
    which=st.sampled_from(["offset", "sizeInBytes", "cardinality"]),
)
def test_foreign_numbers_are_read_or_refused(tmp_path_factory, number: object, which: str) -> None:
    folder = tmp_path_factory.mktemp("table")
    (vector,) = write_vectors(folder, UNIT, {"a": np.arange(0, 5_000, 3)}).values()
    described = vector.in_log()
    if number == described[which]:
        return
    with pytest.raises((ValueError, KeyError, VectorDamaged)):
        read_vector(folder, DeletionVector.of_log(described | {which: number}))


def test_absolute_path_is_read(tmp_path: Path) -> None:
    (vector,) = write_vectors(tmp_path, UNIT, {"a": np.arange(0, 5_000, 3)}).values()
    assert vector.path is not None
    for text in (str(tmp_path / vector.path), (tmp_path / vector.path).as_uri()):
        absolute = DeletionVector("p", text, vector.offset, vector.bytes, vector.cardinality)
        assert len(read_vector(Path("elsewhere"), absolute)) == vector.cardinality


def test_counts_of_log_and_file_are_compared(tmp_path: Path) -> None:
    (vector,) = write_vectors(tmp_path, UNIT, {"a": np.array([2, 9])}).values()
    fewer = DeletionVector(vector.storage, vector.text, vector.offset, vector.bytes, 1)
    with pytest.raises(VectorDamaged, match="lists 2 rows; the log says 1"):
        read_vector(tmp_path, fewer)
    file = LakeFile("a", str(tmp_path / "a"), WHOLE_TABLE, (), 7, 1, vector)
    with pytest.raises(VectorDamaged, match="lists row 9; the file has 9"):
        dead_rows_of(file)


def test_file_with_dead_rows_is_not_handed_out_as_bare_parquet(tmp_path: Path) -> None:
    (vector,) = write_vectors(tmp_path, UNIT, {"a": np.array([2])}).values()
    file = LakeFile("a", str(tmp_path / "a"), WHOLE_TABLE, (), 7, 1, vector)
    assert (file.rows, file.stored_rows, file.stored) == (7, 8, str(tmp_path / "a"))
    assert live_mask(dead_rows_of(file), file.stored_rows).sum() == 7
    with pytest.raises(DeadRows, match="bare Parquet"):
        _ = file.uri
