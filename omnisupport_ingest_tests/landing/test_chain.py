"""The chain of stream batches and its gaps."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.landing.chain import Gap, unbroken
from omnisupport_ingest.landing.epochs import EpochFacts
from omnisupport_ingest.landing.errors import ChainContested, DamagedBatch
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest_tests.landing.batches import land, manifest

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=12)


FACTS = EpochFacts("741", 1, "omnisupport_ingest", Lsn(0x1234), "desk", "18.4")


def manifest_of(store: LandingStore, batch: Manifest) -> Path:
    return store.folder / "manifests" / f"{batch.batch_id}.json"


def chain_of(lengths: list[int]) -> list[Manifest]:
    """Batches that link up, of these lengths in bytes of WAL."""
    return [manifest(start, end) for start, end in pairwise(accumulate(lengths, initial=100))]


@given(lengths, st.randoms(use_true_random=False))
def test_whole_chain_is_accepted_in_any_order_of_listing(lengths: list[int], rng: random.Random) -> None:
    chain = chain_of(lengths)
    shuffled = chain.copy()
    rng.shuffle(shuffled)
    assert unbroken(shuffled) == (tuple(chain), None)


@given(lengths.filter(lambda each: len(each) > 2), st.data())
def test_one_missing_batch_holds_back_everything_after_it(lengths: list[int], data: st.DataObject) -> None:
    chain = chain_of(lengths)
    lost = data.draw(st.integers(1, len(chain) - 2))
    accepted, gap = unbroken(chain[:lost] + chain[lost + 1 :])
    assert accepted == tuple(chain[:lost])
    assert gap is not None
    span = chain[lost].stream
    assert span is not None
    assert (gap.expected, gap.continued) == (span.previous_end_lsn, span.end_lsn)
    assert (gap.after, gap.before) == (chain[lost - 1].batch_id, chain[lost + 1].batch_id)
    assert str(gap.expected) in str(gap) and str(gap.continued) in str(gap)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), unique_by=lambda each: each[0]))
def test_accepted_batches_always_link_up(spans: list[tuple[int, int]]) -> None:
    batches = [manifest(start, start + length) for start, length in spans]
    accepted, gap = unbroken(batches)
    for before, after in pairwise(each.stream for each in accepted):
        assert before is not None and after is not None
        assert before.end_lsn == after.previous_end_lsn
    assert (gap is None) == (len(accepted) == len(batches))


def test_overlap_is_a_gap_too() -> None:
    accepted, gap = unbroken([manifest(1, 9), manifest(5, 12)])
    assert accepted == (manifest(1, 9),)
    assert gap is not None and (gap.expected, gap.continued) == (Lsn(9), Lsn(5))


def test_fix_of_a_gap_names_what_is_lost_and_of_an_overlap_does_not() -> None:
    _, gap = unbroken([manifest(1, 9), manifest(12, 15)])
    assert gap is not None
    assert "from a backup of the landing folder" in gap.fix
    assert "capture --new-epoch" in gap.fix and "between 0/9 and 0/C" in gap.fix
    _, overlap = unbroken([manifest(1, 9), manifest(5, 12)])
    assert overlap is not None
    assert "Two writers" in overlap.fix and "lost" not in overlap.fix


def test_missing_first_batch_is_a_gap_where_the_start_of_the_epoch_is_recorded(
    store: LandingStore,
) -> None:
    began = store.begin_epoch("first start", FACTS)
    assert began.facts is not None
    start = began.facts.consistent_point.value
    first, second = land(store, start, start + 8), land(store, start + 8, start + 20)
    assert (store.landed().batches, store.landed().gap) == ((first, second), None)
    manifest_of(store, first).rename(store.folder / "lost.json")
    landed = store.landed()
    assert landed.batches == ()
    assert landed.gap == Gap(1, None, Lsn(start), second.batch_id, Lsn(start + 8))
    assert "it starts at 0/1234" in str(landed.gap)
    (store.folder / "epochs" / "000001.json").unlink()
    landed = store.landed()
    assert (landed.batches, landed.gap) == ((second,), None), "without a record the lowest batch is the first"


def test_new_epoch_goes_on_behind_a_damaged_batch_whose_manifest_was_moved_away(store: LandingStore) -> None:
    """The repair that ``DamagedBatch`` names where there is no backup."""
    store.begin_epoch("first start", FACTS)
    start = 0x1234
    first, damaged, behind = (land(store, start + n, start + n + 10) for n in (0, 10, 20))
    store.path_of(damaged.files[0]).unlink()
    with pytest.raises(DamagedBatch, match="is missing") as raised:
        store.verify(damaged)
    assert f"manifests/{damaged.batch_id}.json" in raised.value.fix
    assert "capture --new-epoch" in raised.value.fix
    manifest_of(store, damaged).rename(store.folder.parent / "damaged.json")
    again = LandingStore(store.folder.parent, store.source)
    gap = again.landed().gap
    assert gap is not None and (gap.before, gap.later_epoch) == (behind.batch_id, None)
    epoch = again.begin_epoch("a batch was damaged", FACTS)
    assert again.landed().batches == (first,)
    later = land(again, start, start + 30, epoch=epoch.number)
    landed = again.landed()
    assert landed.batches == (first, later)
    assert landed.gap is not None and landed.gap.later_epoch == epoch.number
    assert landed.gap.fix.startswith("Nothing is left to do: epoch 2 has begun")
    for batch in landed.batches:
        again.verify(batch)


def test_of_two_epochs_with_a_gap_the_newer_is_reported(store: LandingStore) -> None:
    for epoch in (1, 2):
        batches = [land(store, start, start + 10, epoch=epoch) for start in (10, 20, 30)]
        manifest_of(store, batches[1]).unlink()
    gap = store.landed().gap
    assert gap is not None and (gap.epoch, gap.later_epoch) == (2, None)


def test_store_gives_batches_up_to_the_gap_and_a_later_epoch(store: LandingStore) -> None:
    first, lost, after = (land(store, start, start + 10) for start in (10, 20, 30))
    later = land(store, 5, 9, epoch=2)
    assert store.landed().batches == (first, lost, after, later)
    manifest_of(store, lost).rename(store.folder / "lost.json")
    landed = store.landed()
    assert landed.batches == (first, later)
    assert landed.gap is not None and (landed.gap.epoch, landed.gap.after) == (1, first.batch_id)
    (store.folder / "lost.json").rename(manifest_of(store, lost))
    assert store.landed().gap is None


def test_batch_that_does_not_continue_the_last_one_is_refused(store: LandingStore) -> None:
    land(store, 10, 20)
    with pytest.raises(ChainContested, match="ends at 0/14"):
        land(store, 25, 30)
    assert len(store.batch_ids()) == 1


def test_last_stream_is_of_the_epoch_asked_for(store: LandingStore) -> None:
    assert store.last_stream(1) is None
    land(store, 10, 20)
    second = land(store, 20, 4096)
    third = land(store, 5, 9, epoch=3)
    assert store.last_stream(1) == second
    assert store.last_stream(2) is None
    assert store.last_stream_until(2) == second
    assert store.last_stream_until(3) == third
