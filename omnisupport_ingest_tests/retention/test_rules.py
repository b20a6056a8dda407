"""The rules of retention alone: nothing that a window may still need is ever taken, whatever the facts."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnisupport_ingest.contracts.durations import duration_text, parse_duration
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import ContractError, RetentionPolicy
from omnisupport_ingest.layers.removed import LANDING, RAW
from omnisupport_ingest.retention.keeping import keep_of, kept_by
from omnisupport_ingest.retention.rules import Answer, WindowFacts, judge_landing, judge_raw
from omnisupport_ingest_tests.layers.story import CONTRACT

END = datetime(2026, 1, 1, tzinfo=UTC)
OLD = WindowFacts("2026-01-01T0000", END, closed=True, settled=True, landed=3, held=3, all_held=True)
TRIMMED = replace(OLD, trimmed=True)
DAY, LATER = timedelta(days=1), END + timedelta(days=30)

facts = st.builds(
    WindowFacts,
    window=st.just("2026-01-01T0000"),
    end=st.just(END),
    closed=st.booleans(),
    settled=st.booleans(),
    landed=st.integers(0, 2),
    held=st.integers(0, 2),
    all_held=st.booleans(),
    taking=st.sampled_from((None, "rows land in it")),
    snapshot=st.sampled_from((None, "public.notes")),
    undecided=st.integers(0, 1),
    judged_whole=st.booleans(),
    trimmed=st.booleans(),
    sealed=st.booleans(),
)
lengths = st.none() | st.timedeltas(timedelta(0), timedelta(days=3))
marks = st.none() | st.datetimes(datetime(2025, 12, 31), datetime(2026, 1, 4), timezones=st.just(UTC))


@given(facts, lengths, marks)
def test_what_goes_is_old_and_nothing_of_it_is_needed_any_more(found, keep, watermark):
    for judge in (judge_landing, judge_raw):
        verdict = judge(found, keep, watermark)
        if verdict.answer is not Answer.REMOVED:
            continue
        assert keep is not None and watermark is not None and watermark - END >= keep
        assert found.closed and found.settled and found.all_held and found.landed == found.held
        if verdict.layer == LANDING:
            assert found.snapshot is None and not found.trimmed
        else:
            assert found.trimmed and not found.undecided and not found.sealed and found.judged_whole
            assert found.taking is None


@given(facts, st.timedeltas(timedelta(0), timedelta(days=3)), marks, st.timedeltas(timedelta(0), DAY))
def test_a_longer_time_never_takes_more(found, keep, watermark, more):
    for judge in (judge_landing, judge_raw):
        if judge(found, keep + more, watermark).answer is Answer.REMOVED:
            assert judge(found, keep, watermark).answer is Answer.REMOVED


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (replace(TRIMMED, closed=False), "not closed"),
        (replace(TRIMMED, settled=False), "pending"),
        (replace(TRIMMED, all_held=False), "every batch"),
        (replace(TRIMMED, held=2), "raw holds 2 of its 3 events"),
        (replace(TRIMMED, undecided=4), "4 of its events in quarantine"),
        (replace(TRIMMED, taking="rows without a time land in it"), "rows without a time"),
        (OLD, "landing keeps"),
    ],
)
def test_a_window_is_not_sealed_while_it_may_be_needed_and_it_is_said_why(found, why):
    verdict = judge_raw(found, DAY, LATER)
    assert (verdict.layer, verdict.answer) == (RAW, Answer.REFUSED)
    assert why in verdict.why


def test_old_windows_go_once_and_young_ones_stay():
    assert judge_landing(OLD, DAY, LATER).answer is Answer.REMOVED
    assert judge_landing(TRIMMED, DAY, LATER).answer is Answer.GONE
    assert judge_raw(TRIMMED, DAY, LATER).answer is Answer.REMOVED
    assert judge_raw(replace(TRIMMED, sealed=True), DAY, LATER).answer is Answer.GONE
    assert judge_landing(OLD, None, LATER).answer is Answer.YOUNG
    assert judge_landing(OLD, DAY, None).answer is Answer.YOUNG
    assert judge_landing(OLD, DAY, END + DAY - timedelta(microseconds=1)).answer is Answer.YOUNG


def contract(**retention):  # type: ignore[no-untyped-def]
    return contract_of({**CONTRACT, "x-cdc": {**CONTRACT["x-cdc"], "retention": retention}}, "notes.json")


@pytest.mark.parametrize(
    ("retention", "why"),
    [
        ({"raw": "P30D"}, "shorter than landing"),
        ({"landing": "P30D", "raw": "P20D"}, "shorter than landing"),
        ({"landing": "P1D", "raw": "P6D"}, "lateness.max"),
        ({"landing": "P7D", "raw": "P10D", "quarantine": "P9D"}, "shorter than raw"),
        ({"landing": "P7D", "quarantine": "P9D"}, "shorter than raw"),
        ({"history": "P6D"}, "lateness.max"),
        ({"old_files": "PT59M"}, "PT1H"),
        ({"landing": "P1M"}, "duration"),
        ({"net_changes": "P30D"}, "net_changes"),
    ],
)
def test_a_contract_that_would_lose_what_it_needs_is_refused(retention, why):
    with pytest.raises(ContractError, match=why):
        contract(**retention)


def test_the_table_that_wants_it_longest_decides_and_retention_judges_no_event():
    kept, other = contract(landing="P7D", raw="P10D"), contract(landing="P30D")
    assert kept.retention == RetentionPolicy(timedelta(days=7), timedelta(days=10))
    assert keep_of([kept], LANDING) == timedelta(days=7)
    assert keep_of([kept, other], LANDING) == timedelta(days=30)
    assert keep_of([kept, other], RAW) is None
    assert kept.fingerprint == other.fingerprint == contract().fingerprint
    assert {each.layer for each in kept_by([kept])} >= {
        "landing",
        "raw",
        "net_changes",
        "history",
        "old_files",
    }


@given(st.timedeltas(timedelta(seconds=1), timedelta(days=400)))
def test_durations_are_written_as_they_are_read(length):
    whole = timedelta(seconds=int(length.total_seconds()))
    assert parse_duration(duration_text(whole)) == whole
