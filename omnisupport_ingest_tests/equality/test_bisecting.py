"""Two sides are told apart to the key, by checksums alone until ranges are small."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from omnisupport_ingest.contracts.row_checksum import EVERY_KEY, Key, KeySpan, RowChecksum, RowNumbers
from omnisupport_ingest.equality import bisecting
from omnisupport_ingest.equality.bisecting import Differing, Remaining, differing
from omnisupport_ingest.equality.checking import nothing_shown
from omnisupport_ingest.equality.repairing import MOST_RANGES, ranges_to_read
from omnisupport_ingest.key_range import KeyRange
from omnisupport_ingest.read.verified import DIFFERS, EQUAL, PART_EQUAL


class Rows:
    """One side: rows by a whole number, which is their key. ``read``: rows that were compared one by one."""

    def __init__(self, numbers: Mapping[int, RowNumbers]) -> None:
        self.rows, self.read, self.asked = dict(numbers), 0, 0

    def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
        self.asked += 1
        found = [RowChecksum(0, 0, 0)] * (len(cuts) + 1)
        edges = [int(cut) for cut in cuts]
        assert edges == sorted(edges)
        for key, (first, second) in self._within(spans).items():
            place = sum(edge <= key for edge in edges)
            rows, ones, others = found[place]
            found[place] = RowChecksum(rows + 1, ones + first, others + second)
        return found

    def numbers(self, spans: Sequence[KeySpan], /) -> Mapping[Key, RowNumbers]:
        found = {(str(key),): numbers for key, numbers in self._within(spans).items()}
        self.read += len(found)
        return found

    def cuts(self, span: KeySpan, parts: int, /) -> list[str]:
        keys = sorted(self._within([span]))
        step = max(1, len(keys) // parts)
        return [str(key) for key in keys[step::step]]

    def _within(self, spans: Sequence[KeySpan]) -> dict[int, RowNumbers]:
        return {
            key: numbers
            for key, numbers in self.rows.items()
            if any(
                (span.start is None or key >= int(span.start)) and (span.end is None or key < int(span.end))
                for span in spans
            )
        }


@pytest.fixture(autouse=True)
def _small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisecting, "LEAF_ROWS", 8)


def rows_of(rng: Random, count: int) -> dict[int, RowNumbers]:
    return {key: (rng.getrandbits(60), rng.getrandbits(60)) for key in rng.sample(range(-2000, 2000), count)}


@pytest.mark.parametrize("seed", range(25))
def test_just_the_keys_that_differ_are_named(seed: int) -> None:
    rng = Random(seed)
    theirs = rows_of(rng, 800)
    ours, wrong = dict(theirs), set()
    for key in rng.sample(sorted(theirs), rng.randint(0, 6)):
        wrong.add((str(key),))
        if rng.random() < 0.5:
            del ours[key]
        else:
            ours[key] = (ours[key][0] + 1, ours[key][1])
    for _ in range(rng.randint(0, 3)):
        key = rng.randint(3000, 4000)
        ours[key], wrong = (1, 2), wrong | {(str(key),)}
    source, lake = Rows(theirs), Rows(ours)
    cuts = lake.cuts(EVERY_KEY, rng.randint(1, 12))
    found = differing(source, lake, EVERY_KEY, cuts)
    assert (set(found.keys), found.rows, found.more) == (wrong, 800, False)
    assert source.asked <= 1 + bisecting.STEPS and source.read <= 12 * max(1, len(wrong))


def test_equal_sides_are_asked_once_and_no_row_is_read() -> None:
    rows = rows_of(Random(3), 500)
    source, lake = Rows(rows), Rows(rows)
    assert differing(source, lake, EVERY_KEY, lake.cuts(EVERY_KEY, 16)) == Differing(500)
    assert (source.asked, source.read) == (1, 0)


@pytest.mark.parametrize("seed", range(10))
def test_rows_that_are_left_out_are_no_difference_wherever_they_lie(seed: int) -> None:
    rng = Random(seed)
    theirs = rows_of(rng, 300)
    moved = {(str(key),): theirs[key] for key in rng.sample(sorted(theirs), 40)}
    ours = {key: numbers for key, numbers in theirs.items() if (str(key),) not in moved}
    wrong = rng.choice(sorted(ours))
    ours[wrong] = (0, 0)
    lake = Rows(ours)
    found = differing(Remaining(Rows(theirs), moved, True), lake, EVERY_KEY, lake.cuts(EVERY_KEY, 7))
    assert (found.keys, found.rows) == (((str(wrong),),), 260)


def test_more_rows_than_may_be_read_are_named_by_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisecting, "MOST_ROWS", 20)
    theirs = rows_of(Random(5), 400)
    source, lake = Rows(theirs), Rows({})
    found = differing(source, lake, EVERY_KEY, [])
    assert (found.keys, found.spans, found.more) == ((), (EVERY_KEY,), True) and source.read == 0


def test_a_row_that_the_lake_has_twice_is_told_by_its_range() -> None:
    class Twice(Rows):
        def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
            return [RowChecksum(rows * 2, one * 2, two * 2) for rows, one, two in super().sums(cuts, spans)]

    found = differing(Rows({1: (5, 6)}), Twice({1: (5, 6)}), EVERY_KEY, [])
    assert found.spans == (EVERY_KEY,) and found.more


def test_a_row_that_the_lake_has_twice_is_not_hidden_by_another_whose_text_alone_differs() -> None:
    class Twice(Rows):
        def sums(self, cuts: Sequence[str], spans: Sequence[KeySpan], /) -> list[RowChecksum]:
            return [RowChecksum(rows + 1, one + 5, two + 6) for rows, one, two in super().sums(cuts, spans)]

    found = differing(Rows({1: (5, 6), 2: (7, 8)}), Twice({1: (5, 6), 2: (9, 9)}), EVERY_KEY, [])
    assert found.without({("2",)}).spans == (EVERY_KEY,)


@pytest.mark.parametrize(
    ("found", "ranges"),
    [
        pytest.param(Differing(9), [], id="nothing"),
        pytest.param(
            Differing(9, keys=(("10",), ("11",), ("12",), ("2",))),
            [(("2",), ("2",)), (("10",), ("12",))],
            id="neighbours together, in the order of numbers",
        ),
        pytest.param(
            Differing(9, (KeySpan("5", "9"), KeySpan("70", None)), more=True),
            [(("5",), ("9",)), (("70",), None)],
            id="ranges where keys are not all known",
        ),
    ],
)
def test_what_is_read_again(found: Differing, ranges: list[object]) -> None:
    assert ranges_to_read(found, whole_numbers=True) == ranges


def test_rows_that_are_the_same_value_by_value_are_no_difference_whatever_their_checksums() -> None:
    found = Differing(9, (KeySpan("1", "9"),), (("2",), ("3",)))
    assert found.without({("2",)}).keys == (("3",),)
    assert found.without({("2",), ("3",)}) == Differing(9)
    assert Differing(9, (KeySpan("1", "9"),), (("2",),), more=True).without({("2",)}).more


def test_very_many_ranges_are_read_as_one() -> None:
    keys = tuple((str(2 * number),) for number in range(MOST_RANGES + 1))
    assert ranges_to_read(Differing(99, keys=keys), whole_numbers=True) == [(("0",), (str(2 * MOST_RANGES),))]


@pytest.mark.parametrize("seed", range(40))
def test_every_key_that_differs_is_read_again_whatever_its_columns_are(seed: int) -> None:
    rng = Random(seed)
    kinds = rng.choice([("integer", "integer"), ("text", "integer"), ("integer", "text")])

    def value(kind: str) -> str:
        number = rng.randrange(-5, 130)
        return str(number) if kind == "integer" else f"{rng.choice('aBä')}{number}"

    keys = tuple(sorted({tuple(value(kind) for kind in kinds) for _ in range(rng.choice([5, 60]))}))
    found = ranges_to_read(Differing(999, (EVERY_KEY,), keys), whole_numbers=kinds[0] == "integer")
    assert len(found) <= MOST_RANGES
    ranges = [KeyRange(kinds, *(None if bound is None else tuple(bound) for bound in each)) for each in found]
    assert not [key for key in keys if not any(each.holds(json.dumps(key)) for each in ranges)]


@pytest.mark.parametrize(
    ("state", "rows", "moved", "unresolved", "why"),
    [
        (EQUAL, 5, 2, 0, None),
        (EQUAL, 0, 0, 0, None),
        (PART_EQUAL, 5, 0, 1, "1 row lacks columns"),
        (EQUAL, 0, 1, 0, "none was compared"),
        (DIFFERS, 0, 1, 3, None),
    ],
)
def test_a_table_of_which_no_row_was_compared_is_not_called_equal(
    state: str, rows: int, moved: int, unresolved: int, why: str | None
) -> None:
    found = nothing_shown(state, rows, moved, unresolved)
    assert found is None if why is None else why in (found or "")
