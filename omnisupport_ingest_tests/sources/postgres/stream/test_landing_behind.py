"""A batch lands while what follows is read: order, confirmation and faults are as if it were not."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.errors import LandingFailed
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")


@dataclass
class Held:
    """A running capture, whose first batch with events cannot land before ``let_go``."""

    source: SourceUnderTest
    reached: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    passed_on: list[Manifest] = field(default_factory=list)
    reports: int = 0
    too_early: list[Lsn] = field(default_factory=list)
    problem: OSError | None = None
    ends: Future[None] = field(default_factory=Future)

    @property
    def unlanded(self) -> set[str]:
        """Batches that are landing, or open."""
        folders = {each.name for each in (self.source.store.folder / "data").iterdir()}
        return folders - set(self.source.store.batch_ids())

    def write_while_one_lands(self) -> None:
        """Commit a change that begins to land, then one that goes into the next batch; let capture report."""
        self.source.sql("INSERT INTO tickets VALUES (1, 'a')")
        assert self.reached.wait(PATIENCE)
        # WAL without changes makes an idle batch due, which must not keep what follows from being read.
        self.source.sql("CHECKPOINT")
        self.await_reports(4)
        self.source.sql("INSERT INTO tickets VALUES (2, 'b')")
        until(lambda: len(self.unlanded) == 2)
        self.await_reports(2)

    def await_reports(self, count: int) -> None:
        """Wait until capture has told the source ``count`` more times that it is alive."""
        before = self.reports
        until(lambda: self.reports >= before + count)

    def landed_end(self) -> Lsn:
        """Where the chain of durable batches ends."""
        end = self.source.store.landed().stream_end
        assert end is not None
        return end


@pytest.fixture
def held(source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.tables.append(contract("tickets", COLUMNS))
    source.overrides["batch_max_seconds"] = 0.05
    source.catch_up()
    held, publish, confirm = Held(source), LandingStore.publish, WalStream.confirm

    def published(store: LandingStore, manifest: Manifest) -> None:
        if manifest.rows and not held.let_go.is_set():
            held.reached.set()
            assert held.let_go.wait(PATIENCE)
            if held.problem is not None:
                raise held.problem
        publish(store, manifest)

    def confirmed(stream: WalStream, durable: Lsn | None, **named: Any) -> None:
        held.reports += 1
        if durable is not None and durable > held.landed_end():
            held.too_early.append(durable)
        confirm(stream, durable, **named)

    monkeypatch.setattr(LandingStore, "publish", published)
    monkeypatch.setattr(WalStream, "confirm", confirmed)
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.2)
    capture = Capture(source.settings, source.home, Contracts(tuple(source.tables)), held.passed_on.append)
    with ThreadPoolExecutor(1) as threads:
        held.ends = threads.submit(capture.run, None, held.stop)
        yield held
        held.let_go.set()
        held.stop.set()
    assert not held.too_early


def assert_all_landed_once(source: SourceUnderTest) -> None:
    source.catch_up()
    assert [event.key for event in source.changes()] == ['["1"]', '["2"]']
    assert folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)
    assert source.store.landed().gap is None


def test_what_comes_while_a_batch_lands_is_read_and_is_the_next_batch(held: Held) -> None:
    before, confirmed = held.landed_end(), held.source.confirmed()
    held.write_while_one_lands()
    assert (held.landed_end(), held.source.confirmed()) == (before, confirmed)
    held.let_go.set()
    until(lambda: held.ends.done() or len(held.source.changes()) == 2)
    held.stop.set()
    held.ends.result(PATIENCE)
    rows = [each for each in held.passed_on if each.stream and each.rows]
    assert [each.rows for each in rows] == [1, 1]
    assert rows[0].stream and rows[1].stream and rows[0].stream.end_lsn <= rows[1].stream.previous_end_lsn
    assert held.source.confirmed() == held.landed_end()
    assert_all_landed_once(held.source)


def test_a_stop_waits_for_the_batch_that_is_landing_and_lands_the_next(held: Held) -> None:
    held.write_while_one_lands()
    held.stop.set()
    held.let_go.set()
    held.ends.result(PATIENCE)
    assert len(held.source.changes()) == 2
    assert held.source.confirmed() == held.landed_end()


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EIO])
def test_where_a_batch_cannot_land_the_next_does_not_either(held: Held, problem: int) -> None:
    before = held.landed_end()
    held.write_while_one_lands()
    held.problem = OSError(problem, "the disk")
    held.let_go.set()
    with pytest.raises(LandingFailed, match="the disk"):
        held.ends.result(PATIENCE)
    assert held.landed_end() == before and not held.unlanded
    assert_all_landed_once(held.source)


def end_replication(source: SourceUnderTest) -> None:
    of_slot = f"FROM pg_replication_slots WHERE slot_name = '{source.slot}'"
    source.sql(f"SELECT pg_terminate_backend(active_pid) {of_slot}")
    until(lambda: source.query(f"SELECT active {of_slot}") == [(False,)])


def test_a_batch_that_is_landing_when_the_source_goes_away_counts(held: Held) -> None:
    held.write_while_one_lands()
    end_replication(held.source)
    held.let_go.set()
    with pytest.raises(SourceUnavailable):
        held.ends.result(PATIENCE)
    assert [event.key for event in held.source.changes()] == ['["1"]']
    assert [each.rows for each in held.passed_on if each.rows] == [1]
    assert not held.unlanded
    assert_all_landed_once(held.source)


def test_what_follows_the_goal_in_the_same_buffer_is_left(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    source.sql(*(f"INSERT INTO tickets VALUES ({number}, 'a')" for number in range(20)))
    goal = current_wal_lsn(source.dsn)
    source.sql(*(f"INSERT INTO tickets VALUES ({number}, 'b')" for number in range(20, 120)))
    source.capture().run(goal, threading.Event())
    assert 20 <= len(source.changes()) <= 21
    source.catch_up()
    assert folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)
