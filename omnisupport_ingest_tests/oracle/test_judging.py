"""The oracle's own verdicts, one rule at a time."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest_tests.oracle.judging import (
    ACCEPTED,
    DUPLICATE,
    OUT_OF_RANGE,
    QUARANTINED,
    Arrival,
    Clockwork,
    Delivery,
    JudgingRules,
    judge,
    ledger,
)
from omnisupport_ingest_tests.oracle.model import Event, Position

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
EVENT = Event(Position(1, 10, 0), "c", "tickets", ("1",), NOON, after={"status": "open"})
FIRST = Delivery(1, EVENT, "2026-03-01T1200", Arrival(NOON, None, 1, from_file=True))
RULES = JudgingRules(
    actions={
        "late_arrival": "replay_window",
        "too_late_arrival": "quarantine",
        "duplicate_position": "dedupe",
        "out_of_order_event": "quarantine",
        "older_epoch": "quarantine",
    },
    to_review=frozenset({"collision", "too_late_arrival"}),
    lateness={"tickets": (HOUR, 3 * HOUR)},
    longest={"tickets": {"status": 10}},
    window_length=HOUR,
)


def reasons(*deliveries: Delivery, judging_rules: JudgingRules = RULES) -> list[str | None]:
    return [
        each.reason
        for each in sorted(judge(deliveries, judging_rules), key=lambda each: each.delivery.number)
    ]


def arrived(hours: float, delivery: Delivery = FIRST) -> Delivery:
    """``delivery`` as it lands when the watermark stands so many hours after noon."""
    return replace(delivery, arrival=replace(delivery.arrival, watermark_before=NOON + hours * HOUR))


@pytest.mark.parametrize(
    ("hours", "late", "reason"),
    [(1.9, False, None), (2, True, None), (3, True, None), (3.1, True, "too_late_arrival")],
)
def test_lateness_is_judged_by_the_watermark_that_the_batch_found(hours, late, reason):
    (verdict,) = judge([arrived(hours)], RULES)
    assert (verdict.late, verdict.reason) == (late, reason)


@pytest.mark.parametrize("op", ["r", "b"])
def test_what_a_snapshot_read_is_never_too_late(op):
    event = replace(EVENT, op=op)
    assert reasons(arrived(9, replace(FIRST, event=event))) == [None]


def test_what_capture_streamed_is_never_too_late():
    streamed = replace(FIRST, arrival=replace(FIRST.arrival, from_file=False))
    assert reasons(arrived(9, streamed)) == [None]


def test_the_copy_that_landed_first_decides():
    late_copy = replace(arrived(9), number=2)
    assert [each.verdict for each in judge([late_copy, FIRST], RULES)] == [ACCEPTED, DUPLICATE]
    late_first = replace(late_copy, number=0)
    assert reasons(late_first, FIRST) == ["too_late_arrival", "duplicate_position"]


def test_other_content_at_one_place_is_a_collision_and_another_identity_is_none():
    other = replace(FIRST, number=2, event=replace(EVENT, after={"status": "closed"}))
    assert reasons(FIRST, other) == ["collision", "collision"]
    assert reasons(FIRST, replace(other, event=replace(other.event, identity="b"))) == [None, None]


def test_a_release_lets_one_event_of_a_collision_in_and_the_other_waits():
    other = replace(FIRST, number=2, event=replace(EVENT, after={"status": "closed"}))
    released = replace(RULES, reviews={other.key: "release"})
    assert reasons(FIRST, other, judging_rules=released) == ["collision", None]


def test_an_event_of_an_epoch_that_was_given_up_waits():
    assert reasons(replace(FIRST, arrival=replace(FIRST.arrival, newest_epoch_before=2))) == ["older_epoch"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": OUT_OF_RANGE}, "out_of_range"),
        ({"unreadable": "{"}, "malformed_image"),
        ({"event": replace(EVENT, key=None)}, "malformed_image"),
        ({"event": replace(EVENT, after=None)}, "malformed_image"),
        ({"event": replace(EVENT, after={"status": "far too long"})}, "row_rule"),
        ({"misplaced": True}, "out_of_order_event"),
    ],
)
def test_what_is_wrong_with_one_event(change, reason):
    assert reasons(replace(FIRST, **change)) == [reason]


def test_an_unsent_column_is_judged_by_the_old_image():
    event = replace(
        EVENT, op="u", before={"status": "far too long"}, after={}, unchanged=frozenset({"status"})
    )
    assert reasons(replace(FIRST, event=event)) == ["row_rule"]


def test_a_release_lets_an_event_in_but_not_one_that_breaks_todays_contract():
    late = arrived(9)
    released = replace(RULES, reviews={late.key: "release"})
    assert [each.verdict for each in judge([late], released)] == [ACCEPTED]
    stricter = replace(released, longest={"tickets": {"status": 3}})
    assert [(each.verdict, each.state) for each in judge([late], stricter)] == [(QUARANTINED, "not_needed")]


def test_a_discarded_event_stays_in_quarantine():
    late = arrived(9)
    (verdict,) = judge([late], replace(RULES, reviews={late.key: "discard"}))
    assert (verdict.verdict, verdict.state, verdict.told.quarantined) == (QUARANTINED, "discarded", True)


def test_a_discarded_event_is_never_accepted_whatever_the_rules_say_later():
    discarded = replace(RULES, reviews={FIRST.key: "discard"})
    first, copy = judge([FIRST, replace(FIRST, number=2)], discarded)
    assert (first.verdict, first.reason, first.state) == (QUARANTINED, "discarded_event", "discarded")
    assert copy.verdict == DUPLICATE


@pytest.mark.parametrize("discarded", [0, 1, 2])
def test_what_was_decided_of_a_content_counts_for_those_that_are_its_copies_by_now(discarded):
    """Three contents, of which nothing is left that tells them apart; a discard counts before a release."""
    contents = [
        replace(
            FIRST,
            number=number + 1,
            event=replace(EVENT, after={"status": str(number)}),
            same=(),
        )
        for number in range(3)
    ]
    reviews = {each.key: "release" for each in contents[1:]} | {contents[discarded].key: "discard"}
    verdicts = once_erased(contents, replace(RULES, reviews=reviews))
    assert (verdicts[0].verdict, verdicts[0].state) == (QUARANTINED, "discarded")
    assert [each.verdict for each in verdicts[1:]] == [DUPLICATE, DUPLICATE]
    released = replace(RULES, reviews={contents[2].key: "release"})
    assert once_erased(contents, released)[0].verdict == ACCEPTED


def once_erased(contents, rules):
    """Judge what an erasure left: the product finds the copies among it before its kernel judges them."""
    return judge(contents, rules)


def test_a_discard_of_copies_concerns_only_them():
    strict = replace(
        RULES,
        actions={**RULES.actions, "duplicate_position": "quarantine"},
        reviews={FIRST.key: "discard copies"},
    )
    first, copy = judge([FIRST, replace(FIRST, number=2)], strict)
    assert first.verdict == ACCEPTED
    assert (copy.reason, copy.state) == ("duplicate_position", "discarded")


def test_an_action_that_lets_pass_lets_pass():
    accepting = replace(RULES, actions={**RULES.actions, "too_late_arrival": "replay_window"})
    assert reasons(arrived(9), judging_rules=accepting) == [None]
    strict = replace(RULES, actions={**RULES.actions, "late_arrival": "quarantine"})
    assert reasons(arrived(2), judging_rules=strict) == ["late_arrival"]


def test_an_erased_event_is_judged_whole_and_kept_without_its_values():
    wrong = replace(FIRST, event=replace(EVENT, at=Position(1, 20, 0), after={"status": "far too long"}))
    later = replace(FIRST, event=replace(EVENT, at=Position(1, 30, 0)))
    judging_rules = replace(RULES, erasures={("tickets", ("1",)): [(None, Position(1, 20, 0))]})
    first, second, third = judge([FIRST, wrong, later], judging_rules)
    assert [each.reason for each in (first, second, third)] == [None, "row_rule", None]
    assert [each.kept.after for each in (first, second, third)] == [{}, {}, {"status": "open"}]
    assert first.kept.unchanged == {"status"}
    above = replace(RULES, erasures={("tickets", ("1",)): [(EVENT.at, Position(1, 20, 0))]})
    assert [each.erased for each in judge([FIRST, wrong, later], above)] == [False, True, False]


def test_the_ledger_counts_a_late_event_besides_what_else_it_is():
    ((verdicts, scenarios),) = ledger(judge([arrived(9), replace(arrived(9), number=2)], RULES)).values()
    assert verdicts == {QUARANTINED: 1, DUPLICATE: 1}
    assert scenarios == {"late_arrival": 1, "too_late_arrival": 1, "duplicate_position": 1}


def test_the_watermark_never_moves_back_within_an_epoch_and_a_new_one_starts_afresh():
    clock = Clockwork()

    def arrive(epoch: int, hours: float) -> datetime | None:
        found = clock.arrive(
            epoch, [NOON + hours * HOUR], NOON + 9 * HOUR, moves=True, from_file=False, begins=True
        )
        return found.watermark_before

    assert arrive(1, 3) is None
    assert arrive(1, 1) == NOON + 3 * HOUR
    assert arrive(2, 1) == NOON + 3 * HOUR
    assert arrive(2, 1) == NOON + HOUR
