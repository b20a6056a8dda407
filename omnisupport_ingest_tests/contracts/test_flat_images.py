"""What is read by whole columns is what the exact reader reads, or is not called proven."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.cdc.images import read_image
from omnisupport_ingest.compiled import compiled_images
from omnisupport_ingest.contracts import flat_images
from omnisupport_ingest.contracts.flat_images import read_flat
from omnisupport_ingest_tests.examples import examples

COLUMNS = ("id", "a/b", "~", "c'd", 'q"', "ü", "0", "\\")
_SPOILERS = (
    *(',"{}[]\\: \n'),
    *("null", "1", "true", "\\u", "\\u0000", "\\ud800", "\x01", "\x00", "\ufeff", "/*x*/"),
    *('"id":"1",', '"id":1,', '"id":[],', '"x":{"id":"2"},', ',"id":null', "NaN"),
)

texts = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=6), st.sampled_from(("\x00", "\n", "\\", '"'))
)
rows = st.dictionaries(
    st.one_of(st.sampled_from(COLUMNS), st.sampled_from(("", "x", "id "))),
    st.one_of(st.none(), texts),
    max_size=7,
)
images = st.one_of(
    rows.map(lambda row: orjson.dumps(row).decode()),
    rows.map(lambda row: json.dumps(row, separators=(",", ":"))),
)


@st.composite
def spoiled(draw: st.DrawFn) -> str:
    """An image of which a few characters were replaced by others."""
    image = draw(images)
    start = draw(st.integers(0, len(image)))
    return image[:start] + draw(st.sampled_from(_SPOILERS)) + image[start + draw(st.integers(0, 4)) :]


@settings(max_examples=examples(250))
@given(st.lists(st.one_of(images, spoiled(), st.none()), max_size=12))
def test_what_is_proven_is_what_the_exact_reader_reads(written: list[str | None]) -> None:
    found = read_flat(pa.array(written, pa.string()), COLUMNS)
    for row, image in enumerate(written):
        if found.proven[row].as_py():
            exact = read_image(image)
            assert exact is not None
            assert _row(found.texts, found.sent, row) == {
                name: value for name, value in exact.items() if name in COLUMNS
            }


def _row(
    texts: dict[str, pa.StringArray], sent: dict[str, pa.BooleanArray], row: int
) -> dict[str, str | None]:
    assert all(texts[name][row].as_py() is None for name in COLUMNS if not sent[name][row].as_py())
    return {name: texts[name][row].as_py() for name in COLUMNS if sent[name][row].as_py()}


@settings(max_examples=examples(60))
@given(st.lists(rows, min_size=1, max_size=9))
def test_images_as_they_land_are_proven(written: list[dict[str, str | None]]) -> None:
    landed = pa.array([orjson.dumps(row).decode() for row in written])
    # JSON's own escape of NUL is left to the exact reader.
    with_nul = ["\x00" in "".join(filter(None, (*row, *row.values()))) for row in written]
    assert read_flat(landed, COLUMNS).proven.to_pylist() == [not each for each in with_nul]


def test_images_of_many_forms_are_read_as_those_of_one() -> None:
    names = ("id", "0", "x")
    forms = [names[:2], names, names[1:], names[::2], names[::-1], names[:1], names[2:], ()]
    written = [
        {name: None if number % 5 == 0 else f"{name} {number}\n" for name in form}
        for number in range(300)
        for form in forms[: 1 + number % len(forms)]
    ]
    for few in (len(written), 70, 5, 1):
        found = read_flat(pa.array([orjson.dumps(row).decode() for row in written[:few]]), COLUMNS)
        assert found.proven.true_count == few
        assert [_row(found.texts, found.sent, row) for row in range(few)] == [
            {name: row[name] for name in COLUMNS if name in row} for row in written[:few]
        ]


def test_a_rare_form_that_comes_first_sends_no_other_image_the_slow_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: list[int] = []
    exact = flat_images.are_flat

    def counted(images: pa.StringArray) -> pa.BooleanArray:
        slow.append(len(images) - images.null_count)
        return exact(images)

    monkeypatch.setattr(flat_images, "are_flat", counted)
    usual = [orjson.dumps({"id": str(number), "0": "x"}).decode() for number in range(200)]
    rare = [orjson.dumps({"id": "0"}).decode()]
    assert read_flat(pa.array(rare + usual), COLUMNS).proven.true_count == 201
    assert sum(slow) == 0


@pytest.mark.parametrize(
    "image",
    [
        None,
        "",
        "nul",
        "[1]",
        '"x"',
        "{",
        '{"id":"1",}',
        '{"id":1}',
        '{"id":true}',
        '{"id":["1"]}',
        '{"other":{"deep":"1"}}',
        '{"id":"1","id":"2"}',
        '{"other":"1","other":"2"}',
        '{"id": "1"}',
        '{"id":"\\ud800"}',
        '{"id":"\\u0000"}',
        '{"id":"1"}{}',
        '{"id":"\n"}',
    ],
)
def test_an_image_that_is_no_compact_flat_object_is_not_proven(image: str | None) -> None:
    assert read_flat(pa.array(['{"id":"1"}', image], pa.string()), ("id",)).proven.to_pylist() == [
        True,
        False,
    ]


def test_a_member_that_is_no_column_hides_no_column() -> None:
    found = read_flat(pa.array(['{"other":"x","id":null}', '{"other":null}']), ("id",))
    assert _told(found.proven, found.texts["id"], found.sent["id"]) == [
        (True, None, True),
        (True, None, False),
    ]


def test_no_images_are_no_rows() -> None:
    found = read_flat(pa.array([], pa.string()), ("id",))
    assert _told(found.proven, found.texts["id"], found.sent["id"]) == []


def _told(*columns: pa.Array) -> Sequence[tuple[object, ...]]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


COMPILED = pytest.mark.skipif(compiled_images is None, reason="installed without a C compiler")


@COMPILED
@settings(max_examples=examples(250))
@given(st.lists(st.one_of(images, spoiled(), st.none()), max_size=12), st.integers(0, 9))
def test_one_pass_reads_what_queries_read(written: list[str | None], start: int) -> None:
    whole = pa.array(written, pa.string())
    # Also of an array that begins within a byte of validity, and of one without content.
    for landed in (whole, whole.slice(start), whole.slice(start, 3)):
        read, seen = COLUMNS[:5], COLUMNS
        assert compiled_images is not None
        found = flat_images._read_in_one_pass(compiled_images, landed, read, seen)
        by_queries = flat_images._read_by_queries(landed, read, seen)
        for row in np.flatnonzero(found.proven).tolist():
            assert by_queries.proven[row].as_py()
            assert found.others[row] == by_queries.others[row]
            for name in seen:
                assert found.sent[name][row] == by_queries.sent[name][row]
            for name in read:
                assert found.texts[name][row] == by_queries.texts[name][row]
        unproven = np.flatnonzero(np.invert(found.proven)).tolist()
        assert not any(each[row].as_py() for row in unproven for each in (found.others, *found.sent.values()))
        assert all(found.texts[name][row].as_py() is None for row in unproven for name in read)


@COMPILED
def test_usual_images_are_read_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(flat_images, "_read_by_queries")
    long = "é\n" * 3000
    rows = [{"id": "1", "0": None}, {"0": long, "x": "\x7f"}, {"~": "\x01\x1f"}, {}]
    found = read_flat(pa.array([orjson.dumps(row).decode() for row in rows]), COLUMNS)
    assert [_row(found.texts, found.sent, row) for row in range(4)] == [rows[0], {"0": long}, rows[2], {}]
    assert found.others.to_pylist() == [False, True, False, False]


@COMPILED
@pytest.mark.parametrize("count", [64, 65])
def test_images_of_many_other_names_are_proven_all_the_same(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    twice = [*names, names[count // 2]]
    written = ["{" + ",".join(f'"{name}":"x"' for name in row) + "}" for row in (names, twice)]
    assert read_flat(pa.array(written), COLUMNS).proven.to_pylist() == [True, False]


@COMPILED
def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    assert compiled_images is not None
    image, offsets, places = b'{"a":"1"}', np.array([0, 9], np.int32), np.array([0, 1], np.int32)
    good = [image, offsets, None, 0, (b"a", places), 1]
    assert bytes(flat_images.buffer_of(compiled_images.read(*good)[0])) == b"\x01"
    wrong = [
        (1, np.array([0, 10], np.int32)), (1, np.array([-1, 9], np.int32)), (1, np.array([9, 0], np.int32)),
        (1, np.zeros(0, np.int32)), (2, pa.py_buffer(b"")), (3, -1), (4, (b"", places)),
        (4, (b"a", places - 1)), (4, (b"a", places[::-1].copy())), (5, 2), (5, -1),
    ]  # fmt: skip
    for at, value in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            compiled_images.read(*(value if i == at else each for i, each in enumerate(good)))
    with pytest.raises(ValueError, match="do not fit"):
        compiled_images.read(*good[:2], pa.py_buffer(b"\x01"), 2**63 - 1, *good[4:])
    for no_names in ([b"a", places], (b"a",), (b"a", places, 1), b"a"):
        with pytest.raises(TypeError, match="read takes 6 arguments"):
            compiled_images.read(*good[:4], no_names, 1)  # type: ignore[arg-type]


@COMPILED
@given(st.binary(max_size=40), st.integers(0, 40), st.integers(0, 40), st.binary(max_size=3))
def test_bytes_are_found_where_python_finds_them(data: bytes, start: int, stop: int, wanted: bytes) -> None:
    assert compiled_images is not None
    start, stop = sorted((min(start, len(data)), min(stop, len(data))))
    assert compiled_images.contains(data, start, stop, wanted) is (wanted in data[start:stop])
    for wrong in ((-1, stop), (stop + 1, stop), (start, len(data) + 1)):
        with pytest.raises(ValueError, match="not within the data"):
            compiled_images.contains(data, *wrong, wanted)
