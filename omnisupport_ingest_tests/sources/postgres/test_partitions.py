"""A partitioned table is one table, also where rows come or leave with their partition.

ATTACH, DETACH, DROP and TRUNCATE of a partition are in nothing that the stream sends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres import snapshots_beside
from omnisupport_ingest.sources.postgres.errors import HoleInSource, PreflightFailed
from omnisupport_ingest_tests.sources.postgres.shop_facts import until
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded

COLUMNS = ("id", "v")


@pytest.fixture
def logs(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a partitioned table, captured up to now: a leaf, one with partitions, and a default."""
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE logs_2 PARTITION OF logs FOR VALUES FROM (10) TO (30) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_2a PARTITION OF logs_2 FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE logs_2b PARTITION OF logs_2 FOR VALUES FROM (20) TO (30)",
        "CREATE TABLE logs_rest PARTITION OF logs DEFAULT",
        "INSERT INTO logs SELECT g, 'old' FROM generate_series(1, 39) g",
    )
    source.tables.append(contract("logs", COLUMNS))
    source.catch_up()
    return source


def snapshots(source: SourceUnderTest) -> int:
    """How often the whole table was read."""
    return sum(1 for each in source.manifests() if each.chunk and each.chunk.boundary)


def same(source: SourceUnderTest) -> bool:
    return folded(source.events(), "logs") == source.rows("logs", COLUMNS)


def test_row_moves_between_partitions_and_every_level_is_the_root(logs: SourceUnderTest) -> None:
    logs.sql("ALTER TABLE logs ALTER COLUMN v SET STORAGE EXTERNAL")
    logs.sql("UPDATE logs SET v = repeat('long', 3000) WHERE id IN (1, 15)")
    logs.transaction(
        "UPDATE logs SET id = 101 WHERE id = 1",
        "UPDATE logs SET id = 0 WHERE id = 15",
        "UPDATE logs SET id = 15 WHERE id = 25",
        "INSERT INTO logs VALUES (1, 'new'), (25, 'new'), (200, 'new')",
        "DELETE FROM logs WHERE id = 39",
    )
    logs.catch_up()
    assert {event.source_table for event in logs.events()} == {"logs"}
    assert same(logs) and snapshots(logs) == 1


def test_truncate_of_the_root_is_one_event(logs: SourceUnderTest) -> None:
    logs.sql("TRUNCATE logs", "INSERT INTO logs VALUES (1, 'new')")
    logs.catch_up()
    assert [event.op for event in logs.changes()] == ["t", "c"]
    assert same(logs)


OLD_TABLE = (
    "CREATE TABLE older (id int PRIMARY KEY, v text)",
    "INSERT INTO older SELECT g, 'attached' FROM generate_series(50, 59) g",
)
ATTACH = "ALTER TABLE logs ATTACH PARTITION older FOR VALUES FROM (50) TO (60)"
DETACH = "ALTER TABLE logs DETACH PARTITION logs_1"
REATTACH = "ALTER TABLE logs ATTACH PARTITION logs_1 FOR VALUES FROM (0) TO (10)"
WITHIN = (
    "CREATE TABLE deeper (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
    "CREATE TABLE deeper_1 PARTITION OF deeper FOR VALUES FROM (60) TO (65)",
    "INSERT INTO deeper SELECT g, 'attached' FROM generate_series(60, 64) g",
    "ALTER TABLE logs ATTACH PARTITION deeper FOR VALUES FROM (60) TO (70)",
)
NEW_AND_FILLED = (
    "CREATE TABLE logs_7 PARTITION OF logs FOR VALUES FROM (70) TO (80)",
    "INSERT INTO logs VALUES (70, 'new'), (71, 'new')",
)
FILLED_WHERE_MADE = (
    "BEGIN; CREATE TABLE made (id int PRIMARY KEY, v text); INSERT INTO made VALUES (80, 'before');"
    " ALTER TABLE logs ATTACH PARTITION made FOR VALUES FROM (80) TO (90); COMMIT",
)
CHANGES = [
    pytest.param((*OLD_TABLE, ATTACH), 1, id="attached"),
    pytest.param(WITHIN, 1, id="attached with partitions of its own"),
    pytest.param(NEW_AND_FILLED, 1, id="made and filled", marks=pytest.mark.slow),
    pytest.param(FILLED_WHERE_MADE, 1, id="made, filled and attached at once", marks=pytest.mark.slow),
    pytest.param((DETACH,), 2, id="detached"),
    pytest.param(
        (DETACH, "UPDATE logs_1 SET v = 'aside'", REATTACH), 2, id="detached, changed, attached anew"
    ),
    pytest.param(("ALTER TABLE logs_2 DETACH PARTITION logs_2a",), 2, id="detached below"),
    pytest.param(("DROP TABLE logs_1",), 2, id="dropped", marks=pytest.mark.slow),
    pytest.param(("DROP TABLE logs_2",), 2, id="dropped with its partitions", marks=pytest.mark.slow),
    pytest.param(("TRUNCATE logs_2b",), 2, id="truncated"),
    pytest.param(
        ("TRUNCATE logs_2b", "INSERT INTO logs VALUES (21, 'again')"),
        2,
        id="truncated and filled",
        marks=pytest.mark.slow,
    ),
    pytest.param((*OLD_TABLE, ATTACH, "DROP TABLE logs_1"), 2, id="one attached, one dropped"),
    pytest.param(
        ("CREATE TABLE logs_9 PARTITION OF logs FOR VALUES FROM (90) TO (99)",), 1, id="made and empty"
    ),
]


@pytest.mark.parametrize(("statements", "reads"), CHANGES)
def test_rows_that_came_or_left_with_a_partition_while_capture_was_stopped_are_right_after_it(
    logs: SourceUnderTest, statements: Sequence[str], reads: int
) -> None:
    logs.sql(*statements)
    logs.sql("UPDATE logs SET v = 'after' WHERE id IN (16, 25, 35, 52)")
    logs.catch_up()
    assert same(logs)
    assert snapshots(logs) == reads
    logs.sql("UPDATE logs SET v = 'later' WHERE id % 5 = 0")
    logs.catch_up()
    assert same(logs)
    assert snapshots(logs) == reads


@contextmanager
def followed(source: SourceUnderTest) -> Iterator[threading.Event]:
    """Capture follows meanwhile; gives what is set at its end. What it ends with is raised."""
    stop, failures, streamed, over = threading.Event(), [], threading.Event(), threading.Event()
    capture = source.capture()

    def landed(batch: Manifest) -> None:
        if batch.stream is not None:
            streamed.set()

    capture._landed = landed

    def run() -> None:
        try:
            capture.run(None, stop)
        except BaseException as error:
            failures.append(error)
        over.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        source.sql("UPDATE logs SET v = 'started' WHERE id = 39")
        assert streamed.wait(20)
        yield over
    finally:
        stop.set()
        thread.join()
    for failure in failures:
        raise failure


@pytest.mark.parametrize(
    "statements",
    [
        pytest.param((*OLD_TABLE, ATTACH), id="attached"),
        pytest.param((DETACH,), id="detached"),
        pytest.param(("TRUNCATE logs_2b",), id="truncated", marks=pytest.mark.slow),
        pytest.param(("DROP TABLE logs_1",), id="dropped", marks=pytest.mark.slow),
    ],
)
def test_rows_that_come_or_leave_with_a_partition_while_capture_runs_are_right_by_themselves(
    logs: SourceUnderTest, statements: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_beside, "PARTITION_SECONDS", 0.3)
    with followed(logs):
        assert same(logs) or snapshots(logs) == 1
        logs.sql(*statements, "UPDATE logs SET v = 'after' WHERE id IN (16, 25, 35, 52)")
        until(lambda: same(logs))


def test_many_new_partitions_are_not_read_where_they_are_seen_empty(
    logs: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_beside, "PARTITION_SECONDS", 0.2)
    note = logs.store.folder / "partitions-logs.json"
    with followed(logs):
        logs.sql("CREATE TABLE logs_9 PARTITION OF logs FOR VALUES FROM (90) TO (99)")
        until(lambda: "public.logs_9" in note.read_text())
        logs.sql("INSERT INTO logs VALUES (90, 'new')")
        until(lambda: same(logs))
    chunks = [each.chunk.chunk for each in logs.manifests() if each.chunk and not each.chunk.boundary]
    assert chunks == [0]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("statements", [(*OLD_TABLE, ATTACH), (DETACH,)], ids=["attached", "detached"])
def test_capture_killed_at_the_note_of_the_partitions_misses_nothing(
    logs: SourceUnderTest, moment: str, statements: Sequence[str]
) -> None:
    logs.sql(*statements)
    logs.killed_at(f"source.partitions.{moment}")
    logs.sql("UPDATE logs SET v = 'after' WHERE id IN (16, 25, 52)")
    logs.catch_up()
    assert same(logs)


def test_first_snapshot_killed_at_the_note_of_the_partitions_is_taken_all_the_same(
    source: SourceUnderTest,
) -> None:
    source.sql(
        "CREATE TABLE logs (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE logs_1 PARTITION OF logs FOR VALUES FROM (0) TO (10)",
        "INSERT INTO logs VALUES (1, 'old')",
    )
    source.tables.append(contract("logs", COLUMNS))
    source.killed_at("source.partitions.before")
    source.sql(*OLD_TABLE, ATTACH)
    source.catch_up()
    source.catch_up()
    assert same(source)


def via_root(source: SourceUnderTest, on: bool) -> str:
    return f"ALTER PUBLICATION {source.slot} SET (publish_via_partition_root = {str(on).lower()})"


@pytest.mark.parametrize("back", [False, True])
def test_changes_that_were_sent_under_the_name_of_a_partition_are_not_missing(
    logs: SourceUnderTest, back: bool
) -> None:
    logs.sql(via_root(logs, False), "UPDATE logs SET v = 'by name' WHERE id = 2")
    if back:
        logs.sql(via_root(logs, True))
    with pytest.raises(HoleInSource, match="altered as a whole"):
        logs.catch_up()
    if not back:
        with pytest.raises(PreflightFailed, match="under the names of its partitions") as refused:
            logs.capture().begin_new_epoch("published by partition")
        logs.sql(refused.value.fix.strip())
    logs.capture().begin_new_epoch("published by partition")
    logs.sql("UPDATE logs SET v = 'as the root' WHERE id = 3")
    logs.catch_up()
    assert same(logs)


@pytest.mark.slow
def test_partitions_published_under_their_own_names_while_capture_runs_end_it(logs: SourceUnderTest) -> None:
    def gone_wrong() -> None:
        with followed(logs) as over:
            logs.sql(via_root(logs, False), "UPDATE logs SET v = 'by name' WHERE id = 2")
            assert over.wait(30)

    with pytest.raises(HoleInSource, match="altered as a whole"):
        gone_wrong()
    logs.sql(via_root(logs, True))
    logs.capture().begin_new_epoch("published by partition")
    logs.catch_up()
    assert same(logs)


def test_partition_is_read_through_its_root_by_a_role_that_may_read_nothing_else(
    logs: SourceUnderTest,
) -> None:
    logs.sql(*OLD_TABLE, ATTACH)
    owner, role = logs.dsn, f"role_{logs.slot}"
    logs.sql(
        f"CREATE ROLE {role} LOGIN REPLICATION",
        f"GRANT SELECT ON logs TO {role}",
    )
    try:
        logs.dsn = owner.replace("user=postgres", f"user={role}")
        assert logs.query("SELECT current_user::text") == [(role,)]
        logs.catch_up()
    finally:
        logs.dsn = owner
        logs.sql(f"REVOKE ALL ON logs FROM {role}", f"DROP ROLE {role}")
    assert same(logs)
