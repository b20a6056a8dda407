"""Our events in Debezium's envelope, held against events recorded from a real Debezium.

``data/debezium.jsonl`` has one value per operation, written by Debezium 3.6.3 from PostgreSQL 15.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.landing.debezium_envelope import OPERATIONS, UNAVAILABLE, Origin, envelope
from omnisupport_ingest.landing.rows import LandedEvent

RECORDED = [
    json.loads(line) for line in (Path(__file__).parent / "data" / "debezium.jsonl").read_text().splitlines()
]
COMMITTED = datetime(2026, 3, 2, 12, 0, 0, 123456, tzinfo=UTC)
LANDED = datetime(2026, 3, 2, 12, 0, 5, 654321, tzinfo=UTC)
ORIGIN = Origin("0.1.0", "postgresql", "desk", "samples", LANDED)


def event(op: str, **fields: Any) -> LandedEvent:
    """An event of ``customers`` as capture lands it."""
    base: dict[str, Any] = {
        "epoch": 1,
        "commit_lsn": 2479968760,
        "ordinal": 0,
        "op": op,
        "source_ts": COMMITTED,
        "tx_id": None if op == "r" else 21403,
        "lsn": None if op == "r" else 2479968700,
        "source_schema": "" if op == "m" else "public",
        "source_table": "" if op == "m" else "customers",
        "key": None if op in "tm" else '["1"]',
        "before": '{"id":"1"}' if op == "d" else None,
        "after": '{"id":"1","name":"Ana"}' if op in "cur" else None,
        "unchanged": None,
        "moved_from_key": None,
        "chunk_id": None,
    }
    if op == "m":
        base["after"] = '{"prefix":"app.outbox","content":"aGk="}'
    return LandedEvent(**base | fields)


def kinds(value: Any) -> Any:
    """The JSON types of ``value``, member by member, without the columns of row images."""
    if not isinstance(value, dict):
        return type(value).__name__
    return {
        name: ("row" if inner is not None else "NoneType")
        if name in ("before", "after")
        else "anything"
        if name == "transaction"
        else kinds(inner)
        for name, inner in value.items()
    }


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['op']}-{each['source']['table']}")
def test_every_operation_has_the_members_and_types_of_the_recorded_one_in_their_order(
    recorded: dict[str, Any],
) -> None:
    ours = envelope(event(recorded["op"]), ORIGIN)
    assert list(ours) == list(recorded)
    assert list(ours["source"]) == list(recorded["source"])
    found, expected = kinds(ours), kinds(recorded)
    # A snapshot row of ours belongs to no transaction; Debezium names its own.
    if recorded["op"] == "r":
        del found["source"]["txId"], expected["source"]["txId"]
    assert found == expected


def test_the_recorded_sample_has_every_operation() -> None:
    assert {each["op"] for each in RECORDED} == OPERATIONS


def test_a_column_that_was_not_sent_is_marked_as_debezium_marks_it() -> None:
    toasted = next(each for each in RECORDED if each["source"]["table"] == "toasty")
    assert toasted["after"]["big"] == UNAVAILABLE
    ours = envelope(event("u", after='{"id":"1","small":"v1"}', unchanged=["big"]), ORIGIN)
    assert ours["after"] == {"id": "1", "small": "v1", "big": UNAVAILABLE}


def test_times_and_positions_are_those_of_commit_and_landing() -> None:
    ours = envelope(event("u"), ORIGIN)
    assert ours["source"]["ts_us"] == 1772452800123456
    assert (ours["source"]["ts_ms"], ours["ts_ms"]) == (1772452800123, 1772452805654)
    assert json.loads(ours["source"]["sequence"]) == ["2479968760", "2479968700"]


def test_a_snapshot_row_stands_at_the_point_of_its_snapshot() -> None:
    recorded = next(each for each in RECORDED if each["op"] == "r")
    ours = envelope(event("r"), ORIGIN)
    assert json.loads(recorded["source"]["sequence"]) == [None, str(recorded["source"]["lsn"])]
    assert json.loads(ours["source"]["sequence"]) == [None, str(ours["source"]["lsn"])]
    assert ours["source"]["snapshot"] == "true"


def test_the_old_row_of_a_key_change_stands_in_its_delete_alone() -> None:
    old = '{"id":"1"}'
    deleted = envelope(event("d", before=old), ORIGIN)
    created = envelope(event("c", ordinal=1, before=old, moved_from_key='["1"]'), ORIGIN)
    assert (deleted["before"], deleted["after"]) == ({"id": "1"}, None)
    assert (created["before"], created["after"]) == (None, {"id": "1", "name": "Ana"})


def test_a_row_of_a_file_has_no_position_in_any_log() -> None:
    ours = envelope(event("r", commit_lsn=0), Origin("0.1.0", "file", "files", "", LANDED))
    assert (ours["source"]["lsn"], ours["source"]["sequence"], ours["source"]["connector"]) == (
        None,
        None,
        "file",
    )


def test_a_boundary_has_no_debezium_form() -> None:
    with pytest.raises(ValueError, match="no operation 'b'"):
        envelope(event("b"), ORIGIN)
