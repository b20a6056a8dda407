"""Whether a recorded change still asks for something, by the contract and the table as it was last seen."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from omnisupport_ingest.landing.schema_changes import SchemaChange, SeenColumn, SeenTable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.schema_changes import JudgedChange, judged
from omnisupport_ingest_tests.layers.test_versions import SIZE, contract

MOOD = {"type": ["string", "null"], "x-pg-type": "mood", "enum": ["ok", None], "description": "Mood."}
CONTRACT = contract("tickets", size=SIZE, mood=MOOD)
"""With the key ``id``, and the columns ``size`` and ``mood``, both of which may be NULL."""

STRICT = replace(CONTRACT, columns=tuple(replace(each, nullable=False) for each in CONTRACT.columns))


def column(name: str, pg_type: str, *labels: str, not_null: bool = False) -> SeenColumn:
    return SeenColumn(7, name, pg_type, not_null, None, None, labels)


def table(*columns: SeenColumn, name: str = "public.tickets", key: str = "id") -> SeenTable:
    return SeenTable(1, name, columns, (key,), None)


AS_IT_WAS = table(column("size", "integer"), column("mood", "mood", "ok"))


def change(kind: str, about: str | None, before: str | None, after: str | None) -> SchemaChange:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    return SchemaChange(1, "tickets", kind, about, before, after, at, 1, Lsn(1), Lsn(2), None, None)


def asked(which: SchemaChange, now: SeenTable, *, read_again: bool = False) -> JudgedChange:
    return judged(which, CONTRACT, now, read_again=read_again)


RETYPED = change("column_retyped", "size", "integer", "text")
WIDENED = change("column_widened", "size", "integer", "bigint")
KEY = change("key_changed", None, "id", "size")
NAME = change("table_renamed", None, "public.tickets", "public.elsewhere")
ADDED = change("column_added", "extra", None, "text")
RENAMED = change("column_renamed", "size", "size", "length")
DROPPED = change("column_dropped", "size", "integer", None)
LABELS = change("enum_values_changed", "mood", "ok", "fine")


@pytest.mark.parametrize(
    ("which", "now"),
    [
        (RETYPED, table(column("size", "text"))),
        (WIDENED, table(column("size", "bigint"))),
        (KEY, table(column("size", "integer"), key="size")),
        (NAME, table(name="public.elsewhere")),
        (ADDED, table(column("extra", "text"))),
        (RENAMED, table(column("length", "integer"))),
        (DROPPED, table()),
        (LABELS, table(column("mood", "mood", "fine"))),
    ],
)
def test_a_change_asks_until_it_is_taken_back(which: SchemaChange, now: SeenTable) -> None:
    asks = asked(which, now)
    assert asks.asks and asks.edit
    back = asked(which, AS_IT_WAS)
    # What was written meanwhile came under another name, or has another value than its last event.
    left = which in (RENAMED, DROPPED)
    assert back.asks == left and ("source snapshot tickets" in back.edit) == left
    assert not asked(which, AS_IT_WAS, read_again=True).asks


def test_a_column_that_may_not_be_null_again_asks_for_nothing() -> None:
    which = change("column_nullable", "size", None, None)
    free, strict = table(column("size", "integer")), table(column("size", "integer", not_null=True))
    assert judged(which, STRICT, free, read_again=False).asks
    assert not judged(which, STRICT, strict, read_again=False).asks


def test_a_renamed_value_of_an_enum_asks_where_the_contract_lists_the_values() -> None:
    asks = asked(LABELS, table(column("mood", "mood", "fine")))
    assert (asks.compatibility, asks.asks) == ("widening", True) and "enum: add fine" in asks.edit
    listed = judged(LABELS, contract("tickets", mood=MOOD | {"enum": ["ok", "fine", None]}),
                    table(column("mood", "mood", "fine")), read_again=False)  # fmt: skip
    assert not listed.asks


@pytest.mark.parametrize(
    ("before", "after", "other_keys"),
    [("integer", "bigint", False), ("date", "timestamp without time zone", True), ("integer", "text", True)],
)
def test_another_type_of_the_key_asks_for_a_read_though_the_contract_follows(
    before: str, after: str, other_keys: bool
) -> None:
    kind = "column_widened" if after == "bigint" else "column_retyped"
    which, now = change(kind, "id", before, after), table(column("id", after))
    key = replace(CONTRACT.columns[0], name="id", pg_type=after)
    follows = replace(CONTRACT, columns=(key, *(each for each in CONTRACT.columns if each.name != "id")))
    asks = judged(which, follows, now, read_again=False)
    assert asks.asks == other_keys and ("source snapshot tickets" in asks.edit) == other_keys
    assert not judged(which, follows, now, read_again=True).asks
