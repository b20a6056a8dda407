"""Snapshots in chunks: exact while the table is being written, resumed chunk by chunk."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest

from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.landing.snapshot_plans import SnapshotPlans
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable, TableMissedChanges
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.snapshot import key_ranges
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    capture,
    chunks,
    complete,
    following,
    make_papers,
    make_tickets,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A table of 1,000 rows, read in chunks of 100 by three connections."""
    make_tickets(source)
    return source


@pytest.mark.quick
def test_table_is_read_in_ranges_of_its_key_that_leave_nothing_out(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    read = chunks(tickets)
    assert [(span.start, span.end) for span in read] == [
        (f'["{n}"]' if n else None, f'["{n + 100}"]' if n < 1000 else None) for n in range(0, 1001, 100)
    ]
    assert same_as_source(tickets) and complete(tickets)
    boundary, *rows = tickets.events("r", "b")
    assert boundary.op == "b" and boundary.commit_lsn == min(span.low for span in read).value
    assert len({row.ordinal for row in rows}) == 1000
    assert all(boundary.ordinal < row.ordinal < 0 for row in rows)


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        pytest.param("bigint", "n::bigint * 1000000007", id="bigint"),
        pytest.param("uuid", "md5(n::text)::uuid", id="uuid"),
        pytest.param('text COLLATE "C"', "md5(n::text) || ' ''\"\\ ü'", id="text, awkward ones"),
        pytest.param(
            "text", "CASE WHEN n % 2 = 0 THEN 'ä' ELSE 'A' END || n", id="text, in the database's order"
        ),
        pytest.param("char(12)", "n::text", id="padded"),
        pytest.param("numeric", "n / 7.0", id="numeric"),
        pytest.param("timestamptz", "'2026-01-01Z'::timestamptz - n * interval '1.5 s'", id="timestamptz"),
        pytest.param("bytea", "sha256(n::text::bytea)", id="bytea"),
        pytest.param("int", "n * n * n", id="skewed"),
        pytest.param("boolean", "n % 2 = 0", id="with one more column"),
    ],
)
def test_rows_are_read_once_each_whatever_the_type_of_the_key(
    source: SourceUnderTest, key: str, rows: str
) -> None:
    source.sql(
        f"CREATE TABLE things (id {key}, part int, v text, PRIMARY KEY (id, part))",
        f"INSERT INTO things SELECT {rows}, n, 'x' FROM generate_series(1, 333) n",
    )
    source.tables.append(contract("things", ("id", "part", "v"), key=("part", "id")))
    source.overrides |= {"snapshot_chunk_rows": 10, "snapshot_threads": 2}
    source.catch_up()
    read = [event.key for event in source.events("r")]
    assert len(chunks(source, "things")) == 34
    assert len(read) == len(set(read)) == 333


@pytest.mark.parametrize(
    ("key", "rows"),
    [
        pytest.param("uuid", "md5(n::text)::uuid", id="keys anywhere"),
        pytest.param("bigint", "n::bigint * n", id="keys in their order"),
        pytest.param("text", "'ü' || n / 4", id="keys that begin alike"),
    ],
)
def test_a_large_table_is_cut_evenly_by_a_sample_of_its_pages(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch, key: str, rows: str
) -> None:
    source.sql(
        f"CREATE TABLE things (n {key}, total int, v text, PRIMARY KEY (n, total))"
        " WITH (autovacuum_enabled = false)",
        f"INSERT INTO things SELECT {rows}, n, repeat('x', 300) FROM generate_series(1, 10000) n",
        "ANALYZE things",
        # What came since is not in the statistics.
        f"INSERT INTO things SELECT {rows}, n, repeat('x', 300) FROM generate_series(10001, 20000) n",
    )
    source.tables.append(contract("things", ("n", "total", "v"), key=("n", "total")))
    source.overrides |= {"snapshot_chunk_rows": 2000, "snapshot_threads": 2}
    monkeypatch.setattr(key_ranges, "_SAMPLED_PAGES", 8)
    source.catch_up()
    events = source.events("r")
    assert len(events) == len({event.key for event in events}) == 20_000
    sizes = Counter(event.chunk_id for event in events)
    assert len(sizes) == 10
    assert all(1300 < size < 2700 and size != 2000 for size in sizes.values()), sizes


def test_chunks_are_as_large_as_wanted_however_old_the_statistics_are(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, v text) WITH (autovacuum_enabled = false)",
        "INSERT INTO things SELECT n, repeat('x', 300) FROM generate_series(1, 20000) n",
        "ANALYZE things",
        "DELETE FROM things WHERE id % 4 > 0",
    )
    source.tables.append(contract("things", ("id", "v"), key=("id",)))
    source.overrides |= {"snapshot_chunk_rows": 2000, "snapshot_threads": 2}
    monkeypatch.setattr(key_ranges, "_SAMPLED_PAGES", 8)
    source.catch_up()
    sizes = Counter(event.chunk_id for event in source.events("r"))
    assert len(sizes) in (2, 3) and sum(sizes.values()) == 5000 and 2000 not in sizes.values()


@pytest.mark.parametrize(
    "made",
    [
        pytest.param("CREATE TABLE things (id int NOT NULL, v text)", id="by place"),
        pytest.param(
            "CREATE TABLE things (id int NOT NULL, v text) PARTITION BY RANGE (id);"
            " CREATE TABLE things_1 PARTITION OF things FOR VALUES FROM (0) TO (500);"
            " CREATE TABLE things_2 PARTITION OF things FOR VALUES FROM (500) TO (5000)",
            id="partitioned, in one chunk",
        ),
    ],
)
def test_table_without_an_index_on_its_key_is_read_whole(source: SourceUnderTest, made: str) -> None:
    source.sql(
        made,
        "ALTER TABLE things REPLICA IDENTITY FULL",
        "INSERT INTO things SELECT n, repeat('x', 200) FROM generate_series(1, 2000) n",
        "ANALYZE things",
    )
    source.tables.append(contract("things", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 100, "snapshot_threads": 2}
    source.catch_up()
    assert same_as_source(source, "things")
    assert (len(chunks(source, "things")) > 15) == ("PARTITION" not in made)
    assert len(source.events("r")) == 2000


PLACED = ("id", "v", "long")


@pytest.fixture
def placed(source: SourceUnderTest) -> SourceUnderTest:
    """A table of 1,000 rows without an index, which the server has never counted, read page by page."""
    long = "repeat(n::text, 3000)"
    source.sql(
        # Nobody is to analyse it, or to make room in its pages, but the test.
        "CREATE TABLE things (id int NOT NULL, v text, long text) WITH (autovacuum_enabled = false)",
        "ALTER TABLE things REPLICA IDENTITY FULL",
        "ALTER TABLE things ALTER COLUMN long SET STORAGE EXTERNAL",
        f"INSERT INTO things SELECT n, repeat('x', 200), {long} FROM generate_series(1, 1000) n",
    )
    source.tables.append(contract("things", PLACED))
    source.overrides |= {"snapshot_chunk_rows": 60, "snapshot_threads": 1}
    return source


def test_rows_that_move_between_pages_while_a_table_is_read_by_place_are_right_by_the_stream(
    placed: SourceUnderTest,
) -> None:
    assert placed.query("SELECT reltuples FROM pg_class WHERE relname = 'things'")[0][0] <= 0
    moved: dict[str, list[int]] = {}

    def ids(condition: str) -> list[int]:
        return [number for (number,) in placed.query(f"SELECT id FROM things WHERE {condition}")]

    def landed(batch: Manifest) -> None:
        if batch.chunk is None or (batch.chunk.chunk, batch.chunk.boundary) != (15, False):
            return
        # The pages that have been read get room, and rows of those that have not take it; and rows of pages
        # that have been read leave for new ones.
        placed.sql(
            "DELETE FROM things WHERE id <= 200",
            "VACUUM (TRUNCATE false) things",
            "UPDATE things SET id = -id, v = repeat('z', 1500) WHERE id BETWEEN 701 AND 710",
            "UPDATE things SET v = repeat('y', 1500) WHERE id > 980",
            "UPDATE things SET v = repeat('y', 1500) WHERE id BETWEEN 301 AND 400",
        )
        moved["to pages that were read"] = ids("ctid < '(15,0)' AND id > 980")
        moved["there, with another key"] = ids("ctid < '(15,0)' AND id < 0")
        moved["from there"] = ids("ctid > '(16,0)' AND id BETWEEN 301 AND 400")

    capture(placed, landed)
    # Else nothing of the kind was tried.
    assert all(moved.values())
    read = [int(json.loads(event.key or "")[0]) for event in placed.events("r")]
    assert {*map(abs, moved["to pages that were read"] + moved["there, with another key"])}.isdisjoint(read)
    assert {read.count(key) for key in moved["from there"]} == {2}
    assert folded(placed.events(), "things") == placed.rows("things", PLACED)
    assert complete(placed, "things")


def test_table_read_by_place_that_is_written_all_the_while_is_exact_at_the_end(
    placed: SourceUnderTest,
) -> None:
    placed.overrides |= {"snapshot_threads": 3, "snapshot_rows_per_second": 700}
    over, turns = threading.Event(), [0, 0]

    def write(number: int) -> None:
        # Each has keys of its own, as nothing else keeps them apart.
        while not over.is_set():
            turns[number] += 1
            turn = turns[number]
            key = turn * 38 % 1000 + number
            placed.transaction(
                f"UPDATE things SET v = repeat('{turn % 10}', {turn * 311 % 1900}) WHERE id = {key}",
                f"UPDATE things SET id = {-turn * 2 - number} WHERE id = {(turn * 74 + 500) % 1000 + number}",
                f"DELETE FROM things WHERE id = {turn * 86 % 1000 + number}",
                f"INSERT INTO things VALUES ({10_000 + turn * 2 + number}, 'new', repeat('n', 3000))",
            )
            if turn % 5 == 0:
                placed.sql("VACUUM (TRUNCATE false) things")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        with following(placed):
            until(lambda: complete(placed, "things"))
            over.set()
            for writer in writers:
                writer.join()
    finally:
        over.set()
    placed.catch_up()
    assert min(turns) > 5 and len({span.low for span in chunks(placed, "things")}) > 1
    assert folded(placed.events(), "things") == placed.rows("things", PLACED)


def test_partitioned_table_is_read_in_chunks_over_its_partitions(source: SourceUnderTest) -> None:
    source.sql(
        "CREATE TABLE things (id int PRIMARY KEY, v text) PARTITION BY HASH (id)",
        *(
            f"CREATE TABLE things_{n} PARTITION OF things FOR VALUES WITH (MODULUS 3, REMAINDER {n})"
            for n in range(3)
        ),
        "INSERT INTO things SELECT n, 'x' FROM generate_series(1, 500) n",
    )
    source.tables.append(contract("things", COLUMNS))
    source.overrides["snapshot_chunk_rows"] = 50
    source.catch_up()
    assert len(chunks(source, "things")) == 11 and same_as_source(source, "things")


def test_empty_table_is_one_chunk_and_complete(source: SourceUnderTest) -> None:
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    assert len(chunks(source)) == 1 and complete(source) and source.events("r") == []


def test_snapshot_that_is_stopped_while_it_is_planned_leaves_nothing_behind(tickets: SourceUnderTest) -> None:
    epoch, stop = tickets.capture().begin_new_epoch("a first one"), threading.Event()
    stop.set()
    tickets.capture().run(current_wal_lsn(tickets.dsn), stop)
    assert SnapshotPlans(tickets.store.folder).all(epoch.number) == []
    assert tickets.manifests() == [] and not complete(tickets)
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)


@pytest.mark.quick
def test_chunks_that_landed_are_not_read_again_after_a_kill(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_threads"] = 1
    tickets.killed_at("landing.manifest.after@tickets-000003")
    before = {batch.batch_id: batch for batch in tickets.manifests()}
    assert [span.chunk for span in chunks(tickets)] == [0, 1, 2, 3] and not complete(tickets)
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id % 3 = 0", "DELETE FROM tickets WHERE id % 7 = 0")
    tickets.catch_up()
    after = {batch.batch_id: batch for batch in tickets.manifests()}
    assert before.items() <= after.items()
    assert [span.chunk for span in chunks(tickets)] == list(range(11))
    assert len({span.snapshot_id for span in chunks(tickets)}) == 1
    assert len({span.low for span in chunks(tickets)}) > 1
    assert same_as_source(tickets) and complete(tickets)


@pytest.mark.parametrize(
    "failpoint",
    [
        "landing.snapshot_plan.before",
        "landing.snapshot_plan.after",
        "landing.data.after@tickets-000000",
        "landing.manifest.before@boundary",
        "landing.manifest.after@boundary",
    ],
)
def test_snapshot_killed_anywhere_ends_as_the_source(tickets: SourceUnderTest, failpoint: str) -> None:
    for _ in range(2 if failpoint.endswith("before") else 1):
        tickets.killed_at(failpoint)
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id % 3 = 0", "DELETE FROM tickets WHERE id % 7 = 0")
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)
    assert len(tickets.events("b")) == 1


def test_source_that_is_written_all_the_while_is_exact_at_the_end(tickets: SourceUnderTest) -> None:
    over = threading.Event()

    def write(number: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            key = (turn * 37 + number * 311) % 1000 + 1
            tickets.transaction(
                f"UPDATE tickets SET v = 'turn {turn}' WHERE id = {key}",
                f"DELETE FROM tickets WHERE id = {1001 - key}",
                f"INSERT INTO tickets VALUES ({10_000 * (number + 1) + turn}, 'new')",
                f"INSERT INTO tickets VALUES ({1001 - key}, 'again') ON CONFLICT (id) DO NOTHING",
            )

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    try:
        with following(tickets):
            until(lambda: complete(tickets))
            over.set()
            for writer in writers:
                writer.join()
    finally:
        over.set()
    tickets.catch_up()
    assert same_as_source(tickets)
    assert len({span.low for span in chunks(tickets)}) > 1


WAITS = "FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
"""Who waits for a standby to confirm a commit."""


def a_commit_waits(source: SourceUnderTest) -> bool:
    """Whether commits wait for a standby: the server's checkpointer decides that, some time after a reload.

    Sees it from a commit that is let go again.
    """
    statement = "SELECT pg_logical_emit_message(true, 'does it wait', '')"
    tried = threading.Thread(target=source.sql, args=(statement,))
    tried.start()
    while tried.is_alive():
        if source.query(f"SELECT pg_cancel_backend(pid) {WAITS}") == [(True,)]:
            tried.join()
            return True
    return False


def test_commit_between_its_record_and_its_visibility_is_not_lost(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_threads"] = 1
    held: list[threading.Thread] = []
    ended: list[Lsn] = []

    def landed(batch: Manifest) -> None:
        if batch.chunk is None or held:
            return
        # Commits now wait for a standby that is not there: their records are written, nobody sees them.
        tickets.sql("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        until(lambda: a_commit_waits(tickets))
        statement = "UPDATE tickets SET v = 'held back' WHERE id = 950"
        held.append(threading.Thread(target=tickets.sql, args=(statement,)))
        held[0].start()
        until(lambda: tickets.query(f"SELECT count(*) {WAITS}") == [(1,)])
        ended.append(current_wal_lsn(tickets.dsn))
        assert tickets.query("SELECT v FROM tickets WHERE id = 950") == [("old",)]

    try:
        capture(tickets, landed, Lsn(1))
    finally:
        tickets.sql("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    held[0].join(PATIENCE)
    (row,) = [event for event in tickets.events("r") if event.key == '["950"]']
    assert row.after is not None and '"old"' in row.after
    tickets.catch_up()
    (update,) = [event for event in tickets.changes() if event.key == '["950"]']
    assert row.commit_lsn < update.commit_lsn < ended[0].value
    assert same_as_source(tickets)


def test_long_transaction_leaves_an_older_watermark_in_force(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_threads"] = 1
    with tickets.connected() as other, other.cursor() as cursor:

        def landed(batch: Manifest) -> None:
            if batch.chunk is not None and batch.chunk.chunk == 0:
                cursor.execute("BEGIN; UPDATE tickets SET v = 'long' WHERE id > 500")

        capture(tickets, landed, Lsn(1))
        first, *later = chunks(tickets)
        assert {span.low for span in later} == {first.low} and len(later) == 10
        cursor.execute("COMMIT")
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)


def test_transaction_under_way_at_the_start_is_waited_for(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    SnapshotRequests(tickets.store.folder).write("tickets", "a test")
    with tickets.connected() as other, other.cursor() as cursor:
        cursor.execute("BEGIN; UPDATE tickets SET v = 'long' WHERE id > 500")
        ending = threading.Timer(1.0, cursor.execute, ["COMMIT"])
        ending.start()
        tickets.catch_up()
        ending.join()
    again = [event for event in tickets.events("r") if event.after and '"long"' in event.after]
    assert len(again) == 500
    assert same_as_source(tickets)


def test_rows_that_vanished_while_nobody_looked_are_ended_by_another_snapshot(
    tickets: SourceUnderTest,
) -> None:
    tickets.catch_up()
    # Not in the stream: the table was out of the publication.
    tickets.sql(
        f"ALTER PUBLICATION {tickets.slot} DROP TABLE tickets",
        "DELETE FROM tickets WHERE id <= 300",
        "UPDATE tickets SET v = 'unseen' WHERE id > 900",
        f"ALTER PUBLICATION {tickets.slot} ADD TABLE tickets",
    )
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    assert not same_as_source(tickets)
    assert SnapshotRequests(tickets.store.folder).write("tickets", "rows were missed")
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)
    assert len(tickets.events("b")) == 2 and SnapshotRequests(tickets.store.folder).read() == []
    reads = len(tickets.events("r"))
    tickets.catch_up()
    assert len(tickets.events("r")) == reads


@pytest.mark.slow
def test_snapshot_asked_for_while_capture_follows_is_taken_beside_the_stream(
    tickets: SourceUnderTest,
) -> None:
    tickets.sql("CREATE TABLE other (id int PRIMARY KEY, v text)", "INSERT INTO other VALUES (1, 'one')")
    tickets.tables.append(contract("other", COLUMNS))
    tickets.overrides["snapshot_rows_per_second"] = 400
    with following(tickets):
        until(lambda: complete(tickets) and complete(tickets, "other"))
        SnapshotRequests(tickets.store.folder).write("tickets", "a test")
        until(lambda: len(chunks(tickets)) > 11)
        tickets.sql("INSERT INTO other VALUES (2, 'two')", "DELETE FROM tickets WHERE id = 999")
        until(lambda: same_as_source(tickets, "other"))
        # The stream did not wait for the snapshot.
        assert len(tickets.events("b")) == 3 - 1
        until(lambda: len(tickets.events("b")) == 3)
        until(lambda: same_as_source(tickets) and complete(tickets))


@pytest.mark.parametrize("mode", ["schema_only", "never"])
def test_no_rows_are_read_in_modes_without_them_until_they_are_asked_for(
    tickets: SourceUnderTest, mode: str
) -> None:
    tickets.overrides["snapshot_mode"] = mode
    tickets.catch_up()
    tickets.sql("UPDATE tickets SET v = 'new' WHERE id = 5")
    tickets.catch_up()
    assert [event.op for event in tickets.events()] == ["u"]
    forms = [batch for batch in tickets.manifests() if batch.chunk is not None]
    assert len(forms) == (mode == "schema_only") and all(form.relations for form in forms)
    why = incomplete_now(tickets.manifests(), "tickets", 1, ())
    assert why is not None and "source snapshot" in why.fix and "has not been read" in why.problem
    SnapshotRequests(tickets.store.folder).write("tickets", "wanted after all")
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)


def test_lost_slot_begins_a_new_epoch_by_itself_in_mode_when_needed(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_mode"] = "when_needed"
    tickets.catch_up()
    tickets.sql(f"SELECT pg_drop_replication_slot('{tickets.slot}')", "DELETE FROM tickets WHERE id < 50")
    tickets.catch_up()
    first, second = tickets.store.epochs()
    assert "slot" in second.reason and first.number == 1
    assert same_as_source(tickets) and complete(tickets)


def test_key_that_was_renamed_since_it_was_planned_is_planned_anew(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_threads"] = 1
    tickets.killed_at("landing.manifest.after@tickets-000003")
    tickets.sql("ALTER TABLE tickets ALTER COLUMN id TYPE bigint")
    tickets.catch_up()
    assert len({span.snapshot_id for span in chunks(tickets)}) == 2
    assert same_as_source(tickets) and complete(tickets)


def test_failed_chunk_ends_a_capture_that_follows_and_what_landed_stays(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    SnapshotRequests(tickets.store.folder).write("tickets", "a test")
    tickets.overrides["snapshot_rows_per_second"] = 200
    with pytest.raises(SourceUnavailable, match="tickets cannot be read"), following(tickets) as running:
        until(lambda: len(chunks(tickets)) > 12)
        tickets.sql("ALTER TABLE tickets RENAME TO elsewhere")
        until(lambda: not running.is_alive())
    landed = len(chunks(tickets))
    tickets.sql("ALTER TABLE elsewhere RENAME TO tickets")
    del tickets.overrides["snapshot_rows_per_second"]
    tickets.catch_up()
    assert 12 < landed < len(chunks(tickets)) == 22 and complete(tickets)


def test_rate_is_kept_over_all_connections(tickets: SourceUnderTest) -> None:
    tickets.overrides["snapshot_rows_per_second"] = 500
    tickets.catch_up()
    landed = [batch.arrival.landed_at for batch in tickets.manifests() if batch.chunk is not None]
    assert (max(landed) - min(landed)).total_seconds() > 1.5
    assert same_as_source(tickets)


def test_row_that_moved_from_a_range_to_be_read_to_one_that_was_is_read_again(
    source: SourceUnderTest,
) -> None:
    make_papers(source, 11, 1000)

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            # To ranges read and to be read; one moves on; one that moved is deleted; a swap.
            source.sql(
                "UPDATE papers SET id = 1 WHERE id = 900",
                "UPDATE papers SET id = 2 WHERE id = 901",
                "UPDATE papers SET id = 3 WHERE id = 2",
                "UPDATE papers SET id = 4 WHERE id = 902",
                "DELETE FROM papers WHERE id = 4",
                "UPDATE papers SET id = 2000 WHERE id = 903",
                "UPDATE papers SET id = 5 WHERE id = 904",
                "UPDATE papers SET id = 904 WHERE id = 12",
                "UPDATE papers SET id = 12 WHERE id = 5",
            )

    capture(source, landed)
    rows = source.rows("papers", ("id", "v", "long"))
    assert len(rows) == 989 and folded(source.events(), "papers") == rows
    again = [span for span in chunks(source, "papers") if span.chunk > 9]
    assert len(again) == 1 and complete(source, "papers")
    # They have an LSN that the chunks saw, so no later clock: a transaction above it may have an earlier one.
    assert again[0].clock == max(span.clock for span in chunks(source, "papers") if span.chunk <= 9)
    assert {event.source_ts for event in source.events() if event.chunk_id == again[0].id} == {again[0].clock}
    source.catch_up()
    assert [span for span in chunks(source, "papers") if span.chunk > 9] == again


def test_row_that_moves_on_while_it_is_read_again_is_read_once_more(source: SourceUnderTest) -> None:
    make_papers(source, 101, 300)

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            source.sql("UPDATE papers SET id = 1 WHERE id = 300")
        elif batch.stream is not None and not source.query("SELECT FROM papers WHERE id = 2"):
            source.sql("UPDATE papers SET id = 2 WHERE id = 1")

    capture(source, landed)
    source.catch_up()
    assert folded(source.events(), "papers") == source.rows("papers", ("id", "v", "long"))


def test_a_snapshot_that_was_searched_for_moved_rows_needs_its_stream_no_more(
    source: SourceUnderTest,
) -> None:
    """Retention removes the data files of old windows from landing; capture starts again all the same."""
    make_papers(source, 11, 300)

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and (batch.chunk.chunk, batch.chunk.boundary) == (0, False):
            source.sql("UPDATE papers SET v = 'changed' WHERE id IN (20, 300)")

    capture(source, landed)
    assert complete(source, "papers")
    gone = [source.store.path_of(file) for batch in source.manifests() for file in batch.files]
    for file in gone:
        file.unlink()
    source.sql("INSERT INTO papers VALUES (2, 'new', 'row')")
    source.catch_up()
    files = [file for batch in source.store.manifests() for file in batch.files]
    assert sum(file.rows for file in files if source.store.path_of(file).exists()) == 1
