"""Whether a recorded change still asks for something, by the contract and the table as it was last seen."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from omnisupport_ingest.contracts.sources import SourceKind
from omnisupport_ingest.landing.schema_changes import SchemaChange, SeenColumn, SeenTable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.schema_changes import JudgedChange, judged
from omnisupport_ingest_tests.layers import test_versions
from omnisupport_ingest_tests.layers.test_versions import NOTE, SIZE, contract

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
ROUNDED = change("column_retyped", "size", "integer", "real")
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
        (ROUNDED, table(column("size", "real"))),
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
    left = which in (RENAMED, DROPPED, ROUNDED, LABELS)
    assert back.asks == left and ("source snapshot tickets" in back.edit) == left
    assert not asked(which, AS_IT_WAS, read_again=True).asks


def test_a_rename_asks_for_a_read_once_the_contract_follows() -> None:
    follows = contract("tickets", length=SIZE, mood=MOOD)
    now = table(column("length", "integer"), column("mood", "mood", "ok"))
    asks = judged(RENAMED, follows, now, read_again=False)
    assert asks.asks and asks.edit == "omnisupport-ingest source snapshot tickets"
    assert not judged(RENAMED, follows, now, read_again=True).asks
    neither = contract("tickets", mood=MOOD)
    assert not judged(RENAMED, neither, now, read_again=False).asks, "only raw has it"


def test_a_rename_asks_for_the_column_where_another_has_its_former_name() -> None:
    now = table(column("length", "integer"), column("size", "integer"))
    for read_again in (False, True):
        asks = asked(RENAMED, now, read_again=read_again)
        assert asks.asks and "add length under properties" in asks.edit
    both = contract("tickets", size=SIZE, length=SIZE)
    assert "source snapshot tickets" in judged(RENAMED, both, now, read_again=False).edit


AGAIN = change("column_added_again", "size", "integer", "text")


@pytest.mark.parametrize("which", [AGAIN, DROPPED])
def test_a_column_that_came_back_with_another_type_asks_for_that_first(which: SchemaChange) -> None:
    dated = table(column("size", "date"))
    for read_again in (False, True):
        asks = asked(which, dated, read_again=read_again)
        assert asks.asks and '"x-pg-type": "date"' in asks.edit
    assert "source snapshot tickets" in asked(which, AS_IT_WAS).edit


def test_a_table_that_is_gone_is_withdrawn_by_its_command() -> None:
    gone = asked(change("table_gone", None, "public.tickets", None), AS_IT_WAS)
    assert gone.asks and "omnisupport-ingest contracts withdraw tickets" in gone.edit


def test_a_column_that_may_not_be_null_again_asks_for_nothing() -> None:
    which = change("column_nullable", "size", None, None)
    free, strict = table(column("size", "integer")), table(column("size", "integer", not_null=True))
    assert judged(which, STRICT, free, read_again=False).asks
    assert not judged(which, STRICT, strict, read_again=False).asks


@pytest.mark.parametrize(("after", "labels"), [("fine", ("fine",)), (None, ("good",))])
def test_a_value_of_an_enum_that_is_renamed_or_removed_asks_for_the_contract_and_then_for_a_read(
    after: str | None, labels: tuple[str, ...]
) -> None:
    """Rows keep the text that their last event had: nothing is sent of what the server made of it."""
    which = change("enum_values_changed", "mood", "ok", after)
    now = table(column("mood", "mood", *labels))
    for read_again in (False, True):
        asks = asked(which, now, read_again=read_again)
        assert (asks.compatibility, asks.asks) == ("breaking", True)
        assert f"enum: add {labels[0]}" in asks.edit
    for values in ({"enum": ["ok", *labels, None]}, {}):
        unlisted = {name: each for name, each in MOOD.items() if name != "enum"}
        follows = contract("tickets", mood=unlisted | values)
        asks = judged(which, follows, now, read_again=False)
        assert (asks.compatibility, asks.edit) == ("breaking", "omnisupport-ingest source snapshot tickets")
        assert not judged(which, follows, now, read_again=True).asks
        assert not judged(which, follows, now, read_again=False, kind=SourceKind.FILES).asks


def test_a_column_that_an_expression_converted_asks_for_a_read() -> None:
    which = change("column_converted", "size", None, None)
    asks = asked(which, AS_IT_WAS)
    assert (asks.compatibility, asks.edit) == ("breaking", "omnisupport-ingest source snapshot tickets")
    assert not asked(which, AS_IT_WAS, read_again=True).asks


def test_a_column_whose_older_rows_are_unresolved_asks_for_a_read_once_the_contract_has_it() -> None:
    now = table(column("extra", "text"))

    def asks(line: dict[str, object], **pii: dict[str, str]) -> str:
        follows = contract("tickets", extra=NOTE | line, pii=pii)
        found = judged(ADDED, follows, now, read_again=False)
        assert found.compatibility == "additive" and bool(found.edit) == found.asks
        assert not judged(ADDED, follows, now, read_again=True).asks
        assert not judged(ADDED, follows, now, read_again=False, kind=SourceKind.FILES).asks
        assert not judged(ADDED, follows, table(), read_again=False).asks, "it is gone again"
        return found.edit

    read = "omnisupport-ingest source snapshot tickets"
    assert asks({}) == read
    assert asks({"default": None}) == asks({"default": "low"}) == ""
    hashed = {"policy": "hash", "note": "Nobody needs it."}
    assert asks({"default": "low"}, extra=hashed) == read, "the lake leaves that default out"
    assert asks({"default": None}, extra=hashed) == asks({}, extra=test_versions.DROPPED) == ""


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


@pytest.mark.parametrize(
    ("before", "after", "altered"),
    [
        ("numeric", "integer", True),
        ("numeric(10,2)", "numeric(10,1)", True),
        ("numeric", "numeric(10,2)", True),
        ("numeric(10,2)", "numeric(12,2)", False),
        ("numeric(10,2)", "numeric", False),
        ("bigint", "integer", False),
        ("integer", "bigint", False),
        ("integer", "numeric", False),
        ("numeric(10,2)", "text", False),
        ("uuid", "text", False),
        ("double precision", "text", True),
        ("boolean", "text", True),
        ("real", "double precision", True),
        ("double precision", "real", True),
        ("timestamp without time zone", "timestamp(0) without time zone", True),
        ("text", "character(8)", True),
        ("text", "character varying(3)", True),
        ("character varying(9)", "character varying(3)", True),
        ("character varying(3)", "character varying(9)", False),
        ("character varying(3)", "text", False),
        ("integer", "numeric(12,0)", False),
        ("bigint", "numeric(20,2)", False),
        ("integer", "numeric(10,-2)", True),
        ("character varying(10)[]", "character varying(20)[]", False),
        ("character varying(20)[]", "character varying(10)[]", True),
        ("integer[]", "bigint[]", False),
        ("integer[]", "text", True),
        ("timestamp(3) without time zone", "timestamp without time zone", False),
        ("timestamp(3) with time zone", "timestamp(6) with time zone", False),
        ("timestamp(3) without time zone", "timestamp(6) with time zone", True),
        ("time(3) without time zone", "timestamp(6) without time zone", True),
        ("time without time zone", "time(0) without time zone", True),
        ("bit varying(8)", "bit varying", False),
        ("bit varying(8)", "bit varying(4)", True),
    ],
)
def test_a_type_that_may_alter_stored_values_asks_for_a_read_until_the_table_was_read(
    before: str, after: str, altered: bool
) -> None:
    """The contract says the present type already: only the read is missing."""
    now = table(column("size", after))
    mine = replace(
        CONTRACT,
        columns=tuple(
            replace(each, pg_type=after) if each.name == "size" else each for each in CONTRACT.columns
        ),
    )
    for kind in ("column_narrowed", "column_widened", "column_retyped"):
        found = judged(change(kind, "size", before, after), mine, now, read_again=False)
        assert found.asks == altered
        assert ("source snapshot tickets" in found.edit) == altered
        assert not judged(change(kind, "size", before, after), mine, now, read_again=True).asks
        files = judged(
            change(kind, "size", before, after), mine, now, read_again=False, kind=SourceKind.FILES
        )
        assert not files.asks, "nobody can read them again here"


@pytest.mark.parametrize("kind", [SourceKind.FILES, SourceKind.KAFKA])
def test_rows_that_wait_for_their_contract_are_named_with_the_command_that_lets_them_in(
    kind: SourceKind,
) -> None:
    blocked = replace(CONTRACT, evolution="block")
    now = table(column("extra", "text"))
    for each, more in ((ADDED, "; its rows wait in quarantine until then"), (DROPPED, "")):
        found = judged(each, blocked, now, read_again=False, kind=kind)
        assert found.asks and found.edit == f"omnisupport-ingest contracts propose tickets --write{more}"
    follows = replace(blocked, columns=CONTRACT.columns[:1], optional_columns=("extra", "size"))
    for each in (ADDED, DROPPED):
        assert not judged(each, follows, now, read_again=False, kind=kind).asks
