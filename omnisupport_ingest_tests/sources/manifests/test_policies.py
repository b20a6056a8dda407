"""Each gate, mode and policy does what the table says, or is refused with the reason that stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.land import Inlet as EventInlet
from omnisupport_ingest.sources.debezium.land import land as land_file
from omnisupport_ingest.sources.manifests.events import examine_events, land_events
from omnisupport_ingest.sources.manifests.examine import SeedRefused, windows_of_batches
from omnisupport_ingest.sources.manifests.formats import digests
from omnisupport_ingest.sources.manifests.land import Delivery, land, look_through
from omnisupport_ingest.sources.manifests.policies import ACTIONS, MODES, ROW_MODES
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifestError, load_manifest
from omnisupport_ingest_tests.sources.manifests import gates
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
from omnisupport_ingest_tests.sources.manifests.gates import FAULTS, Effect, Refused, rule

EVERY = [(mode, fault, action) for mode in MODES for fault in FAULTS for action in ACTIONS]
DONE = [each for each in EVERY if isinstance(rule(*each), Effect)]
ROWS = [each for each in DONE if each[0] in ROW_MODES]
EVENTS = [each for each in DONE if each[0] == "cdc"]
SAMPLE = {"cdc": "partner_tickets_events", "replay": "omnisupport_tickets_again"}


def test_the_schema_says_what_the_table_says() -> None:
    schema = json.loads(program_file("contracts/seed_manifest.schema.json").read_text())
    assert schema["properties"]["gates"] == gates.gates_schema()
    assert schema["allOf"] == gates.modes_schema()
    assert schema["properties"]["load_mode"]["enum"] == list(MODES)


def test_the_page_has_the_table() -> None:
    assert gates.gates_table() in program_file("docs/manifests.md").read_text()


@pytest.mark.parametrize(("mode", "fault", "action"), EVERY)
def test_a_policy_is_carried_out_or_refused_with_the_reason(
    tmp_path: Path, mode: str, fault: str, action: str
) -> None:
    sample = SAMPLE.get(mode, "omnisupport_tickets_full")
    document = json.loads((MANIFESTS / f"{sample}.json").read_text()) | {"load_mode": mode}
    document.setdefault("gates", {})[fault] = action
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document))
    found = rule(mode, fault, action)
    if isinstance(found, Effect):
        assert load_manifest(path, CONTRACTS).gates.action(fault) == action
        return
    with pytest.raises(SeedManifestError) as refused:
        load_manifest(path, CONTRACTS)
    assert f"$.gates.{fault}" in refused.value.problem and found.why in refused.value.fix


UNKNOWN = ticket(2) | {"novel": "s3cret"}
FAULTY: dict[str, dict[str, Any]] = {
    "checksum": {"files": {"sha256": "0" * 64}},
    "row_count": {"files": {"rows": 7}},
    "schema": {"second": ticket(2) | {"ticket_id": None}},
    "unknown_column": {"second": UNKNOWN},
    "row": {"second": ticket(2, status="s3cret")},
    "license": {"license": "LicenseRef-secret"},
    "duplicate_delivery": {"twice": True},
    "missing_file": {"missing": True},
}
"""Kind of fault → what a delivery has that has it."""


def faulty(folder: Path, mode: str, fault: str, action: str) -> Delivery:
    """Deliver three tickets with a fault; the last one is without any."""
    told = FAULTY[fault]
    rows = [ticket(1), told.get("second", ticket(2)), ticket(3)]
    seed = delivery(folder, mode, rows, gates={fault: action}, license=told.get("license", "CC0-1.0"))
    document = json.loads(seed.path.read_text())
    document["files"][0].update(told.get("files", {}))
    if "missing" in told:
        document["files"].append({"path": "gone.jsonl", "sha256": "0" * 64, "rows": 1})
    seed.path.write_text(json.dumps(document))
    seed = load_manifest(seed.path, CONTRACTS)
    into = inlet(folder, licenses=("CC0-1.0",))
    if "twice" in told:
        land(seed, into)
    seen = look_through(seed, into)
    try:
        found = land(seed, into)
    except SeedRefused:
        assert seen.first_rejected is not None and seen.first_rejected.kind == fault
        raise
    # A dry run finds what landing finds.
    assert seen.first_rejected is None and seen.faults == found.examined.faults
    return found


@pytest.mark.parametrize(("mode", "fault", "action"), ROWS)
def test_a_gate_does_what_it_says(tmp_path: Path, mode: str, fault: str, action: str) -> None:
    into, twice = inlet(tmp_path), "twice" in FAULTY[fault]
    if action == "reject":
        with pytest.raises(SeedRefused, match=f"gate {fault}: reject") as refused:
            faulty(tmp_path, mode, fault, action)
        assert "s3cret" not in str(refused.value) and refused.value.fix
        if "second" in FAULTY[fault]:
            assert "tickets.jsonl, line 2" in refused.value.problem
        assert len(into.store.batch_ids()) == (1 if twice else 0)
        return
    found = faulty(tmp_path, mode, fault, action)
    told = {(each.kind, each.action) for each in found.examined.faults}
    assert told == {(fault, action)}
    assert found.already_landed is twice
    landed = [each for each in events(into) if each["op"] != "b"]
    assert sorted(each["file_row"] for each in landed) == [1, 2, 3]
    waiting = {each["file_row"] for each in landed if each["after"] is None}
    by_gate = action == "quarantine" and fault != "row"
    # What breaks a rule of the contract is found by judging, which names the rules.
    expected = {1, 2, 3} if fault in ("checksum", "row_count") else {2}
    assert waiting == (expected if by_gate else set())
    assert found.examined.kept_out == len(waiting)
    for each in landed:
        if each["file_row"] in waiting:
            text, gate = json.loads(each["envelope"]), json.loads(each["identity"])
            assert text["subject"] == f"Ticket {each['file_row']}" and gate[1:3] == [fault, each["file_row"]]
    ends = [each for each in events(into) if each["op"] == "b"]
    whole = fault != "missing_file" and not (fault in ("schema", "checksum", "row_count") and by_gate)
    assert len(ends) == (1 if mode == "full_snapshot" and whole else 0)


@pytest.mark.parametrize(("mode", "fault", "action"), EVENTS)
def test_a_gate_of_events_does_what_it_says(tmp_path: Path, mode: str, fault: str, action: str) -> None:
    if fault in ("row", "unknown_column"):
        # Nothing is done at landing: judging and the raw layers do it, as of every event.
        assert (fault, action) in {("row", "quarantine"), ("unknown_column", "accept")}
        return
    document = json.loads((MANIFESTS / "partner_tickets_events.json").read_text())
    lines = program_file("data/debezium_events/partner_tickets.jsonl").read_bytes()
    if fault == "schema":
        lines += b"no event\n"
    data = tmp_path / "events.jsonl"
    data.write_bytes(lines)
    rows = lines.count(b"\n") + (fault == "row_count")
    sha256 = "0" * 64 if fault == "checksum" else digests(data).file
    document["files"] = [{"path": data.name, "sha256": sha256, "rows": rows}]
    if fault == "missing_file":
        document["files"].append({"path": "gone.jsonl", "sha256": "0" * 64, "rows": 1})
    document["gates"][fault] = action
    document["license"] = "LicenseRef-secret" if fault == "license" else "CC0-1.0"
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document))
    seed = load_manifest(path, CONTRACTS)
    store = LandingStore(tmp_path / "landing", "partner_desk")
    into = EventInlet(store, GRID, CONTRACTS, "support_desk", Handling(), clock=lambda: NOW)
    if fault == "duplicate_delivery":
        document["gates"][fault] = "accept"
        path.write_text(json.dumps(document))
        land_events(load_manifest(path, CONTRACTS), into)
    seen = examine_events(seed, into, ("CC0-1.0",))
    assert {(each.kind, each.action) for each in seen.faults} == {(fault, action)}
    if action == "reject":
        before = store.batch_ids()
        with pytest.raises(SeedRefused, match=f"gate {fault}: reject"):
            land_events(seed, into, ("CC0-1.0",))
        assert store.batch_ids() == before
        return
    found = land_events(seed, into, ("CC0-1.0",))
    assert found.already_landed is (fault == "duplicate_delivery")
    assert len(found.batches) == 1 and found.examined.kept_out == (1 if fault == "schema" else 0)


@pytest.mark.parametrize("action", ["accept", "warn", "reject"])
def test_a_replay_of_a_batch_that_has_not_landed_does_what_its_gate_says(tmp_path: Path, action: str) -> None:
    into = inlet(tmp_path)
    (batch,) = land(delivery(tmp_path, "incremental_cursor", [ticket(1)]), into).batches
    document = json.loads((MANIFESTS / "omnisupport_tickets_again.json").read_text())
    document["replay"]["batches"] = [batch.batch_id, "f-gone"]
    document["gates"] = {"missing_file": action}
    path = tmp_path / "again.json"
    path.write_text(json.dumps(document))
    seed = load_manifest(path, CONTRACTS)
    if action == "reject":
        with pytest.raises(SeedRefused, match=r"batches\[1\].*'f-gone'"):
            windows_of_batches(seed, into.store)
        return
    windows, faults = windows_of_batches(seed, into.store)
    assert windows == ["2026-04-18T1000"] and [each.action for each in faults] == [action]


def test_every_refused_policy_gives_a_reason() -> None:
    assert all(found.why for each in EVERY if isinstance(found := rule(*each), Refused))


def test_an_interrupted_delivery_of_events_goes_on_where_duplicates_are_rejected(tmp_path: Path) -> None:
    document = json.loads((MANIFESTS / "partner_tickets_events.json").read_text())
    lines = program_file("data/debezium_events/partner_tickets.jsonl").read_bytes().splitlines(keepends=True)
    document["gates"]["duplicate_delivery"], document["files"] = "reject", []
    for name, part in (("one.jsonl", lines[:2]), ("two.jsonl", lines[2:])):
        (tmp_path / name).write_bytes(b"".join(part))
        sha256 = digests(tmp_path / name).file
        document["files"].append({"path": name, "sha256": sha256, "rows": len(part)})
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document))
    seed = load_manifest(path, CONTRACTS)
    store = LandingStore(tmp_path / "landing", "partner_desk")
    into = EventInlet(store, GRID, CONTRACTS, "support_desk", Handling(), clock=lambda: NOW)
    land_file(tmp_path / "one.jsonl", into)
    assert len(land_events(seed, into).before) == 1 and len(store.batch_ids()) == 2
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land_events(seed, into)
