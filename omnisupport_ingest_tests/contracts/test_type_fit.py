"""Which types of a contract hold the values of which types of a source."""

from __future__ import annotations

import pytest

from omnisupport_ingest.contracts.pg_types import Fit, PgType, fit


@pytest.mark.parametrize(
    ("contract", "source", "expected"),
    [
        ("text", "character varying(40)", Fit.ALL),
        ("text", "integer", Fit.ALL),
        ("bigint", "integer", Fit.ALL),
        ("integer", "bigint", Fit.NONE),
        ("integer", "text", Fit.NONE),
        ("double precision", "real", Fit.ALL),
        ("double precision", "bigint", Fit.NONE),
        ("numeric", "numeric(10,2)", Fit.ALL),
        ("numeric(12,2)", "numeric(10,2)", Fit.ALL),
        ("numeric(10,2)", "numeric(12,2)", Fit.EXACT_TEXT),
        ("numeric(10,2)", "numeric(10,3)", Fit.EXACT_TEXT),
        ("numeric(10,2)", "numeric", Fit.EXACT_TEXT),
        ("numeric(10,0)", "integer", Fit.ALL),
        ("numeric(10,2)", "integer", Fit.EXACT_TEXT),
        ("numeric(10,2)", "text", Fit.NONE),
        ("timestamptz", "timestamp without time zone", Fit.ALL),
        ("timestamptz", "timestamp(3) with time zone", Fit.ALL),
        ("date", "timestamptz", Fit.NONE),
        ("text[]", "integer[]", Fit.ALL),
        ("bigint[]", "text[]", Fit.EXACT_TEXT),
        ("text[]", "text", Fit.NONE),
        ("boolean", "integer", Fit.NONE),
    ],
)
def test_fit(contract: str, source: str, expected: Fit) -> None:
    assert fit(PgType.parse(contract), PgType.parse(source)) is expected
