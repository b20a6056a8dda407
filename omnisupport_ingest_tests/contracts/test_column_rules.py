"""The rules by whole columns keep and break what the rules of one row do."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.contracts.column_rules import ColumnRules, surely_kept
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pandera_schema import broken_rows, pandera_schema
from omnisupport_ingest.contracts.pg_types import Kind, PgType
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.contracts.typed_values import typed_array
from omnisupport_ingest_tests.cdc import lanes
from omnisupport_ingest_tests.examples import examples

_TYPES = (
    *("boolean", "smallint", "integer", "bigint", "real", "double precision", "numeric(12,2)", "numeric"),
    *("date", "timestamp", "timestamptz", "bytea", "text[]", "integer[]", "text"),
)
_NUMBERS = frozenset(_TYPES[1:8])

_ODD = (
    *("", " ", "t", "f", "true", "on", "0", "-0", "+1", "007", "1e3", "1e-400", "1e400", ".5", "5.", "1_0"),
    *("32767", "32768", "-32768", "-32769", "2147483647", "2147483648", "-2147483649", "9223372036854775807"),
    *("9223372036854775808", "99999999999999999999", "NaN", "Infinity", "-inf", "infinity", "1.17549e-46"),
    *("0.000000000000001", "3.5e38", "2026-02-29", "2024-02-29", "2026-04-31", "0000-01-01", "10000-01-01"),
    *("0044-03-15 BC", "2026-11-01 24:00:00", "2026-11-01 23:59:60", "2026-11-01T10:00:00Z", "-infinity"),
    *("2026-11-01 10:00:00+5", "2026-11-01 10:00:00+05:30", "2026-11-01 10:00:00.1234567", "\\x", "\\xf"),
    *("\\xFF00", "{}", "{1,2}", "{a}\n", "[0:1]={1,2}", "1\n", "١", "９", "12\x00"),
)

numbers = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.integers(-12, 12).map(str),
    st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-20, max_value=20).map(str),
    st.floats().map(str),
)
values = st.one_of(
    st.none(),
    st.sampled_from(_ODD),
    numbers,
    st.dates().map(str),
    st.datetimes().map(str),
    st.datetimes().map(lambda at: f"{at:%Y-%m-%d %H:%M:%S}+00"),
    st.binary(max_size=4).map(lambda content: "\\x" + content.hex()),
    st.text(st.characters(codec="utf-8"), max_size=7),
)
bounds = st.one_of(
    st.none(),
    st.decimals(min_value=-15, max_value=15, places=2),
    st.sampled_from([Decimal(10) ** 19, -(Decimal(10) ** 400), Decimal("0.1"), Decimal(2**63)]),
)


@st.composite
def columns(draw: st.DrawFn) -> Column:
    pg_type = draw(st.sampled_from(_TYPES))
    bounded = pg_type in _NUMBERS
    return Column(
        "value",
        pg_type,
        nullable=draw(st.booleans()),
        enum=draw(st.sampled_from(((), ("t", "1", "{1,2}")))),
        minimum=draw(bounds) if bounded else None,
        maximum=draw(bounds) if bounded else None,
        pattern=draw(st.sampled_from((None, "^[0-9]", "1$"))),
        max_length=draw(st.sampled_from((None, 0, 3))),
        former_types=draw(st.sampled_from(((), (), ("date",), ("numeric(4,1)", "boolean"), ("text",)))),
    )


@settings(max_examples=examples(1500))
@given(columns(), st.lists(st.tuples(st.booleans(), values), max_size=12))
def test_the_same_texts_keep_the_rules(column: Column, cells: list[tuple[bool, str | None]]) -> None:
    contract = replace(lanes.CONTRACT, columns=(column,), key=())
    by_row, by_column = RowRules(contract), ColumnRules(contract)
    texts = pa.array([text if sent else None for sent, text in cells], pa.string())
    kept = by_column.kept({"value": texts}, {"value": pa.array([sent for sent, _ in cells], pa.bool_())})
    assert kept.to_pylist() == [not by_row.broken({"value": text} if sent else {}) for sent, text in cells]
    assert bool(by_column.columns) == bool(by_row.names)


@settings(max_examples=examples(300))
@given(st.sampled_from(("real", "double precision", "numeric(12,2)", "integer")), bounds, st.data())
def test_a_value_near_a_bound_is_on_the_side_it_is_on(
    pg_type: str, bound: Decimal | None, data: st.DataObject
) -> None:
    near = bound or Decimal(0)
    step = st.sampled_from(("0", "1e-9", "-1e-9", "1e-7", "-1e-7", "0.001", "-0.001", "1", "-1"))
    written = [str(near + Decimal(data.draw(step))) for _ in range(5)] + [str(near)]
    for rule in ("minimum", "maximum"):
        column = replace(Column("value", pg_type), **{rule: near})
        contract = replace(lanes.CONTRACT, columns=(column,), key=())
        kept = ColumnRules(contract).kept({"value": pa.array(written)}, {"value": pa.array([True] * 6)})
        assert kept.to_pylist() == [not RowRules(contract).broken({"value": text}) for text in written]


@pytest.mark.parametrize("pg_type", _TYPES)
def test_an_ordinary_value_of_a_type_is_asked_of_no_rule(
    pg_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("asked one by one")

    ordinary = {Kind.BOOLEAN: "t", Kind.BINARY: "\\x00ff", Kind.DATE: "2026-11-30"}
    moments = dict.fromkeys((Kind.TIMESTAMP, Kind.TIMESTAMPTZ), "2026-12-31 23:59:59.123456+00")
    arrays = dict.fromkeys((Kind.TEXT_ARRAY, Kind.INTEGER_ARRAY), "{1,2}")
    text = {**ordinary, **moments, **arrays}.get(PgType.parse(pg_type).kind, "1234")
    monkeypatch.setattr("omnisupport_ingest.contracts.column_rules._checked", never)
    contract = replace(lanes.CONTRACT, columns=(Column("value", pg_type, nullable=False),), key=())
    kept = ColumnRules(contract).kept({"value": pa.array([text, None])}, {"value": pa.array([True, True])})
    assert kept.to_pylist() == [True, False]


NUMBER, TEXT = Column("value", "numeric(12,2)"), Column("value", "text")


@pytest.mark.parametrize(
    ("column", "kept", "broken"),
    [
        (replace(NUMBER, minimum=Decimal("0.5")), ["0.50", "7", None], ["0.49"]),
        (replace(NUMBER, maximum=Decimal("0.5")), ["0.50", "-7", None], ["0.51"]),
        (replace(NUMBER, pg_type="bigint", minimum=Decimal("0.5")), ["1"], ["0"]),
        (replace(NUMBER, pg_type="double precision", maximum=Decimal(1)), ["1"], ["1.5", "NaN"]),
        (replace(NUMBER, pg_type="numeric", minimum=Decimal(1)), [], ["1", "0"]),
        (replace(NUMBER, pg_type="bigint", nullable=False), ["1"], [None]),
        (replace(TEXT, enum=("a", "b")), ["a", "b", None], ["c", ""]),
        (replace(TEXT, max_length=2), ["", "🐘🐘", None], ["abc"]),
        (replace(TEXT, pattern="^a"), [], ["a", "b"]),
    ],
)
def test_rows_pass_the_gate_unseen_only_if_no_value_of_theirs_may_break_a_rule(
    column: Column, kept: list[str | None], broken: list[str | None]
) -> None:
    contract = replace(lanes.CONTRACT, columns=(column,), key=("value",))

    def passes(texts: list[str | None]) -> bool:
        return surely_kept(
            pa.table({"value": typed_array(pa.array(texts, pa.string()), column.type)}), contract
        )

    assert not kept or passes(kept)
    assert not any(passes([*kept, each]) for each in broken)


@settings(max_examples=examples(150), deadline=None)
@given(columns(), st.lists(values, min_size=1, max_size=12))
def test_no_rows_pass_the_gate_unseen_that_pandera_refuses(column: Column, texts: list[str | None]) -> None:
    contract = replace(lanes.CONTRACT, columns=(column,), key=("value",))
    written = typed_array(pa.array(texts, pa.string()), column.type)
    # A dimension has texts that are no value of their type beside the typed columns.
    fitting = [text is None or value.is_valid for text, value in zip(texts, written, strict=True)]
    rows = pa.table({"value": written.filter(pa.array(fitting))})
    if surely_kept(rows, contract):
        assert not list(broken_rows(rows, pandera_schema(contract)))
