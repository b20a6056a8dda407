"""Recorded events sort by position as they were recorded, and no two are one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from omnisupport_ingest.sources.debezium.faults import LineFault
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.positions import LSN_LIMIT, SNAPSHOT_BASE, lsn_in, packed
from omnisupport_ingest_tests.sources.debezium.recorded import DEFAULTS, STRING_MODES, STRINGS, Recorder


@pytest.mark.parametrize(
    ("path", "handling", "order"), [(DEFAULTS, Handling(), "transaction"), (STRINGS, STRING_MODES, "lsn")]
)
def test_positions_sort_as_recorded_per_key_and_tell_every_event_apart(
    tmp_path: Path, path: Path, handling: Handling, order: str
) -> None:
    recorder = Recorder(tmp_path, handling=handling)
    landing = recorder.land(path)
    assert landing.manifest.file is not None
    assert landing.manifest.file.order == order
    events = recorder.events()
    apart = {(event["commit_lsn"], event["ordinal"], event["identity"]) for event in events}
    assert len(apart) == len(events)
    of_key = defaultdict(list)
    for event in events:
        of_key[event["source_table"], event["key"]].append((event["commit_lsn"], event["ordinal"]))
    assert len(of_key) > 80
    for (table, _), positions in of_key.items():
        if table != "nopk":
            assert positions == sorted(positions)
    if order == "transaction":
        changes = [event for event in events if event["op"] != "r"]
        assert len({(event["commit_lsn"], event["ordinal"]) for event in changes}) == len(changes)
        assert {event["identity"] for event in changes} == {None}
        assert [(each["commit_lsn"], each["ordinal"]) for each in changes] == sorted(
            (each["commit_lsn"], each["ordinal"]) for each in changes
        )


def test_rows_of_the_first_snapshot_stand_below_every_change(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.land(DEFAULTS)
    events = recorder.events()
    rows = [event["ordinal"] for event in events if event["op"] == "r"]
    assert len(rows) == 7
    assert max(rows) < 0 <= min(event["ordinal"] for event in events if event["op"] != "r")


def test_the_old_row_of_a_key_change_stands_just_below_the_new_one(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.land(DEFAULTS)
    events = recorder.events()
    moved = [event for event in events if event["moved_from_key"] is not None]
    assert {(event["source_table"], event["key"]) for event in moved} >= {
        ("customers", '["11"]'),
        ("toasty", '["2"]'),
        ("compkey", '["1","y"]'),
        ("uidx", '["2"]'),
    }
    for event in moved:
        below = [
            each
            for each in events
            if (each["commit_lsn"], each["ordinal"]) == (event["commit_lsn"], event["ordinal"] - 1)
        ]
        assert [(each["op"], each["key"]) for each in below] == [("d", event["moved_from_key"])]


def test_an_ordinal_gives_its_lsn_back() -> None:
    assert lsn_in(packed(2479968400, 3)) == 2479968400
    assert lsn_in(packed(2479968400, None) + SNAPSHOT_BASE) == 2479968400
    assert packed(LSN_LIMIT - 1, (1 << 14) - 1) == (1 << 63) - 1


@pytest.mark.parametrize("lsn", [LSN_LIMIT, -1])
def test_an_lsn_without_room_in_a_position_is_refused(lsn: int) -> None:
    with pytest.raises(LineFault, match="49 bits"):
        packed(lsn, None)
