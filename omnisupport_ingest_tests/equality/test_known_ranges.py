"""What earlier checks found out spares reading, and never hides a difference or makes a table look newer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest

from omnisupport_ingest.contracts.row_checksum import KeySpan, RowChecksum, RowVersions
from omnisupport_ingest.equality.bisecting import Unchanged, differing
from omnisupport_ingest.equality.known_ranges import (
    LOOKS_FOR_A_READ,
    READ_AGAIN_AFTER,
    Budget,
    KnownRange,
    KnownRanges,
    Look,
    known_ranges,
    made_of,
    part_to_look_at,
    write_known_ranges,
)
from omnisupport_ingest.home import Home
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import Moment
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.equality.test_bisecting import Rows
from omnisupport_ingest_tests.sources.postgres.source_under_test import contract

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)
NOTES = contract("notes", ("id",))


def moment(number: int) -> Moment:
    return Moment(1, Lsn(number), NOON + timedelta(minutes=5 * number))


def read_range(start: str | None, rows: int = 100, writers: int = 7, equal: int = 1) -> KnownRange:
    return KnownRange(start, rows, (rows, 1, 2), (rows, writers), NOON, moment(equal), "files")


def chosen(
    ranges: Sequence[KnownRange], versions: Sequence[RowVersions] | None, budget: int, now: datetime = NOON
) -> tuple[set[int], set[int]]:
    known = KnownRanges("", tuple(ranges))
    files = ["other files"] * len(ranges)
    look = Look(known, range(len(ranges))).choosing(versions, files, now, budget)
    assert look.settled == frozenset()
    return set(look.chosen), set(look.left)


THREE = (read_range(None), read_range("5", equal=3), read_range("9", equal=2))
SAME = [RowVersions(100, 7)] * 3
OTHER = [RowVersions(100, 8)] * 3


def test_what_has_the_same_row_versions_is_not_read_again() -> None:
    assert chosen(THREE, SAME, 10_000) == (set(), set())
    assert chosen(THREE, [SAME[0], OTHER[1], SAME[2]], 10_000) == ({1}, set())
    assert chosen(THREE, [RowVersions(99, 7), *SAME[1:]], 10_000) == ({0}, set())


def test_what_the_server_may_not_read_is_left_and_what_was_equal_longest_ago_comes_first() -> None:
    looked = 300 // LOOKS_FOR_A_READ
    assert chosen(THREE, OTHER, 200 + looked) == ({0, 2}, {1})
    assert chosen(THREE, OTHER, 1) == ({0}, {1, 2}), "one at least"
    assert chosen([*THREE[:2], KnownRange("9", 100)], OTHER, 1) == ({2}, {0, 1}), "what was never equal"


def test_everything_is_read_again_after_a_day_and_nothing_for_it_is_left_out() -> None:
    later = NOON + READ_AGAIN_AFTER + timedelta(seconds=1)
    assert chosen(THREE, SAME, 10_000, later) == ({0, 1, 2}, set())
    assert chosen(THREE, SAME, 1, later) == ({0}, set())
    assert chosen(THREE, [SAME[0], SAME[1], OTHER[2]], 1, later) == ({2}, set()), "changes come first"


def test_without_row_versions_ranges_are_read_in_turn() -> None:
    assert chosen(THREE, None, 200) == ({0, 2}, {1})


def test_what_is_the_same_on_both_sides_is_not_read_on_either() -> None:
    known = KnownRanges("", (*THREE, replace(THREE[2], start="12", files=None)))
    look = Look(known, range(4))
    versions = [SAME[0], SAME[1], OTHER[2], SAME[2]]
    files = ["files", "others", "files", "files"]
    chosen = look.choosing(versions, files, NOON, 10_000)
    assert (chosen.settled, chosen.chosen, chosen.left) == ({0}, {2}, set())
    assert chosen.passed_over == {KeySpan(None, "5")} and chosen.settled_rows() == 100
    assert set(chosen.unchanged) == {KeySpan("5", "9"), KeySpan("12", None)}
    assert chosen.whole, "a range that is as it was when it was equal is equal"
    later = NOON + READ_AGAIN_AFTER + timedelta(seconds=1)
    assert look.choosing(versions, files, later, 10_000).settled == frozenset()
    assert look.choosing(versions, files, NOON, None).settled == frozenset()


def test_a_range_in_which_rows_were_left_out_or_that_differed_is_not_settled() -> None:
    known = KnownRanges("", THREE)
    look = Look(known, range(3)).choosing(OTHER, ["new"] * 3, NOON, None)
    read = {span: RowChecksum(100, 3, 4) for span in look.spans.values()}
    equal = look.after(read, moment(9), left_out={1})
    assert [each.files for each in equal.ranges] == ["new", None, "new"]
    assert [each.equal for each in equal.ranges] == [moment(9)] * 3
    differed = look.after(read, moment(9), differing={0}, unjudged={2})
    assert [each.files for each in differed.ranges] == [None, "new", None]
    assert [each.equal for each in differed.ranges] == [THREE[0].equal, moment(9), THREE[2].equal]
    assert [each.differed for each in differed.ranges] == [True, False, False]
    assert [each.versions for each in differed.ranges] == [(100, 8)] * 3
    unknown = Look(known, range(3)).choosing(None, ["new"] * 3, NOON, None)
    assert [each.files for each in unknown.after(read, moment(9)).ranges] == [None] * 3


def test_the_ranges_of_keys_that_are_left_out_are_found() -> None:
    known = KnownRanges("", THREE)
    assert known.holding([("-7",), ("5",), ("no number",)], whole_numbers=True) == {0, 1}
    assert known.holding([("9", "x"), ("95",)], whole_numbers=False) == {2}


def test_a_range_that_cannot_be_called_equal_keeps_no_other_from_its_turn() -> None:
    """One row waits for a person, and a table is too large for one check, or all of it changes."""
    part_of = KnownRanges("", tuple(read_range(None if n == 0 else str(n), 1_000) for n in range(9)))
    seen: set[int] = set()
    for number in range(2, 6):
        look = Look(part_of, part_to_look_at(part_of.ranges, 500))
        seen |= set(look.part)
        look = look.choosing([RowVersions(1_000, 7)] * len(look.part), ["new"] * 9, NOON, 500)
        part_of = look.after({}, moment(number), unjudged={0} & set(look.part))
    assert seen == set(range(9))
    known, read = KnownRanges("", THREE), set[int]()
    for number in range(4, 8):
        look = Look(known, range(3)).choosing(None, ["new"] * 3, NOON, 1)
        read |= look.chosen
        known = look.after(
            {span: RowChecksum(100, 3, 4) for span in look.spans.values()}, moment(number), unjudged={0, 1, 2}
        )
    assert read == {0, 1, 2}


def test_a_range_that_differed_is_compared_by_every_check_until_it_is_equal() -> None:
    known = KnownRanges("", (THREE[0], replace(THREE[1], tried=Lsn(3), differed=True), THREE[2]))
    for number in range(4, 8):
        look = Look(known, range(3)).choosing([RowVersions(100, number + 90)] * 3, ["new"] * 3, NOON, 1)
        assert look.chosen == {1}, "a check that leaves it would call a red table equal"
        read = {span: RowChecksum(100, 3, 4) for span in look.spans.values()}
        known = look.after(read, moment(number), differing={1})
    look = Look(known, range(3)).choosing([RowVersions(100, 1)] * 3, ["new"] * 3, NOON, 1)
    known = look.after({}, moment(9))
    assert Look(known, range(3)).choosing(None, ["new"] * 3, NOON, 1).chosen == {0}


def test_a_budget_is_that_of_all_tables() -> None:
    budget = Budget(1_000)
    budget.spend(read=500, looked=2_000)
    assert budget.of_table(100) == 500 - 2_000 // LOOKS_FOR_A_READ
    budget.spend(read=600, looked=0)
    assert budget.of_table(100) == 100, "each table comes to something"
    everything = Budget(None)
    everything.spend(5, 5)
    assert everything.of_table(100) is None


def test_of_a_very_large_table_a_part_is_looked_at_and_the_next_one_then() -> None:
    ranges = [read_range(None if n == 0 else str(n), 1_000, equal=n // 3) for n in range(9)]
    assert part_to_look_at(ranges, None) == range(9)
    assert part_to_look_at(ranges, 2_000) == range(9)
    part = part_to_look_at(ranges, 500)
    assert part == range(4)
    ranges[:4] = [replace(each, equal=moment(9)) for each in ranges[:4]]
    assert part_to_look_at(ranges, 500) == range(4, 8)
    ranges[4:8] = [replace(each, equal=moment(10)) for each in ranges[4:8]]
    assert part_to_look_at(ranges, 500) == range(8, 9)


def test_ranges_that_have_grown_are_divided_and_keep_when_they_were_equal() -> None:
    known = KnownRanges("", (read_range(None), read_range("9", 40, equal=4), read_range("30", 500, equal=5)))
    divided = known.divided(["-3", "4", "9", "20", "30", "110"], 100, whole_numbers=True)
    assert divided.ranges == (*known.ranges[:2], KnownRange("30", 100, equal=moment(5)), divided.ranges[3])
    assert divided.ranges[3] == KnownRange("110", 100, equal=moment(5))
    fresh = KnownRanges("", (KnownRange(None, 1 << 62),)).divided(["-3", "4"], 100, whole_numbers=True)
    assert [each.start for each in fresh.ranges] == [None, "-3", "4"] and fresh.equal is None
    assert divided.equal == moment(1)


def test_small_neighbours_are_one_range_with_the_sums_of_both() -> None:
    unread = KnownRange("30", 3)
    known = KnownRanges(
        "", (read_range(None, 20, 7, 3), read_range("9", 0, 0, 2), read_range("20", 29), unread)
    )
    assert known.joined(40).ranges == (
        KnownRange(None, 20, (20, 2, 4), (20, 7), NOON, moment(2)),
        *known.ranges[2:],
    )
    assert known.joined(64).ranges[1] == KnownRange("20", 32)
    assert known.joined(39) == known


def test_a_table_whose_old_rows_are_deleted_has_no_more_ranges_from_day_to_day() -> None:
    known, counts = KnownRanges("", (KnownRange(None, 1 << 62),)), []
    for day in range(1, 50):
        keys = range(day * 400, day * 400 + 1_000)
        known = known.joined(100).divided([str(key) for key in keys[::100]], 100, whole_numbers=True)
        look = Look(known, range(len(known.ranges)))
        rows = [
            sum(int(s.start or 0) <= key < int(s.end or 1e9) for key in keys) for s in look.spans.values()
        ]
        look = look.choosing([RowVersions(each, each) for each in rows], [""] * len(rows), NOON, 10_000)
        known = look.after({}, moment(day))
        counts.append(len(rows))
    assert max(counts) <= 25, counts


def test_what_differed_is_looked_at_again_and_nothing_else() -> None:
    spans = [KeySpan(None, "3"), KeySpan("3", "5"), KeySpan("9", "12")]
    look = Look.again(spans)
    assert (look.span, look.cuts) == (KeySpan(None, None), ["3", "5", "9", "12"])
    assert look.passed_over == {KeySpan("5", "9"), KeySpan("12", None)} and look.unchanged == {}


def test_what_is_known_is_read_back_unless_it_depends_on_something_that_has_changed(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"))
    depends_on = made_of(NOTES, 1, "bigint")
    assert len({depends_on, made_of(NOTES, 2, "bigint"), made_of(NOTES, 1, "text")}) == 3
    narrower = replace(NOTES, columns=NOTES.columns[:-1])
    assert made_of(narrower, 1, "bigint") != depends_on
    marked = [replace(NOTES, soft_delete_column=mark) for mark in ("gone", "away")]
    assert made_of(marked[0], 1, "bigint") != made_of(marked[1], 1, "bigint")
    known = KnownRanges(depends_on, THREE)
    write_known_ranges(home, NOTES, known)
    assert known_ranges(home, NOTES, depends_on) == known
    nothing = known_ranges(home, NOTES, "another")
    assert [each.equal for each in nothing.ranges] == [None]


@pytest.mark.full
def test_what_is_known_of_a_table_of_hundreds_of_millions_of_rows_is_read_back(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"))
    large = read_range("9" * 18, 8_192, writers=1 << 70)
    large = replace(large, checksum=(8_192, 1 << 70, 1 << 70), files="f" * 64)
    known = KnownRanges("", (read_range(None), *[large] * 45_000))
    write_known_ranges(home, NOTES, known)
    assert len(known_ranges(home, NOTES, "").ranges) == 45_001


class Versioned(Rows):
    """A side whose rows have a writer each, as at the source."""

    def __init__(self, keys: Sequence[int], rng: Random) -> None:
        super().__init__({})
        self.writer: dict[int, int] = {}
        self.rng, self.clock = rng, 0
        for key in keys:
            self.change(key)

    def change(self, key: int) -> None:
        self.clock += 1
        self.rows[key], self.writer[key] = (self.rng.getrandbits(60), self.rng.getrandbits(60)), self.clock

    def versions(self, cuts: Sequence[str], span: KeySpan) -> list[RowVersions]:
        found = [RowVersions(0, 0)] * (len(cuts) + 1)
        for key in self._within([span]):
            place = sum(int(cut) <= key for cut in cuts)
            rows, writers = found[place]
            found[place] = RowVersions(rows + 1, writers + Random(self.writer[key]).getrandbits(60))
        return found


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(20))
def test_a_table_is_equal_only_as_of_a_moment_at_which_each_of_its_rows_was(seed: int) -> None:
    """A table that is changed all the time, a lake that has wrong rows now and then, and small budgets."""
    rng = Random(seed)
    source = Versioned(rng.sample(range(1_000), 400), rng)
    wrong: set[int] = set()
    wrong_at: dict[int, set[int]] = {}
    known, read, settled = KnownRanges("", (KnownRange(None, 1 << 62),)), 0, 0
    for number in range(1, 60):
        for key in rng.sample(range(1_000), rng.choice([0, 3, 30])):
            if key in source.rows and rng.random() < 0.3:
                del source.rows[key]
            else:
                source.change(key)
        wrong &= source.rows.keys()
        if number % 12 == 0:
            wrong.add(rng.choice(sorted(source.rows)))
        elif number % 12 == 6:
            wrong.clear()
        wrong_at[number] = set(wrong)
        lake = Rows(
            {key: (0, 0) if key in wrong else numbers for key, numbers in sorted(source.rows.items())}
        )
        cuts = sorted(lake.cuts(KeySpan(None, None), 16), key=int)
        known = known.joined(25).divided(cuts, 25, whole_numbers=True)
        budget = rng.choice([60, 150]) if number < 59 else None
        look = Look(known, part_to_look_at(known.ranges, budget))
        every = Look(known, range(len(known.ranges))).spans.values()
        files = [str(sorted(lake._within([span]).items())) for span in every]
        look = look.choosing(source.versions(look.cuts, look.span), files, moment(number).at, budget)
        side = Unchanged(source, look.unchanged, look.passed_over)
        found = differing(side, lake, look.span, look.cuts, look.passed_over)
        compared = [span for place, span in look.spans.items() if place not in look.left]
        settled += len(look.settled)
        expected = {
            (str(key),)
            for key in wrong
            if any(
                (span.start is None or key >= int(span.start)) and (span.end is None or key < int(span.end))
                for span in compared
            )
        }
        assert set(found.keys) == expected
        differing_ranges = known.around(found.spans, whole_numbers=True)
        known = look.after(side.read, moment(number), differing=differing_ranges)
        read += sum(each.rows for each in side.read.values())
        through = known.equal
        if through is not None:
            for one, span in zip(
                known.ranges, Look(known, range(len(known.ranges))).spans.values(), strict=True
            ):
                assert one.equal is not None and one.equal.lsn >= through.lsn
                assert not any(
                    (span.start is None or key >= int(span.start))
                    and (span.end is None or key < int(span.end))
                    for key in wrong_at[one.equal.lsn.value]
                )
    assert known.equal is not None and known.equal.lsn.value > 50
    assert read < 59 * 400 / 2, "less than half of what reading everything each time comes to"
    assert settled > 30
