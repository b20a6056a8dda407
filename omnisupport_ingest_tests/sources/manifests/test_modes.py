"""Deliveries of rows in any order and mode: the newest version counts, and nothing lands twice."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.load import TableContract
from omnisupport_ingest.landing.manifest import CURSOR_ORDER, FileSpan
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.sources.contracted_relation import contracted_relation
from omnisupport_ingest.sources.debezium.land import Inlet as EventInlet
from omnisupport_ingest.sources.manifests.examine import SeedRefused
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest, load_manifest
from omnisupport_ingest.windows import KEY_FORMAT
from omnisupport_ingest_tests.sources.manifests.deliveries import (
    CONTRACTS,
    GRID,
    MANIFESTS,
    NOW,
    content,
    delivery,
    document,
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


def test_a_row_far_ahead_of_the_clock_is_in_the_first_window_and_moves_no_watermark(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    rows = [ticket(1), ticket(2, "2126-01-01 00:00:00+00")]
    (batch,) = land(delivery(tmp_path, "incremental_cursor", rows, as_of=AS_OF), into).batches
    assert [each["window"] for each in events(into)][-1] == GRID.first.strftime(KEY_FORMAT)
    assert batch.arrival.watermark == datetime.fromisoformat(AS_OF)


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
    from omnisupport_ingest.sources.debezium.faults import SourceTakesNoFiles
    from omnisupport_ingest.sources.debezium.land import land as land_file

    with pytest.raises(SourceTakesNoFiles, match="not mixed"):
        land_file(seed.files[0].path, events_of)


def test_a_cursor_that_orders_nothing_keeps_its_row_out(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    rows = [ticket(1), ticket(2) | {"updated_at": "soon"}]
    with pytest.raises(SeedRefused, match=r"line 2: the cursor column 'updated_at'"):
        land(delivery(tmp_path, "backfill", rows, gates={"schema": "reject"}), into)
    land(delivery(tmp_path, "backfill", rows), into)
    waiting, good = events(into)
    assert (waiting["key"], waiting["file_row"], good["file_row"]) == (None, 2, 1)


def several(folder: Path, mode: str, parts: dict[str, list[dict[str, Any]]], **more: Any) -> SeedManifest:
    """The manifest ``several.json`` of a file for each of ``parts``, in their order."""
    files = {}
    for name, rows in parts.items():
        (folder / name).write_bytes(content(rows, ".jsonl"))
        files[folder / name] = len(rows)
    manifest = folder / "several.json"
    manifest.write_text(json.dumps(document(mode, files, **more)))
    return load_manifest(manifest, CONTRACTS)


THREE = {f"{number}.jsonl": [ticket(number)] for number in (1, 2, 3)}


def test_a_delivery_of_several_files_is_complete_with_the_last_of_them(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    batches = land(several(tmp_path, "incremental_cursor", THREE, as_of=AS_OF), into).batches
    said = datetime.fromisoformat(AS_OF)
    assert [each.arrival.watermark for each in batches] == [None, None, said]


def test_a_delivery_that_was_interrupted_is_complete_when_the_rest_of_it_has_landed(tmp_path: Path) -> None:
    told = {"as_of": AS_OF, "gates": {"duplicate_delivery": "reject"}}
    whole = land(several(tmp_path, "incremental_cursor", THREE, **told), inlet(tmp_path))
    # As if a killed command had landed one file of the three.
    into = inlet(tmp_path / "killed")
    kept = whole.batches[0].batch_id
    shutil.copytree(inlet(tmp_path).store.folder, into.store.folder, dirs_exist_ok=True)
    for manifest in (into.store.folder / "manifests").glob("*.json"):
        if manifest.stem != kept:
            manifest.unlink()
    shutil.rmtree(into.store.folder / "index", ignore_errors=True)
    into = inlet(tmp_path / "killed")
    done = land(several(tmp_path, "incremental_cursor", THREE, **told), into)
    assert len(done.before) == 1 and len(done.batches) == 3
    assert done.batches[-1].arrival.watermark == datetime.fromisoformat(AS_OF)
    with pytest.raises(SeedRefused, match="has landed before"):
        land(several(tmp_path, "incremental_cursor", THREE, **told), into)


def test_a_file_of_another_delivery_is_still_a_duplicate(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    land(delivery(tmp_path, "incremental_cursor", THREE["1.jsonl"], name="first.jsonl"), into)
    with pytest.raises(SeedRefused, match="has landed before"):
        land(several(tmp_path, "incremental_cursor", THREE, gates={"duplicate_delivery": "reject"}), into)


def test_equal_content_at_a_later_time_says_that_nothing_was_changed(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    for hour in (10, 12, 11):
        seed = delivery(
            tmp_path,
            "incremental_cursor",
            [ticket(1)],
            as_of=f"2026-04-18T{hour}:00:00Z",
            gates={"duplicate_delivery": "accept" if hour == 11 else "reject"},
        )
        assert land(seed, into).already_landed is (hour == 11)
    assert into.store.landed().watermark == datetime.fromisoformat("2026-04-18T12:00:00Z")
    assert len(events(into)) == 1


def test_a_delivery_that_lacks_a_file_is_not_complete(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    seed = several(tmp_path, "incremental_cursor", THREE, as_of=AS_OF, gates={"missing_file": "warn"})
    (tmp_path / "2.jsonl").unlink()
    assert {each.arrival.watermark for each in land(seed, into).batches} == {None}
    (tmp_path / "2.jsonl").write_bytes(content(THREE["2.jsonl"], ".jsonl"))
    land(seed, into)
    assert into.store.landed().watermark == datetime.fromisoformat(AS_OF)


def test_a_snapshot_is_the_same_whatever_order_its_files_are_named_in(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    assert not land(several(tmp_path, "full_snapshot", THREE, as_of=AS_OF), into).already_landed
    backwards = dict(reversed(THREE.items()))
    assert land(several(tmp_path, "full_snapshot", backwards, as_of=AS_OF), into).already_landed


def test_an_empty_snapshot_of_a_second_table_lands_too(tmp_path: Path) -> None:
    orders = replace(contract_of_tickets(), name="orders", table="orders", path="orders.json")
    into = inlet(tmp_path)
    for each in (contract_of_tickets(), orders):
        seed = delivery(tmp_path, "full_snapshot", [], as_of=AS_OF)
        done = land(replace(seed, contract=each), into)
        assert not done.already_landed
        (relation,) = done.batches[0].relations
        assert relation.table == each.table


def test_a_snapshot_that_an_earlier_version_landed_is_known(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    seed = several(tmp_path, "full_snapshot", THREE)
    contents = "".join(each.sha256 for each in seed.files)
    earlier = hashlib.sha256(contents.encode()).hexdigest()
    into.store.begin_epoch("first delivery", None, now=NOW)
    with BatchWriter(into.store, GRID, 1, file_batch_id(earlier), clock=lambda: NOW) as writer:
        writer.seal(
            file=FileSpan(earlier, "1.jsonl, 2.jsonl, 3.jsonl", seed.path.name, CURSOR_ORDER),
            relations=(contracted_relation(seed.contract),),
        )
    assert land(seed, into).already_landed


def contract_of_tickets() -> TableContract:
    return next(each for each in CONTRACTS if each.name == "omnisupport_tickets")


@pytest.mark.parametrize("mode", ["full_snapshot", "incremental_cursor", "backfill"])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_column_that_a_file_does_not_have_is_unknown_and_not_null(
    tmp_path: Path, mode: str, suffix: str
) -> None:
    into = inlet(tmp_path)
    row = ticket(1)
    del row["requester_email"], row["resolved_at"]
    land(delivery(tmp_path, mode, [row], name=f"tickets{suffix}"), into)
    (event,) = [each for each in events(into) if each["op"] == "r"]
    assert event["unchanged"] == ["requester_email", "resolved_at"]
    after = json.loads(event["after"])
    assert not {"requester_email", "resolved_at"} & after.keys() and after["subject"] == row["subject"]


def test_a_member_that_a_line_of_json_leaves_out_is_null(tmp_path: Path) -> None:
    into = inlet(tmp_path)
    row = ticket(1)
    del row["subject"]
    land(delivery(tmp_path, "incremental_cursor", [row]), into)
    (event,) = events(into)
    assert event["unchanged"] is None and json.loads(event["after"])["subject"] is None


@pytest.mark.parametrize(
    ("column", "fault"),
    [
        ("ticket_id", "key column"),
        ("updated_at", "no column 'updated_at'.* requires it"),
        ("subject", "no column 'subject'.* requires it"),
    ],
)
def test_a_file_without_a_required_column_is_refused(tmp_path: Path, column: str, fault: str) -> None:
    row = ticket(1)
    del row[column]
    seed = delivery(tmp_path, "incremental_cursor", [row], name="tickets.csv", gates={"schema": "reject"})
    with pytest.raises(SeedRefused, match=fault):
        land(seed, inlet(tmp_path))
