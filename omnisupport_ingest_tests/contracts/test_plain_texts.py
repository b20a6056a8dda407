"""Texts in the usual spelling, found in one pass over a column, mean what the exact readers say."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.compiled import buffer_of, compiled_values
from omnisupport_ingest.contracts import plain_texts
from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.contracts.pg_values import value_test
from omnisupport_ingest.contracts.plain_texts import are_decimals, dates, integer_keys, moments, whole_numbers
from omnisupport_ingest.contracts.typed_values import _date, _moment
from omnisupport_ingest_tests.examples import examples

COMPILED = pytest.mark.skipif(compiled_values is None, reason="installed without a C compiler")

_years = st.one_of(
    st.integers(1, 9999), st.sampled_from([999, 1000, 1900, 1970, 2000, 2024, 2026, 9998, 9999])
)
_zones = st.sampled_from(
    ["", "", "+00", "Z", "+0000", "+00:00", "-05", "+05:30", "+1245", "-15:59", "+16", "+05:60", "+5", "00"]
)


@st.composite
def _days(draw: st.DrawFn) -> str:
    # One day more than a month may have, and months that there are not.
    return f"{draw(_years):04}-{draw(st.integers(0, 13)):02}-{draw(st.integers(0, 32)):02}"


@st.composite
def _times(draw: st.DrawFn) -> str:
    clock = ":".join(f"{draw(st.integers(0, most)):02}" for most in (24, 60, 60))
    fraction = draw(st.one_of(st.just(""), st.from_regex(r"\A\.[0-9]{0,7}\Z")))
    return draw(_days()) + draw(st.sampled_from(" TTt_")) + clock + fraction + draw(_zones)


_numbers = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.from_regex(r"\A[+-]?[0-9]{0,5}(\.[0-9]{0,5})?([eE][+-]?[0-9]{0,3})?\Z"),
)


@st.composite
def _spoiled(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    text = draw(texts)
    if draw(st.booleans()):
        return text
    at = draw(st.integers(0, len(text)))
    return (
        text[:at]
        + draw(st.sampled_from(["", " ", "0", "-", ".", ":", "é", "\x00", "a"]))
        + text[at + draw(st.integers(0, 1)) :]
    )


def _columns(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[str | None]]:
    return st.lists(st.one_of(_spoiled(texts), st.none()), max_size=20)


def _arrays(written: list[str | None], start: int) -> Sequence[pa.StringArray]:
    """Arrays that begin within a byte of the validity too."""
    whole = pa.array(written, pa.string())
    return whole, whole.slice(start), whole.slice(start, 3)


_starts = st.integers(0, 19)
_ways = st.booleans()
"""Whether a column is read by the compiled pass, if there is one, or by regular expressions."""


@contextmanager
def _read_by(compiled: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(plain_texts, "compiled_values", None)
        yield


@settings(max_examples=examples(400))
@given(_columns(_numbers), _starts, st.integers(1, 18), _ways)
def test_whole_numbers_are_those_of_few_digits(
    written: list[str | None], start: int, digits: int, compiled: bool
) -> None:
    for texts in _arrays(written, start):
        with _read_by(compiled):
            found = whole_numbers(texts, digits)
        found.values.validate(full=True)
        for text, plain, value in _rows(texts, found.plain, found.values):
            expected = None if text is None else bool(re.fullmatch(rf"-?[0-9]{{1,{digits}}}", text))
            assert plain is expected
            assert value == (int(text or "") if plain else None)


_keys = st.one_of(
    st.integers(-(10**19), 10**19).map(lambda number: f'["{number}"]'),
    st.from_regex(r'\A\["-?0?[0-9]{0,19}"(,"1")?\]\Z'),
)


@settings(max_examples=examples(400))
@given(_columns(_keys), _starts, _ways)
def test_integer_keys_are_arrays_of_one_short_number(
    written: list[str | None], start: int, compiled: bool
) -> None:
    for keys in _arrays(written, start):
        with _read_by(compiled):
            found = integer_keys(keys)
        found.values.validate(full=True)
        for text, plain, value in _rows(keys, found.plain, found.values):
            number = None if text is None else re.fullmatch(r'\["(0|-?[1-9][0-9]{0,17})"\]', text)
            assert plain is (None if text is None else number is not None)
            assert value == (int(number[1]) if number else None)


@settings(max_examples=examples(400))
@given(_columns(_numbers), _starts, st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 2)), _ways)
def test_decimals_are_numbers_that_python_reads(
    written: list[str | None], start: int, digits: tuple[int, int, int], compiled: bool
) -> None:
    before, after, exponent = digits
    point = rf"(\.[0-9]{{1,{after}}})?" if after else ""
    power = rf"([eE][+-]?[0-9]{{1,{exponent}}})?" if exponent else ""
    for texts in _arrays(written, start):
        with _read_by(compiled):
            found = are_decimals(texts, *digits)
        for text, plain in _rows(texts, found):
            expected = (
                None if text is None else bool(re.fullmatch(rf"-?[0-9]{{1,{before}}}{point}{power}", text))
            )
            assert plain is expected
            assert not plain or Decimal(text).is_finite()


@settings(max_examples=examples(400))
@given(_columns(st.one_of(_times(), _days())), _starts, st.booleans(), _ways)
def test_plain_times_and_dates_are_what_the_exact_readers_read(
    written: list[str | None], start: int, has_time: bool, compiled: bool
) -> None:
    kind, read = (Kind.TIMESTAMPTZ, moments) if has_time else (Kind.DATE, dates)
    exact: Callable[[str, PgType], Any] = _moment if has_time else _date
    is_value = value_test(kind)
    for texts in _arrays(written, start):
        with _read_by(compiled):
            found = read(texts)
        found.values.validate(full=True)
        for text, plain, value in _rows(texts, found.plain, found.values):
            assert (plain is None) == (text is None)
            assert value == (exact(text, PgType(kind)) if plain else None)
            assert not plain or (value is not None and is_value(text))


USUAL = [
    "2026-12-01 12:02:12.123456+00", "2026-12-01 12:02:12+00", "2026-12-01T12:02:12Z", "2024-02-29 00:00:00",
    "1969-12-31 23:59:59.9+05:30", "1000-01-01 00:00:00-1559", "9998-12-31 23:59:59.999999-15:59",
    "2000-02-29 23:00:00+0100",
]  # fmt: skip


@COMPILED
def test_usual_times_of_all_zones_are_plain() -> None:
    found = moments(pa.array(USUAL))
    assert found.plain.to_pylist() == [True] * len(USUAL)
    assert found.values.to_pylist() == [_moment(text, PgType(Kind.TIMESTAMPTZ)) for text in USUAL]
    # Every day of four hundred years, after which the calendar repeats.
    days = [dt.date(1999, 3, 1) + dt.timedelta(days=number) for number in range(146_097)]
    every = dates(pa.array([day.isoformat() for day in days]))
    assert every.values.to_pylist() == days


def test_without_the_compiled_pass_the_usual_texts_are_plain_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_texts, "compiled_values", None)
    written = ["2026-12-01 12:02:12.5+00", "2026-12-01T12:02:12Z", "2026-12-01 12:02:12+00+00", None]
    found = moments(pa.array(written))
    assert found.plain.to_pylist() == [True, True, False, None]
    utc = [dt.datetime(2026, 12, 1, 12, 2, 12, micro, tzinfo=dt.UTC) for micro in (500_000, 0)]
    assert found.values.to_pylist() == [*utc, None, None]
    assert dates(pa.array(["2026-12-31", "2026-02-30"])).values.to_pylist() == [dt.date(2026, 12, 31), None]
    assert whole_numbers(pa.array(["-12", "123", "1.0"]), 2).values.to_pylist() == [-12, None, None]
    assert are_decimals(pa.array(["1.25", "1e2", "1.", None]), 2, 2).to_pylist() == [True, False, False, None]


def test_no_texts_are_no_values() -> None:
    none = pa.array([], pa.string())
    assert len(moments(none).values) == len(dates(none).plain) == len(are_decimals(none, 1, 0)) == 0
    nulls = whole_numbers(pa.nulls(3, pa.string()), 4)
    assert nulls.plain.null_count == nulls.values.null_count == 3


@COMPILED
def test_arguments_that_do_not_fit_each_other_are_refused() -> None:
    assert compiled_values is not None
    good = [b"12", np.array([0, 2], np.int32), None, 0, 2]
    assert bytes(buffer_of(compiled_values.wholes(*good)[2])) == (12).to_bytes(8, "little")  # type: ignore[arg-type]
    wrong = [
        (1, np.array([0, 3], np.int32)), (1, np.array([-1, 2], np.int32)), (1, np.array([2, 0], np.int32)),
        (1, np.zeros(0, np.int32)), (2, pa.py_buffer(b"")), (3, -1), (4, 0), (4, 19),
    ]  # fmt: skip
    functions: list[tuple[Callable[..., object], list[Any]]] = [
        (compiled_values.wholes, [2]),
        (compiled_values.moments, [True]),
        (compiled_values.keys, []),
        (compiled_values.decimals, [2, 0, 0]),
    ]
    for at, value in wrong:
        for function, numbers in functions[: 1 if at == 4 else None]:
            given = [*good[:4], *numbers]
            with pytest.raises(ValueError, match=r"do not fit|must be 1 to 18"):
                function(*(value if i == at else each for i, each in enumerate(given)))
    for function, numbers in functions:
        # With the first bit the end of the bits would overflow.
        with pytest.raises(ValueError, match="do not fit"):
            function(*good[:2], pa.py_buffer(b"\x03"), 2**63 - 1, *numbers)
    with pytest.raises(TypeError, match="large_string"):
        whole_numbers(pa.array(["12"], pa.large_string()), 2)
    for limits in ((0, 0, 0), (1, -1, 0), (1, 0, 1001)):
        with pytest.raises(ValueError, match="before must be 1 to 1000"):
            compiled_values.decimals(*good[:4], *limits)  # type: ignore[arg-type]


def _rows(texts: pa.StringArray, *found: pa.Array) -> list[tuple[Any, ...]]:
    return list(zip(*(column.to_pylist() for column in (texts, *found)), strict=True))
