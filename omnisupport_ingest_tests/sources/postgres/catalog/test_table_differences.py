"""Two looks at a table tell each sort of change from every other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnisupport_ingest.landing.schema_changes import KINDS, Difference, SeenColumn, SeenTable
from omnisupport_ingest.sources.postgres.catalog.table_differences import differences, type_change


def column(number: int, name: str, pg_type: str = "text", **other: object) -> SeenColumn:
    facts = {"not_null": False, "default": None, "before": None, "labels": ()} | other
    return SeenColumn(number, name, pg_type, **facts)  # type: ignore[arg-type]


ID, TITLE, STATE = (
    column(1, "id", not_null=True),
    column(2, "title"),
    column(3, "state", "plan", labels=("a", "b")),
)
TABLE = SeenTable(7, "public.tickets", (ID, TITLE, STATE), ("id",), 10)


def with_columns(*columns: SeenColumn, **other: object) -> SeenTable:
    return replace(TABLE, columns=columns, **other)  # type: ignore[arg-type]


CASES = {
    "nothing": (replace(TABLE, rows=99), []),
    "added": (with_columns(ID, TITLE, STATE, column(4, "note")), [("column_added", "note", None, "text")]),
    "added with a default": (
        with_columns(ID, TITLE, STATE, column(4, "n", "integer", default="7", before="7", not_null=True)),
        [("column_added", "n", None, "integer DEFAULT 7 NOT NULL")],
    ),
    "dropped": (with_columns(ID, STATE), [("column_dropped", "title", "text", None)]),
    "renamed": (
        with_columns(ID, replace(TITLE, name="subject"), STATE),
        [("column_renamed", "title", "title", "subject")],
    ),
    "dropped, and another added": (
        with_columns(ID, STATE, column(4, "subject")),
        [("column_dropped", "title", "text", None), ("column_added", "subject", None, "text")],
    ),
    "dropped and added again": (
        with_columns(ID, STATE, column(4, "title", "integer")),
        [("column_added_again", "title", "text", "integer")],
    ),
    "may be NULL": (
        with_columns(replace(ID, not_null=False), TITLE, STATE),
        [("column_nullable", "id", None, None)],
    ),
    "not NULL": (
        with_columns(ID, replace(TITLE, not_null=True), STATE),
        [("column_not_null", "title", None, None)],
    ),
    "enum value": (
        with_columns(ID, TITLE, replace(STATE, labels=("a", "b", "c"))),
        [("enum_value_added", "state", None, "c")],
    ),
    "enum value renamed": (
        with_columns(ID, TITLE, replace(STATE, labels=("a", "z"))),
        [("enum_values_changed", "state", "b", "z")],
    ),
    "key": (replace(TABLE, key=("id", "title")), [("key_changed", None, "id", "id, title")]),
    "key column renamed": (
        with_columns(replace(ID, name="number"), TITLE, STATE, key=("number",)),
        [("column_renamed", "id", "id", "number")],
    ),
    "table renamed": (
        replace(TABLE, name="public.cases"),
        [("table_renamed", None, "public.tickets", "public.cases")],
    ),
    "made anew": (
        replace(TABLE, relation=8, columns=(column(1, "title"), column(2, "id", not_null=True))),
        [
            ("table_made_anew", None, "public.tickets", "public.tickets"),
            ("column_dropped", "state", "plan", None),
        ],
    ),
    "gone": (None, [("table_gone", None, "public.tickets", None)]),
}


@pytest.mark.parametrize(("now", "expected"), CASES.values(), ids=CASES.keys())
def test_each_change_is_told_by_its_name(
    now: SeenTable | None, expected: list[tuple[str | None, ...]]
) -> None:
    found = list(differences(TABLE, now))
    assert found == [Difference(*each) for each in expected]  # type: ignore[arg-type]
    assert {each.kind for each in found} <= KINDS.keys()


@pytest.mark.parametrize(
    ("before", "now", "kind"),
    [
        ("integer", "bigint", "column_widened"),
        ("bigint", "integer", "column_narrowed"),
        ("integer", "numeric(12,2)", "column_widened"),
        ("numeric(12,2)", "numeric(10,2)", "column_narrowed"),
        ("numeric(12,2)", "numeric(10,4)", "column_retyped"),
        ("character varying(10)", "character varying(20)", "column_widened"),
        ("character varying(20)", "character varying(10)", "column_narrowed"),
        ("character varying(20)", "text", "column_widened"),
        ("text", "character varying(10)", "column_narrowed"),
        ("integer", "text", "column_retyped"),
        ("text", "integer", "column_retyped"),
        ("text", "uuid", "column_retyped"),
        ("timestamp without time zone", "timestamp with time zone", "column_retyped"),
    ],
)
def test_a_type_is_widened_narrowed_or_another(before: str, now: str, kind: str) -> None:
    assert type_change(before, now) == kind


@pytest.mark.parametrize(
    ("before", "now", "converted"),
    [
        ("character varying(10)", "character varying(20)", True),
        ("character varying(20)", "text", True),
        ("text", "character varying", True),
        ("numeric(10,2)", "numeric(12,2)", True),
        ("numeric(10,2)", "numeric", True),
        ("timestamp(3) without time zone", "timestamp without time zone", True),
        ("bit varying(8)", "bit varying(9)", True),
        # These write the rows anew in any case.
        ("character varying(20)", "character varying(10)", False),
        ("numeric(10,2)", "numeric(12,4)", False),
        ("integer", "bigint", False),
        ("character(3)", "character(5)", False),
        ("character varying(10)[]", "character varying(20)[]", False),
        ("timestamp(3) without time zone", "timestamp with time zone", False),
    ],
)
def test_new_files_show_an_expression_where_the_type_needs_none(
    before: str, now: str, converted: bool
) -> None:
    was = replace(TABLE, columns=(ID, column(2, "title", before)), storage="1")
    table = replace(was, columns=(ID, column(2, "title", now)), storage="2")

    def shown(table: SeenTable) -> bool:
        kinds = {each.column for each in differences(was, table) if each.kind == "column_converted"}
        assert kinds <= {"title"}
        return bool(kinds)

    assert shown(table) == converted
    assert not shown(replace(table, storage="1")), "the same files"
    assert not shown(replace(table, storage=None)), "nothing tells its files"
    assert not shown(replace(was, storage="2")), "only VACUUM FULL"
    by_row = column(3, "token", "uuid", default="gen_random_uuid()")
    assert not shown(replace(table, columns=(*table.columns, by_row))), "its default explains them"
    assert shown(replace(table, columns=(*table.columns, column(3, "note")))) == converted
