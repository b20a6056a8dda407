"""PostgreSQL type names and durations, read or refused."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.pg_types import Kind, PgType


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("boolean", PgType(Kind.BOOLEAN)),
        ("int2", PgType(Kind.SHORT)),
        ("integer", PgType(Kind.INTEGER)),
        ("BIGINT", PgType(Kind.LONG)),
        ("double  precision", PgType(Kind.DOUBLE)),
        ("numeric(12,2)", PgType(Kind.DECIMAL, 12, 2)),
        ("numeric( 38 )", PgType(Kind.DECIMAL, 38, 0)),
        ("numeric", PgType(Kind.NUMERIC_TEXT)),
        ("numeric(39,2)", PgType(Kind.NUMERIC_TEXT)),
        ("numeric(3,-2)", PgType(Kind.NUMERIC_TEXT)),
        ("numeric(3,5)", PgType(Kind.NUMERIC_TEXT)),
        ("timestamp(3) with time zone", PgType(Kind.TIMESTAMPTZ)),
        ("timestamp without time zone", PgType(Kind.TIMESTAMP)),
        ("time with time zone", PgType(Kind.TEXT)),
        ("character varying(40)", PgType(Kind.TEXT)),
        ("character varying(40)[]", PgType(Kind.TEXT_ARRAY)),
        ("uuid[]", PgType(Kind.TEXT_ARRAY)),
        ("bigint[]", PgType(Kind.INTEGER_ARRAY)),
        ("numeric(5,2)[]", PgType(Kind.TEXT)),
        ("box[]", PgType(Kind.TEXT)),
        ("support.plan", PgType(Kind.TEXT)),
    ],
)
def test_type_names(text: str, expected: PgType) -> None:
    assert PgType.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PT1H", timedelta(hours=1)),
        ("P7D", timedelta(days=7)),
        ("P2W", timedelta(weeks=2)),
        ("P1DT6H30M5S", timedelta(days=1, hours=6, minutes=30, seconds=5)),
        ("PT0S", timedelta(0)),
    ],
)
def test_durations(text: str, expected: timedelta) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    "text", ["", "P", "PT", "P1DT", "P1M", "P1Y", "1H", "PT1H ", "PT-1H", "P1W2D", "pt1h"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)
