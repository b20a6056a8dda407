"""Once a data file has left landing, what is kept of it places events exactly as the file did."""

from __future__ import annotations

from datetime import timedelta
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnisupport_ingest.landing import first_windows
from omnisupport_ingest.landing.damage import check_landing
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.kept_positions import (
    KEPT_SCHEMA,
    bytes_kept,
    identity_hashes,
    keep_positions,
    kept_file,
    last_kept_window,
)
from omnisupport_ingest.landing.manifest import FileSpan, Manifest
from omnisupport_ingest.landing.names import file_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.standing import LandedPart
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import BatchWriter, WriterLimits
from omnisupport_ingest_tests.examples import examples
from omnisupport_ingest_tests.landing.batches import GRID, NOON, event

HOUR = timedelta(hours=1)
GROUPS_OF_TEN = WriterLimits(group_rows=10)


def writer_of(store: LandingStore, events: list[LandedEvent], name: str) -> BatchWriter:
    writer = BatchWriter(
        store, GRID, 1, file_batch_id(name), clock=lambda: NOON + 50 * HOUR, limits=GROUPS_OF_TEN
    )
    for each in events:
        writer.add(each)
    return writer


def landed(store: LandingStore, events: list[LandedEvent], name: str) -> Manifest:
    with writer_of(store, events, name) as writer:
        return writer.seal(file=FileSpan(name, f"{name}.jsonl", "", "lsn"))


def parts(manifest: Manifest) -> list[LandedPart]:
    return [LandedPart.of(manifest, file) for file in manifest.files]


def remove(store: LandingStore, manifest: Manifest) -> None:
    """What retention does with the data files of a batch."""
    for part in parts(manifest):
        keep_positions(store.folder, part)
        store.path_of(part).unlink()


def told(lsn: int, key: int, hour: int, more: str = "") -> LandedEvent:
    found = event(lsn, at=NOON + hour * HOUR)
    return found._replace(identity=f'["public","tickets",["{key}"],"c"{more}]')


def placed(store: LandingStore, events: list[LandedEvent]) -> list[str | None]:
    with writer_of(store, events, "next") as writer:
        with FirstWindows.of(store, 1, writer.finish()) as found:
            windows = [found.window_of(each) for each in events]
        writer.abandon()
        return windows


@settings(max_examples=examples(40))
@given(seed=st.integers(0, 2**32))
def test_events_are_placed_as_before_whichever_files_have_left(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = Random(seed)

    def drawn(count: int) -> list[LandedEvent]:
        # Now and then a time that no window has: such events land in the sentinel.
        hours = (0, 1, 2, 2000)
        return [told(chance.randrange(40), chance.randrange(3), chance.choice(hours)) for _ in range(count)]

    store = LandingStore(tmp_path_factory.mktemp("kept"), "desk")
    batches = [landed(store, drawn(chance.randrange(1, 40)), f"{number}") for number in range(3)]
    events = drawn(30)
    expected = placed(store, events)
    for batch in chance.sample(batches, chance.randrange(1, 4)):
        remove(store, batch)
    assert placed(store, events) == expected


def test_a_row_that_was_read_again_at_one_position_is_another_event(store: LandingStore) -> None:
    """Its identity differs in the hash of its content alone, as of snapshots of an idle server."""
    first, again = (told(5, 1, 0, f',"{digit * 16}"') for digit in "01")
    remove(store, landed(store, [first], "one"))
    assert placed(store, [again._replace(source_ts=NOON + HOUR)]) == [None]
    assert placed(store, [first._replace(source_ts=NOON + HOUR)]) != [None]


def test_no_text_of_an_identity_is_kept(store: LandingStore) -> None:
    batch = landed(store, [told(5, 1, 0), told(6, 2, 0)], "one")
    (part,) = parts(batch)
    keep_positions(store.folder, part)
    kept = pq.read_table(kept_file(store.folder, part.path))
    assert kept.schema.equals(KEPT_SCHEMA)
    assert kept["ordinal"].to_pylist() == [0, 0] and kept["commit_lsn"].to_pylist() == [5, 6]
    texts = ['["public","tickets",["1"],"c"]', '["public","tickets",["2"],"c"]', None]
    assert kept["identity"].to_pylist() == identity_hashes(pa.chunked_array([texts])).to_pylist()[:2]
    assert kept.column_names == ["commit_lsn", "ordinal", "identity", "source_ts"]


@pytest.mark.parametrize("events", [1, 20, 1000, 20_000])
def test_what_stays_is_about_as_large_as_the_forecast_counts(store: LandingStore, events: int) -> None:
    """Small files cost by the file, and most files of a source that is read every few seconds are small."""
    chance = Random(events)
    lsns = sorted(chance.sample(range(10**9), events))
    times = sorted(chance.randrange(1_800_000_000) for _ in range(events))
    found = [
        told(lsn, chance.randrange(10**9), 0)._replace(source_ts=NOON + timedelta(microseconds=time))
        for lsn, time in zip(lsns, times, strict=True)
    ]
    with BatchWriter(store, GRID, 1, file_batch_id("one"), clock=lambda: NOON + HOUR) as writer:
        for each in found:
            writer.add(each)
        batch = writer.seal(file=FileSpan("one", "one.jsonl", "", "lsn"))
    remove(store, batch)
    kept = sum(kept_file(store.folder, file.path).stat().st_size for file in batch.files)
    assert bytes_kept(len(batch.files), events) == pytest.approx(kept, rel=0.3)


def test_what_is_read_follows_the_overlap(store: LandingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = landed(store, [told(lsn, 1, 0) for lsn in range(1, 101)], "one")
    remove(store, batch)
    assert last_kept_window(store.folder) == batch.files[0].window
    read: list[int] = []
    positions = first_windows._event_positions

    def noted(group: first_windows._Part) -> pa.Table:
        read.append(group.group)
        return positions(group)

    monkeypatch.setattr(first_windows, "_event_positions", noted)
    assert placed(store, [told(95, 1, 1), told(96, 2, 1)]) == [batch.files[0].window, None]
    assert read == [0, 9], "one row group of the new file, and one of ten"


def test_positions_are_kept_once_and_only_before_their_file_is_deleted(store: LandingStore) -> None:
    assert last_kept_window(store.folder) is None
    (part,) = parts(landed(store, [told(5, 1, 0)], "one"))
    keep_positions(store.folder, part)
    kept = kept_file(store.folder, part.path)
    before = kept.stat()
    keep_positions(store.folder, part)
    store.path_of(part).unlink()
    keep_positions(store.folder, part)
    assert (kept.stat().st_ino, kept.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    (other,) = parts(landed(store, [told(6, 1, 0)], "two"))
    store.path_of(other).unlink()
    keep_positions(store.folder, other)
    assert not kept_file(store.folder, other.path).exists()


@pytest.mark.parametrize("harm", ["gone", "cut"])
def test_positions_that_are_lost_are_damage_and_nothing_lands_beside_them(
    store: LandingStore, harm: str
) -> None:
    batch = landed(store, [told(5, 1, 0)], "one")
    remove(store, batch)
    assert "positions" not in {each.kind for each in check_landing(store, lambda _: False).damage}
    kept = kept_file(store.folder, batch.files[0].path)
    if harm == "gone":
        kept.unlink()
    else:
        kept.write_bytes(kept.read_bytes()[:-9])
    found = [each for each in check_landing(store, lambda _: False).damage if each.kind == "positions"]
    assert len(found) == 1 and kept.name in found[0].problem
    with pytest.raises(DamagedBatch):
        placed(store, [told(5, 1, 1)])


def test_a_damaged_data_file_is_named_and_stays(store: LandingStore) -> None:
    (part,) = parts(landed(store, [told(5, 1, 0)], "one"))
    path = store.path_of(part)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DamagedBatch, match=path.name):
        keep_positions(store.folder, part)
    assert last_kept_window(store.folder) is None
