"""Where a partition goes on: what has landed, held against what the cluster says it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.landing.manifest import OffsetSpan
from omnisupport_ingest.sources.kafka.errors import RecordsGone, TopicReplaced
from omnisupport_ingest.sources.kafka.offsets import (
    UNDECIDED,
    Held,
    Ways,
    all_going_on,
    going_on,
    joined,
    out_of_range,
)

LANDED = OffsetSpan("t", 3, 90, 100, 10, "one")


def held(low: int, end: int, topic_id: str | None = "one") -> Held:
    return Held("t", 3, low, end, topic_id)


def test_what_has_not_landed_begins_where_the_cluster_does() -> None:
    span = going_on("nova", held(40, 90), None, UNDECIDED)
    assert (span.start, span.next, span.gone, span.topic_id) == (40, 40, 0, "one")


@pytest.mark.parametrize("low", [0, 50, 100])
@pytest.mark.parametrize("topic_id", ["one", None])
def test_what_has_landed_decides_where_it_goes_on(low: int, topic_id: str | None) -> None:
    # An end below it proves nothing: not every broker tells the end of a topic.
    span = going_on("nova", held(low, 91, topic_id), LANDED, UNDECIDED)
    assert (span.start, span.next, span.topic_id) == (100, 100, "one")


def test_deleted_records_are_a_gap_that_is_named_and_can_be_accepted() -> None:
    with pytest.raises(
        RecordsGone, match=r"Partition 3 of the topic t .*offsets 100 to 149 were deleted"
    ) as it:
        going_on("nova", held(150, 200), LANDED, UNDECIDED)
    assert "sync nova --accept-gap" in it.value.fix
    span = going_on("nova", held(150, 200), LANDED, Ways(accept_gap="read anew"))
    assert (span.start, span.next, span.gone, span.accepted) == (100, 150, 50, "read anew")


def test_another_id_is_another_topic_whatever_its_offsets_are() -> None:
    for end in (0, 100, 500):
        with pytest.raises(TopicReplaced, match="its id was one and is two"):
            going_on("nova", held(0, end, "two"), LANDED, Ways(accept_gap="read anew"))
        span = going_on("nova", held(0, end, "two"), LANDED, Ways(new_epoch="made anew"))
        assert (span.start, span.next, span.topic_id) == (0, 0, "two")


def test_a_new_epoch_goes_on_where_the_topic_stayed_the_same() -> None:
    assert going_on("nova", held(0, 120), LANDED, Ways(new_epoch="another connector")).next == 100
    # Cut off, or made anew on a cluster without ids.
    assert going_on("nova", held(0, 20, None), LANDED, Ways(new_epoch="put back")).next == 0


def test_a_topic_is_replaced_as_a_whole() -> None:
    of_two = [Held("t", number, 0, 9, "two") for number in range(3)]
    waits = all_going_on("nova", of_two, {("t", 0): replace(LANDED, partition=0)}, UNDECIDED)
    (fault,) = waits.faults
    assert waits.spans == {} and isinstance(fault, TopicReplaced)
    # An earlier version landed an added partition of the new topic in the old epoch.
    mixed = {("t", 0): replace(LANDED, partition=0), ("t", 1): OffsetSpan("t", 1, 0, 5, 5, "two")}
    assert all_going_on("nova", of_two, mixed, UNDECIDED).spans == {}
    begins = all_going_on("nova", of_two, mixed, Ways(new_epoch="made anew"))
    assert [span.next for span in begins.spans.values()] == [0, 0, 0] and begins.anew == {"t"}


def test_what_is_left_of_an_older_topic_makes_no_other_one_of_it() -> None:
    landed = {("t", 0): OffsetSpan("t", 0, 0, 5, 5, "two"), ("t", 3): LANDED}
    now = [Held("t", 0, 0, 9, "two")]
    assert all_going_on("nova", now, landed, UNDECIDED).spans[("t", 0)].next == 5


def test_a_partition_that_is_added_to_a_known_topic_lacks_what_retention_took() -> None:
    landed = {("t", 0): OffsetSpan("t", 0, 0, 5, 5, "one")}
    (gap,) = all_going_on("nova", [held(40, 90)], landed, UNDECIDED).faults
    assert isinstance(gap, RecordsGone) and "nothing of it has landed: offsets 0 to 39" in gap.problem
    accepted = all_going_on("nova", [held(40, 90)], landed, Ways(accept_gap="read anew")).spans[("t", 3)]
    assert (accepted.start, accepted.next, accepted.gone) == (0, 40, 40)
    assert all_going_on("nova", [held(0, 90)], landed, UNDECIDED).spans[("t", 3)].next == 0


def test_an_offset_that_the_cluster_refuses_is_gone_or_was_another_topics() -> None:
    assert isinstance(out_of_range("nova", held(150, 200), LANDED), RecordsGone)
    fault = out_of_range("nova", held(0, 20), LANDED)
    assert isinstance(fault, TopicReplaced) and "has no offset 100 of partition 3" in fault.problem


SPANS = st.dictionaries(
    st.tuples(st.sampled_from("ab"), st.integers(0, 2)),
    st.tuples(st.integers(0, 50), st.integers(0, 50)),
    min_size=1,
)


@given(st.lists(SPANS, min_size=1, max_size=6))
def test_batches_rise_and_the_last_one_says_where_every_partition_goes_on(
    rounds: list[dict[tuple[str, int], tuple[int, int]]],
) -> None:
    landed: dict[tuple[str, int], OffsetSpan] = {}
    expected: dict[tuple[str, int], int] = {}
    sums = []
    for each in rounds:
        spans = []
        for place, (first, count) in each.items():
            start = expected.get(place, first)
            spans.append(OffsetSpan(*place, start, start + count, count))
            expected[place] = start + count
        if not any(span.next > span.start for span in spans):
            expected = {place: span.next for place, span in landed.items()}
            continue
        whole = joined(landed, spans)
        landed = {(span.topic, span.partition): span for span in whole}
        sums.append(sum(span.start for span in whole))
        assert {place: span.next for place, span in landed.items()} == expected
    assert sums == sorted(set(sums)), "no two batches have one name"
