"""Records of landing that others changed: what they say, or the file and the field, and in time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omnisupport_ingest.key_range import TEXT, KeyRange
from omnisupport_ingest.landing.accepted_losses import AcceptedLoss, AcceptedLosses
from omnisupport_ingest.landing.encoding import decode, decode_manifest, encode_manifest
from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord, read_epoch
from omnisupport_ingest.landing.errors import ManifestFromNewerVersion, ManifestUnreadable
from omnisupport_ingest.landing.lost_changes import LostChanges, LostInEpoch, LostStretch
from omnisupport_ingest.landing.manifest import ChunkSpan, DataFile, RelationVersion
from omnisupport_ingest.landing.snapshot_plans import FORMAT, SnapshotPlan, SnapshotPlans
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.records import encode
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.foreign_bytes import IN_THE_PLACE, in_time, mutated
from omnisupport_ingest_tests.landing.batches import manifest

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
SCOPE = KeyRange((TEXT,), ("a",), ("b",))
CHUNK = ChunkSpan("s1", "tickets", 0, 1, Lsn(5), Lsn(9), NOON, scope=SCOPE)
PLAN = SnapshotPlan("s1", 1, "tickets", "why", NOON, -5, 10, ("id",), ("bigint",), (("5",),), scope=SCOPE)
FACTS = EpochFacts("7", 1, "slot", Lsn(5), "shop", "16.4", {"TimeZone": "UTC"})


def plain(record: object) -> Any:
    return json.loads(encode(record))


def read_plan(folder: Path) -> object:
    return SnapshotPlans(folder).all(1)


RECORDS: dict[str, tuple[object, str, Callable[[Path], object]]] = {
    "epoch": (EpochRecord(1, "why", NOON, FACTS), "000001.json", lambda folder: read_epoch(folder, 1)),
    "plan": (PLAN, "snapshots/e000001-fffffffffffb.json", read_plan),
    "lost changes": (
        LostInEpoch(1, (LostStretch("tickets", "why", NOON, Lsn(5), Lsn(6)),)),
        "lost-changes-e000001.json",
        lambda folder: LostChanges(folder, 1).all(),
    ),
    "accepted loss": (
        AcceptedLoss(1, NOON, "ana", "why", Lsn(5), None),
        "accepted-loss-e000001.json",
        lambda folder: AcceptedLosses(folder).of(1),
    ),
}

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("which", RECORDS)
@settings(same_folder, max_examples=examples(100))
@given(data=st.data())
def test_any_record_is_what_it_must_be_or_named(tmp_path: Path, which: str, data: st.DataObject) -> None:
    record, name, read = RECORDS[which]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(data.draw(mutated([plain(record)])))
    with in_time():
        try:
            read(tmp_path)
        except (ManifestUnreadable, ManifestFromNewerVersion) as refused:
            assert str(file) in refused.problem and refused.fix and len(refused.problem) < 1000


IDLE = manifest(5, 9)
DATA = DataFile(
    path="data/b/w.parquet",
    window="2026-11-20T1200",
    rows=3,
    bytes=10,
    sha256="0" * 64,
    first=Position(1, Lsn(5), 0),
    last=Position(1, Lsn(6), 4),
    ordered=True,
    rows_per_table={"public.tickets": 3},
)
TICKETS = RelationVersion("public", "tickets", ("id",), ("bigint",), ("id",), "d")
FULL = replace(IDLE, files=(DATA,), relations=(TICKETS,))
OF_CHUNK = replace(FULL, batch_id=PLAN.batch_id(0), stream=None, chunk=CHUNK)
MANIFESTS: list[Any] = [json.loads(encode_manifest(each)) for each in (IDLE, FULL, OF_CHUNK)]


@settings(same_folder, max_examples=examples(300))
@given(content=mutated(MANIFESTS))
def test_any_manifest_is_what_it_must_be_or_named(content: bytes) -> None:
    file = Path("/landing") / f"{IDLE.batch_id}.json"
    with in_time():
        try:
            found = decode_manifest(content, file)
        except (ManifestUnreadable, ManifestFromNewerVersion) as refused:
            assert str(file) in refused.problem and refused.fix and len(refused.problem) < 1000
        else:
            assert found.batch_id == file.stem
            assert all("\0" not in each.path for each in found.files)


@pytest.mark.parametrize("what", IN_THE_PLACE)
@pytest.mark.parametrize("which", RECORDS)
def test_what_stands_in_the_place_of_a_record_is_named_and_not_waited_for(
    tmp_path: Path, which: str, what: str
) -> None:
    _, name, read = RECORDS[which]
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    IN_THE_PLACE[what](file)
    with in_time():
        if what == "a link to nothing" and which in ("lost changes", "accepted loss"):
            assert not read(tmp_path), "it is as if there was none"
        else:
            with pytest.raises(ManifestUnreadable, match=file.name):
                read(tmp_path)


@pytest.mark.parametrize("what", IN_THE_PLACE)
def test_what_stands_in_the_place_of_a_manifest_is_named_and_not_waited_for(
    tmp_path: Path, what: str
) -> None:
    store = LandingStore(tmp_path, "shop")
    file = store.folder / "manifests" / "f-0123.json"
    IN_THE_PLACE[what](file)
    with in_time(), pytest.raises(ManifestUnreadable, match=r"f-0123\.json"):
        store.read("f-0123")


@pytest.mark.parametrize("kind", ["", "no such order", "integer"])
def test_a_range_of_keys_in_a_record_is_one_that_keys_can_be_held_against(kind: str) -> None:
    document = plain(PLAN)
    document["scope"]["kinds"] = [kind]
    with pytest.raises(ManifestUnreadable, match="scope is no KeyRange"):
        decode(FORMAT, json.dumps(document).encode(), Path("plan.json"))
