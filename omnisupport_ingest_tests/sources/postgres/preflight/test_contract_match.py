"""A contract held against the table it is for, before capture touches anything."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnisupport_ingest.contracts.model import Column, TableContract
from omnisupport_ingest.sources.postgres.catalog.live_table import read_live_tables
from omnisupport_ingest.sources.postgres.preflight import Finding, Severity
from omnisupport_ingest.sources.postgres.preflight.contract_match import contract_findings
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

ID = Column("id", "bigint", nullable=False)


def typed(*columns: Column, key: tuple[str, ...] = ("id",)) -> TableContract:
    return replace(contract("t", ()), columns=(ID, *columns), key=key)


def found(source: SourceUnderTest, agreed: TableContract) -> dict[str, Finding]:
    with source.connected() as connection:
        table = read_live_tables(connection, [(agreed.schema, agreed.table)]).get(
            (agreed.schema, agreed.table)
        )
    return {finding.check: finding for finding in contract_findings(agreed, table)}


def test_a_contract_that_says_what_the_table_is(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE t (id bigint PRIMARY KEY, v varchar(40))")
    assert found(source, typed(Column("v", "character varying(40)", max_length=40))) == {}


@pytest.mark.parametrize(
    ("definition", "column", "check", "severity"),
    [
        ("v int", Column("w", "integer"), "column", Severity.BLOCKS),
        ("v int GENERATED ALWAYS AS (1) STORED", Column("v", "integer"), "generated_column", Severity.BLOCKS),
        ("v text", Column("v", "integer"), "type", Severity.BLOCKS),
        ("v bigint", Column("v", "integer"), "type", Severity.BLOCKS),
        ("v numeric", Column("v", "numeric(10,2)"), "type", Severity.WARNS),
        ("v int", Column("v", "bigint"), "type", Severity.NOTES),
        ("v int", Column("v", "integer", nullable=False), "nullability", Severity.WARNS),
        ("v mood", Column("v", "mood", enum=("fine",)), "enum", Severity.WARNS),
        ("v varchar(40)", Column("v", "text", max_length=20), "max_length", Severity.WARNS),
    ],
)
def test_a_difference_is_told_as_badly_as_it_matters(
    source: SourceUnderTest, definition: str, column: Column, check: str, severity: Severity
) -> None:
    source.sql(
        "CREATE TYPE mood AS ENUM ('fine', 'bad')", f"CREATE TABLE t (id bigint PRIMARY KEY, {definition})"
    )
    finding = found(source, typed(column))[check]
    assert finding.severity is severity
    assert "public.t" in finding.problem
    assert (finding.fix == "") == (severity is Severity.NOTES)


def test_a_column_that_the_contract_does_not_name_is_only_noted(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE t (id bigint PRIMARY KEY, v int, w int)")
    finding = found(source, typed(Column("v", "integer")))["extra_column"]
    assert (finding.severity, "w of public.t" in finding.problem) == (Severity.NOTES, True)
    source.tables.append(typed(Column("v", "integer")))
    source.catch_up()


def test_a_key_that_two_rows_may_share_blocks(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE t (id bigint, part int, PRIMARY KEY (id, part))")
    finding = found(source, typed(Column("part", "integer")))["key_not_unique"]
    assert finding.severity is Severity.BLOCKS
    assert "(id, part)" in finding.fix


def test_a_key_that_nothing_keeps_unique_is_taken_on_trust_with_identity_full(
    source: SourceUnderTest,
) -> None:
    source.sql("CREATE TABLE t (id bigint NOT NULL)", "ALTER TABLE t REPLICA IDENTITY FULL")
    assert found(source, typed())["key_not_unique"].severity is Severity.WARNS


@pytest.mark.parametrize(
    "identity",
    [
        "ALTER TABLE t REPLICA IDENTITY NOTHING",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_other_key",
    ],
)
def test_a_key_that_left_the_replica_identity_is_repaired_by_the_fix(
    source: SourceUnderTest, identity: str
) -> None:
    source.sql("CREATE TABLE t (id bigint PRIMARY KEY, other int NOT NULL UNIQUE)", identity)
    agreed = typed(Column("other", "integer"))
    source.sql(found(source, agreed)["replica_identity"].fix)
    assert found(source, agreed) == {}


def test_capture_refuses_a_contract_that_does_not_match_before_it_touches_the_source(
    source: SourceUnderTest,
) -> None:
    source.sql("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    source.tables.append(typed(Column("v", "integer")))
    with pytest.raises(PreflightFailed, match=r"Column v of public\.t is text; t\.json says integer"):
        source.catch_up()
    assert source.query("SELECT count(*) FROM pg_publication") == [(0,)]
    assert source.query(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{source.slot}'") == [
        (0,)
    ]
    assert source.store.batch_ids() == []
