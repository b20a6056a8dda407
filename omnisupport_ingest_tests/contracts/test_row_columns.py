"""Which columns a row may and must have where its contract says ``block``, and whose rows that is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.learned import LearnedColumns, with_learned
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.contracts.row_columns import MOST_NAMED, RowColumns
from omnisupport_ingest.contracts.sources import SourceDefinition, SourceKind
from omnisupport_ingest_tests.layers.test_versions import DOCUMENT, NOTE, SIZE


def contract(evolution: str = "block", *optional: str, **columns: dict[str, Any]) -> TableContract:
    return contract_of(document(evolution, *optional, **columns), Path("tickets.json"))


def document(evolution: str, *optional: str, **columns: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(DOCUMENT))
    made["properties"] |= columns
    made["x-cdc"] |= {"evolution": evolution, "optional_columns": list(optional)}
    return made


def mismatches(of: TableContract, *columns: str, bare: bool = False) -> list[str]:
    return RowColumns.of(of, bare=bare).mismatches(columns)


def test_a_row_has_every_column_of_its_contract_and_no_other_one() -> None:
    strict = contract(note=NOTE, size=SIZE)
    assert mismatches(strict, "size", "note", "id") == []
    assert mismatches(strict, "id", "size", "more", "any") == [
        "any:unknown_column", "more:unknown_column", "note:missing_column",
    ]  # fmt: skip


def test_an_optional_column_may_be_there_or_not_and_a_bare_row_may_leave_out_any() -> None:
    loose = contract("block", "note", "gone", note=NOTE, size=SIZE)
    assert mismatches(loose, "id", "size") == mismatches(loose, "id", "size", "note", "gone") == []
    assert mismatches(loose, "id") == ["size:missing_column"]
    assert mismatches(loose, "id", "more", bare=True) == ["more:unknown_column"]


def test_names_that_a_foreign_row_has_fit_into_a_message() -> None:
    names = mismatches(contract(), "id", "a\n\x1b[2J", "half \ud800", "x" * 9_000, *map(str, range(9_000)))
    assert len(names) == MOST_NAMED
    assert mismatches(contract(), "id", "a\n\x1b[2J", "half \ud800", "x" * 9_000) == [
        "a��[2J:unknown_column", "half �:unknown_column", f"{'x' * 200}:unknown_column",
    ]  # fmt: skip


def test_a_column_with_a_default_may_be_missing_as_rows_from_before_are_without_it() -> None:
    assert mismatches(contract(note=NOTE | {"default": None}), "id") == []


def test_a_column_that_was_learned_before_the_contract_said_block_is_optional(tmp_path: Path) -> None:
    LearnedColumns(tmp_path, "desk").learn("tickets", {"note": NOTE})
    learned = contract_of(with_learned(tmp_path, document("block", size=SIZE)), Path("tickets.json"))
    assert mismatches(learned, "id", "size") == mismatches(learned, "id", "size", "note") == []


@pytest.mark.parametrize(
    ("kind", "evolution", "held"),
    [
        (SourceKind.FILES, "block", True),
        (SourceKind.KAFKA, "block", True),
        (SourceKind.FILES, "additive", False),
        (SourceKind.KAFKA, "pinned", False),
        (SourceKind.LOG, "block", False),
        (SourceKind.QUERY, "block", False),
    ],
)
def test_rows_of_events_and_files_are_held_to_their_columns_under_block_alone(
    kind: SourceKind, evolution: str, held: bool
) -> None:
    found = SourceDefinition("desk", kind, "A desk.").row_columns([contract(evolution)])
    assert set(found) == ({("public", "tickets")} if held else set())


def test_whether_rows_come_bare_says_their_source() -> None:
    bare = SourceDefinition("desk", SourceKind.KAFKA, "A desk.", events={"bare_rows": True})
    (columns,) = bare.row_columns([contract(note=NOTE)]).values()
    assert not columns.required


def test_other_columns_are_another_version_even_if_no_rule_names_them() -> None:
    plain, noted = contract(), contract(note=NOTE)
    assert plain.judged_by == noted.judged_by
    found = {
        RowColumns.of(each, bare=bare).version(each.judged_by)
        for each in (plain, noted, contract("block", "note", note=NOTE))
        for bare in (False, True)
    }
    assert len(found) == 5, "of bare rows no column is required, so an optional one is the same"
