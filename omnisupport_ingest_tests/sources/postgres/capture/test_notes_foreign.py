"""Notes and requests in the home that others wrote: read, or taken for what the home says they then are."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.key_range import TEXT, KeyRange
from omnisupport_ingest.landing.errors import ManifestFromNewerVersion, ManifestUnreadable
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.records import encode
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest, RestartRequest
from omnisupport_ingest.sources.postgres.capture.state import (
    CaptureRecord,
    CaptureRecords,
    LastError,
    recorded,
)
from omnisupport_ingest.sources.postgres.catalog.partitions import (
    KnownPartitions,
    Partition,
    PartitionRecords,
    Stay,
)
from omnisupport_ingest.sources.postgres.catalog.published import Published, RecordedTable, recorded_tables
from omnisupport_ingest.sources.postgres.embedded.files import Location, LocationUnusable
from omnisupport_ingest.sources.postgres.session.lease import is_captured, lease_holder
from omnisupport_ingest.sources.postgres.slot.home_identity import HomeCopied, HomeIdentity
from omnisupport_ingest.sources.postgres.slot.home_slot import SlotIntent
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
KNOWN = KnownPartitions(
    {"7": Partition("public.p", "a/1", 9, True), "8": Partition("public.q", None, 1, False)},
    Lsn(5),
    {"7": Lsn(4)},
    {"9": Stay(Lsn(1), Lsn(2))},
)

ERROR = LastError("Killed", "It is gone.", "Start it.", NOON)
PUBLISHED = Published(1, "17.5", {"tickets": RecordedTable("public.tickets", 5, "all", Lsn(1), Lsn(2))})


def write_capture_record(folder: Path) -> None:
    CaptureRecords(folder).write(CaptureRecord(5, "host", NOON, True, True, None, NOON, ERROR))


def write_location(folder: Path) -> None:
    (folder / "location.json").write_text(json.dumps({"name": "0123456789abcdef", "outside": False}))


def locate(folder: Path) -> Location | None:
    try:
        return Location.read(folder)
    except LocationUnusable as unusable:
        assert "location.json cannot be read" in unusable.problem
        return None


def tables(folder: Path) -> set[str] | None:
    try:
        return recorded_tables(folder, 1)
    except (ManifestUnreadable, ManifestFromNewerVersion) as refused:
        assert "published-e000001.json" in refused.problem
        return None


def parked(folder: Path) -> object:
    try:
        return ParkedTables(folder, 1).all()
    except (ManifestUnreadable, ManifestFromNewerVersion) as refused:
        assert "parked-e000001.json" in refused.problem
        return None


def home_of(folder: Path) -> Home:
    return Home.open(folder, WindowSize(60))


def make_identity(folder: Path) -> None:
    for file in folder.glob("identity*"):
        file.unlink()
    identity = HomeIdentity(home_of(folder))
    identity.require_original()
    identity.adopt({"shop": 3})


def identify(folder: Path) -> None:
    """All that is asked of an identity; one that is not read as it was written asks a person."""
    identity = HomeIdentity(home_of(folder))
    try:
        identity.look()
    except HomeCopied as asks:
        assert str(folder) in asks.problem and asks.fix
    assert identity.owns("shop", 4) in (True, False)
    try:
        identity.adopt({})
    except IngestError as refused:
        assert "identity.json is a folder" in refused.problem and (folder / "identity.json").is_dir()
    else:
        identity.look()
    assert len(list(folder.glob("identity-*"))) <= 2, "the one before leaves, if it was told of"


def start_and_end(folder: Path) -> None:
    """What each capture does with the record of the one before."""
    with recorded(CaptureRecords(folder), follows=True, last_landed=lambda: NOON) as ready:
        ready()


NOTES: dict[str, tuple[str, Callable[[Path], object], Callable[[Path], object]]] = {
    "pause": (
        "paused.json",
        lambda folder: PauseRequest(folder).write("why"),
        lambda folder: str(PauseRequest(folder).read()),
    ),
    "restart": (
        "restart.json",
        lambda folder: RestartRequest(folder).write("why"),
        lambda folder: RestartRequest(folder).reason,
    ),
    "snapshot request": (
        "snapshot_requests/tickets.json",
        lambda folder: SnapshotRequests(folder).write("tickets", "why"),
        lambda folder: SnapshotRequests(folder).read(),
    ),
    "capture record": ("capture.json", write_capture_record, lambda folder: CaptureRecords(folder).read()),
    "capture record, followed": ("capture.json", write_capture_record, start_and_end),
    "partitions": (
        "partitions-tickets.json",
        lambda folder: PartitionRecords(folder, 1).write("tickets", KNOWN),
        lambda folder: PartitionRecords(folder, 1).read("tickets"),
    ),
    "published": (
        "published-e000001.json",
        lambda folder: (folder / "published-e000001.json").write_bytes(encode(PUBLISHED)),
        tables,
    ),
    "location": ("location.json", write_location, locate),
    "parked": (
        "parked-e000001.json",
        lambda folder: ParkedTables(folder, 1).park({"tickets": "why"}),
        parked,
    ),
    "identity": ("identity.json", make_identity, identify),
    "slot intent": (
        "slot-being-made",
        lambda folder: SlotIntent(folder).record("slot"),
        lambda folder: SlotIntent(folder).covers("slot"),
    ),
}


def written(folder: Path, which: str) -> Path:
    name, write, _ = NOTES[which]
    write(folder)
    return folder / name


@pytest.mark.parametrize("which", NOTES)
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_note_it_is_read(tmp_path: Path, which: str, data: st.DataObject) -> None:
    file = tmp_path / NOTES[which][0]
    file.unlink(missing_ok=True)
    written(tmp_path, which)
    kept = file.read_bytes()
    document = json.loads(kept) if kept.startswith(b"{") else kept.decode()
    if which == "snapshot request":
        document["scope"] = KeyRange((TEXT,), ("a",), ("b",)).text
    file.write_bytes(data.draw(mutated([document])))
    with in_time():
        NOTES[which][2](tmp_path)


@pytest.mark.parametrize("which", [name for name in NOTES if name != "capture record, followed"])
@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_whatever_stands_in_the_place_of_a_note_is_not_waited_for(
    tmp_path: Path, which: str, what: str
) -> None:
    file = written(tmp_path, which)
    file.unlink()
    IN_THE_PLACE[what](file)
    with in_time():
        NOTES[which][2](tmp_path)


def test_notes_come_back_as_they_were_written(tmp_path: Path) -> None:
    for which in NOTES:
        if which != "capture record, followed":
            written(tmp_path, which)
    assert (pause := PauseRequest(tmp_path).read()) is not None and pause.reason == "why"
    assert RestartRequest(tmp_path).reason == "why"
    (request,) = SnapshotRequests(tmp_path).read()
    assert (request.table, request.reason, request.scope) == ("tickets", "why", None)
    assert CaptureRecords(tmp_path).read() == CaptureRecord(5, "host", NOON, True, True, None, NOON, ERROR)
    assert PartitionRecords(tmp_path, 1).read("tickets") == KNOWN
    assert PartitionRecords(tmp_path, 2).read("tickets") is None
    assert recorded_tables(tmp_path, 1) == {"public.tickets"}


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_whatever_stands_where_the_note_of_a_pause_would_is_a_pause_and_a_person_can_end_it(
    tmp_path: Path, what: str
) -> None:
    note = PauseRequest(tmp_path)
    IN_THE_PLACE[what](tmp_path / "paused.json")
    with in_time():
        assert note.present
        if what == "a link to nothing":
            assert note.read() is None
        else:
            assert "cannot be read" in str(note.read())
        if what == "a folder":
            with pytest.raises(IngestError, match=r"paused\.json is a folder"):
                note.clear()
        else:
            assert note.clear() and not note.present


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_a_start_takes_any_note_of_a_restart_away(tmp_path: Path, what: str) -> None:
    note = RestartRequest(tmp_path)
    IN_THE_PLACE[what](tmp_path / "restart.json")
    with in_time():
        assert note.reason == ""
        note.clear()
        assert not note.present


def test_a_place_of_a_server_that_lies_elsewhere_is_refused(tmp_path: Path) -> None:
    for name in ("../../home", "", "/", "0123456789ABCDEF", "0123456789abcdef/.."):
        (tmp_path / "location.json").write_text(json.dumps({"name": name, "outside": True}))
        with pytest.raises(LocationUnusable, match="no name that was given to a server"):
            Location.read(tmp_path)


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutated([{"pid": 5, "host": "host", "since": "2026-11-20T12:00:00+00:00"}]))
def test_a_holder_of_the_lease_that_cannot_be_told_is_a_holder(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "capture-shop.lock"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with in_time():
            assert is_captured(tmp_path, "shop")
            assert lease_holder(tmp_path, "shop") is not None
    finally:
        os.close(descriptor)


EVERY: list[Any] = [KeyRange((TEXT,), ("a",), None).text]


@settings(max_examples=examples(150))
@given(mutated([json.loads(each) for each in EVERY]), st.text(max_size=5))
def test_any_text_is_a_range_of_keys_or_none(content: bytes, key: str) -> None:
    with in_time():
        try:
            found = KeyRange.parse(content.decode(errors="replace"))
        except ValueError:
            return
        for value in (key, "5", "9" * 5000, "2026-01-01", ""):
            assert found.holds(json.dumps([value])) in (True, False)
        assert found.is_empty in (True, False)
