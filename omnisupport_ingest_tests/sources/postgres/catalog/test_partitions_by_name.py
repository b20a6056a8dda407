"""A partitioned table is one table where the publication sends its partitions under their own names, too.

That is what a publication does unless it says otherwise (``publish_via_partition_root``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from omnisupport_ingest.landing.lost_changes import LostChanges
from omnisupport_ingest.sources.postgres.capture import added_tables
from omnisupport_ingest.sources.postgres.capture.status import source_status
from omnisupport_ingest.sources.postgres.session.errors import PreflightFailed, TableMissedChanges
from omnisupport_ingest_tests.sources.postgres.partitioned_logs import (
    ATTACH,
    CHANGES,
    DETACH,
    OLD_TABLE,
    followed,
    make_logs,
    right_after,
    right_beside,
    same,
    snapshots,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.waiting import until


def by_name(source: SourceUnderTest, what: str = "TABLE logs") -> str:
    return f"CREATE PUBLICATION {source.slot} FOR {what}"


@pytest.fixture
def logs(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a partitioned table, whose partitions are sent by name, captured up to now."""
    make_logs(source, by_name(source))
    return source


def test_every_change_of_a_partition_is_one_of_its_table(logs: SourceUnderTest) -> None:
    logs.sql("ALTER TABLE logs ALTER COLUMN v SET STORAGE EXTERNAL")
    logs.sql("UPDATE logs SET v = repeat('long', 3000) WHERE id IN (1, 15)")
    logs.transaction(
        "UPDATE logs SET id = 101 WHERE id = 1",
        "UPDATE logs SET id = 2 + 0 * id, v = v WHERE id = 2",
        "UPDATE logs SET id = 0 WHERE id = 15",
        "UPDATE logs SET id = 15 WHERE id = 25",
        "INSERT INTO logs VALUES (1, 'new'), (25, 'new'), (200, 'new')",
        "DELETE FROM logs WHERE id = 39",
    )
    logs.sql("UPDATE logs_rest SET v = 'by its own name' WHERE id = 35")
    logs.catch_up()
    assert {event.source_table for event in logs.events()} == {"logs"}
    assert {(each.schema, each.table) for batch in logs.manifests() for each in batch.relations} == {
        ("public", "logs")
    }
    assert same(logs) and snapshots(logs) == 1


def test_partition_with_its_columns_in_another_order_and_another_identity_is_its_table(
    logs: SourceUnderTest,
) -> None:
    logs.sql(
        "CREATE TABLE turned (gone int, v text, id int PRIMARY KEY)",
        "ALTER TABLE turned DROP COLUMN gone",
        "ALTER TABLE turned REPLICA IDENTITY FULL",
        "ALTER TABLE logs ATTACH PARTITION turned FOR VALUES FROM (50) TO (60)",
        "INSERT INTO logs VALUES (50, 'x'), (51, 'y'), (1, 'z') ON CONFLICT (id) DO UPDATE SET v = 'z'",
        "UPDATE logs SET v = 'both' WHERE id IN (2, 50)",
        "DELETE FROM logs WHERE id = 51",
        "UPDATE logs SET id = 52 WHERE id = 50",
    )
    logs.catch_up()
    assert {event.source_table for event in logs.events()} == {"logs"}
    assert same(logs)


def test_large_transaction_in_progress_is_of_its_table(logs: SourceUnderTest) -> None:
    logs.overrides["stream_above_bytes"] = 65536
    logs.transaction(
        "INSERT INTO logs SELECT g, repeat('x', 200) FROM generate_series(1000, 3000) g",
        "CREATE TABLE logs_9 PARTITION OF logs FOR VALUES FROM (90) TO (99)",
        "INSERT INTO logs SELECT g, 'in a new one' FROM generate_series(90, 98) g",
    )
    logs.catch_up()
    assert {event.source_table for event in logs.events()} == {"logs"}
    assert same(logs)


def test_truncate_of_the_table_is_one_event_of_it(logs: SourceUnderTest) -> None:
    logs.sql("TRUNCATE logs", "INSERT INTO logs VALUES (1, 'new')")
    logs.catch_up()
    assert [event.op for event in logs.changes() if event.source_table == "logs"] == ["t", "c"]
    assert same(logs)


def test_truncate_of_a_partition_is_none_of_its_table(logs: SourceUnderTest) -> None:
    logs.sql("TRUNCATE logs_1, logs_2", "INSERT INTO logs VALUES (1, 'new')")
    logs.catch_up()
    assert [event.op for event in logs.changes() if event.source_table == "logs"] == ["c"]
    assert same(logs) and snapshots(logs) == 2


@pytest.mark.parametrize(("statements", "reads"), CHANGES)
def test_rows_that_came_or_left_with_a_partition_while_capture_was_stopped_are_right_after_it(
    logs: SourceUnderTest, statements: Sequence[str], reads: int
) -> None:
    right_after(logs, statements, reads)


@pytest.mark.parametrize("statements", [(*OLD_TABLE, ATTACH), (DETACH,)], ids=["attached", "detached"])
def test_rows_that_come_or_leave_with_a_partition_while_capture_runs_are_right_by_themselves(
    logs: SourceUnderTest, statements: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right_beside(logs, statements, monkeypatch)


def test_what_becomes_of_a_table_after_it_was_a_partition_is_not_told_of_its_old_root(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_logs(source, by_name(source, "ALL TABLES"))
    monkeypatch.setattr(added_tables, "PARTITION_SECONDS", 0.3)
    with followed(source):
        source.sql("UPDATE logs SET v = 'a partition' WHERE id = 3")
        until(lambda: same(source))
        source.sql(DETACH, "INSERT INTO logs_1 VALUES (7000, 'aside')", "UPDATE logs_1 SET v = 'aside'")
        until(lambda: snapshots(source) == 2 and same(source))
        source.sql("UPDATE logs_1 SET v = 'long aside'", "UPDATE logs SET v = 'last' WHERE id = 39")
        until(lambda: same(source))
    aside = [event for event in source.changes() if "aside" in (event.after or "")]
    assert aside and {event.source_table for event in aside} == {"logs_1"}


def test_what_became_of_a_table_before_it_was_a_partition_is_not_told_of_its_root(
    source: SourceUnderTest,
) -> None:
    make_logs(source, by_name(source, "ALL TABLES"))
    source.sql(*OLD_TABLE)
    source.catch_up()
    source.sql("UPDATE older SET v = 'before' WHERE id = 50")
    source.catch_up()
    source.sql(ATTACH, "UPDATE logs SET v = 'after' WHERE id = 50")
    source.catch_up()
    assert same(source)
    of_row = [event for event in source.changes() if event.key == '["50"]' and event.op == "u"]
    assert [event.source_table for event in of_row] == ["older", "logs"]


@pytest.mark.parametrize("left", [DETACH, "DROP TABLE logs_1"], ids=["detached", "dropped"])
def test_last_changes_of_a_partition_that_left_while_capture_was_stopped_are_told_to_be_missing(
    logs: SourceUnderTest, left: str
) -> None:
    logs.sql("UPDATE logs SET v = 'its last' WHERE id = 3")
    logs.sql(left)
    logs.catch_up()
    assert same(logs) and snapshots(logs) == 2
    stretches = LostChanges(logs.store.folder, 1).all()
    last = [event for event in logs.changes() if "its last" in (event.after or "")]
    assert len(last) == 1 and last[0].source_table == "logs_1"
    assert any(
        each.table == "logs" and each.lost_from.value <= last[0].commit_lsn and not each.open
        for each in stretches
    )


@pytest.mark.parametrize("what", ["ALL TABLES", "TABLES IN SCHEMA public", "TABLE logs, logs_1"])
def test_publication_may_name_the_table_in_any_way(source: SourceUnderTest, what: str) -> None:
    if "SCHEMA" in what and source.server_version() < 150000:
        pytest.skip("PostgreSQL 15 and newer publish schemas")
    make_logs(source, by_name(source, what))
    source.sql("UPDATE logs SET v = 'new' WHERE id IN (1, 15, 25, 39)")
    source.catch_up()
    assert same(source) and snapshots(source) == 1
    assert {event.source_table for event in source.events()} == {"logs"}


def test_status_takes_the_table_for_published(logs: SourceUnderTest) -> None:
    told = source_status(logs.dsn, logs.settings, logs.home, logs.tables)
    assert told.server is not None and told.server.missing == ()
    logs.sql(f"ALTER PUBLICATION {logs.slot} DROP TABLE logs")
    told = source_status(logs.dsn, logs.settings, logs.home, logs.tables)
    assert told.server is not None and told.server.missing == ("public.logs",)


def test_table_of_which_only_a_partition_is_published_is_published_as_a_whole(
    source: SourceUnderTest,
) -> None:
    make_logs(source, by_name(source, "TABLE logs_1"))
    source.sql("UPDATE logs SET v = 'new' WHERE id IN (1, 15, 25, 39)")
    source.catch_up()
    assert same(source) and snapshots(source) == 1


PARTS = ["logs_1 WHERE (id < 3)", "logs_1 (id)"]


@pytest.mark.parametrize("part", PARTS)
def test_partition_listed_with_rows_or_columns_of_its_own_is_refused_until_it_is_not(
    source: SourceUnderTest, part: str
) -> None:
    if source.server_version() < 150000:
        pytest.skip("PostgreSQL 15 and newer have row filters and column lists")
    with pytest.raises(PreflightFailed, match=r"only some rows or columns of public\.logs_1") as refused:
        make_logs(source, by_name(source, f"TABLE logs, {part}"))
    source.sql(refused.value.fix.strip())
    source.sql("UPDATE logs SET v = 'new' WHERE id IN (1, 5, 15, 25, 39)")
    source.catch_up()
    source.sql("UPDATE logs SET v = 'newer' WHERE id IN (1, 5, 15, 25, 39)")
    source.catch_up()
    assert same(source)


@pytest.mark.parametrize("part", PARTS)
def test_partition_that_was_listed_with_rows_or_columns_of_its_own_for_a_time_is_noticed(
    logs: SourceUnderTest, part: str
) -> None:
    if logs.server_version() < 150000:
        pytest.skip("PostgreSQL 15 and newer have row filters and column lists")
    logs.sql(f"ALTER PUBLICATION {logs.slot} ADD TABLE {part}")
    logs.sql("UPDATE logs SET v = 'part' WHERE id = 5")
    with pytest.raises((TableMissedChanges, PreflightFailed)):
        logs.catch_up()
    logs.sql(f"ALTER PUBLICATION {logs.slot} DROP TABLE logs_1")


@pytest.mark.drawn(2)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_any_history_of_rows_and_partitions_ends_as_the_source(source: SourceUnderTest, seed: int) -> None:
    make_logs(source, by_name(source, "ALL TABLES"))
    chance = random.Random(seed)
    attached, aside, made = {"logs_1": 0}, dict[str, int](), 0
    for step in range(40):
        done = chance.choice(["make", "attach", "detach", "drop", "truncate", *["rows"] * 8, *["look"] * 3])
        if done == "make":
            made += 1
            name, start = f"part_{made}", 1000 + 10 * made
            source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
            source.sql(f"INSERT INTO {name} VALUES ({start + 1}, 'made'), ({start + 2}, 'made')")
            aside[name] = start
        elif done == "attach" and aside:
            name = chance.choice(sorted(aside))
            start = attached[name] = aside.pop(name)
            source.sql(f"DELETE FROM logs WHERE id BETWEEN {start} AND {start + 9}")
            source.sql(
                f"ALTER TABLE logs ATTACH PARTITION {name} FOR VALUES FROM ({start}) TO ({start + 10})"
            )
        elif done in ("detach", "drop") and attached:
            name = chance.choice(sorted(attached))
            start = attached.pop(name)
            if done == "detach":
                aside[name] = start
                source.sql(f"ALTER TABLE logs DETACH PARTITION {name}")
            else:
                source.sql(f"DROP TABLE {name}")
        elif done == "truncate" and attached:
            source.sql(f"TRUNCATE {chance.choice(sorted(attached))}")
        elif done == "look":
            source.catch_up()
        else:
            starts = [10, 20, 30, *attached.values()]
            ids = [chance.choice(starts) + chance.randrange(1, 9) for _ in range(4)]
            source.sql(
                f"INSERT INTO logs VALUES ({ids[0]}, 'step {step}')"
                " ON CONFLICT (id) DO UPDATE SET v = 'again'",
                f"UPDATE logs SET v = 'step {step}' WHERE id = {ids[1]}",
                f"UPDATE logs SET id = {ids[3]} WHERE id = {ids[2]}"
                f" AND NOT EXISTS (SELECT FROM logs WHERE id = {ids[3]})",
                *(f"UPDATE {name} SET v = 'aside {step}'" for name in sorted(aside)),
            )
    source.catch_up()
    assert same(source)
