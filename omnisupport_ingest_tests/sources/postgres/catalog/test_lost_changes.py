"""A table whose changes are missing is told to be so until it is right again, and its history keeps the gap.

The epoch goes on meanwhile, and the older snapshot of the table is still whole.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing

import pytest

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.completeness import incomplete_at
from omnisupport_ingest.landing.lost_changes import LostChanges, LostStretch
from omnisupport_ingest.position import Lsn, Position
from omnisupport_ingest.settings import SnapshotMode
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.catalog.partitions import PartitionRecords
from omnisupport_ingest.sources.postgres.catalog.published import PublishedTables
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.preflight.source_check import published_findings
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, TableMissedChanges
from omnisupport_ingest.sources.postgres.session.safe_watermark import CatalogWatermarks
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    complete,
    make_tickets,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

UNSEEN = (
    "UPDATE tickets SET v = 'unseen' WHERE id % 2 = 0",
    "DELETE FROM tickets WHERE id = 1",
    "INSERT INTO tickets VALUES (2001, 'unseen') ON CONFLICT DO NOTHING",
)


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """1,000 tickets in chunks of 100, and a table whose changes move the stream on, all captured."""
    make_tickets(source)
    source.overrides["snapshot_threads"] = 1
    source.sql("CREATE TABLE other (id int PRIMARY KEY, v text)")
    source.tables.append(contract("other", COLUMNS))
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'seen' WHERE id = 3")
    source.catch_up()
    return source


def stretches(source: SourceUnderTest) -> tuple[LostStretch, ...]:
    return LostChanges(source.store.folder, 1).all()


def told_at(source: SourceUnderTest, lsn: Lsn, table: str = "tickets") -> bool:
    """Whether the state of the table with everything below ``lsn`` is told."""
    found = incomplete_at(source.manifests(), table, Position(1, lsn, 0), stretches(source))
    assert found is None or table in found.problem
    return found is None


def state_at(source: SourceUnderTest, lsn: Lsn, table: str = "tickets") -> dict[str, dict[str, str | None]]:
    return folded([each for each in source.events() if each.commit_lsn < lsn.value], table)


def certain_below(source: SourceUnderTest) -> Lsn:
    """Up to where the written looks at the catalogs are certain of every table."""
    (published,) = source.store.folder.glob("published-e*.json")
    certain = [Lsn.parse(table["certain"]) for table in json.loads(published.read_text())["tables"].values()]
    partitions = [PartitionRecords(source.store.folder, 1).read(each.name) for each in source.tables]
    return min(certain + [known.certain for known in partitions if known is not None])


def catch_up_to_certainty(source: SourceUnderTest, lsn: Lsn) -> None:
    """Capture until it is certain of all below ``lsn``.

    One look may not be: a transaction of the server's own, as autovacuum's, may be under way meanwhile.
    """

    def certain() -> bool:
        source.catch_up()
        return certain_below(source) >= lsn

    until(certain)


def out_and_back(source: SourceUnderTest) -> Lsn:
    """Changes of ``tickets`` that are never sent; returns an LSN among them, of which all is known else."""
    source.sql(f"ALTER PUBLICATION {source.slot} DROP TABLE tickets", *UNSEEN)
    amid = current_wal_lsn(source.dsn)
    source.sql(
        "INSERT INTO other SELECT coalesce(max(id), 0) + 1, 'x' FROM other",
        f"ALTER PUBLICATION {source.slot} ADD TABLE tickets",
        "UPDATE tickets SET v = 'sent again' WHERE id = 5",
    )
    return amid


def ask(source: SourceUnderTest) -> None:
    SnapshotRequests(source.store.folder).write("tickets", "a test")


@pytest.mark.parametrize("way", ["by hand", "when needed"])
@pytest.mark.parametrize(
    "identity", ["PRIMARY KEY", "FULL"], ids=["its key in another order", "without a key"]
)
def test_table_whose_contract_was_away_is_not_complete_before_it_has_been_read_again(
    tickets: SourceUnderTest, identity: str, way: str
) -> None:
    tickets.sql(
        "CREATE TABLE pairs (a int, b int, v text, PRIMARY KEY (b, a))",
        "INSERT INTO pairs VALUES (1, 10, 'x'), (2, 20, 'y')",
    )
    if identity == "FULL":
        tickets.sql("ALTER TABLE pairs REPLICA IDENTITY FULL")
    pairs = contract("pairs", ("a", "b", "v"), key=("b", "a"))
    both, without = [*tickets.tables, pairs], tickets.tables
    tickets.tables = both
    tickets.catch_up()
    amid = current_wal_lsn(tickets.dsn)
    catch_up_to_certainty(tickets, amid)
    tickets.tables = without
    tickets.sql("UPDATE pairs SET v = 'new' WHERE a = 1", "DELETE FROM pairs WHERE a = 2")
    tickets.sql("INSERT INTO pairs VALUES (3, 30, 'z')")
    tickets.catch_up()
    tickets.sql("INSERT INTO other VALUES (7, 'idle')")
    tickets.catch_up()
    assert told_at(tickets, amid, "pairs")
    tickets.tables = both
    if way == "when needed":
        tickets.overrides["snapshot_mode"] = SnapshotMode.WHEN_NEEDED
        tickets.catch_up()
    else:
        for _ in range(2):
            with pytest.raises(TableMissedChanges, match="no contract named it"):
                tickets.catch_up()
            assert not complete(tickets, "pairs")
        SnapshotRequests(tickets.store.folder).write("pairs", "a test")
        tickets.catch_up()
    assert complete(tickets, "pairs")
    rows = {json.loads(key)[1]: row["v"] for key, row in folded(tickets.events(), "pairs").items()}
    assert rows == {"1": "new", "3": "z"}
    keys = {each.key for each in tickets.events() if each.source_table == "pairs" and each.op != "b"}
    assert keys <= {None, '["10","1"]', '["20","2"]', '["30","3"]'}
    assert complete(tickets)


def test_a_start_that_captures_nothing_parks_no_table_whose_contract_is_away(
    tickets: SourceUnderTest,
) -> None:
    both = tickets.tables
    assert len(both) > 1
    tickets.tables = both[1:]
    tickets.sql(f"ALTER TABLE {both[1].table} RENAME TO elsewhere")
    with pytest.raises(IngestError):
        tickets.catch_up()
    assert ParkedTables(tickets.store.folder, 1).all() == {}
    tickets.sql(f"ALTER TABLE elsewhere RENAME TO {both[1].table}")
    tickets.tables = both
    tickets.catch_up()
    assert complete(tickets)


@pytest.mark.parametrize("way", ["told first", "asked for at once", "when needed"])
def test_table_is_not_complete_before_it_has_been_read_again_and_its_gap_is_never_told_as_a_state(
    tickets: SourceUnderTest, way: str
) -> None:
    before, rows = current_wal_lsn(tickets.dsn), tickets.rows("tickets", COLUMNS)
    catch_up_to_certainty(tickets, before)
    amid = out_and_back(tickets)
    if way == "told first":
        with pytest.raises(TableMissedChanges):
            tickets.catch_up()
        assert not complete(tickets), "it is known"
    if way == "when needed":
        tickets.overrides["snapshot_mode"] = SnapshotMode.WHEN_NEEDED
    else:
        ask(tickets)
    # Of the second snapshot: its first chunk has landed, and the stream can go on.
    tickets.killed_at("landing.manifest.after@tickets-000000")
    assert not complete(tickets) and complete(tickets, "other")
    for _ in range(2):
        tickets.killed_at("landing.manifest.before@tickets-000005")
        assert not complete(tickets)
    tickets.catch_up()
    assert complete(tickets) and same_as_source(tickets)
    assert told_at(tickets, before) and state_at(tickets, before) == rows
    assert not told_at(tickets, amid), "what was changed there is not in the events"
    assert told_at(tickets, amid, "other")
    tickets.sql("UPDATE tickets SET v = 'later' WHERE id < 9")
    now = current_wal_lsn(tickets.dsn)
    tickets.catch_up()
    assert told_at(tickets, now) and state_at(tickets, now) == tickets.rows("tickets", COLUMNS)
    (stretch,) = stretches(tickets)
    assert before <= stretch.lost_from < amid and stretch.lost_to is not None and stretch.lost_to < now


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "point",
    [
        "landing.lost_changes.before",
        "landing.lost_changes.after",
        "landing.lost_changes.before:2",
        "landing.lost_changes.after:2",
        "source.published.before",
        "source.published.after",
        "landing.snapshot_plan.before",
        "landing.snapshot_plan.after",
        "source.snapshot_request_clear.before",
        "source.snapshot_request_clear.after",
    ],
)
def test_capture_killed_while_it_takes_up_the_repair_forgets_no_loss(
    tickets: SourceUnderTest, point: str
) -> None:
    amid = out_and_back(tickets)
    ask(tickets)
    tickets.killed_at(point)
    # Before that point nothing at all is durable, so the next look finds the same difference.
    assert complete(tickets) == (point == "landing.lost_changes.before")
    tickets.killed_at("landing.manifest.after@tickets-000000")
    assert not complete(tickets)
    tickets.catch_up()
    assert complete(tickets) and same_as_source(tickets) and not told_at(tickets, amid)


def test_loss_that_nobody_has_looked_for_before_the_repair_is_taken_up_is_written_down(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record,) = tickets.store.folder.glob("published-e*.json")
    held = PublishedTables(tickets.store.folder, 1, tickets.slot, tickets.tables, lambda: {"tickets"})
    with tickets.connected() as connection:
        held.begin(connection)
        before = current_wal_lsn(tickets.dsn)

        def certain() -> bool:
            held.require_same(connection, last=True)
            return certain_below(tickets) >= before

        until(certain)
        amid = out_and_back(tickets)
        known = record.read_bytes()
        for step in ("add", "will_be_read"):
            with monkeypatch.context() as patched:
                patched.setattr(LostChanges, step, _full_disk)
                with pytest.raises(OSError):
                    held.accept(connection, {"tickets"})
            assert record.read_bytes() == known, "the doubt is gone before the note of it is there"
        held.accept(connection, {"tickets"})
        after = current_wal_lsn(tickets.dsn)
    (stretch,) = stretches(tickets)
    assert before <= stretch.lost_from < amid
    assert stretch.lost_to is not None and amid < stretch.lost_to <= after


def test_table_that_is_asked_for_is_known_to_lack_changes_before_the_repair_is_taken_up(
    tickets: SourceUnderTest,
) -> None:
    out_and_back(tickets)
    ask(tickets)
    held = PublishedTables(tickets.store.folder, 1, tickets.slot, tickets.tables, lambda: {"tickets"})
    with tickets.connected() as connection:
        held.begin(connection)
    assert not complete(tickets) and complete(tickets, "other")


def test_loss_that_comes_while_the_table_is_read_again_is_one_more(tickets: SourceUnderTest) -> None:
    out_and_back(tickets)
    ask(tickets)
    tickets.killed_at("landing.manifest.after@tickets-000004")
    amid = out_and_back(tickets)
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    assert not complete(tickets)
    ask(tickets)
    tickets.killed_at("landing.manifest.after@tickets-000004")
    assert not complete(tickets)
    tickets.catch_up()
    assert complete(tickets) and same_as_source(tickets) and not told_at(tickets, amid)
    assert len(stretches(tickets)) == 2


def test_changes_under_another_name_are_not_forgotten_where_the_table_is_read_again_already(
    tickets: SourceUnderTest,
) -> None:
    tickets.sql(
        "ALTER TABLE tickets RENAME TO elsewhere",
        "UPDATE elsewhere SET v = 'unseen' WHERE id < 20",
        "ALTER TABLE elsewhere RENAME TO tickets",
    )
    amid = current_wal_lsn(tickets.dsn)
    ask(tickets)
    # What the stream has under the other name is received after the snapshot was planned.
    tickets.catch_up()
    assert same_as_source(tickets) and complete(tickets)
    assert not told_at(tickets, amid)


def test_reading_a_table_again_that_has_lost_nothing_leaves_its_history(tickets: SourceUnderTest) -> None:
    before = current_wal_lsn(tickets.dsn)
    ask(tickets)
    tickets.killed_at("landing.manifest.after@tickets-000004")
    tickets.catch_up()
    assert complete(tickets) and told_at(tickets, before) and stretches(tickets) == ()


def test_transaction_that_is_under_way_leaves_what_is_certain_where_it_was(tickets: SourceUnderTest) -> None:
    """Its commit may be below the end of the WAL and be seen by nobody yet."""
    tickets.sql("INSERT INTO other VALUES (1, 'before')")
    with tickets.connected() as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN; INSERT INTO other VALUES (2, 'under way')")
        began = current_wal_lsn(tickets.dsn)
        with tickets.connected() as another:
            looks = CatalogWatermarks()
            assert looks.next(another) == Lsn(0)
            tickets.sql("INSERT INTO other VALUES (3, 'meanwhile')")
            assert looks.next(another) == Lsn(0)
            cursor.execute("COMMIT")
            until(lambda: looks.next(another) > began)


def test_looks_that_a_transaction_of_another_database_held_back_are_certain_once_it_is_over(
    logs: SourceUnderTest, postgres: EmbeddedPostgres
) -> None:
    with closing(connect(postgres.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN; SELECT pg_current_xact_id()")
        logs.sql("INSERT INTO older VALUES (0, 'meanwhile')")
        before = current_wal_lsn(logs.dsn)
        logs.catch_up()
        assert certain_below(logs) < before
    catch_up_to_certainty(logs, before)


def test_publication_that_was_altered_as_a_whole_leaves_no_certain_state_behind_it(
    tickets: SourceUnderTest,
) -> None:
    before = current_wal_lsn(tickets.dsn)
    catch_up_to_certainty(tickets, before)
    tickets.sql(
        f"ALTER PUBLICATION {tickets.slot} SET (publish = 'insert')",
        *UNSEEN,
        f"ALTER PUBLICATION {tickets.slot} SET (publish = 'insert, update, delete, truncate')",
    )
    with pytest.raises(GapInSource, match="altered as a whole"):
        tickets.catch_up()
    assert {each.table for each in stretches(tickets)} == {"tickets", "other"}
    assert not complete(tickets) and told_at(tickets, before)


def _full_disk(*_: object, **__: object) -> None:
    raise OSError


@pytest.fixture
def logs(source: SourceUnderTest) -> SourceUnderTest:
    """A partitioned table that is cut into four chunks, captured."""
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE logs_2 PARTITION OF logs FOR VALUES FROM (100) TO (200)",
        "INSERT INTO logs SELECT g, 'old' FROM generate_series(0, 199) g",
        "CREATE TABLE older (id int PRIMARY KEY, v text)",
        "INSERT INTO older SELECT g, 'attached' FROM generate_series(300, 309) g",
    )
    source.tables.append(contract("logs", COLUMNS))
    source.overrides |= {"snapshot_chunk_rows": 50, "snapshot_threads": 1}
    source.catch_up()
    source.sql("UPDATE logs SET v = 'seen' WHERE id = 3")
    source.catch_up()
    return source


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(("ALTER TABLE logs DETACH PARTITION logs_1",), id="detached"),
        pytest.param(("TRUNCATE logs_2",), id="truncated", marks=pytest.mark.slow),
        pytest.param(("DROP TABLE logs_1",), id="dropped", marks=pytest.mark.slow),
    ],
)
def test_table_that_rows_left_with_a_partition_is_not_complete_before_they_are_ended(
    logs: SourceUnderTest, left: Sequence[str]
) -> None:
    before, rows = current_wal_lsn(logs.dsn), logs.rows("logs", COLUMNS)
    catch_up_to_certainty(logs, before)
    logs.sql(*left)
    amid = current_wal_lsn(logs.dsn)
    logs.sql("UPDATE logs SET v = 'after' WHERE id IN (50, 150)")
    for point in ("source.snapshot_request.before", "source.partitions.before", "source.published.before"):
        logs.killed_at(point)
        assert not complete(logs, "logs")
    logs.killed_at("landing.manifest.after@logs-000000")
    assert not complete(logs, "logs")
    logs.catch_up()
    assert complete(logs, "logs") and same_as_source(logs, "logs")
    assert told_at(logs, before, "logs") and state_at(logs, before, "logs") == rows
    assert not told_at(logs, amid, "logs")


def test_table_that_rows_came_to_with_a_partition_is_not_complete_before_they_are_read(
    logs: SourceUnderTest,
) -> None:
    # The chunk is added to the newer of two snapshots, so the older one goes on to tell of states.
    SnapshotRequests(logs.store.folder).write("logs", "a test")
    logs.catch_up()
    before = current_wal_lsn(logs.dsn)
    catch_up_to_certainty(logs, before)
    logs.sql("ALTER TABLE logs ATTACH PARTITION older FOR VALUES FROM (300) TO (400)")
    amid = current_wal_lsn(logs.dsn)
    logs.sql("UPDATE logs SET v = 'after' WHERE id IN (50, 305)")
    logs.killed_at("landing.manifest.before@logs-00000")
    assert not complete(logs, "logs")
    logs.killed_at("landing.lost_changes.before")
    assert not complete(logs, "logs")
    logs.catch_up()
    assert complete(logs, "logs") and same_as_source(logs, "logs")
    assert told_at(logs, before, "logs") and not told_at(logs, amid, "logs")
    now = current_wal_lsn(logs.dsn)
    logs.sql("UPDATE logs SET v = 'later' WHERE id = 301")
    logs.catch_up()
    assert told_at(logs, now, "logs")


def test_partition_that_left_again_before_its_rows_were_read_leaves_no_doubt(logs: SourceUnderTest) -> None:
    logs.sql("ALTER TABLE logs ATTACH PARTITION older FOR VALUES FROM (300) TO (400)")
    logs.killed_at("landing.manifest.before@logs-00000")
    assert not complete(logs, "logs")
    logs.sql("ALTER TABLE logs DETACH PARTITION older")
    logs.catch_up()
    assert complete(logs, "logs") and same_as_source(logs, "logs")


def test_record_of_version_1_is_read_and_is_certain_of_nothing_until_the_next_look(
    tickets: SourceUnderTest,
) -> None:
    (file,) = tickets.store.folder.glob("published-e*.json")
    record = json.loads(file.read_text()) | {"format_version": 1}
    for table in record["tables"].values():
        del table["certain"]
    file.write_text(json.dumps(record))
    before = current_wal_lsn(tickets.dsn)
    out_and_back(tickets)
    with pytest.raises(TableMissedChanges):
        tickets.catch_up()
    assert [each.lost_from for each in stretches(tickets)] == [Lsn(0)] and not told_at(tickets, before)
    ask(tickets)
    tickets.catch_up()
    assert complete(tickets) and same_as_source(tickets) and not told_at(tickets, before)
    assert all(table["certain"] for table in json.loads(file.read_text())["tables"].values())


def test_looking_from_outside_of_capture_writes_nothing_down(tickets: SourceUnderTest) -> None:
    out_and_back(tickets)
    with tickets.connected() as connection:
        found = list(published_findings(connection, tickets.store, tickets.slot, tickets.tables))
    assert [each.raises for each in found] == [TableMissedChanges] and stretches(tickets) == ()
