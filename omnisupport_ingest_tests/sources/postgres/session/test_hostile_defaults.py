"""Whatever a database and a role have as defaults: what we write and read means what it always means."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.pg_types import PgType
from omnisupport_ingest.sources.postgres.session.connection import (
    QUOTING_SETTINGS,
    VALUE_SETTINGS,
    connect,
    connect_replication,
)
from omnisupport_ingest.sources.postgres.session.quoting import NotQuotable, identifier, literal
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

HOSTILE = {
    "standard_conforming_strings": "off",
    "backslash_quote": "on",
    "quote_all_identifiers": "on",
    "search_path": "evil, pg_catalog",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kolkata",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "xmlbinary": "hex",
    "xmloption": "document",
    "statement_timeout": "1",
}
TEXTS = (
    r"back\slash",
    r"\'; DROP TABLE notes; --",
    "it''s",
    r"ends in \\",
    "\\",
    "ünïcode \U0001f600",
    "\n\t\r",
    "%s",
)
VALUES = (
    "timestamptz '2026-03-04 05:06:07.891+02'",
    "date '2026-12-11'",
    "interval '1 mon -2 days 03:04:05'",
    "float8 '0.1' + float8 '0.2'",
    r"bytea '\x00ff5c27'",
    "'public.mood'::regtype",
    "'public.notes'::regclass",
    "format_type('public.mood'::regtype, -1)",
    "ARRAY[NULL, 'NULL']",
)


@pytest.fixture
def hostile(source: SourceUnderTest) -> Iterator[SourceUnderTest]:
    """A database whose every default is another, with a function that stands in front of PostgreSQL's own."""
    ((role,),) = source.query("SELECT current_user")
    source.sql(
        "CREATE SCHEMA evil",
        "CREATE TYPE public.mood AS ENUM ('glad', 'sad')",
        "CREATE TABLE public.notes (id text PRIMARY KEY, v text, m public.mood, at timestamptz)",
        "CREATE FUNCTION evil.format_type(oid, int) RETURNS text LANGUAGE sql AS $$ SELECT 'evil' $$",
        "CREATE FUNCTION evil.lower(text) RETURNS text LANGUAGE sql AS $$ SELECT 'evil' $$",
    )
    for name, value in HOSTILE.items():
        quoted = value if name == "search_path" else f"'{value}'"
        source.sql(f"ALTER DATABASE {source.slot} SET {name} = {quoted}")
        source.sql(f"ALTER ROLE {role} IN DATABASE {source.slot} SET {name} = {quoted}")
    yield source


@pytest.mark.parametrize("opened", [connect, connect_replication])
def test_what_is_pinned_is_pinned_on_every_kind_of_connection(
    hostile: SourceUnderTest, opened: Callable[[str], Connection]
) -> None:
    with closing(opened(hostile.dsn)) as connection, connection.cursor() as cursor:
        for name, value in (VALUE_SETTINGS | QUOTING_SETTINGS).items():
            cursor.execute(f"SELECT current_setting('{name}')")
            assert cursor.fetchone()[0].split(",")[0] == value, name


def test_every_literal_and_canonical_text_is_that_of_a_plain_server(hostile: SourceUnderTest) -> None:
    told = []
    for opened in (connect, connect_replication):
        with closing(opened(hostile.dsn)) as connection, connection.cursor() as cursor:
            for text in TEXTS:
                cursor.execute(f"SELECT {literal(text)}")
                assert cursor.fetchone() == (text,)
            cursor.execute(
                "SELECT lower('X'), CAST('{NULL}' AS text[]) IS NOT DISTINCT FROM ARRAY[NULL::text]"
            )
            assert cursor.fetchone() == ("x", True)
            cursor.execute(f"SELECT {', '.join(f'({each})::text' for each in VALUES)}")
            told.append(cursor.fetchone())
    assert (
        told[0]
        == told[1]
        == (
            "2026-03-04 03:06:07.891+00",
            "2026-12-11",
            "1 mon -2 days +03:04:05",
            "0.30000000000000004",
            "\\x00ff5c27",
            "mood",
            "notes",
            "mood",
            '{NULL,"NULL"}',
        )
    )


def test_table_with_keys_full_of_backslashes_is_read_in_chunks_and_followed(hostile: SourceUnderTest) -> None:
    hostile.overrides["snapshot_chunk_rows"] = 2
    with hostile.connected() as connection, connection.cursor() as cursor:
        for text in TEXTS:
            cursor.execute(
                "INSERT INTO notes VALUES (%s, %s, 'glad', '2026-01-02 03:04:05+00')", (text, text)
            )
    hostile.tables.append(contract("notes", ("id", "v", "m", "at")))
    hostile.catch_up()
    assert len([each for each in hostile.manifests() if each.chunk]) > 3
    hostile.sql(
        "UPDATE notes SET m = 'sad', at = at + interval '1 hour'", "DELETE FROM notes WHERE id = '\\'"
    )
    hostile.catch_up()
    rows = {json.dumps([key], ensure_ascii=True): row for key, row in _rows(hostile).items()}
    assert folded(hostile.events(), "notes") == rows and len(rows) == len(TEXTS) - 1


def _rows(source: SourceUnderTest) -> dict[str, dict[str, str | None]]:
    found = source.query("SELECT id, v, m::text, at::text FROM notes")
    return {row[0]: dict(zip(("id", "v", "m", "at"), row, strict=True)) for row in found}


def test_citext_of_any_schema_is_what_it_is_without_one() -> None:
    for name in ("citext", "citext[]"):
        assert PgType.parse(f"app.{name}") == PgType.parse(name)
    assert PgType.parse("app.other[]") != PgType.parse("citext[]")


@given(st.text(max_size=20), st.sampled_from(["\0", "\ud800", "\udfff"]), st.text(max_size=20))
def test_what_postgresql_cannot_hold_is_refused_and_not_repeated(before: str, bad: str, after: str) -> None:
    for quote in (identifier, literal):
        with pytest.raises(NotQuotable) as refused:
            quote(before + bad + after)
        assert bad not in str(refused.value)
    with pytest.raises(NotQuotable):
        identifier("")
