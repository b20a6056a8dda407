"""A table of a new contract joins a capture that runs: it is exact from its first row on, and nothing else
stops for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from random import Random

import pytest
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.sources.postgres.capture import added_tables
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.session import connection as connection_settings
from omnisupport_ingest.sources.postgres.session.errors import TableMissedChanges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest.sources.postgres.stream.captured import CapturedTables
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    chunks,
    complete,
    following,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until


@pytest.fixture
def tickets(source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch) -> SourceUnderTest:
    """A captured table; that the stream of an idle source has passed a snapshot is seen soon."""
    monkeypatch.setattr(follower, "IDLE_SECONDS", 0.3)
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)", "INSERT INTO tickets VALUES (1, 'old')")
    source.tables.append(contract("tickets", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 100}
    return source


def make_late(source: SourceUnderTest, rows: int = 250) -> None:
    source.sql(
        "CREATE TABLE late (id int PRIMARY KEY, v text)",
        f"INSERT INTO late SELECT g, 'old' FROM generate_series(1, {rows}) g",
    )


def ask(source: SourceUnderTest, table: str = "late", key: Sequence[str] = ("id",)) -> None:
    """Give the table a contract, and ask the capture for it."""
    source.tables.append(contract(table, COLUMNS, key))
    SnapshotRequests(source.store.folder).write(table, "its contract is new")


def reader(source: SourceUnderTest) -> int | None:
    ((pid,),) = source.query(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{source.slot}'")
    return None if pid is None else int(pid)


@contextmanager
def joined(source: SourceUnderTest) -> Iterator[None]:
    """Capture runs meanwhile; the same session has read the slot from the beginning to the end."""
    with following(source) as thread:
        until(lambda: complete(source))
        before = reader(source)
        yield
        assert thread.is_alive() and reader(source) == before is not None


def up_to_now(source: SourceUnderTest, table: str = "late") -> bool:
    return complete(source, table) and same_as_source(source, table)


PUBLISHED = [
    pytest.param(None, id="by a publication that capture makes"),
    pytest.param("FOR TABLE tickets", id="by one that has not the table"),
    pytest.param("FOR TABLE tickets, late", id="by one that has the table already"),
    pytest.param("FOR ALL TABLES", id="by one of all tables"),
]


@pytest.mark.parametrize("published", PUBLISHED)
def test_table_of_a_new_contract_is_read_and_followed_in_the_session_that_runs(
    tickets: SourceUnderTest, published: str | None
) -> None:
    make_late(tickets)
    if published is not None:
        tickets.sql(f"CREATE PUBLICATION {tickets.slot} {published}")
    with joined(tickets):
        # Where it is published, the stream has told of it already, by no contract.
        tickets.sql("UPDATE late SET v = 'before' WHERE id <= 3", "INSERT INTO tickets VALUES (2, 'before')")
        until(lambda: len(tickets.events("c")) == 1)
        ask(tickets)
        until(lambda: up_to_now(tickets))
        tickets.sql(
            "UPDATE late SET v = 'after' WHERE id % 2 = 0",
            "UPDATE late SET id = id + 1000 WHERE id < 20",
            "DELETE FROM late WHERE id > 1010",
            "INSERT INTO tickets VALUES (3, 'after')",
        )
        until(lambda: up_to_now(tickets) and up_to_now(tickets, "tickets"))
    assert len(chunks(tickets, "late")) == 3
    assert SnapshotRequests(tickets.store.folder).read() == []
    # What a start finds is what has joined.
    tickets.sql("DELETE FROM late WHERE id = 100")
    tickets.catch_up()
    assert up_to_now(tickets) and len(chunks(tickets, "late")) == 3


def test_no_other_table_stops_for_it(tickets: SourceUnderTest) -> None:
    """What commits to the others while the new one is read lands before that is over."""
    make_late(tickets, rows=20_000)
    tickets.overrides |= {"snapshot_rows_per_second": 1000, "snapshot_chunk_rows": 1000}
    with joined(tickets):
        ask(tickets)
        until(lambda: len(chunks(tickets, "late")) > 0)
        for number in range(2, 6):
            tickets.sql(f"INSERT INTO tickets VALUES ({number}, 'beside')")
            until(lambda number=number: same_as_source(tickets, "tickets"))
            assert not complete(tickets, "late"), "the table was read too fast to show anything"


def test_what_was_begun_before_it_was_published_and_commits_later_is_not_lost(
    tickets: SourceUnderTest,
) -> None:
    """The stream does not send what was written before the table was published."""
    make_late(tickets)
    with joined(tickets), tickets.connected() as writer, writer.cursor() as cursor:
        cursor.execute("BEGIN; UPDATE late SET v = 'before' WHERE id = 1; DELETE FROM late WHERE id = 2")
        ask(tickets)
        until(lambda: ("late",) in published(tickets))
        cursor.execute("UPDATE late SET v = 'within' WHERE id IN (1, 3); INSERT INTO late VALUES (900, 'x')")
        # Its chunks wait for what may have written unseen.
        assert chunks(tickets, "late") == []
        cursor.execute("COMMIT")
        # Servers that do not tell those who write of the publication would send nothing more of the table.
        tickets.sql("UPDATE late SET v = 'later' WHERE id IN (4, 900)")
        until(lambda: up_to_now(tickets))
        tickets.sql("DELETE FROM late WHERE id = 5", "UPDATE late SET v = 'last' WHERE id = 1")
        until(lambda: up_to_now(tickets))


def published(source: SourceUnderTest) -> list[tuple[str]]:
    return source.query(f"SELECT tablename FROM pg_publication_tables WHERE pubname = '{source.slot}'")


def test_nothing_of_it_is_read_before_the_stream_has_taken_it(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What commits above a chunk must come under the contract's key; the others are read meanwhile."""
    make_late(tickets)
    tickets.sql(f"CREATE PUBLICATION {tickets.slot} FOR ALL TABLES")
    between_transactions, take = threading.Event(), CapturedTables.take

    def take_then(self: CapturedTables, add_tables: Callable[[Sequence[TableContract]], None]) -> None:
        if between_transactions.is_set():
            take(self, add_tables)

    monkeypatch.setattr(CapturedTables, "take", take_then)
    with joined(tickets):
        ask(tickets)
        SnapshotRequests(tickets.store.folder).write("tickets", "again")
        until(lambda: len(chunks(tickets)) == 2)
        assert not between_transactions.wait(1.0)
        assert SnapshotPlans(tickets.store.folder).all(1)[-1].table == "tickets"
        assert chunks(tickets, "late") == []
        between_transactions.set()
        until(lambda: up_to_now(tickets))


def test_it_waits_for_the_end_of_a_transaction_that_is_being_read(tickets: SourceUnderTest) -> None:
    """The stream takes it between two transactions; one of many batches is not parted by it."""
    make_late(tickets)
    tickets.sql(f"CREATE PUBLICATION {tickets.slot} FOR ALL TABLES")
    with joined(tickets):
        ask(tickets)
        tickets.sql("INSERT INTO tickets SELECT g, repeat('x', 500) FROM generate_series(10, 30000) g")
        until(lambda: up_to_now(tickets) and up_to_now(tickets, "tickets"))


def test_every_batch_says_the_key_that_its_events_have(tickets: SourceUnderTest) -> None:
    """What was told without a contract is in a batch of its own."""
    make_late(tickets, rows=5)
    tickets.sql("ALTER TABLE late REPLICA IDENTITY FULL", f"CREATE PUBLICATION {tickets.slot} FOR ALL TABLES")
    tickets.overrides |= {"batch_max_seconds": 20}
    with joined(tickets):
        tickets.sql("UPDATE late SET v = 'before' WHERE id = 1")
        ask(tickets)
        until(lambda: [event.key for event in tickets.events("u")] == [None])
        tickets.sql("UPDATE late SET v = 'after' WHERE id = 2")
        until(lambda: len(chunks(tickets, "late")) == 1)
    keys = {
        (relation.key_columns, event.key is not None)
        for batch in tickets.manifests()
        for relation in batch.relations
        for event in tickets.events("u")
        if relation.table == "late" and batch.stream is not None
        if batch.stream.previous_end_lsn.value <= event.commit_lsn < batch.stream.end_lsn.value
    }
    assert keys == {((), False), (("id",), True)}
    assert with_keys(tickets) == tickets.rows("late", COLUMNS)


def test_table_that_has_joined_is_watched_like_the_others(tickets: SourceUnderTest) -> None:
    make_late(tickets)
    with following(tickets):
        until(lambda: complete(tickets))
        ask(tickets)
        until(lambda: up_to_now(tickets))
        tickets.sql(f"ALTER PUBLICATION {tickets.slot} DROP TABLE late")
        parked = ParkedTables(tickets.store.folder, 1)
        until(lambda: "late" in parked.all())
        assert "late is not in the publication any more" in parked.all()["late"].reason
        tickets.sql("UPDATE tickets SET v = 'goes on'")
        until(lambda: same_as_source(tickets))
        assert not complete(tickets, "late")


@pytest.mark.parametrize("via_root", [True, False])
def test_partitioned_table_joins_with_the_partitions_it_has_and_gets(
    tickets: SourceUnderTest, via_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(added_tables, "PARTITION_SECONDS", 0.3)
    tickets.sql(
        "CREATE TABLE late (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE late_1 PARTITION OF late FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE late_2 PARTITION OF late FOR VALUES FROM (100) TO (1000)",
        "INSERT INTO late SELECT g, 'old' FROM generate_series(1, 250) g",
        f"CREATE PUBLICATION {tickets.slot} FOR TABLE tickets, late"
        f" WITH (publish_via_partition_root = {via_root})",
    )
    with joined(tickets):
        tickets.sql("UPDATE late SET v = 'before' WHERE id % 2 = 0")
        until(lambda: len(tickets.events("u")) == 125)
        told = {event.source_table for event in tickets.events("u")}
        assert told == ({"late"} if via_root else {"late_1", "late_2"})
        ask(tickets)
        until(lambda: up_to_now(tickets))
        tickets.sql(
            "UPDATE late SET v = 'after' WHERE id % 3 = 0",
            "UPDATE late SET id = id + 500 WHERE id < 10",
            "CREATE TABLE late_3 PARTITION OF late FOR VALUES FROM (1000) TO (2000)",
            "INSERT INTO late VALUES (1000, 'in a new one')",
        )
        until(lambda: up_to_now(tickets))
        tickets.sql("UPDATE late SET v = 'followed' WHERE id >= 1000")
        until(lambda: up_to_now(tickets))
        assert tickets.events("u")[-1].source_table == "late"
        # No change tells of the rows that come with it.
        tickets.sql(
            "CREATE TABLE older (id int PRIMARY KEY, v text)",
            "INSERT INTO older VALUES (3000, 'attached')",
            "ALTER TABLE late ATTACH PARTITION older FOR VALUES FROM (3000) TO (4000)",
        )
        until(lambda: up_to_now(tickets))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("publish", ["FOR TABLE tickets", "FOR ALL TABLES"])
@pytest.mark.parametrize("seed", range(4))
def test_table_that_is_written_while_it_joins_ends_as_the_source(
    tickets: SourceUnderTest, seed: int, publish: str
) -> None:
    """Writers change rows of their own all the time, in short and long transactions, and roll some back."""
    make_late(tickets, rows=600)
    tickets.sql(f"CREATE PUBLICATION {tickets.slot} {publish}")
    with joined(tickets):
        with written(tickets, seed):
            ask(tickets)
            until(lambda: complete(tickets, "late"))
        until(lambda: up_to_now(tickets))


@contextmanager
def written(source: SourceUnderTest, seed: int, writers: int = 3) -> Iterator[None]:
    over, failed = threading.Event(), list[BaseException]()

    def write(number: int) -> None:
        chance = Random(10 * seed + number)
        try:
            with source.connected() as connection:
                while not over.is_set():
                    _transaction(connection, chance, writers, number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for error in failed:
        raise error


def _transaction(connection: Connection, chance: Random, writers: int, number: int) -> None:
    def key() -> int:
        return writers * chance.randint(1, 230) + number

    with connection.cursor() as cursor:
        cursor.execute("BEGIN")
        for _ in range(chance.choice([1, 1, 3, 20])):
            one, other = key(), key()
            cursor.execute(
                chance.choice(
                    [
                        f"UPDATE late SET v = '{other}' WHERE id = {one}",
                        f"DELETE FROM late WHERE id = {one}",
                        f"INSERT INTO late VALUES ({one}, 'new') ON CONFLICT DO NOTHING",
                        f"UPDATE late SET id = {other} WHERE id = {one} AND NOT EXISTS"
                        f" (SELECT FROM late WHERE id = {other})",
                    ]
                )
            )
            if chance.random() < 0.2:
                cursor.execute("SELECT pg_sleep(0.02)")
        cursor.execute(chance.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))


def test_table_that_cannot_be_captured_is_told_and_joins_once_it_can(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(added_tables, "_RETRY_SECONDS", 0.2)
    tickets.sql("CREATE TABLE late (id int NOT NULL, v text)", "INSERT INTO late VALUES (1, 'one')")
    with joined(tickets):
        ask(tickets)
        until(lambda: "late is not captured yet" in caplog.text)
        tickets.sql("INSERT INTO tickets VALUES (2, 'beside')")
        until(lambda: same_as_source(tickets, "tickets"))
        assert published(tickets) == [("tickets",)] and chunks(tickets, "late") == []
        # Tried again and again, told once.
        assert caplog.text.count("late is not captured yet") == 1
        tickets.sql("ALTER TABLE late ADD PRIMARY KEY (id)")
        until(lambda: up_to_now(tickets))


def test_table_that_somebody_holds_joins_once_it_is_let_go_and_holds_up_no_other(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(added_tables, "_RETRY_SECONDS", 0.2)
    monkeypatch.setitem(connection_settings._SQL_SETTINGS, "lock_timeout", "200ms")
    make_late(tickets)
    with joined(tickets):
        with tickets.connected() as holder, holder.cursor() as cursor:
            cursor.execute("BEGIN; LOCK TABLE late")
            ask(tickets)
            until(lambda: "late is not captured yet" in caplog.text)
            tickets.sql("INSERT INTO tickets VALUES (2, 'beside')")
            until(lambda: same_as_source(tickets, "tickets"))
            cursor.execute("COMMIT")
        until(lambda: up_to_now(tickets))


def test_request_for_a_table_without_a_contract_holds_up_no_other(
    tickets: SourceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    make_late(tickets)
    with joined(tickets):
        SnapshotRequests(tickets.store.folder).write("gone", "")
        until(lambda: "gone is not captured yet: support_desk has no contract of that name" in caplog.text)
        ask(tickets)
        until(lambda: up_to_now(tickets))


def test_contract_that_was_given_another_name_is_no_new_table(
    tickets: SourceUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    with joined(tickets):
        tickets.tables[:] = [replace(contract("tickets", COLUMNS), name="calls")]
        SnapshotRequests(tickets.store.folder).write("calls", "")
        until(lambda: "public.tickets is captured by the contract tickets" in caplog.text)
        tickets.sql("INSERT INTO tickets VALUES (2, 'beside')")
        until(lambda: same_as_source(tickets, "tickets"))


def test_tables_that_are_handed_over_are_taken_once_and_only_the_last_of_them() -> None:
    tables = CapturedTables([contract("tickets", COLUMNS)])
    taken = list[str]()

    def add_tables(handed: Sequence[TableContract]) -> None:
        taken.extend(each.name for each in handed)

    tables.hand_over([contract("gone", COLUMNS)])
    tables.hand_over([contract("late", COLUMNS), contract("later", COLUMNS)])
    assert tables.any_waiting and [each.name for each in tables.all] == ["tickets"]
    tables.take(add_tables)
    tables.take(add_tables)
    assert not tables.any_waiting and taken == ["late", "later"]
    assert [each.name for each in tables.all] == ["tickets", "late", "later"]


def test_changes_from_before_the_table_had_its_key_stop_nothing(tickets: SourceUnderTest) -> None:
    """They were described without it, and nothing describes a table anew that is not written."""
    tickets.sql(
        "CREATE TABLE late (id int NOT NULL, v text)", f"CREATE PUBLICATION {tickets.slot} FOR ALL TABLES"
    )
    with joined(tickets):
        tickets.sql("INSERT INTO late VALUES (1, 'one'), (2, 'two')")
        until(lambda: len(tickets.events("c")) == 2)
        tickets.sql("ALTER TABLE late ADD PRIMARY KEY (id)")
        ask(tickets)
        until(lambda: complete(tickets, "late"))
        tickets.sql("UPDATE late SET v = 'after' WHERE id = 1", "DELETE FROM late WHERE id = 2")
        until(lambda: len(tickets.events("d")) == 1)
    assert [event.key for event in tickets.events("c", "u", "d")] == [None, None, '["1"]', '["2"]']
    assert with_keys(tickets) == tickets.rows("late", COLUMNS)


def test_changes_from_before_the_table_had_its_key_stop_no_start_that_is_far_behind(
    tickets: SourceUnderTest,
) -> None:
    tickets.sql(
        "CREATE TABLE late (id int NOT NULL, v text)", f"CREATE PUBLICATION {tickets.slot} FOR ALL TABLES"
    )
    tickets.catch_up()
    tickets.sql("INSERT INTO late VALUES (1, 'one'), (2, 'two')", "ALTER TABLE late ADD PRIMARY KEY (id)")
    tickets.sql("UPDATE late SET v = 'after' WHERE id = 1")
    tickets.tables.append(contract("late", COLUMNS))
    tickets.catch_up()
    assert [event.key for event in tickets.events("c", "u")] == [None, None, '["1"]']
    assert with_keys(tickets) == tickets.rows("late", COLUMNS)
    # What comes above the snapshot must have the key.
    tickets.sql("ALTER TABLE late DROP CONSTRAINT late_pkey", "INSERT INTO late VALUES (3, 'three')")
    tickets.sql("ALTER TABLE late ADD PRIMARY KEY (id)")
    with pytest.raises(TableMissedChanges, match="key column id"):
        tickets.catch_up()


def with_keys(source: SourceUnderTest) -> dict[str, dict[str, str | None]]:
    """The rows of the table that joins, by the events that name one."""
    told = [event for event in source.events() if event.op == "b" or event.key is not None]
    return folded(told, "late")
