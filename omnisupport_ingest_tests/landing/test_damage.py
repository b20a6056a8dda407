"""Looking through landing finds every damage, each by name, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.manifest import FileSpan, OffsetSpan
from omnisupport_ingest.landing.names import offsets_batch_id
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest_tests.landing.batches import GRID, NOON, SKEW, event, land


def told(store: LandingStore) -> list[tuple[str, str | None]]:
    # A store keeps what it has read; damage is looked for in the files.
    fresh = LandingStore(store.folder.parent, store.source)
    return [(each.kind, each.batch_id) for each in check_landing(fresh).damage if each.kind != "epoch"]


def chain(store: LandingStore, ends: tuple[int, ...] = (100, 200, 300, 400)) -> list[str]:
    starts = (0, *ends[:-1])
    return [land(store, start, end).batch_id for start, end in zip(starts, ends, strict=True)]


def test_an_unharmed_chain_has_no_damage(store: LandingStore) -> None:
    chain(store)
    found = check_landing(store)
    assert (found.batches, found.files, told(store)) == (4, 4, [])


def test_every_damage_is_named_and_none_hides_another(store: LandingStore) -> None:
    first, second, third, fourth = chain(store)
    data = [store.path_of(store.read(each).files[0]) for each in (first, second)]
    data[0].write_bytes(data[0].read_bytes()[:-1])
    data[1].unlink()
    (store.folder / "manifests" / f"{fourth}.json").write_text("{")
    assert told(store) == [("manifest", fourth), ("file", first), ("file", second)]
    assert store.exists(third)


def test_every_break_of_a_chain_is_named_not_the_first_alone(store: LandingStore) -> None:
    names = chain(store, (100, 200, 300, 400, 500))
    for name in (names[1], names[3]):
        (store.folder / "manifests" / f"{name}.json").unlink()
    assert told(store) == [("chain", names[2]), ("chain", names[4])]


def test_a_manifest_that_counts_other_rows_than_its_file_has(store: LandingStore) -> None:
    (name,) = chain(store, (100,))
    path: Path = store.folder / "manifests" / f"{name}.json"
    document = json.loads(path.read_text())
    document["files"][0] |= {"rows": 2, "rows_per_table": {"public.tickets": 2}}
    path.write_text(json.dumps(document))
    assert told(store) == [("rows", name)]


def test_batches_of_an_epoch_without_a_record_are_told(store: LandingStore) -> None:
    chain(store, (100,))
    (damage,) = check_landing(store).damage
    assert (damage.kind, "Epoch 1" in damage.problem) == ("epoch", True)


def records(store: LandingStore, *spans: OffsetSpan) -> str:
    """Land a batch of Kafka records that covers ``spans``; return its name."""
    name = offsets_batch_id(1, sum(span.start for span in spans))
    with BatchWriter(store, GRID, 1, name, clock=lambda: NOON) as writer:
        writer.add(event(1 + spans[0].start))
        file = FileSpan("0" * 64, "t", "", "lsn", spans)
        return writer.seal(file=file, confirmed_clock=None, max_clock_skew=SKEW).batch_id


def test_offsets_that_landed_in_no_batch_are_named(store: LandingStore) -> None:
    first = records(store, OffsetSpan("t", 0, 0, 5, 5), OffsetSpan("t", 1, 0, 2, 2))
    second = records(store, OffsetSpan("t", 0, 5, 9, 4), OffsetSpan("t", 1, 2, 2, 0))
    accepted = OffsetSpan("t", 0, 9, 20, 3, gone=8, accepted="retention")
    third = records(store, accepted, OffsetSpan("t", 1, 2, 3, 1))
    assert told(store) == []
    (store.folder / "manifests" / f"{second}.json").unlink()
    assert told(store) == [("chain", third)]
    (damage,) = (each for each in check_landing(store).damage if each.kind == "chain")
    assert "Offsets 5 to 8 of partition 0 of the topic t" in damage.problem
    assert "incremental snapshot" in damage.fix
    store.path_of(store.read(first).files[0]).unlink()
    with pytest.raises(DamagedBatch) as lost:
        store.verify_file(store.read(first).files[0])
    assert "incremental snapshot" in lost.value.fix and "manifest load" not in lost.value.fix
