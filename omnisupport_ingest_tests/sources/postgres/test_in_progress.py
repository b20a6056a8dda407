"""Transactions that are sent before they commit land as if they had been sent afterwards."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from omnisupport_ingest.sources.postgres.capture import end_of_chain
from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.follower import Follower
from omnisupport_ingest.sources.postgres.pgoutput import Begin
from omnisupport_ingest.sources.postgres.server import current_wal_lsn
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
            # So large that it is sent at once, and nothing of the transaction is left for later.
            run(writer, "BEGIN", "INSERT INTO notes VALUES (1, repeat('x', 200000))")
            eventually(lambda: both.sent_early() > 0)
            source.sql(f"ALTER PUBLICATION {publication} SET TABLE notes (id, body, tag, b)")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5001, 'a', 'b')")
            run(writer, "COMMIT")
            source.sql("INSERT INTO notes (id, a, b) VALUES (5002, 'a', 'b')")
        finally:
            stop.set()
            reader.join()
    source.catch_up()
    columns = {
        event.key: [name for name in json.loads(event.after or "") if name in "ab"]
        for event in source.changes()
    }
    assert columns == {'["5001"]': ["b"], '["1"]': ["a"], '["5002"]': ["b"]}


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", path], capture_output=True
    ).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


def test_transaction_that_does_not_fit_on_the_disk_is_left_to_the_server(
    both: TwoReaders, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = both.early
    source.sql("INSERT INTO notes VALUES (1)")
    both.catch_up()
    shutil.move(source.home_folder, small_disk / "home")
    source.home_folder = small_disk / "home"
    # Far more than the disk has, and hardly anything as Parquet.
    source.sql("INSERT INTO notes SELECT g, repeat('x', 3000), 'x' FROM generate_series(2, 4000) g")
    both.catch_up()
    both.assert_same()
    assert "No space left on device. Until the next start" in caplog.text
    assert len(source.changes()) == 4000


def test_transaction_that_is_open_for_long_holds_nothing_up_and_comes_again_whole(both: TwoReaders) -> None:
    source = both.early
    with session(source) as writer:
        run(writer, "BEGIN", many(1))
        process = source.capture_process(overrides=source.overrides)
        try:
            eventually(lambda: both.sent_early() > 0)
            sent = current_wal_lsn(source.dsn)
            source.sql("INSERT INTO notes VALUES (9000)")
            eventually(lambda: source.confirmed() > sent)
            run(writer, many(1001))
        finally:
            process.kill()
            process.communicate(timeout=20)
        (landed,) = source.changes()
        assert landed.key == '["9000"]'
        run(writer, "COMMIT")
    both.catch_up()
    both.assert_same()
    assert len(source.changes()) == 801


def test_capture_killed_while_it_gives_a_transaction_out_loses_nothing_and_moves_nothing(
    both: TwoReaders,
) -> None:
    source = both.early
    source.sql("INSERT INTO notes SELECT g, 'some words', 'x' FROM generate_series(1, 25000) g")
    landed = source.store.batch_ids()
    process = source.capture_process(overrides=source.overrides)
    try:
        # The batch is opened when the transaction begins to be given out.
        eventually(lambda: len(list((source.store.folder / "data").glob("*-s-*"))) > 0)
    finally:
        process.kill()
        process.communicate(timeout=20)
    assert source.store.batch_ids() == landed
    both.catch_up()
    both.assert_same()
    assert len(source.changes()) == 25000


def test_transaction_that_landed_and_was_not_confirmed_is_known_when_it_comes_again(both: TwoReaders) -> None:
    source = both.early
    source.sql(many(1))
    process = source.capture_process(
        until=current_wal_lsn(source.dsn), failpoint="landing.manifest.after", overrides=source.overrides
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors
    assert both.sent_early() == 1 and len(source.changes()) == 400
    source.sql(many(1001))
    both.catch_up()
    both.assert_same()
    assert sum(bool(each.stream and each.stream.recovered_from) for each in source.manifests()) == 1


def test_pass_ends_while_a_large_transaction_is_open(both: TwoReaders) -> None:
    source = both.early
    with session(source) as writer:
        run(writer, "BEGIN", many(1))
        source.sql("INSERT INTO notes VALUES (9000)")
        both.catch_up()
        both.assert_same()
        assert both.sent_early() == 1 and len(source.changes()) == 1
        run(writer, "COMMIT")
    both.catch_up()
    both.assert_same()
    assert len(source.changes()) == 401


def test_stop_that_cannot_wait_gives_up_a_transaction_that_is_given_out(
    both: TwoReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopWithinIt(threading.Event):
        """Set as soon as a transaction is being given out."""

        def is_set(self) -> bool:
            return given_out.is_set()

    given_out = threading.Event()
    begin = Follower._begin

    def seen(self: Follower, transaction: Begin) -> None:
        begin(self, transaction)
        given_out.set()

    source = both.early
    source.sql("INSERT INTO notes SELECT g, 'some words', 'x' FROM generate_series(1, 9000) g")
    with monkeypatch.context() as patched:
        patched.setattr(Follower, "_begin", seen)
        patched.setattr("omnisupport_ingest.sources.postgres.follower._STOP_GRACE_SECONDS", 0.0)
        source.capture().run(None, StopWithinIt())
    assert source.changes() == [] and both.sent_early() == 1
    both.catch_up()
    both.assert_same()


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


class Script:
    """Writers that do something at random, in turns; each has tables of its own, and one is for all."""

    def __init__(self, source: SourceUnderTest, seed: int, *, messages: bool) -> None:
        self.random, self.source, self.messages = random.Random(seed), source, messages
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

    def play(self, steps: int, pause: float = 0) -> None:
        """Do so many things, with ``pause`` seconds behind each."""
        with ExitStack() as stack:
            writers = [stack.enter_context(session(self.source)) for _ in range(WRITERS)]
            for _ in range(steps):
                number = self.random.randrange(WRITERS)
                run(writers[number], *self._step(number))
                time.sleep(pause)
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
        if self.messages and self.random.random() < 0.2:
            transactional = self.random.choice(["true", "true", "false"])
            return f"SELECT pg_logical_emit_message({transactional}, 'audit', repeat('x', 1000))"
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
            ]
        )
        self.next_id += rows
        return change


SEEDS = [
    pytest.param(seed, marks=() if seed < 2 else pytest.mark.slow, id=f"seed {seed}") for seed in range(8)
]


@pytest.mark.parametrize("seed", SEEDS)
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


@pytest.mark.slow
def test_capture_killed_again_and_again_under_random_transactions_loses_nothing_and_moves_nothing(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    script, chance = Script(source, 99, messages=False), random.Random(99)
    script.prepare()
    both = TwoReaders(source, tmp_path)
    both.catch_up()
    playing = threading.Thread(target=script.play, args=(200, 0.1))
    playing.start()
    kills = 0
    while playing.is_alive():
        process = source.capture_process(overrides=source.overrides)
        enough = both.sent_early() + 1
        try:
            while both.sent_early() < enough and playing.is_alive():
                time.sleep(0.02)
            time.sleep(chance.random() / 5)
        finally:
            process.kill()
            process.communicate(timeout=20)
        kills += 1
    playing.join()
    assert kills > 3
    both.catch_up()
    both.assert_same()
