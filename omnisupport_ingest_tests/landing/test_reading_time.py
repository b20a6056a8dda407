"""Seconds in which chunks were being read: neither other tables nor pauses count, and no second twice."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_progress import ReadingTime
from omnisupport_ingest_tests.landing.landed_chunks import landed_chunk

HOUR = 3600


def seconds(chunks: Iterable[Manifest], *others: Manifest, ahead: float = 0) -> float:
    """For how long ``chunks`` were being read, where ``others`` landed too."""
    found = list(chunks)
    return ReadingTime([*found, *others], timedelta(seconds=ahead)).seconds(found)


def test_reading_of_one_chunk_is_from_its_clock_to_its_landing() -> None:
    assert seconds([landed_chunk(0, 5, 12, (10, 19))]) == 7


def test_nothing_that_has_landed_is_no_time() -> None:
    assert seconds([], landed_chunk(0, 0, 100, (10, 19))) == 0


def test_table_that_waited_for_another_one_was_read_since_that_was_done() -> None:
    # One mark serves both: the source wrote nothing meanwhile.
    first = [
        landed_chunk(0, 0, 50, (10, 19), table="items"),
        landed_chunk(1, 0, 100, (20, 29), table="items"),
    ]
    second = [landed_chunk(0, 0, 110, (30, 39)), landed_chunk(1, 0, 120, (40, 49))]
    assert seconds(first, *second) == 100
    assert seconds(second, *first) == 20


def test_pause_of_hours_between_two_chunks_is_no_reading() -> None:
    again = 10 + 5 * HOUR
    chunks = [landed_chunk(0, 0, 10, (10, 19)), landed_chunk(1, again, again + 10, (20, 29))]
    assert seconds(chunks) == 20


def test_chunks_read_side_by_side_share_their_seconds() -> None:
    chunks = [landed_chunk(0, 0, 10, (10, 29)), landed_chunk(1, 2, 12, (15, 34))]
    assert seconds(chunks) == 12


def test_chunk_whose_rows_were_all_read_before_those_of_one_beside_it_counts_no_less() -> None:
    chunks = [landed_chunk(0, 0, 10, (10, 19)), landed_chunk(1, 0, 12, (20, 29))]
    assert seconds(chunks) == 12


def test_chunk_without_rows_follows_the_landing_before_it() -> None:
    before = landed_chunk(0, 0, 100, (10, 19), table="items")
    assert seconds([landed_chunk(0, 0, 101, None)], before) == 1


def test_boundary_of_another_table_that_lands_meanwhile_is_no_beginning() -> None:
    boundary = landed_chunk(1, 0, 8, (1, 1), table="items", boundary=True)
    assert seconds([landed_chunk(0, 0, 10, (10, 19))], boundary) == 10
    assert seconds([landed_chunk(0, 0, 10, None)], boundary) == 10


def test_clock_of_a_server_that_is_ahead_or_behind_is_set_right() -> None:
    for ahead in (HOUR, -HOUR):
        chunks = [landed_chunk(0, ahead, 10, (10, 19)), landed_chunk(1, ahead + 60, 70, (20, 29))]
        assert seconds(chunks, ahead=ahead) == 20


def test_landing_clock_that_was_set_back_takes_no_seconds_away() -> None:
    chunks = [landed_chunk(0, 0, 10, (10, 19)), landed_chunk(1, 90, 50, (20, 29))]
    assert seconds(chunks) == 10
    assert seconds([*chunks, landed_chunk(2, 91, 95, (30, 39))]) == 14


@dataclass(frozen=True)
class Read:
    """A chunk as it was really read, from ``begin`` to ``end``, at a mark of ``clock``."""

    table: str
    number: int
    begin: int
    end: int
    clock: int


def readings(
    tables: Sequence[Sequence[int]],
    threads: int,
    runs: Sequence[tuple[int, int]],
    clock: Callable[[int, int], int],
) -> list[Read]:
    """Read chunks that take so many seconds each, table after table, ``threads`` at a time.

    ``runs``: a pause, and after how long reading is stopped again; what is in hand then is lost. The last
    one reads what is left. ``clock``: that of a mark, between the start of the run and that of a chunk.
    """
    missing = {(f"t{n}", k): takes for n, chunks in enumerate(tables) for k, takes in enumerate(chunks)}
    now, found = 0, list[Read]()
    for pause, length in [*runs, (1, 1_000_000)]:
        start = now + pause
        now = start + length
        free, left = [start] * threads, deque(missing.items())
        while left:
            begin = min(free)
            if begin >= start + length:
                break
            (table, number), takes = left.popleft()
            free[free.index(begin)] = begin + takes
            if begin + takes <= start + length:
                found.append(Read(table, number, begin, begin + takes, clock(start, begin)))
                del missing[table, number]
    return found


def manifests(reads: Sequence[Read], ahead: int) -> dict[Read, Manifest]:
    """As they land; ordinals are taken at the first row, and at the last one, which ends the chunk."""
    taken = sorted(
        [(read.end, 0, read) for read in reads] + [(read.begin, 1, read) for read in reads], key=by_time
    )
    ordinal = {(read, first): n for n, (_, first, read) in enumerate(taken)}
    return {
        read: landed_chunk(
            read.number,
            read.clock + ahead,
            read.end,
            (ordinal[read, 1], ordinal[read, 0]),
            table=read.table,
        )
        for read in reads
    }


def by_time(taken: tuple[int, int, Read]) -> tuple[int, int]:
    return taken[:2]


@given(
    tables=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=6), min_size=1, max_size=4),
    threads=st.integers(1, 4),
    runs=st.lists(st.tuples(st.integers(1, 10_000), st.integers(1, 120)), max_size=3),
    ahead=st.integers(-5000, 5000),
    data=st.data(),
)
def test_seconds_are_those_in_which_the_table_was_really_read(
    tables: list[list[int]], threads: int, runs: list[tuple[int, int]], ahead: int, data: st.DataObject
) -> None:
    reads = readings(tables, threads, runs, lambda start, begin: data.draw(st.integers(start, begin)))
    landed = manifests(reads, ahead)
    time = ReadingTime(landed.values(), timedelta(seconds=ahead))
    for name in {read.table for read in reads}:
        of_table = [read for read in reads if read.table == name]
        really = {second for read in of_table for second in range(read.begin, read.end)}
        assert time.seconds(landed[read] for read in of_table) == len(really)
