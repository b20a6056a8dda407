"""Transactions that are sent before they commit land as if they had been sent afterwards."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.capture import end_of_chain
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "body", "tag")
WRITERS = 3
LONG = "repeat(md5(random()::text), 100)"


class TwoReaders:
    """One database that is read twice: with transactions sent in progress, and all of them afterwards."""

    def __init__(self, source: SourceUnderTest, folder: Path) -> None:
        self.early = source
        source.overrides["stream_above_bytes"] = 64 * 1024
        self.late = SourceUnderTest(
            source.dsn, f"{source.slot}_late", folder / "late", source.tables, {"stream_transactions": False}
        )

    def catch_up(self) -> None:
        self.early.catch_up()
        self.late.catch_up()

    def assert_same(self) -> None:
        """Both have landed the same events up to the same transaction."""
        early, late = self.early.changes(), self.late.changes()
        assert early == late
        positions = [(event.commit_lsn, event.ordinal) for event in early]
        assert len(set(positions)) == len(positions)
        last = []
        for reader in (self.early, self.late):
            epoch = reader.store.current_epoch()
            assert epoch is not None
            last.append(end_of_chain(reader.store, epoch)[1])
        assert last[0] == last[1] and last[0] is not None

    def sent_early(self) -> int:
        """How many transactions the server has sent, at least in part, before they committed."""
        ((early, late),) = self.early.query(
            "SELECT max(stream_txns) FILTER (WHERE slot_name = current_database()),"
            " max(stream_txns) FILTER (WHERE slot_name = current_database() || '_late')"
            " FROM pg_stat_replication_slots"
        )
        assert not late
        return int(early or 0)


@pytest.fixture
def both(source: SourceUnderTest, tmp_path: Path) -> TwoReaders:
    """Two readers of a table ``notes`` with a TOASTed column, both up to now."""
    source.sql(
        "CREATE TABLE notes (id bigint PRIMARY KEY, body text, tag text)",
        "ALTER TABLE notes ALTER COLUMN body SET STORAGE EXTERNAL",
    )
    source.tables.append(contract("notes", COLUMNS))
    readers = TwoReaders(source, tmp_path)
    readers.catch_up()
    return readers


@contextmanager
def session(source: SourceUnderTest) -> Iterator[Connection]:
    """A session of a writer; what it has not committed is rolled back at the end."""
    with source.connected() as connection:
        yield connection


def run(connection: Connection, *statements: str) -> None:
    with connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def many(first: int, rows: int = 400, table: str = "notes") -> str:
    """Inserts enough that the server does not keep it in memory."""
    rows_of = f"generate_series({first}, {first + rows - 1})"
    return f"INSERT INTO {table} (id, body, tag) SELECT g, {LONG}, 'new' FROM {rows_of} g"


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


def test_table_described_anew_while_a_transaction_is_in_progress_is_known_by_its_newest_description(
    both: TwoReaders,
) -> None:
    """The server counts on what it has sent last, and the older description is given out later."""
    source = both.early
    source.sql("ALTER TABLE notes ADD COLUMN a text", "ALTER TABLE notes ADD COLUMN b text")
    publication = source.slot
    source.sql(f"ALTER PUBLICATION {publication} SET TABLE notes (id, body, tag, a)")
    stop = threading.Event()
    reader = threading.Thread(target=source.capture().run, args=(None, stop))
    with session(source) as writer:
        reader.start()
        try:
            run(writer, "BEGIN", many(1))
            eventually_sent(both, 1)
            source.sql(f"ALTER PUBLICATION {publication} SET TABLE notes (id, body, tag, b)")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5001, 'a', 'b')")
            run(writer, "COMMIT")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5002, 'a', 'b')")
        finally:
            stop.set()
            reader.join()
    source.catch_up()
    between, *_, after = sorted(source.changes(), key=lambda event: event.commit_lsn)
    assert [event.key for event in (between, after)] == ['["5001"]', '["5002"]']
    for event in (between, after):
        assert event.after is not None and '"b":"b"' in event.after and '"a"' not in event.after
    early = [event for event in source.changes() if event.commit_lsn not in (between[1], after[1])]
    columns = [list(json.loads(event.after or ""))[3:] for event in early]
    # What the server had sent before the change, and the rest; each as it was described then.
    assert len(early) == 400 and columns[0] == ["a"]
    assert all(each in (["a"], ["b"]) for each in columns)


def eventually_sent(both: TwoReaders, transactions: int) -> None:
    """Wait until the server has sent that many transactions early."""
    for _ in range(400):
        if both.sent_early() >= transactions:
            return
        threading.Event().wait(0.05)
    pytest.fail("the server has sent nothing of a transaction in progress")


def test_message_that_may_have_been_rolled_back_is_read_afterwards(both: TwoReaders) -> None:
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


class Script:
    """Writers that do something at random, in turns; each has tables of its own, and one is for all."""

    def __init__(self, source: SourceUnderTest, seed: int) -> None:
        self.random, self.source = random.Random(seed), source
        self.next_id = 1
        self.depth = [-1] * WRITERS
        """Open savepoints of each writer; -1 outside of a transaction."""
        self.columns = 0

    @staticmethod
    def tables() -> list[str]:
        return ["shared", *(f"{name}_{writer}" for name in ("mine", "theirs") for writer in range(WRITERS))]

    def prepare(self) -> None:
        for name in self.tables():
            self.source.sql(
                f"CREATE TABLE {name} (id bigint PRIMARY KEY, body text, tag text)",
                f"ALTER TABLE {name} ALTER COLUMN body SET STORAGE EXTERNAL",
            )
            self.source.tables.append(contract(name, COLUMNS))
        for writer in range(WRITERS):
            self.source.sql(
                f"ALTER TABLE theirs_{writer} REPLICA IDENTITY FULL",
                f"ALTER TABLE theirs_{writer} ADD COLUMN of bigint REFERENCES mine_{writer}",
            )
        self.source.sql("CREATE TABLE elsewhere (id bigint, body text, tag text)")

    def play(self, steps: int) -> None:
        with ExitStack() as stack:
            writers = [stack.enter_context(session(self.source)) for _ in range(WRITERS)]
            for _ in range(steps):
                number = self.random.randrange(WRITERS)
                run(writers[number], *self._step(number))
            for number, writer in enumerate(writers):
                if self.depth[number] >= 0 and self.random.random() < 0.7:
                    run(writer, "COMMIT")

    def _step(self, writer: int) -> list[str]:
        if self.depth[writer] < 0:
            self.depth[writer] = 0
            return ["BEGIN", self._change(writer)]
        roll = self.random.random()
        if roll < 0.12:
            self.depth[writer] = -1
            return ["COMMIT"]
        if roll < 0.16:
            self.depth[writer] = -1
            return ["ROLLBACK"]
        if roll < 0.34:
            self.depth[writer] += 1
            return [f"SAVEPOINT s{self.depth[writer]}", self._change(writer)]
        if self.depth[writer] and roll < 0.5:
            to = self.random.randint(1, self.depth[writer])
            back = self.random.random() < 0.6
            self.depth[writer] = to - 1
            # What is rolled back to stands still; here it is left for good.
            return [f"ROLLBACK TO s{to}", f"RELEASE s{to}"] if back else [f"RELEASE s{to}"]
        return [self._change(writer)]

    def _change(self, writer: int) -> str:
        table = self.random.choice(
            ["shared", "elsewhere", *(f"{name}_{writer}" for name in ("mine", "theirs"))]
        )
        first, rows = self.next_id, self.random.choice([1, 3, 60, 150])
        insert = (
            f"INSERT INTO {table} (id, body, tag) SELECT g, {LONG}, md5(g::text)"
            f" FROM generate_series({first}, {first + rows - 1}) g"
        )
        if table in ("shared", "elsewhere"):
            self.next_id += rows
            return insert
        self.columns += 1
        some = f"WHERE abs(id) % {self.random.randint(2, 5)} = 0"
        change = self.random.choice(
            [
                insert,
                insert,
                insert,
                f"UPDATE theirs_{writer} SET tag = 'changed' {some}",
                f"UPDATE mine_{writer} SET tag = 'changed' {some}",
                f"UPDATE theirs_{writer} SET id = -id {some}",
                f"UPDATE theirs_{writer} SET body = {LONG} {some}",
                f"DELETE FROM theirs_{writer} {some}",
                f"TRUNCATE mine_{writer} CASCADE",
                f"TRUNCATE theirs_{writer}",
                f"ALTER TABLE {table} ADD COLUMN c{self.columns} int DEFAULT {self.columns}",
                "SELECT pg_logical_emit_message(true, 'audit', repeat('x', 1000))",
                "SELECT pg_logical_emit_message(false, 'audit', 'outside')",
            ]
        )
        self.next_id += rows
        return change


@pytest.mark.parametrize("seed", range(3))
def test_random_transactions_of_several_writers_land_as_they_would_afterwards(
    source: SourceUnderTest, tmp_path: Path, seed: int
) -> None:
    script = Script(source, seed)
    script.prepare()
    both = TwoReaders(source, tmp_path)
    both.catch_up()
    script.play(150)
    both.catch_up()
    both.assert_same()
    assert both.sent_early() >= 5
    for table in script.tables():
        columns = [
            row[0]
            for row in source.query(
                f"SELECT attname::text FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
            )
        ]
        seen = folded(source.events(), table)
        found = source.rows(table, columns)
        assert seen.keys() == found.keys()
