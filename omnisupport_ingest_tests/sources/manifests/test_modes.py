"""Deliveries of rows in any order and mode: the newest version counts, and nothing lands twice."""

from __future__ import annotations

import itertools
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.sources.debezium.land import Inlet as EventInlet
from omnisupport_ingest.sources.manifests.examine import SeedRefused
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import load_manifest
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    CONTRACTS,
    GRID,
    MANIFESTS,
    NOW,
    delivery,
    events,
    inlet,
    ticket,
)

AS_OF = "2026-04-18T12:00:00Z"


def newest(inlet: Inlet) -> dict[str, str]:
    """The newest version of each row that has landed and has not ended, by position: key → subject."""
    found: dict[str, tuple[int, str]] = {}
    ended = -(1 << 63)
    for event in events(inlet):
        if event["op"] == "b":
            ended = max(ended, event["ordinal"])
        elif event["key"] is not None and found.get(event["key"], (ended, ""))[0] <= event["ordinal"]:
            found[event["key"]] = event["ordinal"], json.loads(event["after"])["subject"]
    return {json.loads(key)[0][-1]: subject for key, (at, subject) in found.items() if at > ended}


STEPS: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
    ("full_snapshot", [ticket(1, subject="whole"), ticket(2, subject="whole")], {"as_of": AS_OF}),
    ("incremental_cursor", [ticket(2, "2026-04-18 13:00:00+00", subject="changed")], {}),
    (
        "backfill",
        [
            ticket(1, "2026-04-17 09:00:00+00", subject="older"),
            ticket(2, "2026-04-18 12:30:00+00", subject="older"),
            ticket(3, "2026-04-18 11:59:00+00", subject="gone"),
            ticket(4, "2026-04-18 12:01:00+00", subject="new"),
        ],
        {},
    ),
]


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
def test_whatever_order_deliveries_come_in_the_newest_version_counts(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    into = inlet(tmp_path)
    for number in order:
        mode, rows, more = STEPS[number]
        land(delivery(tmp_path, mode, rows, name=f"{mode}.jsonl", **more), into)
    assert newest(into) == {"1": "whole", "2": "changed", "4": "new"}


def test_only_an_incremental_delivery_moves_the_watermark(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    (first,) = land(delivery(tmp_path, "incremental_cursor", [ticket(1)], as_of=AS_OF), into).batches
    assert first.arrival.watermark == datetime.fromisoformat(AS_OF)
    (late,) = land(
        delivery(tmp_path, "backfill", [ticket(2, "2026-04-17 09:00:00+00")], name="late.csv"), into
    ).batches
    assert late.arrival.watermark == late.arrival.watermark_before == first.arrival.watermark
    assert late.windows == ("2026-04-17T0900",)


def test_a_table_that_is_again_what_it_was_lands_again_if_it_says_when(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    for hour, subject in (("10", "a"), ("11", "b"), ("12", "a")):
        seed = delivery(
            tmp_path, "full_snapshot", [ticket(1, subject=subject)], as_of=f"2026-04-18T{hour}:00:00Z"
        )
        assert not land(seed, into).already_landed
        assert land(seed, into).already_landed
    assert newest(into) == {"1": "a"}


def test_a_row_that_waited_lands_when_its_manifest_is_corrected(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    seed = delivery(
        tmp_path, "incremental_cursor", [ticket(1), ticket(2)], count=7, gates={"row_count": "quarantine"}
    )
    assert land(seed, into).examined.kept_out == 2
    corrected = delivery(tmp_path, "incremental_cursor", [ticket(1), ticket(2)])
    assert not land(corrected, into).already_landed
    assert sorted(each["after"] is None for each in events(into)) == [False, False, True, True]


def test_ways_in_are_not_mixed_in_one_source(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    land(delivery(tmp_path, "incremental_cursor", [ticket(1)]), into)
    events_of = EventInlet(into.store, GRID, CONTRACTS, "support_desk", clock=lambda: NOW)
    seed = load_manifest(MANIFESTS / "omnisupport_tickets_late.json", CONTRACTS)
    from omnisupport_ingest.sources.debezium.faults import SourceRefused
    from omnisupport_ingest.sources.debezium.land import land as land_file

    with pytest.raises(SourceRefused, match="not mixed"):
        land_file(seed.files[0].path, events_of)


def test_a_cursor_that_orders_nothing_keeps_its_row_out(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    rows = [ticket(1), ticket(2) | {"updated_at": "soon"}]
    with pytest.raises(SeedRefused, match=r"line 2: the cursor column 'updated_at'"):
        land(delivery(tmp_path, "backfill", rows, gates={"schema": "reject"}), into)
    land(delivery(tmp_path, "backfill", rows), into)
    waiting, good = events(into)
    assert (waiting["key"], waiting["file_row"], good["file_row"]) == (None, 2, 1)
