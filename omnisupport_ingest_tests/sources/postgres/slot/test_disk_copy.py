"""A copy of the server's disk that is put back: the same system identifier, timeline and slot.

Nothing that the server says of itself tells it from the server that was captured. What it sends does.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.errors import GapInSource
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.slot.home_slot import end_of_chain
from omnisupport_ingest.sources.postgres.snapshot.requests import SnapshotRequests
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres.copied_server import CopiedServer
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE

pytestmark = pytest.mark.full

COLUMNS = ("id", "v")


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CopiedServer]:
    server = CopiedServer(tmp_path_factory.mktemp("copied") / "server")
    server.start()
    yield server
    server.destroy()


@pytest.fixture
def tickets(copied: CopiedServer, tmp_path: Path) -> Iterator[SourceUnderTest]:
    """A source on ``copied`` with a table ``tickets``, captured up to now."""
    name = f"copy_{secrets.token_hex(4)}"
    copied.sql(f"CREATE DATABASE {name}")
    source = SourceUnderTest(copied.server.dsn(name), name, tmp_path / "home")
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 20) g")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    yield source
    copied.sql(f"SELECT pg_drop_replication_slot('{name}')", f"DROP DATABASE {name} WITH (FORCE)")


def landed_end(source: SourceUnderTest) -> Lsn:
    epoch = source.store.current_epoch()
    assert epoch is not None
    return end_of_chain(source.store, epoch).end


def written_beyond(source: SourceUnderTest, end: Lsn) -> None:
    """Let the WAL of the server grow until positions above ``end`` are there again."""
    source.sql("CREATE TABLE filling (v text)")
    while current_wal_lsn(source.dsn) <= end:
        source.sql("INSERT INTO filling VALUES ('x')", "SELECT pg_switch_wal()")
    source.sql("INSERT INTO filling VALUES ('y')")


def refused_every_time(source: SourceUnderTest, problem: str) -> None:
    """Capture stops at the gap, at a second start too, and neither lands nor confirms anything."""
    landed, confirmed = source.store.batch_ids(), source.confirmed()
    for _ in range(2):
        with pytest.raises(GapInSource, match=problem) as gap:
            source.catch_up()
        assert "--new-epoch" in gap.value.fix
        assert (source.store.batch_ids(), source.confirmed()) == (landed, confirmed)


def repaired(source: SourceUnderTest) -> None:
    """A new epoch makes the lake what the source is, and leaves what has landed as it was."""
    before = source.store.batch_ids()
    source.capture().begin_new_epoch("a copy of the disk was put back")
    source.catch_up()
    source.sql("UPDATE tickets SET v = 'afterwards' WHERE id = 3")
    source.catch_up()
    assert set(before) < set(source.store.batch_ids())
    events = source.events()
    positions = [(event.epoch, event.commit_lsn, event.ordinal) for event in events]
    assert len(set(positions)) == len(positions)
    assert folded(events, "tickets") == source.rows("tickets", COLUMNS)


@pytest.mark.slow
def test_copy_older_than_what_has_landed_is_a_gap(tickets: SourceUnderTest, copied: CopiedServer) -> None:
    copy = copied.copy_disk("copy")
    tickets.sql("UPDATE tickets SET v = 'undone' WHERE id < 5", "DELETE FROM tickets WHERE id = 20")
    # More than a server writes by itself when it starts.
    tickets.sql("INSERT INTO tickets SELECT g, repeat('undone', 100) FROM generate_series(21, 2000) g")
    tickets.catch_up()
    copied.put_back(copy)
    refused_every_time(tickets, "WAL ends before the landed chain")
    repaired(tickets)


def test_copy_that_was_written_to_beyond_what_has_landed_is_a_gap(
    tickets: SourceUnderTest, copied: CopiedServer
) -> None:
    copy = copied.copy_disk("copy")
    tickets.sql("UPDATE tickets SET v = 'undone' WHERE id < 5", "INSERT INTO tickets VALUES (21, 'undone')")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    tickets.sql("INSERT INTO tickets VALUES (21, 'other')", "DELETE FROM tickets WHERE id = 1")
    written_beyond(tickets, end)
    refused_every_time(tickets, "history is another one")
    repaired(tickets)


@pytest.mark.slow
def test_copy_without_the_last_transaction_that_has_nothing_to_send_is_a_gap(
    tickets: SourceUnderTest, copied: CopiedServer
) -> None:
    copy = copied.copy_disk("copy")
    tickets.sql("UPDATE tickets SET v = 'undone' WHERE id < 5")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    written_beyond(tickets, end)
    refused_every_time(tickets, "nothing in the WAL up to")
    repaired(tickets)


@pytest.mark.parametrize(
    "last",
    [
        pytest.param("none", marks=pytest.mark.slow),
        "confirmed",
        pytest.param("sent again", marks=pytest.mark.slow),
    ],
)
def test_change_of_a_copy_where_only_an_idle_stretch_has_landed_is_a_gap(
    tickets: SourceUnderTest, copied: CopiedServer, last: str
) -> None:
    """The slot of the copy stands below the chain's end, and everything landed is in its history too."""
    if last != "none":
        tickets.sql("UPDATE tickets SET v = 'landed' WHERE id = 2")
    if last == "confirmed":
        tickets.catch_up()
    elif last == "sent again":
        tickets.killed_at("landing.manifest.after")
    copy = copied.copy_disk("copy")
    tickets.sql("CREATE TABLE elsewhere AS SELECT generate_series(1, 20000)")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    tickets.sql("INSERT INTO tickets VALUES (21, 'other')")
    assert current_wal_lsn(tickets.dsn) < end
    written_beyond(tickets, end)
    refused_every_time(tickets, "has passed without seeing")
    repaired(tickets)


@pytest.mark.slow
def test_copy_in_which_nothing_differs_is_gone_on_with(
    tickets: SourceUnderTest, copied: CopiedServer
) -> None:
    tickets.sql("UPDATE tickets SET v = 'landed' WHERE id = 2")
    tickets.catch_up()
    copy = copied.copy_disk("copy")
    tickets.sql("CREATE TABLE elsewhere AS SELECT generate_series(1, 20000)")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    written_beyond(tickets, end)
    tickets.sql("INSERT INTO tickets VALUES (21, 'other')", "DELETE FROM tickets WHERE id = 1")
    tickets.catch_up()
    assert {event.epoch for event in tickets.events()} == {1}
    assert folded(tickets.events(), "tickets") == tickets.rows("tickets", COLUMNS)


@pytest.mark.parametrize("follows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_table_is_read_from_a_copy_before_it_is_noticed(
    tickets: SourceUnderTest, copied: CopiedServer, follows: bool
) -> None:
    copy = copied.copy_disk("copy")
    tickets.sql("UPDATE tickets SET v = 'undone' WHERE id < 5")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    tickets.sql("INSERT INTO tickets VALUES (21, 'other')")
    written_beyond(tickets, end)
    SnapshotRequests(tickets.store.folder).write("tickets", "a test")
    landed = tickets.store.batch_ids()
    if follows:
        process = tickets.capture_process()
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == GapInSource.exit_code, errors
    else:
        with pytest.raises(GapInSource):
            tickets.catch_up()
    assert tickets.store.batch_ids() == landed
    repaired(tickets)


@pytest.mark.slow
def test_copy_is_repaired_by_itself_in_mode_when_needed(
    tickets: SourceUnderTest, copied: CopiedServer
) -> None:
    tickets.overrides["snapshot_mode"] = "when_needed"
    copy = copied.copy_disk("copy")
    tickets.sql("UPDATE tickets SET v = 'undone' WHERE id < 5")
    tickets.catch_up()
    end = landed_end(tickets)
    copied.put_back(copy)
    tickets.sql("INSERT INTO tickets VALUES (21, 'other')")
    written_beyond(tickets, end)
    tickets.catch_up()
    assert [epoch.number for epoch in tickets.store.epochs()] == [1, 2]
    assert folded(tickets.events(), "tickets") == tickets.rows("tickets", COLUMNS)
    assert any(is_stream(name) for name in tickets.store.batch_ids() if name.startswith("e000002"))
