"""A partitioned table is one table, also where rows come or leave with their partition.

ATTACH, DETACH, DROP and TRUNCATE of a partition are in nothing that the stream sends.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from omnisupport_ingest.sources.postgres.capture import added_tables
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest_tests.sources.postgres.partitioned_logs import (
    ATTACH,
    CHANGES,
    COLUMNS,
    DETACH,
    OLD_TABLE,
    followed,
    make_logs,
    right_after,
    right_beside,
    same,
    snapshots,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import PATIENCE, until


@pytest.fixture
def logs(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a partitioned table, captured up to now."""
    make_logs(source)
    return source


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


@pytest.mark.parametrize(("statements", "reads"), CHANGES)
def test_rows_that_came_or_left_with_a_partition_while_capture_was_stopped_are_right_after_it(
    logs: SourceUnderTest, statements: Sequence[str], reads: int
) -> None:
    right_after(logs, statements, reads)


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
    right_beside(logs, statements, monkeypatch)


def test_many_new_partitions_are_not_read_where_they_are_seen_empty(
    logs: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(added_tables, "PARTITION_SECONDS", 0.2)
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
def test_partitions_published_under_their_own_names_while_capture_was_stopped_take_a_new_epoch(
    logs: SourceUnderTest, back: bool
) -> None:
    logs.sql(via_root(logs, False), "UPDATE logs SET v = 'by name' WHERE id = 2")
    if back:
        logs.sql(via_root(logs, True))
    with pytest.raises(GapInSource, match="altered as a whole"):
        logs.catch_up()
    logs.capture().begin_new_epoch("published by partition")
    logs.sql("UPDATE logs SET v = 'in the new epoch' WHERE id = 3")
    logs.catch_up()
    assert same(logs)
    logs.sql("UPDATE logs SET v = 'by the stream' WHERE id = 4")
    logs.catch_up()
    assert same(logs) and snapshots(logs) == 2


@pytest.mark.slow
def test_partitions_published_under_their_own_names_while_capture_runs_end_it(logs: SourceUnderTest) -> None:
    def gone_wrong() -> None:
        with followed(logs) as over:
            logs.sql(via_root(logs, False), "UPDATE logs SET v = 'by name' WHERE id = 2")
            assert over.wait(PATIENCE)

    with pytest.raises(GapInSource, match="altered as a whole"):
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
