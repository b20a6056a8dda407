"""Contracts, decision tables and values that others wrote: a result or our error, and in time."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts import pg_values
from omnisupport_ingest.contracts.decision_table import (
    COLUMNS,
    DecisionTableRefused,
    default_decision_table,
    load_decision_table,
)
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.durations import parse_duration
from omnisupport_ingest.contracts.load import ContractError, load_contract
from omnisupport_ingest.contracts.model import Column
from omnisupport_ingest.contracts.pandera_schema import failures, pandera_schema
from omnisupport_ingest.contracts.pg_types import ALWAYS_FITS, FLOATS, NUMBERS, Kind, PgType
from omnisupport_ingest.contracts.pg_values import number, value_test, whole_number
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.contracts.spark_types import spark_schema
from omnisupport_ingest.contracts.typed_values import typed_array
from omnisupport_ingest_tests.contracts.test_rules import CONTRACT, FINE
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import (
    IN_THE_PLACE,
    ODD_TEXTS,
    in_time,
    mutated,
    odd_texts,
    places,
    with_value_at,
)

DOCUMENTS: list[Any] = [
    json.loads(path.read_text()) for path in sorted(program_file("contracts/data").glob("*.json"))[:3]
]
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

LONGEST = "-" + "9" * 131_072 + "." + "9" * 16_383
"""The longest numeric that PostgreSQL holds."""


@settings(same_folder, max_examples=examples(250))
@given(content=mutated(DOCUMENTS))
def test_any_file_is_a_contract_that_can_be_used_or_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "orders.json"
    path.write_bytes(content)
    with in_time():
        try:
            contract = load_contract(path)
        except ContractError as refused:
            assert str(path) in refused.problem and refused.fix and len(refused.problem) < 2000
        else:
            # Whatever is read from it can be judged by.
            image = dict.fromkeys(contract.column_names, "5")
            assert isinstance(RowRules(contract).broken(image), list)


def test_a_refusal_is_short_wherever_a_long_text_stands(tmp_path: Path) -> None:
    document, path, refusals = DOCUMENTS[0], tmp_path / "orders.json", 0
    for keys in places(document):
        path.write_text(json.dumps(with_value_at(document, keys, "9" * 5000)))
        try:
            load_contract(path)
        except ContractError as refused:
            refusals += 1
            assert len(refused.problem) < 2000 and len(refused.fix) < 2000, keys
    assert refusals > 50


@settings(same_folder, max_examples=examples(250))
@given(content=mutated(DOCUMENTS))
def test_of_any_contract_that_is_taken_a_gate_is_made_that_asks_what_judging_asks(
    tmp_path: Path, spark: SparkSession, content: bytes
) -> None:
    path = tmp_path / "orders.json"
    path.write_bytes(content)
    with in_time():
        try:
            contract = load_contract(path)
        except ContractError:
            return
        schema = pandera_schema(contract)
        asked = {check.name for column in schema.columns.values() for check in column.checks}
        asked |= {f"{name}:not_null" for name, column in schema.columns.items() if not column.nullable}
    assert list(schema.columns) == list(contract.column_names)
    # Of a typed column, what is no value of its type is NULL; where that happens NULL is no fault. What a
    # policy leaves of a value keeps no rule about the value.
    in_lake = replace(contract, unprotected=())
    judged = {name for name in RowRules(in_lake).names if not name.endswith(":type")}
    plain = [column.name for column in contract.source_columns if column.pii == "keep"]
    every = {name for name in RowRules(contract).names if not name.endswith(":type")}
    assert {name for name in every ^ judged if name.rpartition(":")[0] in plain} == set()
    unasked = {
        f"{column.name}:not_null"
        for column in contract.columns
        if not column.nullable and column.type.kind not in ALWAYS_FITS
    }
    # Rules of several columns are asked where events are judged, and nowhere else.
    of_several = {rule.name for rule in contract.quality.rules}
    assert asked == judged - unasked - of_several


@settings(same_folder, max_examples=examples(25), deadline=None)
@given(content=mutated(DOCUMENTS))
def test_the_gate_of_any_contract_gives_an_answer_for_rows_of_nothing(
    tmp_path: Path, spark: SparkSession, content: bytes
) -> None:
    path = tmp_path / "orders.json"
    path.write_bytes(content)
    try:
        contract = load_contract(path)
    except ContractError:
        return
    frame = spark.createDataFrame([tuple(None for _ in contract.columns)], spark_schema(contract))
    missing = {
        f"{column.name}:not_null"
        for column in contract.columns
        if not column.nullable and column.type.kind in ALWAYS_FITS
    }
    assert set(failures(frame, contract)) == missing


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_is_no_contract_file_is_refused_and_not_waited_for(tmp_path: Path, what: str) -> None:
    path = tmp_path / "orders.json"
    IN_THE_PLACE[what](path)
    with in_time(), pytest.raises(ContractError, match=r"orders\.json"):
        load_contract(path)
    with in_time(), pytest.raises(DecisionTableRefused, match=r"orders\.json"):
        load_decision_table(path)


@pytest.mark.parametrize("rule", ["minimum", "maximum"])
@pytest.mark.parametrize("bound", [10**38, 1e300, 1e-300])
def test_a_bound_that_spark_has_no_decimal_for_is_refused_where_decimals_are_compared(
    tmp_path: Path, rule: str, bound: float
) -> None:
    document = json.loads(json.dumps(DOCUMENTS[0]))
    body = {"type": ["number", "null"], "x-pg-type": "numeric(12,2)", "description": "Odd.", rule: bound}
    document["properties"]["odd"] = body
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ContractError, match=rf"\$\.properties\.odd\.{rule}: has \d+ digits"):
        load_contract(path)
    body["x-pg-type"] = "double precision"
    path.write_text(json.dumps(document))
    found = load_contract(path).column("odd")
    assert float(getattr(found, rule)) == float(bound)


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 5000 + ")" * 5000, "(?P<a>x", "[", "*", "\\"])
def test_a_pattern_that_no_regular_expression_is_made_of_is_refused(tmp_path: Path, pattern: str) -> None:
    document = json.loads(json.dumps(DOCUMENTS[0]))
    document["properties"]["odd"] = {
        "type": ["string", "null"],
        "x-pg-type": "text",
        "description": "Odd.",
        "pattern": pattern,
    }
    path = tmp_path / "orders.json"
    path.write_text(json.dumps(document))
    with in_time(), pytest.raises(ContractError, match=r"\$\.properties\.odd\.pattern"):
        load_contract(path)


def test_a_length_of_time_that_no_calendar_holds_is_none() -> None:
    assert parse_duration("P36525D").days == 36525
    for text in ("P36526D", "P999999W", "P" + "9" * 5000 + "D"):
        with pytest.raises(ValueError, match="P") as refused:
            parse_duration(text)
        assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("numeric(" + "9" * 5000 + ")", Kind.TEXT),
        ("numeric(0,0)", Kind.NUMERIC_TEXT),
        ("numeric(999999999)", Kind.NUMERIC_TEXT),
        ("varchar(" + " " * 5000, Kind.TEXT),
        ("(" * 5000, Kind.TEXT),
    ],
)
def test_the_name_of_a_type_may_be_anything(text: str, kind: Kind) -> None:
    with in_time():
        assert PgType.parse(text).kind is kind


def table(rows: list[list[str]]) -> str:
    written = io.StringIO()
    csv.writer(written).writerows(rows)
    return written.getvalue()


DECISIONS = list(csv.reader(default_decision_table().read_text().splitlines()))


@settings(same_folder, max_examples=examples(150))
@given(
    place=st.tuples(st.integers(0, len(DECISIONS) - 1), st.integers(0, len(COLUMNS) - 1)),
    cell=odd_texts,
    cut=st.none() | st.integers(0, 2000),
    tail=st.binary(max_size=4),
)
def test_any_file_is_a_decision_table_or_refused_by_name(
    tmp_path: Path, place: tuple[int, int], cell: str, cut: int | None, tail: bytes
) -> None:
    row, column = place
    rows = [list(each) for each in DECISIONS]
    rows[row][column] = cell
    path = tmp_path / "decisions.csv"
    path.write_bytes(table(rows).encode()[:cut] + tail)
    with in_time():
        try:
            load_decision_table(path)
        except DecisionTableRefused as refused:
            assert str(path) in refused.problem and refused.fix and len(refused.problem) < 2000


@pytest.mark.parametrize("cell", ['"never ends', '"ends" too early', "x" * 200_000])
def test_a_decision_table_that_is_no_csv_is_refused_with_its_line(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "decisions.csv"
    path.write_text(f"{default_decision_table().read_text()}late_arrival,watermark_gap,ingest,false,{cell}\n")
    with in_time(), pytest.raises(DecisionTableRefused, match=rf"decisions\.csv, line {len(DECISIONS) + 1}"):
        load_decision_table(path)


@pytest.mark.parametrize("kind", list(Kind))
def test_any_text_is_judged_for_every_type(kind: Kind) -> None:
    for text in [*ODD_TEXTS, LONGEST, "9" * 10_000_000, "1." + "0" * 1_000_000]:
        with in_time():
            holds = value_test(kind)(text)
            spelled = number(text, kind) if kind in NUMBERS else None
            if not holds:
                assert spelled is None
            elif spelled is not None:
                assert pg_values.above(spelled, Decimal(-1)) in (True, False)
                assert pg_values.below(spelled, Decimal(1)) in (True, False)


@given(st.integers(-(10**25), 10**25), st.integers(0, 6000))
def test_a_whole_number_is_read_whatever_zeros_stand_before_it(value: int, zeros: int) -> None:
    sign = "-" if value < 0 else ""
    found = whole_number(f"{sign}{'0' * zeros}{abs(value)}")
    assert found == (value if abs(value) < 10**19 else None)


@pytest.mark.parametrize("text", ["", "+", "-", "1 ", " 1", "1.0", "1e3", "\u0663", "1_0", "0x1"])
def test_what_spells_no_whole_number_is_none(text: str) -> None:
    assert whole_number(text) is None


def test_a_numeric_is_what_postgresql_can_hold() -> None:
    test = value_test(Kind.NUMERIC_TEXT)
    for text in (
        LONGEST,
        "9" * 131_072,
        "0." + "1" * 16_383,
        "1e131071",
        "1e-16383",
        "0e-5",
        "NaN",
        "-Infinity",
    ):
        assert test(text), text[:20]
    for text in ("9" * 131_073, "0." + "1" * 16_384, "1e131072", "1e-16384", "1e999999999", "9" * 10_000_000):
        assert not test(text), text[:20]


def test_a_long_number_breaks_the_rule_of_its_type_and_a_long_numeric_none() -> None:
    rules = RowRules(CONTRACT)
    assert rules.broken(FINE | {"id": "9" * 5000}) == ["id:type"]
    assert rules.broken(FINE | {"priority": "-" + "9" * 5000}) == ["priority:type"]
    assert rules.broken(FINE | {"id": "0" * 5000 + "7"}) == []
    assert rules.broken(FINE | {"value": "9" * 100_000}) == []
    assert rules.broken(FINE | {"weight": "9" * 100_000}) == ["weight:maximum"]
    assert rules.broken(FINE | {"rating": "9" * 100_000}) == ["rating:type"]


def test_any_text_is_typed_in_time_and_none_is_kept_that_does_not_fit() -> None:
    texts = [*ODD_TEXTS, LONGEST, "9" * 400_000, "1." + "0" * 200_000]
    columns = {
        kind: Column("c", "numeric(12,2)" if kind is Kind.DECIMAL else name)
        for kind, name in [
            *((kind, kind.value) for kind in FLOATS),
            *((kind, kind.value) for kind in (Kind.SHORT, Kind.INTEGER, Kind.LONG)),
            (Kind.DECIMAL, ""),
            (Kind.DATE, "date"),
            (Kind.TIMESTAMPTZ, "timestamptz"),
            (Kind.BINARY, "bytea"),
            (Kind.TEXT_ARRAY, "text[]"),
            (Kind.INTEGER_ARRAY, "integer[]"),
            (Kind.BOOLEAN, "boolean"),
        ]
    }
    with in_time(60):
        typed = {
            kind: typed_array(pa.array(texts, pa.string()), column.type).to_pylist()
            for kind, column in columns.items()
        }
    for kind, values in typed.items():
        for text, value in zip(texts, values, strict=True):
            # What has a typed value, judging takes for a value.
            assert value is None or value_test(kind)(text), (kind, text[:40])
