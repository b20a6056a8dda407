"""When the state of a table can be told: its snapshot whole, and the stream past all of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from omnisupport_ingest.landing.completeness import (
    chunks_of,
    incomplete_at,
    incomplete_now,
    is_captured,
)
from omnisupport_ingest.landing.lost_changes import LostChanges, LostStretch
from omnisupport_ingest.landing.manifest import ArrivalFacts, ChunkSpan, FileSpan, Manifest
from omnisupport_ingest.position import LOWEST_ORDINAL, Lsn, Position
from omnisupport_ingest_tests.landing.batches import NOON, manifest

ARRIVAL = ArrivalFacts(NOON, None, None, None)


def chunk(
    low: int,
    high: int,
    *,
    snapshot: str = "s1",
    table: str = "tickets",
    number: int = 0,
    epoch: int = 1,
    boundary: bool = False,
) -> Manifest:
    span = ChunkSpan(snapshot, table, number, 1, Lsn(low), Lsn(high), NOON, boundary=boundary)
    name = f"{epoch}-{snapshot}-{table}-{number}-{boundary}"
    return Manifest(batch_id=name, source="support_desk", epoch=epoch, arrival=ARRIVAL, chunk=span)


def whole(low: int, high: int, *, snapshot: str = "s1", epoch: int = 1) -> list[Manifest]:
    return [
        chunk(low, high, snapshot=snapshot, epoch=epoch),
        chunk(low, high, snapshot=snapshot, epoch=epoch, number=1, boundary=True),
    ]


def why(batches: list[Manifest], epoch: int = 1, lost: tuple[LostStretch, ...] = ()) -> str | None:
    found = incomplete_now(batches, "tickets", epoch, lost)
    return found.problem if found else None


def why_at(
    batches: list[Manifest],
    lsn: int,
    *,
    ordinal: int = 0,
    epoch: int = 1,
    lost: tuple[LostStretch, ...] = (),
) -> str | None:
    found = incomplete_at(batches, "tickets", Position(epoch, Lsn(lsn), ordinal), lost)
    return found.problem if found else None


@pytest.mark.parametrize(
    ("batches", "problem"),
    [
        pytest.param([], "has not been read in epoch 1", id="nothing landed"),
        pytest.param([manifest(0, 99)], "has not been read in epoch 1", id="a stream and no snapshot"),
        pytest.param([chunk(10, 10), manifest(0, 99)], "is not finished", id="rows without a boundary"),
        pytest.param(
            [chunk(10, 10, boundary=True), manifest(0, 99)],
            "a batch of its rows is missing",
            id="a boundary without rows",
        ),
        pytest.param(
            [chunk(10, 10), chunk(12, 12, number=2), chunk(10, 12, number=3, boundary=True), manifest(0, 99)],
            "a batch of its rows is missing",
            id="a chunk in the middle is missing",
        ),
        pytest.param(
            [chunk(10, 10), chunk(10, 10, boundary=True), manifest(0, 99)], None, id="an older snapshot"
        ),
        pytest.param(
            [chunk(10, 10), chunk(12, 12, snapshot="s2", boundary=True), manifest(0, 99)],
            "a batch of its rows is missing",
            id="rows of one snapshot and the boundary of another",
        ),
        pytest.param(whole(10, 20), "has landed nothing and must pass 0/14", id="no stream yet"),
        pytest.param(
            [*whole(10, 20), manifest(0, 19)], "has landed up to 0/13 and must pass 0/14", id="stream below"
        ),
        pytest.param([*whole(10, 20), manifest(0, 20)], None, id="stream at the highest high"),
        pytest.param(
            [*whole(10, 20), chunk(10, 30, number=1), manifest(0, 20)], "must pass 0/1E", id="a higher chunk"
        ),
        pytest.param(
            [*whole(10, 20), manifest(0, 99), chunk(100, 110, snapshot="s2")],
            "must pass 0/6E",
            id="read again while the stream goes on",
        ),
        pytest.param(
            [*whole(10, 20, epoch=2), manifest(0, 99)], "in epoch 1", id="the snapshot of another epoch"
        ),
    ],
)
def test_the_newest_state_is_complete_once_the_stream_has_passed_every_chunk(
    batches: list[Manifest], problem: str | None
) -> None:
    found = why(batches)
    assert found is None if problem is None else problem in (found or "")


def test_a_newer_epoch_without_a_snapshot_leaves_the_table_incomplete() -> None:
    batches = [*whole(10, 20), manifest(0, 99)]
    assert why(batches) is None
    assert why(batches, epoch=2) == "Table tickets has not been read in epoch 2."
    batches += [*whole(5, 5, epoch=2), manifest(0, 5, epoch=2)]
    assert why(batches, epoch=2) is None


def test_what_is_missing_is_counted_in_bytes_of_the_log() -> None:
    found = incomplete_now([*whole(10, 5020), manifest(0, 20)], "tickets", 1, ())
    assert found is not None
    assert found.bytes_behind == 5000
    assert "capture is still behind: 5,000 bytes" in found.fix


def test_a_state_is_told_from_the_snapshot_up_to_the_end_of_the_stream() -> None:
    batches = [*whole(10, 20), manifest(0, 30)]
    assert "its history there starts at 0/14" in (why_at(batches, 9) or "")
    assert "its history there starts at 0/14" in (why_at(batches, 19) or "")
    assert why_at(batches, 20) is None
    assert why_at(batches, 30) is None
    assert "must pass 0/1F" in (why_at(batches, 31) or "")
    assert "must pass 0/1E" in (why_at(batches, 30, ordinal=2) or ""), "that transaction has not landed"
    assert "has not been read in epoch 2" in (why_at(batches, 25, epoch=2) or "")


def test_a_table_read_again_keeps_its_history_but_for_the_time_of_the_reading() -> None:
    batches = [*whole(10, 20), *whole(40, 50, snapshot="s2"), manifest(0, 60)]
    assert why_at(batches, 40) is not None
    assert why_at(batches, 49) is not None
    assert [why_at(batches, lsn) for lsn in (20, 39, 50, 60)] == [None] * 4


def test_no_state_is_shown_between_the_rows_of_a_snapshot_at_one_lsn() -> None:
    batches = [*whole(10, 10), *whole(40, 40, snapshot="s2"), manifest(0, 60)]
    assert [why_at(batches, 40, ordinal=ordinal) for ordinal in (LOWEST_ORDINAL, 0)] == [None, None]
    for ordinal in (-100, -1):
        found = why_at(batches, 40, ordinal=ordinal) or ""
        assert "no state at 0/28 below its changes in epoch 1: a snapshot of it was being read" in found
    assert "0/A below its changes in epoch 1: its history there" in (why_at(batches, 10, ordinal=-99) or "")


def lost(
    lost_from: int, lost_to: int | None = None, mended: int | None = None, *, table: str = "tickets"
) -> tuple[LostStretch, ...]:
    to, known = (None if each is None else Lsn(each) for each in (lost_to, mended))
    return (LostStretch(table, "was out", NOON, Lsn(lost_from), to, known),)


def test_a_table_whose_changes_are_missing_is_incomplete_until_a_snapshot_after_them_is_whole() -> None:
    batches = [*whole(10, 20), manifest(0, 99)]
    assert "may be missing" in (why(batches, lost=lost(30)) or "")
    assert "may be missing" in (why(batches, lost=lost(30, 40)) or "")
    begun = [*batches, chunk(40, 45, snapshot="s2")]
    assert "may be missing" in (why(begun, lost=lost(30, 40)) or "")
    ended = [*begun, chunk(40, 45, snapshot="s2", number=1, boundary=True)]
    assert why(ended, lost=lost(30, 40)) is None
    assert "may be missing" in (why(ended, lost=lost(30, 41)) or ""), "begun before the end of the loss"
    assert "may be missing" in (why(ended, lost=lost(30)) or ""), "the loss goes on"
    assert why(ended, lost=lost(30, table="agents")) is None
    assert why(batches, lost=lost(30, mended=50)) is None


def test_no_state_is_told_of_a_stretch_whose_changes_are_missing() -> None:
    batches = [*whole(10, 20), *whole(40, 45, snapshot="s2"), manifest(0, 60)]
    stretch = lost(30, 40)
    assert [why_at(batches, lsn, lost=stretch) for lsn in (20, 30, 45, 60)] == [None] * 4
    assert "between 0/1E and 0/2D" in (why_at(batches, 30, ordinal=1, lost=stretch) or "")
    assert all("between 0/1E and 0/2D" in (why_at(batches, lsn, lost=stretch) or "") for lsn in (31, 39, 44))
    assert "has not been read since" in (why_at(batches, 60, lost=lost(30)) or "")
    assert [why_at(batches, lsn, lost=lost(30, mended=35)) for lsn in (30, 35, 39)] == [None] * 3
    assert why_at(batches, 34, lost=lost(30, mended=35)) is not None


def test_a_stretch_of_lost_changes_is_written_down_once_and_ended_by_what_makes_good_for_it(
    tmp_path: Path,
) -> None:
    record = LostChanges(tmp_path, 1)
    assert record.all() == ()
    record.will_be_read("tickets", Lsn(5))
    record.was_mended("tickets", Lsn(5))
    assert record.all() == () and list(tmp_path.iterdir()) == []
    record.add("tickets", "out", Lsn(30))
    record.add("tickets", "out, seen again", Lsn(35))
    record.add("agents", "out", Lsn(30))
    record.add("tickets", "a partition came", Lsn(31), whole=False)
    record.was_mended("tickets", Lsn(40))
    held = [(each.table, each.lost_from.value, each.lost_to, each.mended) for each in record.all()]
    assert held == [("tickets", 30, None, None), ("agents", 30, None, None), ("tickets", 31, None, Lsn(40))]
    record.will_be_read("tickets", Lsn(50))
    record.will_be_read("tickets", Lsn(60))
    record.add("tickets", "renamed", Lsn(33), Lsn(50))
    record.add("tickets", "out for another time", Lsn(70))
    held = [(each.lost_from.value, each.lost_to) for each in LostChanges(tmp_path, 1).all()]
    assert held == [(30, Lsn(50)), (30, None), (31, None), (70, None)]
    assert LostChanges(tmp_path, 2).all() == ()


def test_a_delivery_of_files_is_not_captured() -> None:
    delivery = Manifest("f-1", "files", 1, ARRIVAL, file=FileSpan("0" * 64, "a.jsonl", "a.json"))
    assert not is_captured([])
    assert not is_captured([delivery])
    assert is_captured([delivery, manifest(0, 20)])


def test_chunks_of_a_table_are_those_of_its_epoch() -> None:
    below, across, above = manifest(0, 15), manifest(15, 25), manifest(25, 30)
    other = chunk(10, 90, table="agents")
    batches = [*whole(10, 20), other, below, across, above, manifest(0, 5, epoch=2)]
    assert chunks_of(batches, "tickets", 1) == [*whole(10, 20)]


@dataclass(frozen=True)
class Told:
    """One row of a source that counts its commits, and what landed of it.

    ``commits``: their LSNs. ``reads``: (low, high, LSN that the read saw up to).
    """

    commits: tuple[int, ...]
    reads: tuple[tuple[int, int, int], ...]
    stream_end: int
    batches: tuple[Manifest, ...]

    def at_source(self, lsn: int) -> int:
        """The value that the source held once everything below ``lsn`` had committed."""
        return sum(commit < lsn for commit in self.commits)

    def folded(self, below: int | None) -> int | None:
        """The value that the fold of what landed gives, of events below an LSN (null: of all)."""
        events = [(lsn, 1, self.at_source(lsn + 1)) for lsn in self.commits if lsn < self.stream_end]
        events += [(low, 0, self.at_source(seen)) for low, _, seen in self.reads]
        values = [value for lsn, _, value in sorted(events) if below is None or lsn < below]
        # A snapshot row stands below what commits at its LSN, so it counts at that LSN itself.
        at_once = [self.at_source(seen) for low, _, seen in sorted(self.reads) if below == low]
        return (values + at_once or [None])[-1]


def told(rng: Random) -> Told:
    commits = tuple(sorted(rng.sample(range(1, 80), rng.randrange(1, 25))))
    reads = []
    batches: list[Manifest] = []
    low = 0
    for number in range(rng.randrange(1, 4)):
        low += rng.randrange(1, 20)
        high = low + rng.choice([0, 0, 5, 15])
        reads.append((low, high, rng.randint(low, high)))
        batches += whole(low, high, snapshot=f"s{number}")
        low = high
    stream_end = rng.randrange(1, 90)
    batches.append(manifest(0, stream_end))
    return Told(commits, tuple(reads), stream_end, tuple(batches))


class TestAgainstASourceThatCounts:
    """What the rule lets through is a state of the source, and what it holds back need not be one."""

    def test_every_state_that_is_not_refused_is_one_the_source_had(self) -> None:
        shown = refused = wrong_but_refused = 0
        for seed in range(300):
            story = told(Random(seed))
            for lsn in range(1, 95):
                true = story.at_source(lsn) == story.folded(lsn)
                if why_at(list(story.batches), lsn) is None:
                    assert true, f"seed {seed}, LSN {lsn}"
                    shown += 1
                else:
                    refused += 1
                    wrong_but_refused += not true
        assert min(shown, refused, wrong_but_refused) > 1000

    def test_a_table_that_counts_as_complete_shows_the_source_where_the_stream_ends(self) -> None:
        complete = wrong_but_incomplete = 0
        for seed in range(2000):
            story = told(Random(seed))
            true = story.folded(None) == story.at_source(story.stream_end)
            if why(list(story.batches)) is None:
                assert true, f"seed {seed}"
                complete += 1
            else:
                wrong_but_incomplete += not true
        assert min(complete, wrong_but_incomplete) > 100
