"""PostgreSQL text becomes typed values without loss, and never an error."""

from __future__ import annotations

import datetime as dt
import math
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import psycopg2
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as T

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pg_types import INTEGERS, Kind, PgType
from omnisupport_ingest.contracts.pg_values import value_test
from omnisupport_ingest.contracts.spark_types import spark_schema, spark_type
from omnisupport_ingest.contracts.typed_values import arrow_type, typed_array
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest_tests.examples import examples

HELD: list[tuple[str, str, Any]] = [
    ("boolean", "t", True),
    ("boolean", "false", False),
    ("smallint", "-32768", -32768),
    ("bigint", "9223372036854775807", 9223372036854775807),
    ("real", "1.1", pytest.approx(1.1)),
    ("double precision", "0.1", 0.1),
    ("double precision", "-Infinity", -math.inf),
    ("double precision", "0e10", 0.0),
    ("numeric(5,2)", "-999.99", Decimal("-999.99")),
    ("numeric(5,2)", "1.2300", Decimal("1.23")),
    ("numeric(38,0)", "9" * 38, Decimal("9" * 38)),
    ("numeric", "123456789012345678901234567890.1234567890123456789", None),
    ("date", "2024-02-29", dt.date(2024, 2, 29)),
    ("timestamptz", "2026-11-21 01:36:00.123456+00", dt.datetime(2026, 11, 21, 1, 36, 0, 123456)),
    ("timestamptz", "2026-11-21 01:36:00+05:30", dt.datetime(2026, 11, 20, 20, 6)),
    ("timestamptz", "2026-11-21T01:36:00Z", dt.datetime(2026, 11, 21, 1, 36)),
    ("timestamp", "2026-11-21 01:36:00", dt.datetime(2026, 11, 21, 1, 36)),
    ("bytea", "\\x6869", b"hi"),
    ("bytea", "\\x", b""),
    ("text[]", "{}", []),
    ("text[]", '{a,"b c",NULL,"NULL","","x,{y}"}', ["a", "b c", None, "NULL", "", "x,{y}"]),
    ("text[]", r'{"say \"hi\"","back\\slash"}', ['say "hi"', "back\\slash"]),
    ("text[]", '{"two\nlines",ä}', ["two\nlines", "ä"]),
    ("text[]", '{"' + '\\"' * 20_000 + '"}', ['"' * 20_000]),
    ("text[]", "{" + ",".join("a" * 20_000) + "}", ["a"] * 20_000),
    ("bigint[]", "{1,-2,NULL}", [1, -2, None]),
    ("jsonb", '{"a": [1]}', '{"a": [1]}'),
    ("inet", "10.0.0.1/8", "10.0.0.1/8"),
    ("text", "", ""),
]

NOT_HELD: list[tuple[str, str]] = [
    ("numeric(5,2)", "NaN"),
    ("numeric(5,2)", "Infinity"),
    ("numeric(5,2)", "1.234"),
    ("numeric(5,2)", "1000"),
    ("date", "infinity"),
    ("date", "0044-03-15 BC"),
    ("date", "12026-01-01"),
    ("timestamptz", "-infinity"),
    ("timestamptz", "0044-03-15 00:00:00+00 BC"),
    ("text[]", "{{a,b},{c,d}}"),
    ("text[]", "[0:1]={a,b}"),
    ("bigint[]", "{1,99999999999999999999}"),
]

GARBAGE: list[tuple[str, str]] = [
    ("boolean", "maybe"),
    ("smallint", "32768"),
    ("integer", "1.5"),
    ("integer", ""),
    ("bigint", "abc"),
    ("double precision", "1.0d"),
    ("double precision", "1e400"),
    ("double precision", "1e-400"),
    ("real", "1e39"),
    ("real", "1e-60"),
    ("numeric(5,2)", "x"),
    ("date", "2026-02-31"),
    ("date", "2026"),
    ("timestamptz", "10:00"),
    ("timestamptz", "2026-11-21 25:00:00+00"),
    ("bytea", "\\x6"),
    ("text[]", "abc"),
]


@dataclass(frozen=True)
class Judged:
    """A text: its typed value, whether that loses nothing, whether the text is a value of its type."""

    typed: Any
    fits: bool
    is_value: bool


def judged(cases: list[tuple[str, str | None]]) -> list[Judged]:
    """Each (type, text) judged."""
    found = []
    for pg_type, text in cases:
        of = PgType.parse(pg_type)
        [typed] = typed_array(pa.array([text], pa.string()), of).to_pylist()
        if isinstance(typed, dt.datetime):
            typed = typed.replace(tzinfo=None)
        is_value = text is not None and value_test(of.kind)(text)
        found.append(Judged(typed, fits=text is None or typed is not None, is_value=is_value))
    return found


def test_held_values_are_typed_without_loss() -> None:
    for (pg_type, text, expected), found in zip(HELD, judged([h[:2] for h in HELD]), strict=True):
        assert found.typed == (text if pg_type == "numeric" else expected), (pg_type, text[:60])
        assert found.fits and found.is_value, (pg_type, text[:60])


def test_a_double_holds_nan() -> None:
    [found] = judged([("double precision", "NaN")])
    assert math.isnan(found.typed) and found.fits and found.is_value


def test_values_without_room_do_not_fit_and_are_values_all_the_same() -> None:
    for case, found in zip(NOT_HELD, judged(list(NOT_HELD)), strict=True):
        assert (found.typed, found.fits, found.is_value) == (None, False, True), case


def test_garbage_is_no_value() -> None:
    for case, found in zip(GARBAGE, judged(list(GARBAGE)), strict=True):
        assert (found.typed, found.fits, found.is_value) == (None, False, False), case
    [unbounded] = judged([("numeric", "abc")])
    assert not unbounded.is_value


def test_null_is_typed_as_null_of_every_type() -> None:
    types = sorted({pg_type for pg_type, *_ in HELD})
    assert {found.typed for found in judged([(pg_type, None) for pg_type in types])} == {None}


NEAR_MISSES = st.sampled_from([text for _, text, *_ in [*HELD, *NOT_HELD, *GARBAGE] if len(text) < 60])


@given(
    texts=st.lists(st.one_of(NEAR_MISSES, st.text("0123456789-+.:eE TZ{},\\xabN", max_size=12)), max_size=40)
)
def test_a_text_that_has_a_typed_value_is_a_value(texts: list[str]) -> None:
    # What the row rules take for garbage, the dimension must not take for a value.
    types = sorted({pg_type for pg_type, *_ in HELD} - {"numeric"})
    cases = [(pg_type, text) for text in texts for pg_type in types]
    for case, found in zip(cases, judged(cases), strict=True):
        assert found.is_value or found.typed is None, case


DAYS = st.dates().map(dt.date.isoformat)
CLOCKS = st.builds(
    "{}{}{}{}".format,
    DAYS,
    st.sampled_from(" T"),
    st.times().map(dt.time.isoformat),
    st.sampled_from(["", "Z", "+00", "+00:00", "-05", "+05:30", "+1400"]),
)


def written(number: str) -> str:
    """A number as PostgreSQL writes it."""
    return number.replace("inf", "Infinity").replace("nan", "NaN")


VALUES: dict[str, st.SearchStrategy[str]] = {
    "smallint": st.integers(-(2**15), 2**15 - 1).map(str),
    "integer": st.integers(-(2**31), 2**31 - 1).map(str),
    "bigint": st.integers(-(2**63), 2**63 - 1).map(str),
    "real": st.floats(width=32).map(lambda value: written(str(np.float32(value)))),
    "double precision": st.floats().map(lambda value: written(repr(value))),
    "numeric(12,4)": st.decimals(-(10**9), 10**9, places=5).map(str),
    "numeric(4,4)": st.decimals(-2, 2, places=4).map(str),
    "date": DAYS,
    "timestamptz": CLOCKS,
}


def plainly(text: str, of: PgType) -> Any:
    """The value of ``text`` as Python reads it; None where the typed column has no room."""
    if of.kind in INTEGERS:
        return int(text)
    if of.kind is Kind.FLOAT:
        return float(np.float32(text))
    if of.kind is Kind.DOUBLE:
        return float(text)
    if of.kind is Kind.DECIMAL:
        value = Decimal(text)
        room = round(value, of.scale) == value and abs(value) < Decimal(10) ** (of.precision - of.scale)
        return value if room else None
    if of.kind is Kind.DATE:
        return dt.date.fromisoformat(text)
    moment = dt.datetime.fromisoformat(text)
    offset = moment.utcoffset() or dt.timedelta()
    try:
        return moment.replace(tzinfo=None) - offset
    except OverflowError:
        return None


@pytest.mark.parametrize("pg_type", VALUES)
@settings(max_examples=examples(300))
@given(data=st.data())
def test_values_of_one_column_are_each_read_as_alone(pg_type: str, data: st.DataObject) -> None:
    of = PgType.parse(pg_type)
    texts = data.draw(st.lists(st.one_of(st.none(), VALUES[pg_type]), min_size=1, max_size=20))
    typed = typed_array(pa.array(texts, pa.string()), of)
    assert typed.type == arrow_type(of)
    found = [
        value.replace(tzinfo=None) if isinstance(value, dt.datetime) else value for value in typed.to_pylist()
    ]
    expected = [None if text is None else plainly(text, of) for text in texts]
    assert list(map(repr, found)) == list(map(repr, expected)) or found == expected


def test_the_types_of_every_contract_are_those_of_its_table() -> None:
    for contract in load_contracts(program_file("contracts/data")):
        on_disk = arrow_schema(spark_schema(contract), without=())
        for column in contract.columns:
            held, typed = on_disk.field(column.name).type, arrow_type(column.type)
            assert held == typed or held.value_type == typed.value_type, column.name


def test_a_type_nobody_knows_is_a_string() -> None:
    assert spark_type(Column("c", "geometry(Point,4326)")) == T.StringType()


def test_what_postgresql_writes_is_held(postgres: EmbeddedPostgres) -> None:
    values: list[tuple[str, str, Any]] = [
        ("boolean", "true", True),
        ("double precision", "1e-300::float8", 1e-300),
        ("double precision", "0.1::float8 + 0.2::float8", 0.1 + 0.2),
        ("numeric(38,10)", "12345.6789::numeric(38,10)", Decimal("12345.6789")),
        ("date", "date '0001-01-01'", dt.date(1, 1, 1)),
        (
            "timestamptz",
            "timestamptz '2026-11-21 06:36:00.5+05'",
            dt.datetime(2026, 11, 21, 1, 36, 0, 500_000),
        ),
        ("bytea", r"decode('00ff', 'hex')", b"\x00\xff"),
        (
            "text[]",
            r"""array['a', 'b c', null, 'NULL', '', 'x,{y}', 'q"q', E'back\\slash', E'two\nlines', 'ä']""",
            ["a", "b c", None, "NULL", "", "x,{y}", 'q"q', "back\\slash", "two\nlines", "ä"],
        ),
        ("integer[]", "array[1, null, -3]", [1, None, -3]),
    ]
    with closing(psycopg2.connect(postgres.dsn("postgres"))) as connection, connection.cursor() as cursor:
        cursor.execute("SET TimeZone = 'UTC'")
        cursor.execute("SELECT " + ", ".join(f"({expression})::text" for _, expression, _ in values))
        texts = cursor.fetchone()
    cases = [(pg_type, text) for (pg_type, *_), text in zip(values, texts, strict=True)]
    for (pg_type, _, expected), found in zip(values, judged(cases), strict=True):
        assert found.typed == expected, pg_type
        assert found.fits, pg_type
