"""``x-policy`` and ``x-cdc.quality`` of a contract: what they take, and what each refusal says."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from omnisupport_ingest.contracts import expression_syntax
from omnisupport_ingest.contracts.expression_syntax import ExpressionProblem, columns_of
from omnisupport_ingest.contracts.expressions import ExpressionRules
from omnisupport_ingest.contracts.load import contract_of, default_contracts_dir
from omnisupport_ingest.contracts.model import Column, ContractError, Contracts
from omnisupport_ingest.contracts.pg_types import PgType
from omnisupport_ingest.contracts.quality import ExpressionRule, Freshness
from omnisupport_ingest.contracts.quality_document import reference_problems
from omnisupport_ingest.contracts.row_rules import policies_of
from omnisupport_ingest.contracts.typed_values import typed_array

TICKETS: dict[str, Any] = json.loads((default_contracts_dir() / "tickets.json").read_text())
COLUMNS = contract_of(TICKETS, Path("tickets.json")).source_columns


def with_quality(**quality: Any) -> dict[str, Any]:
    document = copy.deepcopy(TICKETS)
    document["x-cdc"]["quality"] = quality
    return document


def rule(expression: str, **more: str) -> dict[str, Any]:
    return with_quality(rules=[{"name": "a_rule", "expression": expression, **more}])


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("updated_at >= creatd_at", r"names 'creatd_at', .*\nFix: Write created_at"),
        ("lenght(subject) > 1", r"calls lenght, .*\nFix: Write length"),
        ("subject", "gives VARCHAR, not BOOLEAN"),
        ("id >", "is no expression of SQL"),
        ("1 = 1", "names no column"),
        ("id = subject[1] + current_date", "does not fit|names 'current_date'|calls current_date"),
        ("created_at < now()", "calls now"),
        ("id > random() * 10", "calls random"),
        ("age(created_at) > INTERVAL 1 DAY", "calls age"),
        ("sum(id) > 1", "calls sum"),
        ("rpad(subject, id, 'x') = subject", "calls rpad"),
        ("hour(created_at AT TIME ZONE subject) < 10", "calls timezone"),
        ("subject NOT LIKE 'a' ESCAPE subject", "calls (not_)?like_escape"),
        ("count(*) > id", "calls count_star"),
        ("row_number() OVER () > id", "has a window function"),
        ("id IN (SELECT 1)", "has a query"),
        ("EXISTS (FROM read_text('/etc/passwd'))", "has a query"),
        ("read_text('/etc/passwd') = subject", "calls read_text"),
        ("getenv('HOME') = subject", "calls getenv"),
        ("current_setting('TimeZone') = subject", "calls current_setting"),
        ("id > $1", "has parameter"),
        ("len(list_filter([1], x -> x = id)) > 0", "has a lambda|names 'x'"),
        ("id > 0), (id > 1", "is not one expression"),
        ("id > 0) AS x, (id > 1", "is no"),
        ("id > 0) FROM rows; DROP TABLE rows; --", "is no"),
        ("id > 0) FROM (SELECT 1 AS id) AS rows --", "is no"),
        ("id > 0) UNION SELECT (true", "is not one expression"),
        ("tickets.id > 0", "names 'tickets.id'"),
        ("id > " + "1 + " * 600 + "1", "has .* characters"),
    ],
)
def test_an_expression_that_may_not_be_is_refused_where_the_contract_is_read(
    expression: str, problem: str
) -> None:
    with pytest.raises(ContractError, match=problem) as refused:
        contract_of(rule(expression), Path("t.json"))
    assert "t.json at $.x-cdc.quality.rules[0].expression: " in str(refused.value)


def test_a_column_named_like_a_keyword_is_to_be_quoted() -> None:
    columns = (Column("at", "timestamptz"), Column("end", "bigint"), Column("id", "bigint"))
    for expression, names in (("at > '2026-01-01'", '"at"'), ("end > id AND id > at", '"at", "end"')):
        with pytest.raises(ExpressionProblem, match="is no expression of SQL") as refused:
            columns_of(expression, columns)
        assert refused.value.fix.startswith(f"Write {names} in double quotes")
    with pytest.raises(ExpressionProblem) as refused:
        columns_of("id > \"at\" AND 'end' = (", columns)
    assert refused.value.fix.startswith("Correct it")
    assert columns_of('"end" > id', columns) == ("end", "id")


@pytest.mark.parametrize(
    ("expression", "columns"),
    [
        ("updated_at >= created_at", ("created_at", "updated_at")),
        ("ID > 0 -- why", ("id",)),
        ("status IN ('new', 'open') OR satisfaction IS NOT NULL", ("status", "satisfaction")),
        ("CASE WHEN priority = 1 THEN agent_handle IS NOT NULL ELSE true END", ("agent_handle", "priority")),
        ("subject SIMILAR TO '[a-z ]+' AND length(trim(body)) BETWEEN 1 AND 9", ("subject", "body")),
        (
            "metadata->>'$.a' = 'x' AND created_at + INTERVAL 1 DAY > updated_at",
            ("metadata", "created_at", "updated_at"),
        ),
    ],
)
def test_an_expression_names_its_columns(expression: str, columns: tuple[str, ...]) -> None:
    assert columns_of(expression, COLUMNS) == columns


@pytest.mark.parametrize(
    "query",
    [
        "FROM read_text('/etc/hostname')",
        "COPY (SELECT 1) TO '/tmp/x'",
        "SET enable_external_access = true",
        "SET lock_configuration = false",
        "INSTALL httpfs",
    ],
)
def test_what_reads_files_or_changes_a_setting_could_not_even_if_it_were_let_through(query: str) -> None:
    with pytest.raises(duckdb.Error, match=r"disabled|locked"):
        expression_syntax.connection().execute(query)


@pytest.mark.parametrize(
    "pg_type",
    [
        "boolean",
        "int2",
        "int4",
        "int8",
        "real",
        "double precision",
        "numeric(12,2)",
        "numeric",
        "date",
        "timestamp",
        "timestamptz",
        "bytea",
        "text[]",
        "bigint[]",
        "text",
        "uuid",
        "jsonb",
    ],
)
def test_an_expression_is_bound_to_the_types_that_it_is_asked_of(pg_type: str) -> None:
    """What DuckDB sees of a typed column is what the contract was checked with."""
    (column,) = columns = (Column("value", pg_type),)
    bound = f"typeof(value) = '{expression_syntax._sql_type(column.type)}'"
    asked = ExpressionRules([ExpressionRule("same", bound, ("value",), "warn")], columns)
    texts = pa.array(["1"], pa.string())
    found = asked.false_of({"value": typed_array(texts, PgType.parse(pg_type))})
    assert found["same"].to_pylist() == [False]


def test_null_keeps_a_rule_as_check_does() -> None:
    asked = ExpressionRules(
        [ExpressionRule("later", "updated_at >= created_at", ("created_at", "updated_at"), "warn")], COLUMNS
    )
    old, new = "2026-01-01 00:00:00+00", "2026-01-02 00:00:00+00"
    images: list[dict[str, str | None]] = [
        {"created_at": new, "updated_at": old},
        {"created_at": None, "updated_at": old},
        {"updated_at": old},
        {"created_at": "infinity", "updated_at": old},
        {"created_at": old, "updated_at": new},
    ]
    assert asked.of_images(images) == [["later"], [], [], [], []]


def test_policies_of_columns_are_by_the_keyword_of_the_rule() -> None:
    document = copy.deepcopy(TICKETS)
    document["properties"]["priority"]["x-policy"] = {"maximum": "warn", "type": "reject_batch"}
    document["properties"]["subject"]["x-policy"] = {"required": "reject_batch"}
    found = policies_of(contract_of(document, Path("t.json")))
    assert {name: found[name] for name in found if ":" in name} == {
        "priority:maximum": "warn",
        "priority:type": "reject_batch",
        "subject:not_null": "reject_batch",
    }


@pytest.mark.parametrize(
    ("column", "policies", "problem"),
    [
        ("priority", {"maxmum": "warn"}, r"\nFix: Write maximum in place of maxmum"),
        ("priority", {"pattern": "warn"}, r"priority\.x-policy\.pattern: is the policy of a rule"),
        ("priority", {"required": "quarantine"}, "is the policy of a rule that the column does not have"),
        ("subject", {"type": "quarantine"}, "is the policy of a rule that the column does not have"),
        ("priority", {"type": "warn"}, "a typed column cannot hold"),
        ("status", {"enum": "ignore"}, "Use accept .*, warn .*, quarantine, or reject_batch"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(column: str, policies: dict[str, str], problem: str) -> None:
    document = copy.deepcopy(TICKETS)
    document["properties"][column]["x-policy"] = policies
    with pytest.raises(ContractError, match=problem):
        contract_of(document, Path("t.json"))


@pytest.mark.parametrize(
    ("quality", "problem"),
    [
        ({"rule": []}, "Write rules in place of rule"),
        ({"rules": [{"name": "a", "expression": "id > 0"}] * 2}, "'a' is there twice"),
        ({"volume": {"at_least": 2, "at_most": 1}}, "is 1, below at_least"),
        ({"volume": {"learned": {}, "at_most": 1}}, "at_least, at_most or both; or learned"),
        ({"freshness": {"max_lag": "soon"}}, "Write a duration such as PT15M"),
        ({"freshness": "soon"}, "(?s)x-cdc.quality.freshness: .*Write a duration such as PT15M"),
        ({"freshness": {"verified_within": "PT"}}, "(?s)freshness.verified_within: .*such as PT15M"),
        ({"references": [{"name": "a", "columns": ["x"], "table": "t"}]}, "'x' is not a column"),
    ],
)
def test_an_expectation_that_cannot_be_is_refused(quality: dict[str, Any], problem: str) -> None:
    with pytest.raises(ContractError, match=problem):
        contract_of(with_quality(**quality), Path("t.json"))


def test_a_freshness_of_one_duration_is_how_far_behind_the_table_may_be() -> None:
    short, long = (
        contract_of(with_quality(freshness=each), Path("t.json")).quality.freshness
        for each in ("PT1M", {"max_lag": "PT1M"})
    )
    assert short == long == Freshness(timedelta(minutes=1))


def test_a_reference_to_no_table_or_by_another_number_of_columns_is_a_problem_of_all_contracts() -> None:
    references = [
        {"name": "one", "columns": ["organization_id"], "table": "tikets"},
        {"name": "two", "columns": ["organization_id", "id"], "table": "tickets"},
        {"name": "three", "columns": ["organization_id"], "table": "tickets"},
    ]
    contract = contract_of(with_quality(references=references), Path("t.json"))
    problems = [str(each) for each in reference_problems(Contracts((contract,)))]
    assert len(problems) == 2
    assert "'tikets' is no table of the source" in problems[0] and "Write tickets" in problems[0]
    assert "has 2 columns, the key of tickets 1" in problems[1]


def test_rules_make_another_contract_and_expectations_do_not() -> None:
    plain = contract_of(with_quality(), Path("t.json")).fingerprint
    expecting = with_quality(volume={"at_least": 1}, freshness={"max_lag": "PT1M"})
    assert contract_of(expecting, Path("t.json")).fingerprint == plain
    assert contract_of(rule("id > 0"), Path("t.json")).fingerprint != plain
    warned = contract_of(rule("id > 0", policy="warn"), Path("t.json")).fingerprint
    assert warned != contract_of(rule("id > 0"), Path("t.json")).fingerprint


def test_an_expression_knows_what_is_wrong_with_it() -> None:
    with pytest.raises(ExpressionProblem) as found:
        columns_of("id > 'x' AND subjct = ''", COLUMNS)
    assert found.value.fix == "Write subject, if that is meant."


def test_reading_contracts_leaves_no_thread_behind_that_would_forbid_a_fork() -> None:
    """In a process of its own: threads of this one's libraries are not meant."""
    program = (
        "from omnisupport_ingest.contracts.documents import program_file\n"
        "from omnisupport_ingest.contracts.load import load_contracts\n"
        "from omnisupport_ingest.runtime.fork_server import threads_in_the_way\n"
        "assert any(each.quality.rules for each in load_contracts(program_file('contracts/data')))\n"
        "print(threads_in_the_way())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
