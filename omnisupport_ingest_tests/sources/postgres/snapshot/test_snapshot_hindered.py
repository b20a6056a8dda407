"""A snapshot that is hindered: by a table that is rewritten between its chunks, by locks, by time limits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Event

import pytest
from psycopg2.extensions import make_dsn

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.session import connection
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    capture,
    complete,
    following,
    make_papers,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")
NULLABLE = (
    "ALTER TABLE tickets REPLICA IDENTITY FULL",
    "ALTER TABLE tickets DROP CONSTRAINT tickets_pkey, ALTER id DROP NOT NULL",
    "CREATE UNIQUE INDEX ON tickets (id)",
)
LOCKED = "SELECT FROM pg_locks WHERE NOT granted AND relation = 'tickets'::regclass"


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A filled table ``tickets`` that is read in chunks of 100 rows, one after the other."""
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 1000) g")
    source.tables.append(contract("tickets", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 100, "snapshot_threads": 1}
    return source


@pytest.fixture
def without_index(tickets: SourceUnderTest) -> SourceUnderTest:
    """``tickets`` without an index on its key and with half of its rows gone, so that there is room."""
    tickets.sql(
        "ALTER TABLE tickets DROP CONSTRAINT tickets_pkey",
        "ALTER TABLE tickets REPLICA IDENTITY FULL",
        "DELETE FROM tickets WHERE id % 2 = 0",
        "ANALYZE tickets",
    )
    return tickets


def assert_same_as_source(source: SourceUnderTest) -> None:
    assert folded(source.events(), "tickets") == source.rows("tickets", COLUMNS)


@pytest.mark.parametrize("meanwhile", ["goes on", "is stopped"])
def test_table_rewritten_between_chunks_that_are_ranges_of_places_is_read_anew(
    without_index: SourceUnderTest, meanwhile: str
) -> None:
    """VACUUM FULL moves rows to places that were read before, and tells the stream nothing."""
    source, stop = without_index, Event()
    landed: list[str] = []

    def rewrite(batch: Manifest) -> None:
        if batch.chunk is not None and not landed:
            landed.append(batch.batch_id)
            source.sql("VACUUM FULL tickets")
            if meanwhile == "is stopped":
                stop.set()

    first = Capture(source.settings, source.home, Contracts(tuple(source.tables)), rewrite)
    if meanwhile == "goes on":
        with pytest.raises(SourceUnavailable, match="was rewritten"):
            first.run(current_wal_lsn(source.dsn), stop)
    else:
        # It may still begin the next chunk.
        with suppress(SourceUnavailable):
            first.run(current_wal_lsn(source.dsn), stop)
    (plan,) = SnapshotPlans(source.store.folder).all(1)
    assert plan.by == ("ctid",) and plan.chunks > 2 and landed
    source.catch_up()
    assert len(SnapshotPlans(source.store.folder).all(1)) == 2
    assert_same_as_source(source)
    # Rows that change their places after the snapshot are no matter.
    source.sql("VACUUM FULL tickets", "UPDATE tickets SET v = 'new' WHERE id < 50")
    source.catch_up()
    assert len(SnapshotPlans(source.store.folder).all(1)) == 2
    assert_same_as_source(source)


@pytest.fixture
def in_a_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.mark.parametrize("when", ["planned", "read"])
def test_stop_does_not_wait_for_somebody_who_holds_the_table(
    tickets: SourceUnderTest, in_a_thread: ThreadPoolExecutor, when: str
) -> None:
    stop, ready, go_on = Event(), Event(), Event()

    def hold_on(batch: Manifest) -> None:
        wanted = batch.chunk is not None and batch.chunk.boundary is (when == "planned")
        if wanted and not ready.is_set():
            ready.set()
            assert go_on.wait(PATIENCE)

    capture = Capture(tickets.settings, tickets.home, Contracts(tuple(tickets.tables)), hold_on)
    with tickets.connected() as holder, holder.cursor() as migration:
        following = in_a_thread.submit(capture.run, None, stop)
        assert ready.wait(PATIENCE)
        migration.execute("BEGIN; LOCK TABLE tickets IN ACCESS EXCLUSIVE MODE")
        if when == "planned":
            SnapshotRequests(tickets.store.folder).write("tickets", "a test")
        go_on.set()
        until(lambda: bool(tickets.query(LOCKED)))
        stop.set()
        following.result(timeout=PATIENCE)
    tickets.catch_up()
    assert_same_as_source(tickets)


def test_lock_that_is_let_go_is_waited_for(tickets: SourceUnderTest, in_a_thread: ThreadPoolExecutor) -> None:
    ready, go_on = Event(), Event()

    def hold_on(batch: Manifest) -> None:
        if batch.chunk is not None and not ready.is_set():
            ready.set()
            assert go_on.wait(PATIENCE)

    capture = Capture(tickets.settings, tickets.home, Contracts(tuple(tickets.tables)), hold_on)
    with tickets.connected() as holder, holder.cursor() as migration:
        passing = in_a_thread.submit(capture.run, current_wal_lsn(tickets.dsn), Event())
        assert ready.wait(PATIENCE)
        migration.execute("BEGIN; LOCK TABLE tickets IN ACCESS EXCLUSIVE MODE")
        go_on.set()
        until(lambda: bool(tickets.query(LOCKED)))
        # Longer than a single wait for it.
        time.sleep(3)
        assert not passing.done()
        migration.execute("COMMIT")
        passing.result(timeout=PATIENCE)
    assert_same_as_source(tickets)


def test_start_beside_somebody_who_holds_the_table_says_so_and_the_next_one_goes_on(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tickets.server_version() < 160000:
        pytest.skip("older servers tell of a publication without looking into its tables")
    monkeypatch.setitem(connection._SQL_SETTINGS, "lock_timeout", "1s")
    tickets.sql("CREATE PUBLICATION other FOR TABLE tickets")
    tickets.overrides["publication"] = "other"
    with tickets.connected() as holder, holder.cursor() as migration:
        migration.execute("BEGIN; LOCK TABLE tickets IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(SourceUnavailable, match="lock timeout"):
            tickets.catch_up()
    tickets.catch_up()
    assert_same_as_source(tickets)


def test_first_start_beside_somebody_who_holds_the_table_waits_on_a_server_that_tells_of_it_all_the_same(
    tickets: SourceUnderTest, in_a_thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the holder's transaction when its slot is made, as for every one that may write."""
    if tickets.server_version() >= 160000:
        pytest.skip("newer servers look into the tables of a publication to tell of it")
    monkeypatch.setitem(connection._SQL_SETTINGS, "lock_timeout", "1s")
    tickets.sql("CREATE PUBLICATION other FOR TABLE tickets")
    tickets.overrides["publication"] = "other"
    with tickets.connected() as holder, holder.cursor() as migration:
        migration.execute("BEGIN; LOCK TABLE tickets IN ACCESS EXCLUSIVE MODE")
        starting = in_a_thread.submit(tickets.catch_up)
        time.sleep(3)
        assert not starting.done()
        migration.execute("COMMIT")
        starting.result(timeout=PATIENCE)
    assert_same_as_source(tickets)


def test_time_limits_of_the_role_end_neither_a_snapshot_nor_the_stream(tickets: SourceUnderTest) -> None:
    limits = {"statement_timeout": 0, "idle_in_transaction_session_timeout": 0}
    limits |= {"idle_session_timeout": 140000, "transaction_timeout": 170000}
    given = [f"-c {name}=500" for name, since in limits.items() if tickets.server_version() >= since]
    behind = replace(tickets, dsn=make_dsn(tickets.dsn, options=" ".join(given)))
    # Two seconds in all, and more than one within a chunk.
    tickets.overrides |= {"snapshot_rows_per_second": 400, "snapshot_chunk_rows": 500}
    behind.overrides = tickets.overrides
    behind.catch_up()
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id < 50")
    behind.catch_up()
    assert_same_as_source(tickets)


@pytest.mark.parametrize(
    "emptied",
    [
        pytest.param("UPDATE tickets SET id = NULL WHERE id > 50", id="in the first chunk"),
        pytest.param("UPDATE tickets SET id = NULL WHERE id = 1000", id="in the last chunk"),
    ],
)
def test_key_column_that_is_null_by_now_is_named_and_its_table_left_out(
    tickets: SourceUnderTest, emptied: str, caplog: pytest.LogCaptureFixture
) -> None:
    tickets.sql("CREATE TABLE other (id int PRIMARY KEY, v text)")
    tickets.tables.append(contract("other", COLUMNS))
    with following(tickets):
        until(lambda: complete(tickets) and complete(tickets, "other"))
        tickets.sql(*NULLABLE, emptied)
        SnapshotRequests(tickets.store.folder).write("tickets", "a test")
        until(lambda: "tickets is left out, the other tables go on" in caplog.text)
        tickets.sql("INSERT INTO other VALUES (1, 'one')")
        until(lambda: folded(tickets.events(), "other") == tickets.rows("other", COLUMNS))
    assert "Key column id of public.tickets is NULL in some rows" in caplog.text
    assert len(tickets.events("b")) == 2, "no snapshot without those rows counts as whole"


def test_row_whose_key_becomes_null_while_its_table_is_read_is_not_read_again(
    source: SourceUnderTest,
) -> None:
    make_papers(source, 101, 300)

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            source.sql(
                *(each.replace("tickets", "papers") for each in NULLABLE),
                "UPDATE papers SET id = NULL WHERE id = 300",
                "UPDATE papers SET id = 1 WHERE id = 299",
            )

    capture(source, landed)
    changed = {event.key: event.unchanged for event in source.events("c")}
    assert changed == {"[null]": ["long"], '["1"]': ["long"]}
    assert [event.key for event in source.events("r")].count('["1"]') == 1
