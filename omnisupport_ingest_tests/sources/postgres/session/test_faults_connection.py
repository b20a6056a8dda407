"""Connections that are cut, and those that fall silent without it: both are noticed, nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeVar

import pytest
from psycopg2 import OperationalError
from psycopg2.extensions import make_dsn, parse_dsn

from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.connection import connect, connect_replication, with_silence
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import slot_facts
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres.fronts import Swallowing, losing, swallowing
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

T = TypeVar("T")

COLUMNS = ("id", "v")
SILENCE = 1.0
NOTICED = 45.0
"""Seconds in which a silence has to be noticed: the server is asked, borne with, and asked elsewhere.

The default of the setting alone is 60, so what notices in this time has heard of ``SILENCE``.
"""


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A filled table ``tickets``, and a capture that bears a second of silence."""
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 500) g")
    source.tables.append(contract("tickets", COLUMNS))
    source.overrides["source_silence_seconds"] = SILENCE
    return source


@dataclass
class Fronted:
    """``source`` directly, for the test; ``behind`` the front for capture."""

    source: SourceUnderTest
    behind: SourceUnderTest
    front: Swallowing

    def server_sees_dead_readers_itself(self) -> None:
        """Within two seconds, by a setting of capture's sessions."""
        self.behind.dsn = make_dsn(self.behind.dsn, options="-c wal_sender_timeout=2000")


@pytest.fixture
def fronted(tickets: SourceUnderTest) -> Iterator[Fronted]:
    given = parse_dsn(tickets.dsn)
    with swallowing(f"{given['host']}/.s.PGSQL.{given['port']}") as front:
        dsn = make_dsn(tickets.dsn, host="127.0.0.1", port=front.port)
        yield Fronted(tickets, replace(tickets, dsn=dsn), front)


def silence(front: Swallowing, others_work: bool) -> None:
    if others_work:
        front.swallow_open()
    else:
        front.swallow_all()


def assert_same_as_source(source: SourceUnderTest) -> None:
    assert folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)


def noticed(front: Swallowing, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises; fails if it still waits for ``front`` after ``NOTICED``."""
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run).start()
    try:
        return ended.result(NOTICED)
    except TimeoutError:
        front.break_connections()
        raise


def streams(source: SourceUnderTest) -> bool:
    return any(is_stream(name) for name in source.store.batch_ids())


@pytest.mark.parametrize(
    "others_work",
    [pytest.param(True, id="others work", marks=pytest.mark.slow), pytest.param(False, id="all silent")],
)
def test_stream_that_falls_silent_is_given_up_and_the_next_start_goes_on(
    fronted: Fronted, others_work: bool
) -> None:
    if not others_work:
        # Nobody can tell the server then that its reader is gone.
        fronted.server_sees_dead_readers_itself()
    process = fronted.behind.capture_process()
    try:
        until(lambda: streams(fronted.source))
        silence(fronted.front, others_work)
        began = time.monotonic()
        fronted.source.sql("UPDATE tickets SET v = 'unheard' WHERE id < 9")
        _, errors = process.communicate(timeout=NOTICED)
    finally:
        process.kill()
    assert time.monotonic() - began < NOTICED
    assert process.returncode == SourceUnavailable.exit_code, errors
    assert "fallen silent" in errors or "nothing has come from it" in errors
    fronted.source.wait_for_free_slot()
    fronted.front.swallow_open()
    fronted.behind.catch_up()
    assert_same_as_source(fronted.source)


@pytest.mark.slow
def test_idle_stream_is_not_taken_for_a_silent_one(fronted: Fronted) -> None:
    process = fronted.behind.capture_process()
    try:
        until(lambda: streams(fronted.source))
        time.sleep(4 * SILENCE)
        fronted.source.sql("UPDATE tickets SET v = 'heard' WHERE id < 9")
        until(lambda: bool(fronted.source.changes()))
        assert process.poll() is None
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    finally:
        process.kill()


@pytest.mark.parametrize("others_work", [True, False], ids=["others work", "all silent"])
def test_statement_without_an_answer_is_given_up(fronted: Fronted, others_work: bool) -> None:
    with closing(connect(with_silence(fronted.behind.dsn, SILENCE))) as connection:
        assert slot_facts(connection, "none") is None
        silence(fronted.front, others_work)
        with pytest.raises(SourceUnavailable, match="while reading the replication slot: nothing has come"):
            slot_facts(connection, "none")
        assert connection.closed


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_end_of_a_transaction_without_an_answer_is_given_up(tickets: SourceUnderTest, end: str) -> None:
    given = parse_dsn(tickets.dsn)
    with swallowing(f"{given['host']}/.s.PGSQL.{given['port']}", after="SET v") as front:
        behind = with_silence(make_dsn(tickets.dsn, host="127.0.0.1", port=front.port), SILENCE)
        with closing(connect(behind)) as connection, connection.cursor() as cursor:
            connection.autocommit = False
            cursor.execute("UPDATE tickets SET v = 'never'")
            with pytest.raises(OperationalError, match="nothing has come from it"):
                noticed(front, getattr(connection, end))
    assert tickets.query("SELECT FROM tickets WHERE v = 'never'") == []


def test_session_is_usable_as_soon_as_its_settings_are_made(tickets: SourceUnderTest) -> None:
    """Where the server falls silent right after that, nothing is waited for that nobody watches."""
    given = parse_dsn(tickets.dsn)
    with swallowing(f"{given['host']}/.s.PGSQL.{given['port']}", after="set_config") as front:
        behind = with_silence(make_dsn(tickets.dsn, host="127.0.0.1", port=front.port), SILENCE)
        with closing(noticed(front, lambda: connect(behind))) as connection:
            assert not connection.info.transaction_status


def test_stream_that_falls_silent_before_it_begins_is_given_up(fronted: Fronted) -> None:
    fronted.source.catch_up()
    replication = connect_replication(with_silence(fronted.behind.dsn, SILENCE))
    fronted.front.swallow_open()
    with pytest.raises(SourceUnavailable, match="while starting replication: nothing has come"):
        WalStream(replication, fronted.source.slot, fronted.source.slot, fronted.source.confirmed())


def test_snapshot_that_falls_silent_is_given_up_and_goes_on_at_the_next_start(fronted: Fronted) -> None:
    source = fronted.source
    source.sql("ALTER TABLE tickets ADD filling text")
    source.sql("INSERT INTO tickets SELECT g, 'more', repeat('x', 2000) FROM generate_series(1000, 9000) g")
    fronted.behind.overrides |= {"snapshot_rows_per_second": 2000, "snapshot_fetch_bytes": 65536}
    # The first of the two dead sessions that is noticed ends capture.
    fronted.server_sees_dead_readers_itself()
    process = fronted.behind.capture_process()
    reading = "SELECT FROM pg_stat_activity WHERE query LIKE 'COPY%tickets%' AND xact_start IS NOT NULL"
    try:
        until(lambda: bool(source.query(reading)))
        fronted.front.swallow_open()
        _, errors = process.communicate(timeout=NOTICED)
    finally:
        process.kill()
    assert process.returncode == SourceUnavailable.exit_code, errors
    assert "nothing has come from it" in errors or "fallen silent" in errors
    source.wait_for_free_slot()
    del fronted.behind.overrides["snapshot_rows_per_second"]
    fronted.behind.catch_up()
    assert folded(source.events(), "tickets") == source.rows("tickets", (*COLUMNS, "filling"))


def test_statement_that_waits_for_a_lock_is_waited_for(tickets: SourceUnderTest) -> None:
    with (
        tickets.connected() as holder,
        closing(connect(with_silence(tickets.dsn, SILENCE))) as waiting,
        holder.cursor() as locks,
        waiting.cursor() as waits,
    ):
        locks.execute("BEGIN; LOCK TABLE tickets")
        release = "SELECT pg_sleep(4), pg_terminate_backend(%s)"
        with tickets.connected() as timer, timer.cursor() as later:
            later.execute("SELECT 1")
            ending = threading.Thread(target=later.execute, args=(release, (holder.info.backend_pid,)))
            ending.start()
            waits.execute("SELECT count(*) FROM tickets")
            assert waits.fetchone() == (500,)
            ending.join()


def test_clean_end_leaves_the_slot_where_landing_ends_whatever_is_lost_on_the_way(
    tickets: SourceUnderTest,
) -> None:
    given = parse_dsn(tickets.dsn)
    tickets.catch_up()
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id < 9")
    with losing(f"{given['host']}/.s.PGSQL.{given['port']}") as port:
        replace(tickets, dsn=make_dsn(tickets.dsn, host="127.0.0.1", port=port)).catch_up()
    tickets.wait_for_free_slot()
    epoch = tickets.store.current_epoch()
    assert epoch is not None and tickets.confirmed() == end_of_chain(tickets.store, epoch).end
    tickets.catch_up()
    assert not any(each.stream and each.stream.recovered_from for each in tickets.manifests())
    assert_same_as_source(tickets)


@pytest.mark.slow
def test_what_was_confirmed_is_heard_too_where_the_stream_is_begun_anew(tickets: SourceUnderTest) -> None:
    """A transaction in progress that cannot be told from its rolled back parts is read after its commit."""
    given = parse_dsn(tickets.dsn)
    tickets.overrides |= {"stream_above_bytes": 64 * 1024, "batch_max_bytes": 1}
    tickets.catch_up()
    tickets.sql("UPDATE tickets SET v = 'landed first' WHERE id < 9")
    many = "INSERT INTO tickets SELECT g, repeat('x', 1000) FROM generate_series({}, {}) g"
    tickets.transaction(
        many.format(1000, 1500),
        "SAVEPOINT s",
        "SELECT pg_logical_emit_message(true, 'audit', 'never')",
        many.format(2000, 2500),
        "ROLLBACK TO s",
        many.format(3000, 3500),
    )
    with losing(f"{given['host']}/.s.PGSQL.{given['port']}") as port:
        replace(tickets, dsn=make_dsn(tickets.dsn, host="127.0.0.1", port=port)).catch_up()
    assert len(tickets.changes()) == 8 + 501 + 501
    assert not any(each.stream and each.stream.recovered_from for each in tickets.manifests())
    assert_same_as_source(tickets)


@pytest.mark.parametrize("what", ["walsender", pytest.param("client backend", marks=pytest.mark.slow)])
def test_terminated_session_ends_capture_and_the_next_start_goes_on(
    tickets: SourceUnderTest, what: str
) -> None:
    process = tickets.capture_process()
    try:
        until(lambda: streams(tickets))
        tickets.sql("UPDATE tickets SET v = 'new' WHERE id < 9")
        tickets.sql(
            f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = '{what}'"
            " AND application_name = 'omnisupport-ingest' AND datname = current_database()"
        )
        _, errors = process.communicate(timeout=NOTICED)
        assert process.returncode == SourceUnavailable.exit_code, errors
        if what == "walsender":
            assert "terminating connection due to administrator command" in errors
    finally:
        process.kill()
    tickets.sql("UPDATE tickets SET v = 'newer' WHERE id > 400")
    tickets.catch_up()
    assert_same_as_source(tickets)


def test_terminated_read_of_a_snapshot_ends_capture_and_the_next_start_goes_on(
    tickets: SourceUnderTest,
) -> None:
    tickets.sql("INSERT INTO tickets SELECT g, 'more' FROM generate_series(1000, 9000) g")
    tickets.overrides |= {"snapshot_rows_per_second": 2000, "snapshot_chunk_rows": 1000}
    process = tickets.capture_process()
    reading = "FROM pg_stat_activity WHERE query LIKE 'COPY%tickets%' AND xact_start IS NOT NULL"
    try:
        until(lambda: bool(tickets.query(f"SELECT {reading}")))
        tickets.sql(f"SELECT pg_terminate_backend(pid) {reading}")
        _, errors = process.communicate(timeout=NOTICED)
        assert process.returncode == SourceUnavailable.exit_code, errors
    finally:
        process.kill()
    del tickets.overrides["snapshot_rows_per_second"]
    tickets.catch_up()
    assert_same_as_source(tickets)
