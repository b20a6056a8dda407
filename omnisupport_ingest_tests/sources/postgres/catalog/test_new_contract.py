"""Contracts drafted from tables of every kind, read from a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.catalog.live_table import LiveTable, read_live_tables
from omnisupport_ingest.sources.postgres.catalog.new_contract import CannotBeCaptured, NoKey, draft
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest


def live(source: SourceUnderTest, *statements: str, table: str = "t", schema: str = "public") -> LiveTable:
    source.sql(*statements)
    with source.connected() as connection:
        return read_live_tables(connection)[schema, table]


def drafted(table: LiveTable) -> dict[str, Any]:
    """The document, which loads as a contract."""
    document = draft(table, source="shop", name="t", owner="team:shop").document
    contract_of(document, Path("t.json"))
    return document


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("bigint", {"type": ["integer", "null"], "x-pg-type": "bigint"}),
        ("numeric(12,2)", {"type": ["number", "null"], "x-pg-type": "numeric(12,2)"}),
        ("numeric(60,2)", {"type": ["number", "null"], "x-pg-type": "numeric(60,2)"}),
        ("varchar(40)", {"x-pg-type": "character varying(40)", "maxLength": 40}),
        ("char(3)", {"x-pg-type": "character(3)", "maxLength": 3}),
        ("mood", {"x-pg-type": "mood", "enum": ["fine", "so so", "it's bad", None]}),
        ("mood[]", {"type": ["string", "null"], "x-pg-type": "mood[]"}),
        ("short", {"x-pg-type": "character varying(12)", "maxLength": 12}),
        ("shorter", {"x-pg-type": "character varying(12)", "maxLength": 12}),
        ("shorter[]", {"x-pg-type": "character varying(12)[]", "items": {"type": "string"}}),
        ("ids", {"x-pg-type": "integer[]", "items": {"type": "integer"}}),
        ("ids[]", {"type": ["string", "null"], "x-pg-type": "integer[][]"}),
        ("numeric(4,1)[]", {"type": ["string", "null"], "x-pg-type": "numeric(4,1)[]"}),
        ("pair", {"type": ["string", "null"], "x-pg-type": "pair"}),
        ("interval day to second(3)", {"type": ["string", "null"]}),
        ('"char"', {"type": ["string", "null"], "x-pg-type": '"char"'}),
        ("timestamp(3) with time zone", {"x-pg-type": "timestamp(3) with time zone"}),
        ("int4range", {"type": ["string", "null"], "x-pg-type": "int4range"}),
        ("money", {"type": ["string", "null"], "x-pg-type": "money"}),
    ],
)
def test_a_type_is_what_values_of_the_column_are(
    source: SourceUnderTest, declared: str, expected: dict[str, Any]
) -> None:
    table = live(
        source,
        "CREATE TYPE mood AS ENUM ('fine', 'so so', 'it''s bad')",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE DOMAIN short AS varchar(12)",
        "CREATE DOMAIN shorter AS short CHECK (value <> '')",
        "CREATE DOMAIN ids AS int[]",
        f"CREATE TABLE t (id int PRIMARY KEY, v {declared})",
    )
    body = drafted(table)["properties"]["v"]
    assert {name: body.get(name) for name in expected} == expected


def test_comments_are_descriptions_and_what_has_none_says_so(source: SourceUnderTest) -> None:
    document = drafted(
        live(
            source,
            "CREATE TABLE t (id int PRIMARY KEY, first_name text, v text NOT NULL)",
            "COMMENT ON TABLE t IS 'People\n  who ask.'",
            "COMMENT ON COLUMN t.v IS 'What they want.'",
        )
    )
    assert document["description"] == "People who ask."
    assert document["properties"]["v"]["description"] == "What they want."
    assert document["properties"]["id"]["description"] == "Id, part of the key (no comment at the source)."
    assert document["properties"]["first_name"]["description"] == "First name (no comment at the source)."
    assert document["required"] == ["id", "v"]
    assert "pii" not in document["x-cdc"]


@pytest.mark.parametrize(
    ("statements", "key"),
    [
        (["CREATE TABLE t (a int, b text, c int, PRIMARY KEY (c, a))"], ["c", "a"]),
        (
            [
                "CREATE TABLE t (pk int PRIMARY KEY, id int NOT NULL UNIQUE)",
                "ALTER TABLE t REPLICA IDENTITY USING INDEX t_id_key",
            ],
            ["id"],
        ),
        (["CREATE TABLE t (id int PRIMARY KEY)", "ALTER TABLE t REPLICA IDENTITY FULL"], ["id"]),
        (["CREATE TABLE t (id int NOT NULL UNIQUE)", "ALTER TABLE t REPLICA IDENTITY FULL"], ["id"]),
        (
            [
                "CREATE TABLE t (id int NOT NULL, v int NOT NULL)",
                "CREATE UNIQUE INDEX i ON t (id) INCLUDE (v)",
                "ALTER TABLE t REPLICA IDENTITY USING INDEX i",
            ],
            ["id"],
        ),
    ],
)
def test_the_key_is_what_the_stream_names_rows_by(
    source: SourceUnderTest, statements: list[str], key: list[str]
) -> None:
    assert drafted(live(source, *statements))["x-cdc"]["key"] == key


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["CREATE TABLE t (id int, v text)"], ("ADD PRIMARY KEY", "USING INDEX ...", "leave it out")),
        (["CREATE TABLE t (id int NOT NULL UNIQUE)"], ('USING INDEX "t_id_key"',)),
        (["CREATE TABLE t (id int)", "ALTER TABLE t REPLICA IDENTITY FULL"], ("FULL alone is no way",)),
        (
            ["CREATE TABLE t (id int PRIMARY KEY)", "ALTER TABLE t REPLICA IDENTITY NOTHING"],
            ("REPLICA IDENTITY DEFAULT",),
        ),
        (["CREATE TABLE t (id int, PRIMARY KEY (id) DEFERRABLE)"], ("NOT DEFERRABLE",)),
        (
            ["CREATE TABLE t (id int NOT NULL)", "CREATE UNIQUE INDEX i ON t (id) WHERE id > 0"],
            ("ADD PRIMARY KEY", "USING INDEX ..."),
        ),
        (
            ["CREATE TABLE t (a int, b int GENERATED ALWAYS AS (a + 1) STORED PRIMARY KEY)"],
            ("USING INDEX",),
        ),
    ],
)
def test_a_table_whose_changes_name_no_row_is_refused_with_the_ways_out(
    source: SourceUnderTest, statements: list[str], words: tuple[str, ...]
) -> None:
    table = live(source, *statements)
    with pytest.raises(NoKey) as refused:
        drafted(table)
    assert "public.t" in refused.value.problem
    for word in words:
        assert word in refused.value.fix


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["CREATE VIEW t AS SELECT 1 AS id"], "a view"),
        (["CREATE UNLOGGED TABLE t (id int PRIMARY KEY)"], "an unlogged table"),
        (
            [
                "CREATE TABLE whole (id int PRIMARY KEY) PARTITION BY RANGE (id)",
                "CREATE TABLE t PARTITION OF whole DEFAULT",
            ],
            "under the name of public.whole",
        ),
        (['CREATE TABLE t ("the key" int PRIMARY KEY)'], "Key column 'the key'"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(
    source: SourceUnderTest, statements: list[str], words: str
) -> None:
    table = live(source, *statements)
    with pytest.raises(CannotBeCaptured, match=words):
        drafted(table)


def test_columns_that_the_lake_cannot_name_are_left_out_and_told(source: SourceUnderTest) -> None:
    table = live(
        source,
        'CREATE TABLE t ("Id" int PRIMARY KEY, "größe" text, "order-id" int, "has space" text, "a.b" text,'
        ' "window" text, "_CDC_x" text, "id" int, twice int GENERATED ALWAYS AS ("Id" * 2) STORED)',
    )
    made = draft(table, source="shop", name="t", owner="team:shop")
    assert list(made.document["properties"]) == ["Id", "größe", "order-id"]
    assert [each.column for each in made.left_out] == ["has space", "a.b", "window", "_CDC_x", "id", "twice"]
    contract_of(made.document, Path("t.json"))


def test_a_partitioned_table_is_one_table(source: SourceUnderTest) -> None:
    table = live(
        source,
        "CREATE TABLE t (id int, day date, PRIMARY KEY (day, id)) PARTITION BY RANGE (day)",
        "CREATE TABLE t_rest PARTITION OF t DEFAULT",
    )
    assert drafted(table)["x-cdc"]["key"] == ["day", "id"]


def test_every_refusal_is_one_of_ours(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE nothing ()", "CREATE TABLE only_json (v json)")
    with source.connected() as connection:
        for table in read_live_tables(connection).values():
            with pytest.raises(IngestError):
                drafted(table)
