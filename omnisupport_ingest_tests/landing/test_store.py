"""Landed batches on disk: epochs, damage, and what a listing sees."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from omnisupport_ingest.landing.epochs import EpochFacts, EpochRecord, write_epoch
from omnisupport_ingest.landing.errors import DamagedBatch, EpochContested, ManifestUnreadable
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.landing.batches import NOON, event, land, open_writer

FACTS = EpochFacts("741", 1, "omnisupport_ingest", Lsn(0x1234), "desk", "18.4", {"TimeZone": "UTC"})


def test_empty_landing_has_nothing_landed(store: LandingStore) -> None:
    assert store.landed().batches == ()
    assert store.landed().gap is None
    assert store.current_epoch() is None


def test_epochs_are_numbered_durably(store: LandingStore) -> None:
    first = store.begin_epoch("first start", FACTS, now=NOON)
    second = store.begin_epoch("slot was lost", None, now=NOON)
    again = LandingStore(store.folder.parent, store.source)
    assert again.epochs() == (first, second)
    assert again.current_epoch() == second
    assert (first.number, second.number) == (1, 2)
    assert first.facts == FACTS


def test_epoch_number_that_batches_bear_is_never_given_again(store: LandingStore) -> None:
    land(store, 8, 20, epoch=4)
    assert store.begin_epoch("epoch records were lost", FACTS).number == 5


def test_store_of_a_long_run_remembers_only_so_many_manifests(store: LandingStore) -> None:
    """It reads each batch that it lands once more, for months."""
    few = LandingStore(store.folder.parent, store.source, remembered=5)
    for end in range(10, 60):
        land(few, end, end + 1)
    assert few.manifests() == store.manifests()

    def held() -> int:
        gc.collect()
        return sum(isinstance(each, Manifest) for each in gc.get_objects())

    of_both = held()
    del few
    assert of_both - held() <= 5


def test_several_threads_read_more_manifests_than_are_remembered(store: LandingStore) -> None:
    """Snapshots and stream of a capture land on threads of their own."""
    for end in range(10, 15):
        land(store, end, end + 1, at=None)
    few, names = LandingStore(store.folder.parent, store.source, remembered=2), store.batch_ids()

    def read(step: int) -> set[bool]:
        wanted = [names[number * step % len(names)] for number in range(3000)]
        return {few.read(name).batch_id == name for name in wanted}

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(read, (1, 2, 3))) == [{True}] * 3
    finally:
        sys.setswitchinterval(often)


def test_landing_one_more_batch_lists_no_names(store: LandingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.begin_epoch("first start", FACTS, now=NOON)
    land(store, 10, 11)
    land(store, 11, 12)
    again = LandingStore(store.folder.parent, store.source)
    land(again, 12, 13)
    monkeypatch.setattr(LandingStore, "batch_ids", None)
    for end in range(13, 20):
        land(again, end, end + 1)
    last = again.last_stream(1)
    assert last is not None and last.stream is not None and last.stream.end_lsn == Lsn(20)
    assert again.newest_epoch_begun() == 1


def test_a_store_sees_what_another_one_has_landed(store: LandingStore) -> None:
    other = LandingStore(store.folder.parent, store.source)
    land(store, 10, 11)
    assert other.last_stream(1) == store.last_stream(1)
    newest = [land(store, end, end + 1) for end in range(11, 15)][-1]
    assert other.last_stream(1) == other.last_stream_until(3) == newest
    store.begin_epoch("first start", FACTS, now=NOON)
    store.begin_epoch("slot was lost", None, now=NOON)
    assert other.newest_epoch_begun() == 1
    newest = land(store, 40, 50, epoch=2)
    assert other.newest_epoch_begun() == 2
    assert other.last_stream_until(3) == newest


def test_a_last_batch_that_was_removed_is_not_the_last(store: LandingStore) -> None:
    before, removed = land(store, 10, 11), land(store, 11, 12)
    assert store.last_stream(1) == removed
    (store.folder / "manifests" / f"{removed.batch_id}.json").unlink()
    assert store.last_stream(1) == before


def test_epoch_is_begun_once(store: LandingStore) -> None:
    record = store.begin_epoch("first start", FACTS)
    with pytest.raises(EpochContested):
        write_epoch(store.folder / "epochs", EpochRecord(record.number, "again", NOON, FACTS))


def test_damaged_epoch_record_is_named(store: LandingStore) -> None:
    store.begin_epoch("first start", FACTS)
    file = store.folder / "epochs" / "000001.json"
    file.write_text(file.read_text().replace('"timeline": 1', '"timeline": null'))
    with pytest.raises(ManifestUnreadable, match=r"000001.json .*facts.timeline must be int"):
        store.current_epoch()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"!"), "is altered"),
        (lambda path: path.write_bytes(b"!" + path.read_bytes()[1:]), "is altered: SHA-256"),
    ],
)
def test_damaged_data_file_is_named_with_its_fix(
    store: LandingStore, damage: Callable[[Path], object], named: str
) -> None:
    batch = land(store, 8, 20)
    path = store.path_of(batch.files[0])
    store.verify(batch)
    damage(path)
    with pytest.raises(DamagedBatch, match=named) as raised:
        store.verify(batch)
    assert str(path) in raised.value.problem
    assert batch.batch_id in raised.value.fix and "backup" in raised.value.fix


def test_removed_batch_is_unreadable_and_not_listed(store: LandingStore) -> None:
    batch = land(store, 8, 20)
    (store.folder / "manifests" / f"{batch.batch_id}.json").unlink()
    assert store.batch_ids() == []
    assert store.manifests() == []
    with pytest.raises(ManifestUnreadable, match="does not exist"):
        LandingStore(store.folder.parent, store.source).read(batch.batch_id)


def test_manifest_of_another_source_is_refused(store: LandingStore, tmp_path: Path) -> None:
    batch = land(store, 8, 20)
    other = LandingStore(tmp_path, "billing")
    name = f"{batch.batch_id}.json"
    (other.folder / "manifests" / name).write_bytes((store.folder / "manifests" / name).read_bytes())
    with pytest.raises(ManifestUnreadable, match="source 'support_desk', not of 'billing'"):
        other.manifests()


def test_drafts_of_manifests_are_not_batches(store: LandingStore) -> None:
    (store.folder / "manifests" / ".e000001-s-0000000000000008.json.1234").write_bytes(b"{")
    (store.folder / "manifests" / ".x.json").write_bytes(b"{")
    assert store.batch_ids() == []


def test_garbage_is_cleared_and_live_and_landed_batches_stay(store: LandingStore) -> None:
    landed = land(store, 8, 20)
    crashed = store.data_folder("e000001-r-s1-public.tickets-000001-a1")
    crashed.mkdir()
    (crashed / "part.parquet").write_bytes(b"PAR1")
    stray = store.data_folder("notes of somebody.txt")
    stray.write_text("not a folder")
    with open_writer(store, 20) as live:
        live.add(event(21))
        assert store.clear_garbage() == [crashed.name]
        assert not crashed.exists()
        assert stray.exists()
        assert store.data_folder(live.batch_id).exists()
    store.verify(landed)
