"""Under which name an image has the value of a column that was renamed."""

from __future__ import annotations

from datetime import UTC, datetime

from omnisupport_ingest.landing.schema_changes import SchemaChange
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.column_names import ColumnNames


def renamed(before: str, after: str, above: int, first_commit: int | None, look: int = 0) -> SchemaChange:
    noticed = datetime(2026, 1, 1, 12, look, tzinfo=UTC)
    commit = None if first_commit is None else Lsn(first_commit)
    place = (noticed, 1, Lsn(above), Lsn(above + 10), commit, None)
    return SchemaChange(look + 1, "notes", "column_renamed", after, before, after, *place)


def test_a_column_that_was_never_renamed_has_its_own_name() -> None:
    names = ColumnNames([], ["n"])
    assert names.value({"n": "1"}, "n", (1, 5, 0)) == "1"
    assert names.value({"m": "1"}, "n", (1, 5, 0)) is None and names.now("n") == "n"


def test_a_value_is_found_under_each_name_in_its_time() -> None:
    names = ColumnNames([renamed("a", "b", 100, 120), renamed("b", "c", 200, None, 1)], ["c"])
    for name, lsn in (("a", 50), ("b", 150), ("b", 205), ("c", 205), ("c", 300)):
        assert [names.value({name: "1"}, each, (1, lsn, 0)) for each in "abc"] == ["1"] * 3, (name, lsn)
    assert {names.now(each) for each in "abc"} == {"c"}
    # A row that a snapshot read stands below the change, with the later name.
    assert names.value({"b": "1"}, "c", (1, 90, -5)) == "1"


def test_columns_that_swapped_their_names_are_told_apart_by_the_time() -> None:
    names = ColumnNames([renamed("a", "b", 100, 120), renamed("b", "a", 100, 120)], ["a", "b"])
    image = {"a": "1", "b": "2"}
    assert [names.value(image, "b", (1, lsn, 0)) for lsn in (50, 120)] == ["1", "2"]
    assert [names.value(image, "a", (1, lsn, 0)) for lsn in (50, 120)] == ["2", "1"]
    assert names.value(image, "a", (0, 500, 0)) == "2", "an earlier epoch is before every change of a later"


def test_a_new_column_with_the_former_name_of_another_is_another_column() -> None:
    names = ColumnNames([renamed("a", "b", 100, 120)], ["a", "b"])
    assert names.value({"a": "2", "b": "1"}, "a", (1, 130, 0)) == "2"
    assert names.value({"a": "1"}, "b", (1, 50, 0)) == "1" and names.now("a") == "a"
