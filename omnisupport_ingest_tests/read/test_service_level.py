"""What a contract promises of a table: how far behind it may be, and when it was equal to its source."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.contracts.model import DelayedMerge, TableContract
from omnisupport_ingest.contracts.quality import Freshness as Asked
from omnisupport_ingest.contracts.quality import Quality
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.freshness import Freshness, service_level, verified_in_words
from omnisupport_ingest.read.verified import DIFFERS, EQUAL, Moment, Verified
from omnisupport_ingest_tests.sources.postgres.source_under_test import contract

NOW = datetime(2026, 11, 24, 12, tzinfo=UTC)


def promising(**asked: timedelta) -> TableContract:
    return replace(contract("notes", ("id",)), quality=Quality(freshness=Asked(**asked)))


def behind(seconds: float) -> Freshness:
    moment = NOW - timedelta(seconds=seconds)
    return Freshness(moment, moment, 0)


def equal(seconds: float) -> Verified:
    at = NOW - timedelta(seconds=seconds)
    return Verified("notes", EQUAL, at, 9, through=Moment(1, Lsn(255), at))


@pytest.mark.parametrize(("seconds", "kept"), [(59, True), (60, True), (61, False)])
def test_a_table_may_be_as_far_behind_as_its_contract_says(seconds: float, kept: bool) -> None:
    level = service_level(promising(max_lag=timedelta(minutes=1)), behind(seconds), None, NOW)
    assert (level.kept, level.by_contract, level.within) == (kept, True, 60)


def test_without_a_promise_it_is_a_quarter_of_an_hour_and_nobody_s_promise() -> None:
    level = service_level(contract("notes", ("id",)), behind(899), None, NOW)
    assert (level.kept, level.by_contract, level.within) == (True, False, 900)
    assert not service_level(contract("notes", ("id",)), behind(901), None, NOW).kept


def test_what_may_wait_for_its_merge_is_allowed_on_top() -> None:
    waits = replace(
        promising(max_lag=timedelta(minutes=1)), delayed_merge=DelayedMerge(timedelta(minutes=10), 0.01)
    )
    assert service_level(waits, behind(650), None, NOW).kept
    assert not service_level(waits, behind(670), None, NOW).kept


def test_nothing_landed_is_neither_kept_nor_broken() -> None:
    level = service_level(promising(max_lag=timedelta(minutes=1)), Freshness(None, None, 0), None, NOW)
    assert level.kept is None


def test_equal_to_the_source_long_ago_or_never_breaks_a_promise_of_it() -> None:
    asked = promising(verified_within=timedelta(minutes=10))
    assert service_level(asked, behind(1), equal(599), NOW).kept
    late, never = (service_level(asked, behind(1), each, NOW) for each in (equal(601), None))
    assert not late.kept and "it was 10 minutes ago found equal" in late.broken[0]
    assert not never.kept and "it was never found equal" in never.broken[0]


def test_what_is_known_of_a_table_and_its_source_is_one_sentence() -> None:
    assert verified_in_words(None, NOW) is None
    assert verified_in_words(equal(180), NOW) == "equal to the source at LSN 0/FF, checked 3 minutes ago"
    later = replace(equal(180), state=DIFFERS, why="2 rows differ from the source, at two LSNs")
    assert verified_in_words(later, NOW) == (
        "equal to the source at LSN 0/FF, checked 3 minutes ago; since then differs: 2 rows differ from the "
        "source, at two LSNs"
    )
