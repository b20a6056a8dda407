"""A source that was restored from a base backup: as it was then, or up to a later point of its archive."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest_tests.sources.postgres.copied_server import CopiedServer
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

pytestmark = pytest.mark.slow

COLUMNS = ("id", "v")


@pytest.fixture
def copied(tmp_path: Path) -> Iterator[CopiedServer]:
    server = CopiedServer(tmp_path / "server")
    server.start()
    yield server
    server.destroy()


@pytest.fixture
def tickets(copied: CopiedServer, tmp_path: Path) -> SourceUnderTest:
    """A source on ``copied`` of which everything is captured, also what is not in its base backup."""
    source = SourceUnderTest(copied.server.dsn(), "ours", tmp_path / "home")
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 20) g")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    copied.base_backup("for_later")
    source.sql("UPDATE tickets SET v = 'archived' WHERE id < 5")
    source.sql("SELECT pg_create_restore_point('here')")
    source.sql("INSERT INTO tickets VALUES (21, 'undone')", "DELETE FROM tickets WHERE id = 20")
    source.catch_up()
    return source


def backup_of(copied: CopiedServer) -> Path:
    return copied.data.parent / "for_later"


def repaired(source: SourceUnderTest) -> None:
    source.capture().begin_new_epoch("restored from a backup")
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'afterwards' WHERE id = 9")
    source.catch_up()
    events = source.events()
    positions = [(event.epoch, event.commit_lsn, event.ordinal) for event in events]
    assert len(set(positions)) == len(positions)
    assert folded(events, "tickets") == source.rows("tickets", COLUMNS)


def refused(source: SourceUnderTest, problem: str) -> None:
    landed = source.store.batch_ids()
    for _ in range(2):
        with pytest.raises(GapInSource, match=problem):
            source.catch_up()
    assert source.store.batch_ids() == landed


def test_base_backup_put_in_place_has_no_slot(tickets: SourceUnderTest, copied: CopiedServer) -> None:
    end = current_wal_lsn(tickets.dsn)
    copied.put_back(backup_of(copied))
    refused(tickets, "The replication slot ours is gone")
    assert tickets.query("SELECT pg_walfile_name(pg_current_wal_lsn()) LIKE '00000001%'") == [(True,)]
    # Somebody helps with a slot of that name, and the WAL grows beyond what has landed.
    tickets.sql("SELECT pg_create_logical_replication_slot('ours', 'pgoutput')")
    tickets.sql("DELETE FROM tickets WHERE id = 2")
    while current_wal_lsn(tickets.dsn) <= end:
        tickets.sql("CREATE TABLE IF NOT EXISTS filling (v text)", "SELECT pg_switch_wal()")
        tickets.sql("INSERT INTO filling VALUES ('x')")
    refused(tickets, "made anew|history is another one")
    repaired(tickets)


def test_recovery_to_an_earlier_point_is_another_timeline(
    tickets: SourceUnderTest, copied: CopiedServer
) -> None:
    backup, archive = backup_of(copied), copied.data.parent / "copy_of_archive"
    copied.stop()
    (copied.data / "pg_wal").rename(archive)
    copied.recover(backup, f"restore_command = 'cp {archive}/%f %p'", "recovery_target_name = 'here'")
    until(lambda: copied.value("SELECT pg_is_in_recovery()") is False)
    assert ("21",) not in tickets.query("SELECT id::text FROM tickets")
    assert tickets.query("SELECT count(*) FROM tickets WHERE v = 'archived'") == [(4,)]
    refused(tickets, "timeline 2, landed from 1")
    repaired(tickets)
