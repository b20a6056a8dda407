"""What contracts learn stands beside their files, and counts until the file says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnisupport_ingest.contracts.learned import (
    LearnedColumns,
    LearnedUnreadable,
    with_learned,
)
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest_tests.layers.test_versions import DOCUMENT, NOTE, SIZE


def test_a_learned_column_is_in_force_and_raises_the_version(tmp_path: Path) -> None:
    learned = LearnedColumns(tmp_path, "desk")
    assert with_learned(tmp_path, DOCUMENT) == DOCUMENT
    learned.learn("tickets", {"note": NOTE | {"default": None}})
    learned.learn("tickets", {"note": SIZE, "size": SIZE})
    found = contract_of(with_learned(tmp_path, DOCUMENT), Path("tickets.json"))
    assert (found.version, found.column_names) == ("1.2.0", ("id", "note", "size"))
    assert found.column("note").pg_type == "text", "a line that is there stays"


def test_a_file_that_says_what_was_learned_is_the_contract_in_force(tmp_path: Path) -> None:
    LearnedColumns(tmp_path, "desk").learn("tickets", {"note": NOTE})
    in_force = with_learned(tmp_path, DOCUMENT)
    assert with_learned(tmp_path, in_force) == in_force


def test_what_other_tables_have_learned_is_not_theirs(tmp_path: Path) -> None:
    LearnedColumns(tmp_path, "desk").learn("agents", {"note": NOTE})
    LearnedColumns(tmp_path, "elsewhere").learn("tickets", {"note": NOTE})
    assert with_learned(tmp_path, DOCUMENT) == DOCUMENT


def test_a_record_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    LearnedColumns(tmp_path, "desk").learn("tickets", {"note": NOTE})
    (tmp_path / "learned" / "desk.json").write_text("{")
    with pytest.raises(LearnedUnreadable, match=r"desk\.json"):
        with_learned(tmp_path, DOCUMENT)


def test_what_the_contract_has_lost_does_not_come_back(tmp_path: Path) -> None:
    learned = LearnedColumns(tmp_path, "desk")
    learned.forget_others("tickets", ())
    learned.learn("tickets", {"note": NOTE, "size": SIZE})
    learned.learn("agents", {"note": NOTE})
    learned.forget_others("tickets", {"id", "note"})
    assert set(learned.of("tickets")) == {"note"} and set(learned.of("agents")) == {"note"}
    learned.forget_others("tickets", ())
    assert with_learned(tmp_path, DOCUMENT) == DOCUMENT
