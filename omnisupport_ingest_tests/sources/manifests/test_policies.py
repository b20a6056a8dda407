"""Each gate, mode and policy does what the table says, or is refused with the reason that stands there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.row_rules import RowRules
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium import lines as lines_module
from omnisupport_ingest.sources.debezium.handling import Handling
from omnisupport_ingest.sources.debezium.land import Inlet as EventInlet
from omnisupport_ingest.sources.debezium.land import land as land_file
from omnisupport_ingest.sources.manifests import events as events_module
from omnisupport_ingest.sources.manifests.events import examine_events, land_events
from omnisupport_ingest.sources.manifests.examine import Examined, SeedRefused, windows_of_batches
from omnisupport_ingest.sources.manifests.formats import digests
from omnisupport_ingest.sources.manifests.land import Delivery, land, look_through
from omnisupport_ingest.sources.manifests.policies import ACTIONS, MODES, ROW_MODES
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest, SeedManifestError, load_manifest
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, Recorder
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope
from omnisupport_ingest_tests.sources.manifests import gates
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
from omnisupport_ingest_tests.sources.manifests.gates import FAULTS, Effect, Refused, rule

EVERY = [(mode, fault, action) for mode in MODES for fault in FAULTS for action in ACTIONS]
DONE = [each for each in EVERY if isinstance(rule(*each), Effect)]
ROWS = [each for each in DONE if each[0] in ROW_MODES]
EVENTS = [each for each in DONE if each[0] == "cdc"]
NOVEL = (b'"status":"open"', b'"status":"open","novel":1')
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
    path = tmp_path / "seed_manifests" / "manifest.json"
    path.parent.mkdir()
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
    document = json.loads((MANIFESTS / "partner_tickets_events.json").read_text())
    lines = program_file("data/debezium_events/partner_tickets.jsonl").read_bytes()
    if fault == "schema":
        lines += b"no event\n"
    if fault in ("row", "unknown_column"):
        lines = lines.replace(*{"row": (b'"status":"open"', b'"status":"odd"')}.get(fault, NOVEL))
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
    if fault in ("row", "unknown_column"):
        # Nothing is done at landing: judging and the raw layers do it, as of every event.
        assert seen.faults == land_events(seed, into, ("CC0-1.0",)).examined.faults == []
        images = [json.loads(each["after"]) for each in events(into) if each["after"] is not None]
        broken = {rule for each in images for rule in RowRules(seed.contract).broken(each)}
        assert broken == ({"status:enum"} if fault == "row" else set())
        assert any("novel" in each for each in images) is (fault == "unknown_column")
        return
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


def test_an_interrupted_delivery_of_events_goes_on_where_duplicates_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    def stopped(file: Path, *given: Any, **more: Any) -> Any:
        if file.name == "two.jsonl":
            raise OSError(28, "No space left on device")
        return land_file(file, *given, **more)

    monkeypatch.setattr(events_module, "land_file", stopped)
    with pytest.raises(OSError, match="No space"):
        land_events(seed, into)
    monkeypatch.undo()
    (batch,) = store.manifests()
    assert batch.file is not None and batch.file.manifest == f"manifest.json (SHA-256 {seed.sha256}, 2 files)"
    assert len(land_events(seed, into).before) == 1 and len(store.batch_ids()) == 2
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land_events(seed, into)


def recorded_delivery(recorder: Recorder, *files: Path, **policies: str) -> SeedManifest:
    """A delivery of events, of the files of ``recorder``."""
    document = json.loads((MANIFESTS / "partner_tickets_events.json").read_text())
    table = {"source": SOURCE, "schema": "public", "table": "customers", "version": "1.0.0"}
    document |= {"contract": table, "license": "CC0-1.0"}
    document["gates"] |= policies
    document["files"] = [
        {"path": each.name, "sha256": digests(each).file, "rows": each.read_bytes().count(b"\n")}
        for each in files
    ]
    path = recorder.folder / "manifest.json"
    path.write_text(json.dumps(document))
    return load_manifest(path, recorder.workspace.contracts)


def lines(*changes: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in changes]


AT_ODDS = {
    "two orders": (
        [envelope("c", customer(1), order=1)],
        [envelope("c", customer(2), lsn=2000), envelope("c", customer(3), lsn=2001)],
    ),
    "two lives": (
        [envelope("c", customer(1), order=1, before_lsn=None)],
        [envelope("c", customer(2), order=1, lsn=2000, before_lsn=900)],
    ),
    "a file of snapshot rows that a connector read later sets the order": (
        [envelope("r", customer(1), before_lsn=900)],
        [envelope("c", customer(2), order=1, lsn=2000, before_lsn=1500)],
    ),
}


@pytest.mark.parametrize("how", AT_ODDS)
def test_of_files_that_do_not_go_together_nothing_lands(tmp_path: Path, how: str) -> None:
    recorder = Recorder(tmp_path, "customers")
    files = [recorder.file(f"{number}.jsonl", lines(*each)) for number, each in enumerate(AT_ODDS[how])]
    seed = recorded_delivery(recorder, *files, schema="reject")
    seen = examine_events(seed, recorder.inlet)
    assert [(each.kind, each.action) for each in seen.faults] == [("schema", "reject")]
    assert "1.jsonl" in seen.faults[0].problem
    with pytest.raises(SeedRefused, match="gate schema: reject"):
        land_events(seed, recorder.inlet)
    assert recorder.inlet.store.batch_ids() == []


def test_a_dry_run_of_events_counts_the_lines_that_landing_keeps_out(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    first = recorder.file("1.jsonl", lines(envelope("c", customer(1), order=1)))
    without = [envelope("c", customer(number), lsn=2000 + number) for number in (2, 3)]
    mixed = [*without, envelope("c", customer(4), lsn=2001, order=1)]
    second = recorder.file("2.jsonl", lines(*mixed))
    seed = recorded_delivery(recorder, first, second, schema="quarantine")
    assert examine_events(seed, recorder.inlet).kept_out == 2
    assert land_events(seed, recorder.inlet).examined.kept_out == 2
    identities = [str(each["identity"]) for each in recorder.events()]
    assert sum(each.startswith('["odd"') for each in identities) == 2


def test_events_that_change_after_they_were_examined_do_not_land(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(tmp_path, "customers")
    path = recorder.file("1.jsonl", lines(envelope("c", customer(1), order=1)))
    seed = recorded_delivery(recorder, path)

    def changing(*given: Any) -> Examined:
        examined = examine_events(*given)
        recorder.file("1.jsonl", lines(envelope("c", customer(99), order=1)))
        return examined

    monkeypatch.setattr(events_module, "examine_events", changing)
    with pytest.raises(SeedRefused, match=r"1\.jsonl has changed since it was examined"):
        land_events(seed, recorder.inlet)
    assert recorder.inlet.store.batch_ids() == []


def test_a_line_that_is_too_long_is_a_fault_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 200)
    recorder = Recorder(tmp_path, "customers")
    path = recorder.file("1.jsonl", [b'{"a":"' + b"x" * 500 + b'"}'])
    seed = recorded_delivery(recorder, path, schema="quarantine", missing_file="accept")
    (fault,) = examine_events(seed, recorder.inlet).faults
    assert (fault.kind, fault.action) == ("schema", "reject") and "line 1 is longer than" in fault.problem


def test_a_delivery_goes_on_whose_file_was_corrected_after_another_had_landed(tmp_path: Path) -> None:
    recorder, strict = Recorder(tmp_path, "customers"), {"duplicate_delivery": "reject"}
    one = recorder.file("1.jsonl", lines(envelope("c", customer(1), order=1)))
    two = recorder.file("2.jsonl", lines(envelope("c", customer(2), order=1, lsn=1001)))
    begun = recorded_delivery(recorder, one, two, **strict)
    # As if its writer had changed the second file before it was read.
    into = replace(recorder.inlet, delivery=begun.reference)
    land_file(one, into)
    recorder.file("2.jsonl", lines(envelope("c", customer(3), order=1, lsn=1001)))
    corrected = recorded_delivery(recorder, one, two, **strict)
    assert corrected.reference != begun.reference
    found = land_events(corrected, recorder.inlet)
    assert (len(found.batches), len(found.before)) == (2, 1)
    again = recorded_delivery(recorder, two, one, **strict)
    assert again.reference != corrected.reference
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land_events(again, recorder.inlet)


def test_a_delivery_of_events_that_an_earlier_version_began_goes_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    one = recorder.file("1.jsonl", lines(envelope("c", customer(1), order=1)))
    two = recorder.file("2.jsonl", lines(envelope("c", customer(2), order=1, lsn=1001)))
    # It recorded no manifest.
    recorder.land(one)
    seed = recorded_delivery(recorder, one, two, duplicate_delivery="reject")
    assert len(land_events(seed, recorder.inlet).before) == 1
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land_events(seed, recorder.inlet)


def test_events_of_another_manifest_of_the_same_name_are_duplicates(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "customers")
    one = recorder.file("1.jsonl", lines(envelope("c", customer(1), order=1)))
    two = recorder.file("2.jsonl", lines(envelope("c", customer(2), order=1, lsn=1001)))
    land_events(recorded_delivery(recorder, one), recorder.inlet)
    seed = recorded_delivery(recorder, one, two, duplicate_delivery="reject")
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land_events(seed, recorder.inlet)
    assert len(recorder.inlet.store.batch_ids()) == 1


def test_rows_of_another_manifest_of_the_same_name_are_duplicates(tmp_path: Path) -> None:
    into, strict = inlet(tmp_path), {"duplicate_delivery": "reject"}
    for folder, rows in (("jan", [ticket(1)]), ("feb", [ticket(1), ticket(2)])):
        (tmp_path / folder).mkdir()
        files = {tmp_path / folder / f"{row['ticket_id']}.jsonl": row for row in rows}
        for path, row in files.items():
            path.write_bytes(content([row], ".jsonl"))
        described = document("incremental_cursor", dict.fromkeys(files, 1), gates=strict)
        (tmp_path / folder / "delivery.json").write_text(json.dumps(described))
    land(load_manifest(tmp_path / "jan" / "delivery.json", CONTRACTS), into)
    with pytest.raises(SeedRefused, match="gate duplicate_delivery: reject"):
        land(load_manifest(tmp_path / "feb" / "delivery.json", CONTRACTS), into)
