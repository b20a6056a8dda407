"""What is said of the slot that a pass leaves."""

from __future__ import annotations

from omnisupport_ingest.cli.slot_left import SlotLeft, slot_left
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


def test_the_slot_that_capture_left_is_told_with_the_wal_that_it_holds(source: SourceUnderTest) -> None:
    assert slot_left(source.settings, source.home) is None
    source.sql("CREATE TABLE notes (id int PRIMARY KEY)")
    source.tables.append(contract("notes", ["id"]))
    source.catch_up()
    before = slot_left(source.settings, source.home)
    source.sql("INSERT INTO notes SELECT generate_series(1, 20000)")
    after = slot_left(source.settings, source.home)
    assert before is not None
    assert after is not None
    assert (after.name, after.safe_bytes is not None) == (source.slot, True)
    assert after.retained_bytes > before.retained_bytes + 1_000_000


def test_without_a_limit_the_danger_is_named() -> None:
    told = SlotLeft("mine", 3 * 1024**3, None).told
    assert "3.0 GB now" in told
    assert "sets no limit" in told
    assert "omnisupport-ingest source drop" in told
    assert "After 5 MB more" in SlotLeft("mine", 10, 5 * 1024**2).told
