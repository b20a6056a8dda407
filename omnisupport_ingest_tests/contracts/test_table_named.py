"""A person may call a table as the lake does or as the source does; every command understands both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.load import TableContract, load_contract
from omnisupport_ingest.contracts.model import UnknownTable, table_named

TICKETS = load_contract(program_file("contracts/data/tickets.json"))


def contract(name: str, schema: str, table: str, source: str = "shop") -> TableContract:
    return replace(TICKETS, name=name, schema=schema, table=table, source=source)


ODD = contract("Odd_Table", "public", "Odd Table")
QUOTED = contract("say_hi", "public", 'say "hi"')
UPPER = contract("ORDERS", "sales", "ORDERS")
LINES = contract("lines", "sales", "lines")
OTHER_LINES = contract("archive_lines", "archive", "lines")
ELSEWHERE = contract("lines", "public", "lines", source="desk")
ALL = (ODD, QUOTED, UPPER, LINES, OTHER_LINES)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Odd_Table", ODD),
        ("shop.Odd_Table", ODD),
        ("Odd Table", ODD),
        ('"Odd Table"', ODD),
        ('public."Odd Table"', ODD),
        ("public.Odd Table", ODD),
        ('"public"."Odd Table"', ODD),
        ("odd table", ODD),
        ('say "hi"', QUOTED),
        ('"say ""hi"""', QUOTED),
        ("ORDERS", UPPER),
        ("orders", UPPER),
        ("sales.orders", UPPER),
        # Of several that are called so at the source, the one that the lake calls so.
        ("lines", LINES),
        ("sales.lines", LINES),
        ("archive.lines", OTHER_LINES),
    ],
)
def test_a_table_is_found_by_its_name_in_the_lake_and_at_the_source(text: str, meant: TableContract) -> None:
    assert table_named(text, ALL) is meant


def test_a_name_of_several_tables_is_answered_with_each() -> None:
    with pytest.raises(UnknownTable, match="one of several") as refused:
        table_named("lines", (LINES, ELSEWHERE))
    assert "shop.lines (sales.lines), desk.lines (public.lines)" in refused.value.fix
    assert table_named("desk.lines", (LINES, ELSEWHERE)) is ELSEWHERE
    assert refused.value.exit_code == 2


@pytest.mark.parametrize("text", ["", "Odd", "nothing", "public.", '"'])
def test_a_name_of_no_table_is_answered_with_those_there_are(text: str) -> None:
    with pytest.raises(UnknownTable) as refused:
        table_named(text, ALL)
    assert "shop.Odd_Table" in refused.value.fix
