"""The making of a slot waits for every transaction that may write: it is told for whom, and heeds a stop."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.session.server import open_transactions
from omnisupport_ingest.sources.postgres.slot import slot
from omnisupport_ingest.sources.postgres.slot.slot import SlotNotMade, consistent_snapshot, create_slot
from omnisupport_ingest_tests.sources.postgres.awkward import Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import same_as_source
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import PATIENCE, until


@pytest.fixture
def tickets(source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch) -> SourceUnderTest:
    monkeypatch.setattr(slot, "_SILENT_SECONDS", 0.2)
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'one')")
    source.tables.append(contract("tickets", ("id", "v")))
    return source


@contextmanager
def writing(dsn: str) -> Iterator[int]:
    """A transaction that has written and does not end; gives the process that has it."""
    connection = connect(dsn, application_name="test")
    with connection.cursor() as cursor:
        cursor.execute("BEGIN; UPDATE tickets SET v = 'open' WHERE id = 1")
        try:
            yield connection.info.backend_pid
        finally:
            cursor.execute("COMMIT")
            connection.close()


def slots(source: SourceUnderTest) -> list[tuple[str]]:
    return source.query(f"SELECT slot_name FROM pg_replication_slots WHERE database = '{source.slot}'")


def test_first_start_names_whom_it_waits_for_once_and_goes_on_when_they_are_done(
    tickets: SourceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    stop = threading.Event()
    with writing(tickets.dsn) as pid:
        capture = threading.Thread(target=tickets.capture().run, args=(None, stop))
        capture.start()
        until(lambda: f"of process {pid}" in caplog.text)
        # Looked at again and again, told once.
        assert not stop.wait(1.0) and caplog.text.count("waits for transactions") == 1
        assert tickets.manifests() == []
    until(lambda: [event.op for event in tickets.events("r")] == ["r"])
    stop.set()
    capture.join()
    assert tickets.rows("tickets", ["v"])['["1"]'] == {"v": "open"}


def test_stop_gives_up_the_slot_and_the_next_start_makes_it(tickets: SourceUnderTest) -> None:
    stop, waits = threading.Event(), threading.Event()
    with writing(tickets.dsn):
        capture = threading.Thread(target=tickets.capture().run, args=(None, stop))
        capture.start()
        until(lambda: making(tickets))
        assert not waits.wait(0.3) and capture.is_alive()
        stop.set()
        capture.join(PATIENCE)
        assert not capture.is_alive()
        assert slots(tickets) == [] and not making(tickets)
        assert tickets.store.current_epoch() is None
    tickets.catch_up()
    assert [event.op for event in tickets.events("r")] == ["r"]


def test_stop_gives_up_the_slot_of_a_new_epoch_too_and_the_old_one_goes_on_being_what_it_was(
    tickets: SourceUnderTest,
) -> None:
    tickets.catch_up()
    before, stop = tickets.store.current_epoch(), threading.Event()
    with writing(tickets.dsn):
        threading.Timer(0.5, stop.set).start()
        with pytest.raises(SlotNotMade):
            tickets.capture().begin_new_epoch("a test", stop=stop)
    assert tickets.store.current_epoch() == before
    # The slot of the epoch before is gone: a new one is what is left.
    with pytest.raises(GapInSource):
        tickets.catch_up()
    tickets.capture().begin_new_epoch("a test")
    tickets.catch_up()
    assert tickets.rows("tickets", ["v"])['["1"]'] == {"v": "open"}


def making(source: SourceUnderTest) -> bool:
    """Whether a session waits for the end of somebody's transaction to make a slot."""
    return bool(
        source.query(
            "SELECT FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'walsender'"
            " AND cardinality(pg_blocking_pids(pid)) > 0"
        )
    )


def test_slot_that_is_made_before_the_stop_is_heard_is_there(tickets: SourceUnderTest) -> None:
    stop = threading.Event()
    point = create_slot(tickets.dsn, tickets.slot, stop)
    assert slots(tickets) == [(tickets.slot,)] and point > Lsn(0)
    stop.set()
    with pytest.raises(SlotNotMade), writing(tickets.dsn):
        create_slot(tickets.dsn, f"{tickets.slot}_2", stop)
    assert slots(tickets) == [(tickets.slot,)]


def test_exact_snapshot_names_whom_it_waits_for_too(
    tickets: SourceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    found = list[Lsn]()

    def read() -> None:
        with consistent_snapshot(tickets.dsn) as snapshot:
            found.append(snapshot.consistent_point)

    with writing(tickets.dsn) as pid:
        thread = threading.Thread(target=read)
        thread.start()
        until(lambda: f"of process {pid}" in caplog.text)
    thread.join()
    assert len(found) == 1


@pytest.mark.slow
def test_command_that_is_told_to_stop_while_its_slot_is_made_ends_well(shop: Shop) -> None:
    """A signal is heard though the process waits for the server."""
    shop.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'one')")
    capture = shop.following()
    with writing(shop.server.server.dsn(shop.database)) as pid:
        capture.says(f"waits for transactions that were under way when it began: of process {pid}")
        os.kill(capture.process.pid, signal.SIGTERM)
        assert capture.process.wait(PATIENCE) == 0
        assert shop.query("SELECT FROM pg_replication_slots WHERE database = current_database()") == []
    assert shop.run("capture", "--once").code == 0
    same_as_source(shop)


def test_a_transaction_of_another_database_is_named_with_database_user_and_age_and_told_again(
    tickets: SourceUnderTest,
    postgres: EmbeddedPostgres,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slot, "_AGAIN_SECONDS", 0.5)

    def read() -> None:
        with consistent_snapshot(tickets.dsn):
            pass

    thread = threading.Thread(target=read)
    with closing(connect(postgres.dsn("postgres"))) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN; SELECT pg_current_xact_id()")
        thread.start()
        try:
            name = f"of process {connection.info.backend_pid}, postgres in database postgres, for "
            until(lambda: caplog.text.count(name) >= 2)
            (first, *_) = [line for line in caplog.text.splitlines() if name in line]
            assert re.search(r"database postgres, for \d+ s", first)
        finally:
            cursor.execute("COMMIT")
            thread.join()


def test_open_transactions_are_listed_the_oldest_first_with_their_subtransactions(
    tickets: SourceUnderTest,
) -> None:
    with closing(connect(tickets.dsn)) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN; INSERT INTO tickets VALUES (7); SAVEPOINT s; INSERT INTO tickets VALUES (8)")
        with closing(connect(tickets.dsn)) as other:
            (found,) = [each for each in open_transactions(other) if each.pid == connection.info.backend_pid]
        assert (found.database, found.user, found.gid) == (tickets.slot, "postgres", None)
        assert len(found.ids) == 2
        assert found.seconds is not None and found.seconds >= 0
        assert str(found).startswith(f"{found.name}, for ")
        cursor.execute("ROLLBACK")
