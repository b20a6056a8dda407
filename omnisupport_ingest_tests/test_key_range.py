"""Which keys lie in a range: as in tuples of the values that the texts stand for."""

from __future__ import annotations

import json
from datetime import date
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest import key_range
from omnisupport_ingest.key_range import KeyRange

NUMBERS = st.integers(min_value=-12, max_value=12)
KEYS = st.tuples(NUMBERS, NUMBERS)
BOUNDS = st.none() | st.tuples(NUMBERS) | KEYS


def texts(values: tuple[int, ...] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(str(value) for value in values)


@given(KEYS, BOUNDS, BOUNDS)
def test_a_key_lies_in_a_range_if_its_first_columns_lie_between_the_bounds(
    key: tuple[int, int], start: tuple[int, ...] | None, end: tuple[int, ...] | None
) -> None:
    scope = KeyRange((key_range.INTEGER,) * 2, texts(start), texts(end))
    above = start is None or key[: len(start)] >= start
    below = end is None or key[: len(end)] <= end
    assert scope.holds(json.dumps(texts(key))) == (above and below)
    if above and below:
        assert not scope.is_empty


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        pytest.param(key_range.INTEGER, ["-10", "-9", "0", "9", "10"], id="numbers, not their texts"),
        pytest.param(
            key_range.DATE,
            [
                "-infinity",
                "0044-03-15 BC",
                "0001-01-01",
                "1999-12-31",
                "2026-01-02",
                "10000-01-01",
                "infinity",
            ],
            id="dates, of any year",
        ),
        pytest.param(key_range.TEXT, ["", "A", "Z", "a", "z", "é", "€", "\U0001f600"], id="texts by bytes"),
        pytest.param(key_range.UUID, [str(UUID(int=n << 100)) for n in (0, 9, 10, 200)], id="uuids"),
    ],
)
def test_values_of_a_type_have_the_order_of_the_server(kind: str, values: list[str]) -> None:
    for number, value in enumerate(values):
        up_to, from_here = KeyRange((kind,), end=(value,)), KeyRange((kind,), start=(value,))
        assert [up_to.holds(json.dumps([each])) for each in values] == [
            other <= number for other in range(len(values))
        ]
        assert [from_here.holds(json.dumps([each])) for each in values] == [
            other >= number for other in range(len(values))
        ]


@given(st.dates(), st.dates(), st.dates())
def test_dates_lie_in_a_range_as_dates_do(first: date, last: date, day: date) -> None:
    scope = KeyRange((key_range.DATE,), (first.isoformat(),), (last.isoformat(),))
    assert scope.holds(json.dumps([day.isoformat()])) == (first <= day <= last)
    assert scope.is_empty == (first > last)


@given(BOUNDS, BOUNDS)
def test_a_range_is_read_back_from_its_text(
    start: tuple[int, ...] | None, end: tuple[int, ...] | None
) -> None:
    scope = KeyRange((key_range.INTEGER,) * 2, texts(start), texts(end))
    assert KeyRange.parse(scope.text) == scope


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"kinds": ["integer"], "from": ["1"]}',
        '{"kinds": ["numeric"], "from": ["1"], "to": null}',
        '{"kinds": ["integer"], "from": ["one"], "to": null}',
        '{"kinds": ["integer"], "from": [1], "to": null}',
        '{"kinds": ["integer"], "from": ["1", "2"], "to": null}',
        '{"kinds": ["integer"], "from": [], "to": null}',
        '{"kinds": ["integer"], "from": "1", "to": null}',
    ],
)
def test_a_text_that_tells_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        KeyRange.parse(text)


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        (KeyRange((key_range.INTEGER,), ("5",), ("9",)), "5 to 9"),
        (KeyRange((key_range.INTEGER,), ("5",)), "from 5"),
        (KeyRange((key_range.INTEGER,), end=("9",)), "up to 9"),
        (KeyRange((key_range.INTEGER,), ("5",), ("5",)), "5"),
        (KeyRange((key_range.TEXT, key_range.INTEGER), ("eu", "1"), ("us",)), "eu, 1 to us"),
    ],
)
def test_people_are_told_a_range_in_words(scope: KeyRange, said: str) -> None:
    assert str(scope) == said
