"""Copies of events that raw holds: which are duplicates, which are not judged yet."""

from __future__ import annotations

from datetime import UTC, datetime

from omnisupport_ingest.read.cell_origins import KeyEvent
from omnisupport_ingest.read.explain import copies_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
KEY, OTHER = '["1"]', '["2"]'


def event(lsn: int, batch: str) -> KeyEvent:
    return KeyEvent("w", (1, lsn, 0), "u", KEY, NOON, batch, NOON)


def raw(lsn: int, batch: str, key: str = KEY, identity: str | None = None) -> tuple[str, dict[str, object]]:
    facts = {"epoch": 1, "commit_lsn": lsn, "ordinal": 0, "identity": identity, "key": key}
    return "w", facts | {"batch_id": batch, "landed_at": NOON}


def told(*rows: tuple[str, dict[str, object]]) -> list[tuple[int, str, bool, int]]:
    copies = copies_of(KEY, [event(10, "a")], rows)
    return [(each.position[1], each.batch_id, each.duplicate, each.copies) for each in copies]


def test_the_event_that_is_kept_is_no_copy() -> None:
    assert told(raw(10, "a")) == []


def test_the_same_position_from_another_batch_or_twice_in_one_is_a_duplicate() -> None:
    assert told(raw(10, "a"), raw(10, "b"), raw(10, "a")) == [(10, "a", True, 1), (10, "b", True, 1)]


def test_an_event_at_a_position_that_no_layer_has_is_not_judged_yet() -> None:
    assert told(raw(10, "a"), raw(20, "c")) == [(20, "c", False, 1)]


def test_a_copy_is_known_by_its_position_whatever_became_of_its_key() -> None:
    assert told(raw(10, "a", "protected"), raw(10, "b", "protected")) == [(10, "b", True, 1)]
    assert told(raw(10, "a"), raw(20, "b", OTHER)) == []


def test_where_positions_are_not_unique_the_key_tells_events_apart() -> None:
    assert told(raw(10, "a", identity="1 u"), raw(10, "a", OTHER, identity="2 u")) == []
