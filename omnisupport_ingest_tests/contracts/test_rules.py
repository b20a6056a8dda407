"""Row rules name every fault of a row, and the pandera gate finds nothing in rows they accept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from decimal import Decimal
from functools import partial

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from omnisupport_ingest.cdc.fold import with_types
from omnisupport_ingest.cdc.typed_rows import EXACT, typed_batches
from omnisupport_ingest.contracts import pandera_schema
from omnisupport_ingest.contracts.column_rules import surely_kept
from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.contracts.pandera_schema import GateFailed, broken_rows, failures, failures_of_few
from omnisupport_ingest.contracts.quality import ExpressionRule, Policies, Quality
from omnisupport_ingest.contracts.row_rules import VALUE_RULES, RowRules, ValueRule, policies_of
from omnisupport_ingest.contracts.typed_values import typed_array
from omnisupport_ingest_tests.examples import examples

CONTRACT = TableContract(
    name="parcels",
    version="1.0.0",
    source="shop",
    schema="public",
    table="parcels",
    title="Parcels",
    description="What is sent.",
    owner="team:shop",
    key=("id",),
    columns=(
        Column("id", "bigint", nullable=False, minimum=Decimal(1)),
        Column("state", "shop.state", nullable=False, enum=("new", "sent")),
        Column("priority", "smallint", minimum=Decimal(1), maximum=Decimal(4)),
        Column("weight", "numeric(6,2)", minimum=Decimal("0.50"), maximum=Decimal(100)),
        Column("value", "numeric", minimum=Decimal(0)),
        Column("rating", "double precision", maximum=Decimal(5)),
        Column("label", "text", max_length=4, pattern="^[a-zä]*$"),
        Column("sent_at", "timestamptz", nullable=False),
        Column("tags", "text[]"),
    ),
    soft_delete_column=None,
    allowed_lateness=timedelta(hours=1),
    max_lateness=timedelta(days=7),
    path="parcels.json",
    fingerprint="0" * 64,
)

Image = dict[str, str | None]

FINE: Image = {
    "id": "1",
    "state": "new",
    "priority": None,
    "weight": "0.50",
    "value": "1",
    "rating": "5",
    "label": "abä",
    "sent_at": "2026-11-21 09:00:00+00",
    "tags": "{a}",
}

IMAGES = T.StructType([T.StructField("image", T.MapType(T.StringType(), T.StringType()))])


def frame_of(spark: SparkSession, images: list[Image | None]) -> DataFrame:
    return spark.createDataFrame([(image,) for image in images], IMAGES).coalesce(1)


RULES = RowRules(CONTRACT)


def typed_frame(images: DataFrame) -> DataFrame:
    texts = images.select(*[F.try_element_at("image", F.lit(c.name)).alias(c.name) for c in CONTRACT.columns])
    return with_types(texts, CONTRACT).drop("_cdc_exact")


def test_every_broken_rule_is_named() -> None:
    cases: list[tuple[Image, list[str]]] = [
        ({}, []),
        ({"id": None, "state": None}, ["id:not_null", "state:not_null"]),
        ({"id": "x"}, ["id:type"]),
        ({"id": "0"}, ["id:minimum"]),
        ({"state": "lost"}, ["state:enum"]),
        ({"priority": "5"}, ["priority:maximum"]),
        ({"weight": "0.49"}, ["weight:minimum"]),
        ({"weight": "12345.00"}, ["weight:maximum"]),
        ({"weight": "NaN"}, ["weight:maximum"]),
        ({"weight": "-Infinity"}, ["weight:minimum"]),
        ({"value": "-0.1"}, ["value:minimum"]),
        ({"value": "much"}, ["value:type"]),
        ({"rating": "5.1"}, ["rating:maximum"]),
        ({"label": "ABCDE"}, ["label:max_length", "label:pattern"]),
        ({"sent_at": "yesterday"}, ["sent_at:type"]),
        ({"tags": "a"}, ["tags:type"]),
    ]
    found = [RULES.broken(FINE | changed) for changed, _ in cases]
    assert found == [expected for _, expected in cases]


def test_a_value_that_does_not_fit_its_typed_column_breaks_no_rule() -> None:
    unfit: Image = {"sent_at": "infinity", "tags": "{{a}}", "weight": "1.234", "value": "NaN"}
    assert RULES.broken(FINE | unfit) == []


FORMER = replace(
    CONTRACT,
    quality=Quality(rules=(ExpressionRule("priced", "price IS NOT NULL", ("price",), "quarantine"),)),
    columns=(
        Column("id", "bigint", nullable=False),
        Column("size", "integer", nullable=False, minimum=Decimal(1), former_types=("text",)),
        Column("day", "date", former_types=("timestamptz",)),
        Column("price", "numeric", former_types=("text",)),
    ),
)


def test_a_value_of_a_former_type_is_kept_as_its_text_and_breaks_no_rule() -> None:
    rules, columns = RowRules(FORMER), FORMER.columns
    former: Image = {"id": "1", "size": "ten", "day": "2026-01-31 09:00:00+00", "price": "dear"}
    present: Image = {"id": "2", "size": "7", "day": "2026-02-01", "price": "1.50"}
    assert rules.broken(former) == rules.broken(present) == []
    assert rules.broken_of([former, present, present | {"price": None}]) == [[], [], ["priced"]]
    assert rules.broken({"size": "0", "day": "soon"}) == ["size:minimum", "day:type"]
    assert rules.broken({"size": None}) == ["size:not_null"], "NULL is no value of any type"
    rows = pa.table({each.name: pa.array([former[each.name], present[each.name]]) for each in columns})
    (typed,) = typed_batches(rows.to_batches(), columns, [*FORMER.column_names, EXACT])
    shown, other = typed.to_pylist()
    assert [shown[name] for name in ("size", "day", "price")] == [None, None, None]
    assert dict(shown[EXACT]) == {name: text for name, text in former.items() if name != "id"}
    assert (other["size"], other["day"].isoformat(), other["price"]) == (7, "2026-02-01", "1.50")
    assert not other[EXACT]
    assert failures_of_few(pa.Table.from_batches([typed]), FORMER) == {}, "the gate lets them pass too"
    assert surely_kept(pa.Table.from_batches([typed]), FORMER)


def test_columns_that_were_not_sent_are_not_judged() -> None:
    assert RULES.broken({}) == []
    assert RULES.broken({"priority": "9"}) == ["priority:maximum"]


_RULED: dict[str, tuple[Column, str]] = {
    "enum": (Column("c", "text", enum=("a",)), "b"),
    "minimum": (Column("c", "integer", minimum=Decimal(2)), "1"),
    "maximum": (Column("c", "integer", maximum=Decimal(2)), "3"),
    "max_length": (Column("c", "text", max_length=1), "ab"),
    "pattern": (Column("c", "text", pattern="^a$"), "b"),
}
"""By rule of values: a column that has it alone, and a value that breaks it."""


@pytest.mark.parametrize("rule", VALUE_RULES, ids=lambda rule: rule.name)
def test_every_rule_of_values_is_known_to_all_that_judge(rule: ValueRule) -> None:
    column, wrong = _RULED[rule.name]
    contract = replace(CONTRACT, key=("c",), columns=(column,))
    assert RowRules(contract).broken({"c": wrong}) == [f"c:{rule.name}"]
    rows = pa.table({"c": typed_array(pa.array([wrong]), column.type)})
    assert not surely_kept(rows, contract)
    assert failures_of_few(rows, contract) == {f"c:{rule.name}": 1}
    let_pass = replace(column, policies=Policies(((rule.name, "warn"),)))
    assert failures_of_few(rows, replace(contract, columns=(let_pass,))) == {}


def test_every_rule_has_a_name_of_its_own() -> None:
    names = RULES.names
    assert len(set(names)) == len(names) and "label:pattern" in names


def test_the_gate_names_what_is_broken_and_shows_no_row(spark: SparkSession) -> None:
    schema = pandera_schema.pandera_schema(CONTRACT)
    assert set(schema.columns) == set(CONTRACT.column_names)
    secret: Image = {"state": "s3cret", "priority": "9", "label": "s3cret", "id": None}
    found = failures(typed_frame(frame_of(spark, [FINE, FINE | secret, FINE | {"priority": "7"}])), CONTRACT)
    assert found == {
        "id:not_null": 1,
        "label:max_length": 1,
        "label:pattern": 1,
        "priority:maximum": 2,
        "state:enum": 1,
    }


def test_the_gate_names_columns_that_are_missing_or_of_another_type(spark: SparkSession) -> None:
    frame = typed_frame(frame_of(spark, [FINE])).drop("tags").withColumn("priority", F.lit("s3cret"))
    assert failures(frame, CONTRACT) == {"priority:schema": 0, "tags:schema": 0}


def test_the_gate_passes_an_empty_frame_and_allows_further_columns(spark: SparkSession) -> None:
    frame = typed_frame(frame_of(spark, [])).withColumn("_cdc_op", F.lit("c"))
    assert failures(frame, CONTRACT) == {}


def test_a_gate_that_could_not_look_is_no_pass_and_no_fault_of_the_rows(spark: SparkSession) -> None:
    frame = typed_frame(frame_of(spark, [FINE])).withColumn(
        "id", F.raise_error(F.lit("s3cret")).cast("bigint")
    )
    with pytest.raises(GateFailed) as failed:
        failures(frame, CONTRACT)
    assert "s3cret" not in str(failed.value)


NUMBERS = st.one_of(
    st.integers(-2, 6).map(str),
    st.decimals(-2, 200, places=3).map(str),
    st.sampled_from(["NaN", "Infinity", "-Infinity", "1e3", "99999999999999999999", "abc", ""]),
)
TEXTS: dict[str, st.SearchStrategy[str]] = {
    "id": NUMBERS,
    "state": st.sampled_from(["new", "sent", "lost", ""]),
    "priority": NUMBERS,
    "weight": NUMBERS,
    "value": NUMBERS,
    "rating": NUMBERS,
    "label": st.text("aäB\n", max_size=6),
    "sent_at": st.sampled_from(["2026-11-21 09:00:00+00", "infinity", "now", "0044-03-15 00:00:00+00 BC"]),
    "tags": st.sampled_from(["{}", '{"a b",NULL}', "{{a}}", "[2:3]={a,b}", "a"]),
}
ROWS = st.fixed_dictionaries(
    {
        column.name: st.one_of(st.none(), st.just(FINE[column.name]), TEXTS[column.name])
        for column in CONTRACT.columns
    }
)


def fits(text: str | None, column: Column) -> bool:
    return text is None or typed_array(pa.array([text]), column.type)[0].is_valid


def everything_fits(row: Image) -> bool:
    return all(fits(row.get(column.name), column) for column in CONTRACT.columns)


def if_fitting(text: str, column: Column) -> str | None:
    return text if fits(text, column) else FINE[column.name]


FITTING_ROWS: st.SearchStrategy[Image] = st.fixed_dictionaries(
    {
        column.name: st.one_of(st.none(), TEXTS[column.name].map(partial(if_fitting, column=column)))
        for column in CONTRACT.columns
    }
)
"""What does not fit is replaced: thrown away, hardly a row would be left."""

WITH_POLICIES = replace(
    CONTRACT,
    columns=tuple(
        replace(
            column, policies=Policies((("maximum", "warn"), ("enum", "reject_batch"), ("pattern", "accept")))
        )
        for column in CONTRACT.columns
    ),
)


def typed_rows(rows: list[Image], contract: TableContract) -> pa.Table:
    """``rows`` as a dimension has them."""
    return pa.table(
        {
            column.name: typed_array(pa.array([row[column.name] for row in rows], pa.string()), column.type)
            for column in contract.columns
        }
    )


@pytest.mark.parametrize(
    "variable", [("PANDERA_VALIDATION_ENABLED", "False"), ("PANDERA_VALIDATION_DEPTH", "SCHEMA_ONLY")]
)
def test_the_gate_looks_whatever_the_variables_of_pandera_say(variable: tuple[str, str]) -> None:
    code = (
        "from omnisupport_ingest_tests.contracts.test_rules import CONTRACT, FINE, typed_rows\n"
        "from omnisupport_ingest.contracts.pandera_schema import failures_of_few\n"
        "print(failures_of_few(typed_rows([FINE | {'priority': '9'}], CONTRACT), CONTRACT))"
    )
    environment = os.environ | dict([variable])
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "{'priority:maximum': 1}", done.stderr[-500:]


@settings(max_examples=examples(60), deadline=None)
@given(rows=st.lists(FITTING_ROWS, min_size=1, max_size=60), policies=st.booleans())
def test_pandera_says_of_each_row_what_the_row_rules_say(rows: list[Image], policies: bool) -> None:
    """By the number of the row: pandera judges rows, and nothing of ours tells it how."""
    contract = WITH_POLICIES if policies else CONTRACT
    typed = typed_rows(rows, contract)
    rules, given = RowRules(contract), policies_of(contract)
    verdicts: list[set[str]] = [set() for _ in rows]
    for broken in broken_rows(typed, pandera_schema.pandera_schema(contract)):
        assert broken.rule not in verdicts[broken.row]
        verdicts[broken.row].add(broken.rule)
    assert not (surely_kept(typed, contract) and any(verdicts))
    # NOT NULL of a column whose values may not fit, and text that is no number in an exact
    # numeric, are for the row rules alone.
    due = [
        {name for name in rules.broken(row) if given.get(name) != "warn"} - {"sent_at:not_null", "value:type"}
        for row in rows
    ]
    assert verdicts == due


@settings(
    max_examples=examples(5), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(ROWS, min_size=1, max_size=60))
def test_gate_and_row_rules_agree(spark: SparkSession, rows: list[Image]) -> None:
    accepted = frame_of(spark, [row for row in rows if not RULES.broken(row)])
    assert failures(typed_frame(accepted), CONTRACT) == {}

    # Where every value fits its type, the gate finds exactly the rules that rows break, and in as many rows.
    fitting = frame_of(spark, [row for row in rows if everything_fits(row)])
    named = Counter(name for row in fitting.collect() for name in RULES.broken(row.image))
    for name in ("sent_at:not_null", "value:type"):
        named.pop(name, None)
    assert failures(typed_frame(fitting), CONTRACT) == named
