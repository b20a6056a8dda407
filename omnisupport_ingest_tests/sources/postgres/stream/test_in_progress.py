"""Transactions that are sent before they commit land as if they had been sent afterwards."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.stream import follower
from omnisupport_ingest_tests.sources.postgres.random_writers import Script
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.sources.postgres.two_readers import (
    COLUMNS,
    TwoReaders,
    many,
    run,
    session,
)
from omnisupport_ingest_tests.waiting import PATIENCE, until


def test_large_transaction_lands_as_it_would_afterwards(both: TwoReaders) -> None:
    both.early.transaction(
        many(1),
        "UPDATE notes SET tag = 'without its body' WHERE id % 3 = 0",
        "UPDATE notes SET id = -id WHERE id % 5 = 0",
        "SELECT pg_logical_emit_message(true, 'audit', 'inside')",
        "SELECT pg_logical_emit_message(false, 'audit', 'outside')",
        "DELETE FROM notes WHERE id % 7 = 0",
        many(1000),
    )
    both.catch_up()
    both.assert_same()
    assert both.sent_early() == 1
    assert folded(both.early.events(), "notes") == both.early.rows("notes", COLUMNS)


def test_rolled_back_parts_leave_no_trace_and_no_gap(both: TwoReaders) -> None:
    both.early.transaction(
        "SAVEPOINT first",
        many(1),
        "ROLLBACK TO first",
        many(1001),
        "SAVEPOINT outer_one",
        "ALTER TABLE notes ADD COLUMN extra int DEFAULT 7",
        many(2001),
        "SAVEPOINT inner_one",
        "UPDATE notes SET extra = 8 WHERE id > 2000",
        "RELEASE inner_one",
        "ROLLBACK TO outer_one",
        many(3001),
    )
    both.early.sql(f"BEGIN; {many(5001)}; ROLLBACK")
    both.early.sql("INSERT INTO notes VALUES (9000)")
    both.catch_up()
    both.assert_same()
    assert both.sent_early() >= 1
    created = [event.ordinal for event in both.early.changes() if event.op == "c"]
    assert created == [*range(0, 1600, 2), 0]


def test_column_added_within_a_transaction_in_progress(both: TwoReaders) -> None:
    both.early.transaction(
        many(1), "ALTER TABLE notes ADD COLUMN extra int DEFAULT 7", many(1001), "UPDATE notes SET extra = 8"
    )
    both.early.sql("INSERT INTO notes VALUES (5000)")
    both.catch_up()
    both.assert_same()
    with_extra = [event for event in both.early.changes() if '"extra"' in (event.after or "")]
    assert len(with_extra) == 400 + 800 + 1


def test_truncate_that_cascades_within_a_transaction_in_progress(both: TwoReaders) -> None:
    both.early.sql("CREATE TABLE replies (id bigint PRIMARY KEY, body text, tag text, n bigint)")
    both.early.sql("ALTER TABLE replies ADD FOREIGN KEY (n) REFERENCES notes")
    both.early.tables.append(contract("replies", COLUMNS))
    both.catch_up()
    both.early.transaction(many(1), many(1, 400, "replies"), "TRUNCATE notes CASCADE", many(1))
    both.catch_up()
    both.assert_same()
    truncated = sorted(event.source_table for event in both.early.changes() if event.op == "t")
    assert truncated == ["notes", "replies"]
    assert folded(both.early.events(), "replies") == {}


def test_transaction_of_which_nothing_is_left_is_not_there(both: TwoReaders) -> None:
    both.early.sql("CREATE TABLE elsewhere (id int, body text, tag text)")
    both.catch_up()
    before = len(both.early.changes())
    both.early.transaction("SAVEPOINT s", many(1), "ROLLBACK TO s")
    both.early.transaction(many(1, 4000, "elsewhere"))
    both.early.sql("INSERT INTO notes VALUES (1)")
    both.catch_up()
    both.early.transaction(many(1, 4000, "elsewhere"))
    both.catch_up()
    both.assert_same()
    assert both.sent_early() >= 2
    assert len(both.early.changes()) == before + 1
    both.early.sql("INSERT INTO notes VALUES (2)")
    both.catch_up()
    both.assert_same()


def taken_as_it_is(source: SourceUnderTest) -> None:
    """Forget how the tables were published, so that they are captured with the columns that they have now."""
    (record,) = source.store.folder.glob("published-*.json")
    record.unlink()


@pytest.mark.slow
def test_table_described_anew_while_a_transaction_is_in_progress_is_known_by_its_newest_description(
    both: TwoReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts on what it has sent last, and the older description is given out later."""
    # Else the other columns are noticed in between on a busy machine, and the table is left out.
    monkeypatch.setattr(follower, "IDLE_SECONDS", PATIENCE)
    source = both.early
    source.sql("ALTER TABLE notes ADD COLUMN a text", "ALTER TABLE notes ADD COLUMN b text")
    publication = source.slot
    source.sql(f"ALTER PUBLICATION {publication} SET TABLE notes (id, body, tag, a)")
    taken_as_it_is(source)
    stop = threading.Event()

    def read() -> None:
        source.capture().run(None, stop)

    reader = threading.Thread(target=read)
    with session(source) as writer:
        reader.start()
        try:
            # So large that it is sent at once, and nothing of the transaction is left for later.
            run(writer, "BEGIN", "INSERT INTO notes VALUES (1, repeat('x', 200000))")
            until(lambda: both.sent_early() > 0)
            source.sql(f"ALTER PUBLICATION {publication} SET TABLE notes (id, body, tag, b)")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5001, 'a', 'b')")
            run(writer, "COMMIT")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5002, 'a', 'b')")
        finally:
            stop.set()
            reader.join()
    taken_as_it_is(source)
    source.catch_up()
    columns = {
        event.key: [name for name in json.loads(event.after or "") if name in "ab"]
        for event in source.changes()
    }
    assert columns == {'["5001"]': ["b"], '["1"]': ["a"], '["5002"]': ["b"]}


def test_message_that_may_have_been_rolled_back_is_read_afterwards(both: TwoReaders) -> None:
    both.early.overrides["batch_max_bytes"] = 1
    both.early.sql("INSERT INTO notes VALUES (8000)")
    both.early.transaction(
        many(1),
        "SAVEPOINT s",
        "SELECT pg_logical_emit_message(true, 'audit', 'never')",
        many(1001),
        "ROLLBACK TO s",
        "SELECT pg_logical_emit_message(true, 'audit', 'always')",
        many(2001),
    )
    both.early.sql("INSERT INTO notes VALUES (9000)")
    both.catch_up()
    both.assert_same()
    assert both.sent_early() == 1
    (message,) = both.early.events("m")
    assert message.ordinal == 800
    assert not any(each.stream and each.stream.recovered_from for each in both.early.manifests())


@pytest.mark.slow
def test_prepared_transactions_land_when_they_are_committed(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "server")
    server.start()
    try:
        source = SourceUnderTest(server.dsn(), "support", tmp_path / "home")
        source.sql("ALTER SYSTEM SET max_prepared_transactions = 5")
        server.stop()
        server.start()
        source.sql("CREATE TABLE notes (id bigint PRIMARY KEY, body text, tag text)")
        source.tables.append(contract("notes", COLUMNS))
        both = TwoReaders(source, tmp_path)
        both.catch_up()
        source.sql(
            f"BEGIN; {many(1)}; PREPARE TRANSACTION 'large'",
            "BEGIN; INSERT INTO notes VALUES (2001); PREPARE TRANSACTION 'small'",
            f"BEGIN; {many(3001)}; PREPARE TRANSACTION 'never'",
        )
        both.catch_up()
        assert source.changes() == []
        source.sql("INSERT INTO notes VALUES (5001)", "COMMIT PREPARED 'small'", "COMMIT PREPARED 'large'")
        source.sql("ROLLBACK PREPARED 'never'")
        both.catch_up()
        both.assert_same()
        assert both.sent_early() >= 1
        in_order = list(dict.fromkeys(event.commit_lsn for event in source.changes()))
        first, second, *large = source.changes()
        assert [first.key, second.key] == ['["5001"]', '["2001"]']
        assert len(large) == 400 and {event.commit_lsn for event in large} == {in_order[2]}
    finally:
        server.destroy()


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("seed", range(8))
def test_random_transactions_of_several_writers_land_as_they_would_afterwards(
    source: SourceUnderTest, tmp_path: Path, seed: int
) -> None:
    """Read while they are made (seeds that are even) or when all are over; every third with messages."""
    script = Script(source, seed, messages=seed % 3 == 2)
    script.prepare()
    both = TwoReaders(source, tmp_path)
    both.catch_up()
    stop = threading.Event()
    reader = threading.Thread(target=source.capture().run, args=(None, stop))
    if seed % 2 == 0:
        reader.start()
    try:
        script.play(80)
    finally:
        stop.set()
        if reader.ident is not None:
            reader.join()
    both.catch_up()
    both.assert_same()
    assert script.messages or both.sent_early() >= 3
    for table in script.tables():
        assert folded(source.events(), table).keys() == source.rows(table, ("id",)).keys()
