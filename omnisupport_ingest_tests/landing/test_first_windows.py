"""A position that landed in another window is found, and nothing is read that cannot have one."""

from __future__ import annotations

from datetime import timedelta

import pytest

from omnisupport_ingest.landing import first_windows
from omnisupport_ingest.landing.errors import DamagedBatch
from omnisupport_ingest.landing.first_windows import FirstWindows
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.landing.writer import WriterLimits
from omnisupport_ingest_tests.landing.batches import NOON, event, open_writer, span

GROUPS_OF_TEN = WriterLimits(group_rows=10)
HOUR = timedelta(hours=1)


def landed(store: LandingStore, first: int, count: int, hour: int) -> Manifest:
    """A batch of ``count`` positions from ``first`` on, committed in one hour, in row groups of ten."""
    with open_writer(store, first - 1, limits=GROUPS_OF_TEN) as writer:
        for lsn in range(first, first + count):
            writer.add(event(lsn, at=NOON + hour * HOUR))
        return writer.seal(stream=span(first - 1, first + count, NOON))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The windows of the row groups that were read, in order."""
    found: list[str] = []
    read_positions = first_windows._event_positions

    def noted(group: first_windows._Part) -> object:
        found.append(group.window)
        return read_positions(group)

    monkeypatch.setattr(first_windows, "_event_positions", noted)
    return found


def written(store: LandingStore, lsns: range, hour: int) -> FirstWindows:
    """What is found for a batch of ``lsns`` of another hour that is written and has not landed."""
    with open_writer(store, 5000, epoch=1, limits=GROUPS_OF_TEN) as writer:
        for lsn in lsns:
            writer.add(event(lsn, at=NOON + hour * HOUR))
        return FirstWindows.of(store, 1, writer.finish())


def test_files_of_other_positions_or_of_the_same_window_are_not_even_opened(
    store: LandingStore, read: list[str]
) -> None:
    for number in range(5):
        batch = landed(store, 1 + 100 * number, 99, hour=0)
        for file in batch.files:
            store.path_of(file).unlink()
    with written(store, range(1000, 1050), hour=1) as above, written(store, range(1, 400), hour=0) as same:
        assert not above
        assert not same
    assert read == []


def test_what_is_read_follows_the_overlap(store: LandingStore, read: list[str]) -> None:
    batch = landed(store, 1, 1000, hour=0)
    with written(store, range(995, 1500), hour=1) as found:
        assert found
        assert [lsn for lsn in range(980, 1020) if found.window_of(event(lsn))] == [*range(995, 1001)]
        assert found.window_of(event(1000)) == batch.files[0].window
    assert len(read) == 2


def test_of_several_windows_the_first_landed_counts(store: LandingStore) -> None:
    first = landed(store, 1, 30, hour=3)
    with open_writer(store, 31) as writer:
        writer.add(event(7, at=NOON))
        writer.seal(stream=span(31, 40, NOON))
    with written(store, range(5, 10), hour=1) as found:
        assert {found.window_of(event(lsn)) for lsn in range(5, 10)} == {first.files[0].window}


def test_a_landed_file_that_is_gone_is_named(store: LandingStore) -> None:
    batch = landed(store, 1, 20, hour=0)
    store.path_of(batch.files[0]).unlink()
    with pytest.raises(DamagedBatch, match=batch.files[0].path.rpartition("/")[2]):
        written(store, range(1, 5), hour=1)
