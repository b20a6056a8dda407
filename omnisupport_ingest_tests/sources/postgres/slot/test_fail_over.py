"""A fail-over: another server goes on with the history, or with less of it, on a timeline of its own.

The new epoch reads every table again, so that what the old primary sent and the new one never had does not
stay in the lake.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import parse_dsn

from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.landing.completeness import incomplete_now
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.connection import connect_replication
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, PreflightFailed
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.slot.continuity import connect_to_source
from omnisupport_ingest.sources.postgres.snapshot.compared_reading import Recovered
from omnisupport_ingest_tests.sources.postgres.copied_server import CopiedServer
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import until

pytestmark = pytest.mark.slow

COLUMNS = ("id", "v")


class Pair:
    """A primary that is captured, and its standby."""

    def __init__(self, folder: Path) -> None:
        self.primary = CopiedServer(folder / "primary")
        self.primary.start()
        self.source = SourceUnderTest(self.primary.server.dsn(), "ours", folder / "home")
        self.source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
        self.source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 20) g")
        self.source.tables.append(contract("tickets", COLUMNS))
        self.source.catch_up()
        self.standby = self.primary.standby(folder / "standby")

    def in_step(self) -> None:
        """Wait until the standby has replayed all that the primary has written."""
        end = current_wal_lsn(self.source.dsn)
        until(lambda: Lsn.parse(str(self.standby.value("SELECT pg_last_wal_replay_lsn()::text"))) >= end)

    def fail_over(self) -> Lsn:
        """Promote the standby, and lead capture there; returns the end of the common history."""
        self.primary.stop()
        self.standby.sql("SELECT pg_promote()")
        fork = self.standby.value(
            "SELECT split_part(pg_read_file('pg_wal/00000002.history'), E'\t', 2)", "postgres"
        )
        self.source.dsn = self.standby.server.dsn()
        return Lsn.parse(str(fork))

    def destroy(self) -> None:
        self.standby.destroy()
        self.primary.destroy()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.destroy()


def refused(source: SourceUnderTest) -> None:
    """Capture stops before it lands anything of the new timeline, at every start."""
    landed = source.store.batch_ids()
    for _ in range(2):
        with pytest.raises(GapInSource, match="timeline 2, landed from 1"):
            source.catch_up()
    assert source.store.batch_ids() == landed


def same_as_source(source: SourceUnderTest) -> None:
    events = source.events()
    positions = [(event.epoch, event.commit_lsn, event.ordinal) for event in events]
    assert len(set(positions)) == len(positions)
    assert folded(events, "tickets") == source.rows("tickets", COLUMNS)


def test_standby_is_not_captured_before_it_is_promoted(pair: Pair) -> None:
    pair.source.dsn = pair.standby.server.dsn()
    with pytest.raises(PreflightFailed, match="is a standby"):
        pair.source.capture().run(None, threading.Event())


def test_transactions_below_the_fork_keep_their_epoch_and_are_in_the_lake_once(pair: Pair) -> None:
    source = pair.source
    source.sql("UPDATE tickets SET v = 'landed' WHERE id < 5")
    source.catch_up()
    landed = source.changes()
    # Committed and replayed, and nobody has captured it.
    source.sql("DELETE FROM tickets WHERE id = 7", "UPDATE tickets SET v = 'not landed' WHERE id = 8")
    pair.in_step()
    fork = pair.fail_over()
    assert source.query("SELECT FROM pg_replication_slots") == []
    source.sql("INSERT INTO tickets VALUES (21, 'on the new primary')")
    refused(source)
    source.capture().begin_new_epoch("failed over")
    source.sql("UPDATE tickets SET v = 'captured there' WHERE id = 9")
    source.catch_up()
    same_as_source(source)
    events = source.events()
    assert [event for event in source.changes() if event.epoch == 1] == landed
    assert all(event.commit_lsn < fork.value for event in events if event.epoch == 1)
    assert all(event.commit_lsn >= fork.value for event in events if event.epoch == 2)
    assert [event.key for event in source.changes() if event.epoch == 2] == ['["9"]']


@pytest.mark.parametrize("mode", ["resnapshot", "recovery", "accept-loss"])
def test_transactions_that_the_fail_over_lost_do_not_stay_in_the_lake_silently(
    pair: Pair, mode: str, tmp_path: Path
) -> None:
    source = pair.source
    source.sql("UPDATE tickets SET v = 'kept' WHERE id = 1")
    pair.in_step()
    pair.standby.stop()
    source.sql(
        "INSERT INTO tickets VALUES (21, 'lost')",
        "UPDATE tickets SET v = 'lost' WHERE id < 5",
        "DELETE FROM tickets WHERE id = 6",
    )
    source.catch_up()
    assert folded(source.events(), "tickets")['["21"]']["v"] == "lost"
    pair.primary.stop()
    pair.standby.start()
    fork = pair.fail_over()
    refused(source)
    if mode == "recovery":
        lake, told = FoldedLake(source, tmp_path), list[Recovered]()
        source.capture().recover("failed over", lake, threading.Event(), told.append)
        assert [(each.read_again, each.ended) for each in told] == [(1, 1)]
    else:
        accepted_by = "anna" if mode == "accept-loss" else None
        source.capture().begin_new_epoch("failed over", loss_accepted_by=accepted_by)
    source.catch_up()
    assert any(event.commit_lsn >= fork.value for event in source.changes() if event.epoch == 1)
    if mode != "accept-loss":
        same_as_source(source)
    else:
        assert folded(source.events(), "tickets")['["21"]']["v"] == "lost"
        # What is in the lake and nowhere else is told of until the table is read.
        loss = AcceptedLosses(source.store.folder).of(2)
        assert loss is not None and loss.of_another_history
        assert incomplete_now(source.manifests(), "tickets", 2, ()) is not None


def test_slot_of_our_name_on_the_new_primary_does_not_pass_for_ours(pair: Pair) -> None:
    source = pair.source
    pair.in_step()
    pair.fail_over()
    source.sql("DELETE FROM tickets WHERE id = 3")
    source.sql("SELECT pg_create_logical_replication_slot('ours', 'pgoutput')")
    source.sql("UPDATE tickets SET v = 'above the slot' WHERE id = 4")
    refused(source)
    source.capture().begin_new_epoch("failed over")
    source.catch_up()
    same_as_source(source)


def test_slot_that_the_server_has_synchronised_is_not_gone_on_with_on_another_timeline(pair: Pair) -> None:
    source = pair.source
    if pair.primary.value("SELECT current_setting('server_version_num')::int") < 170000:
        pytest.skip("slots are synchronised by PostgreSQL 17 and newer")
    replication = connect_replication(source.dsn)
    with replication.cursor() as cursor:
        cursor.execute('ALTER_REPLICATION_SLOT "ours" (FAILOVER true)')
    replication.close()
    pair.primary.sql("SELECT pg_create_physical_replication_slot('standby', true)")
    pair.standby.configure("primary_slot_name = 'standby'", "hot_standby_feedback = on")
    pair.standby.restart()
    source.sql("UPDATE tickets SET v = 'landed' WHERE id < 5")
    source.catch_up()

    def synchronised() -> bool:
        # It takes both to have come far enough, which a checkpoint and new WAL bring about.
        source.sql("SELECT pg_log_standby_snapshot()", "CHECKPOINT")
        source.catch_up()
        pair.in_step()
        try:
            pair.standby.sql("SELECT pg_sync_replication_slots()")
        except psycopg2.Error:
            return False
        return bool(
            pair.standby.value(
                "SELECT count(*) = 1 FROM pg_replication_slots"
                " WHERE slot_name = 'ours' AND synced AND NOT temporary"
            )
        )

    until(synchronised)
    pair.in_step()
    pair.fail_over()
    source.sql("DELETE FROM tickets WHERE id = 3")
    assert source.query("SELECT plugin FROM pg_replication_slots WHERE slot_name = 'ours'") == [("pgoutput",)]
    refused(source)
    source.capture().begin_new_epoch("failed over")
    source.catch_up()
    same_as_source(source)


def test_old_primary_that_comes_back_is_not_captured_again_without_being_noticed(pair: Pair) -> None:
    """Capture has moved on with the new primary; the connection string leads back to the old one."""
    source = pair.source
    pair.in_step()
    old, before = source.dsn, source.store.current_epoch()
    pair.fail_over()
    assert before is not None
    with pytest.raises(GapInSource, match="timeline 2, landed from 1"):
        connect_to_source(source.dsn, before)
    source.capture().begin_new_epoch("failed over")
    source.catch_up()
    pair.primary.start()
    assert parse_dsn(old) != parse_dsn(source.dsn)
    new, source.dsn = source.dsn, old
    source.sql("UPDATE tickets SET v = 'on the old one' WHERE id = 1")
    landed = source.store.batch_ids()
    with pytest.raises(GapInSource, match="timeline 1, landed from 2"):
        source.catch_up()
    assert source.store.batch_ids() == landed
    source.dsn = new
    source.sql("UPDATE tickets SET v = 'on the new one' WHERE id = 2", "DELETE FROM tickets WHERE id = 3")
    source.catch_up()
    same_as_source(source)
