"""Dying and starting again: the chain goes on, no event is missing, none moves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from omnisupport_ingest.contracts.model import Contracts
from omnisupport_ingest.landing.errors import ChainContested
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.protocol.walstream import WalStream
from omnisupport_ingest.sources.postgres.session.connection import connect_replication
from omnisupport_ingest.sources.postgres.session.errors import (
    CaptureRunning,
    GapInSource,
    PreflightFailed,
    SlotInUse,
    SourceUnavailable,
)
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.slot.home_slot import RecoveryStopped, end_of_chain
from omnisupport_ingest_tests.contracts.decision_tables import write_decision
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.sources.postgres import fronts
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

COLUMNS = ("id", "v")


@pytest.fixture
def tickets(source: SourceUnderTest) -> SourceUnderTest:
    """A source with a filled table ``tickets``, nothing of it captured yet."""
    source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
    source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 500) g")
    source.tables.append(contract("tickets", COLUMNS))
    return source


def _change(source: SourceUnderTest, mark: str) -> None:
    source.sql(
        f"UPDATE tickets SET v = '{mark}' WHERE id % 7 = 0",
        "UPDATE tickets SET id = -id WHERE id = (SELECT min(id) FROM tickets WHERE id > 0)",
        "DELETE FROM tickets WHERE id = (SELECT max(id) FROM tickets)",
        f"INSERT INTO tickets SELECT max(id) + 1, '{mark}' FROM tickets",
    )


def _assert_same_as_source(source: SourceUnderTest) -> None:
    events = source.events()
    positions = [(event.epoch, event.commit_lsn, event.ordinal) for event in events]
    assert len(set(positions)) == len(positions)
    assert folded(events, "tickets") == source.rows("tickets", COLUMNS)


@pytest.mark.parametrize(
    "failpoint",
    [
        "landing.data.after",
        "landing.manifest.after",
        "source.confirm.before@forward",
        "source.confirm.after@forward",
    ],
)
def test_capture_killed_on_the_way_loses_nothing_and_moves_nothing(
    tickets: SourceUnderTest, tmp_path: Path, failpoint: str
) -> None:
    undisturbed = SourceUnderTest(tickets.dsn, f"{tickets.slot}_b", tmp_path / "undisturbed", tickets.tables)
    tickets.catch_up()
    undisturbed.catch_up()
    _change(tickets, "before")
    tickets.killed_at(failpoint)
    _change(tickets, "after")
    tickets.catch_up()
    undisturbed.catch_up()
    assert tickets.changes() == undisturbed.changes()
    _assert_same_as_source(tickets)


def test_capture_killed_between_a_batch_and_its_confirmation_waits_for_a_person_where_the_table_says_stop(
    tickets: SourceUnderTest, tmp_path: Path
) -> None:
    tickets.catch_up()
    _change(tickets, "new")
    tickets.killed_at("landing.manifest.after")
    _change(tickets, "newer")
    landed, confirmed = tickets.store.batch_ids(), tickets.confirmed()
    tickets.overrides["decision_table"] = write_decision(tmp_path / "table.csv", "crash_after_emit", "stop")
    for _ in range(2):
        with pytest.raises(RecoveryStopped, match=f"confirmed up to {confirmed}") as stopped:
            tickets.catch_up()
        assert "replay_and_dedupe" in stopped.value.fix
        assert (tickets.store.batch_ids(), tickets.confirmed()) == (landed, confirmed)
    del tickets.overrides["decision_table"]
    tickets.catch_up()
    (recovered,) = (each for each in tickets.manifests() if each.stream and each.stream.recovered_from)
    assert recovered.stream is not None and recovered.stream.recovered_from == confirmed
    assert recovered.batch_id not in landed
    _assert_same_as_source(tickets)


@pytest.mark.parametrize("failpoint", ["landing.data.after", "landing.data.before@boundary"])
def test_first_snapshot_killed_on_the_way_is_taken_again(tickets: SourceUnderTest, failpoint: str) -> None:
    tickets.killed_at(failpoint)
    tickets.sql("DELETE FROM tickets WHERE id < 100")
    tickets.catch_up()
    _assert_same_as_source(tickets)
    assert [epoch.number for epoch in tickets.store.epochs()] == [1]


def test_snapshot_that_is_stopped_within_a_table_goes_on_at_the_next_start(tickets: SourceUnderTest) -> None:
    tickets.sql("INSERT INTO tickets SELECT g, 'more' FROM generate_series(1000, 9000) g")
    tickets.overrides |= {
        "snapshot_chunk_rows": 1000,
        "snapshot_threads": 1,
        "snapshot_rows_per_second": 4000,
    }
    stop = threading.Event()
    contracts = Contracts(tuple(tickets.tables))

    def landed(batch: Manifest) -> None:
        # The stream may land an idle batch before the first chunk.
        if batch.chunk is not None:
            stop.set()

    Capture(tickets.settings, tickets.home, contracts, landed).run(None, stop)
    chunks = [batch.chunk for batch in tickets.manifests() if batch.chunk is not None]
    assert 1 <= len(chunks) < 9 and not any(chunk.boundary for chunk in chunks)
    tickets.catch_up()
    _assert_same_as_source(tickets)


def test_snapshot_under_concurrent_writes_ends_up_as_the_source(tickets: SourceUnderTest) -> None:
    done = threading.Event()

    def write() -> None:
        for turn in range(1000):
            if done.is_set():
                return
            _change(tickets, f"turn {turn}")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        tickets.catch_up()
    finally:
        done.set()
        writer.join()
    tickets.catch_up()
    _assert_same_as_source(tickets)
    boundary, *rows = [event for event in tickets.events() if event.op in ("r", "b")]
    assert boundary.op == "b" and all(boundary.ordinal < row.ordinal < 0 for row in rows)


def test_table_added_by_a_contract_is_read_in_the_same_epoch(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    tickets.sql(
        "CREATE TABLE extra (id int PRIMARY KEY, v text)", "INSERT INTO extra VALUES (1, 'a'), (2, 'b')"
    )
    tickets.tables.append(contract("extra", COLUMNS))
    tickets.catch_up()
    tickets.sql("DELETE FROM extra WHERE id = 1")
    tickets.catch_up()
    assert folded(tickets.events(), "extra") == tickets.rows("extra", COLUMNS)
    assert {event.epoch for event in tickets.events()} == {1}


def test_killed_server_sends_again_and_nothing_lands_twice(
    tickets: SourceUnderTest, postgres: EmbeddedPostgres
) -> None:
    tickets.catch_up()
    for attempt in range(3):
        _change(tickets, f"attempt {attempt}")
        tickets.catch_up()
        confirmed, landed = tickets.confirmed(), tickets.changes()
        assert postgres.pid is not None
        os.kill(postgres.pid, signal.SIGKILL)
        with pytest.raises(SourceUnavailable):
            tickets.capture().run(None, threading.Event())
        postgres.start()
        # The server writes a slot down now and then: mostly it forgets the last confirmations.
        if tickets.confirmed() < confirmed:
            break
    else:
        pytest.fail("the server never forgot a confirmation, so it had nothing to send again")
    _change(tickets, "two")
    tickets.catch_up()
    assert tickets.changes()[: len(landed)] == landed
    _assert_same_as_source(tickets)


def test_server_that_shuts_down_is_let_go_at_once_and_capture_goes_on_after(
    tickets: SourceUnderTest, postgres: EmbeddedPostgres
) -> None:
    process = tickets.capture_process()
    try:
        until(lambda: any(is_stream(name) for name in tickets.store.batch_ids()))
        _change(tickets, "one")
        began = time.monotonic()
        postgres.stop()
        # A server that waited for its reader would give it up after `wal_sender_timeout`, 60 seconds.
        assert time.monotonic() - began < 45
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == SourceUnavailable.exit_code, errors
    finally:
        process.kill()
        postgres.start()
    _change(tickets, "two")
    tickets.catch_up()
    _assert_same_as_source(tickets)


def test_stop_lands_what_is_complete(tickets: SourceUnderTest) -> None:
    tickets.overrides["batch_max_seconds"] = 3600
    process = tickets.capture_process()
    try:
        until(lambda: any(is_stream(name) for name in tickets.store.batch_ids()))
        _change(tickets, "one")
        goal = current_wal_lsn(tickets.dsn)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    epoch = tickets.store.current_epoch()
    assert epoch is not None and tickets.confirmed() == end_of_chain(tickets.store, epoch).end
    assert tickets.changes() and goal > Lsn(0)


def test_idle_source_moves_slot_and_watermark_by_empty_batches_of_their_own(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    before = tickets.manifests()
    tickets.sql("CREATE TABLE elsewhere AS SELECT generate_series(1, 1000)")
    tickets.catch_up()
    (idle,) = tickets.manifests()[len(before) :]
    assert idle.rows == 0 and idle.stream is not None and idle.stream.start_lsn is None
    assert tickets.confirmed() == idle.stream.end_lsn
    assert idle.arrival.watermark is not None


@pytest.mark.quick
def test_second_capture_is_refused_and_told_who_runs(tickets: SourceUnderTest) -> None:
    with take_lease(tickets.home.run, "support_desk"), pytest.raises(CaptureRunning) as refused:
        tickets.catch_up()
    assert f"process {os.getpid()}" in refused.value.problem
    tickets.catch_up()


def test_lease_of_a_killed_process_is_free(tickets: SourceUnderTest) -> None:
    process: subprocess.Popen[str] = tickets.capture_process()
    lock = tickets.home.run / "capture-support_desk.lock"
    until(lambda: lock.exists() and lock.read_text() != "")
    process.kill()
    process.communicate(timeout=PATIENCE)
    until(lambda: not tickets.query("SELECT FROM pg_replication_slots WHERE active"))
    tickets.catch_up()
    _assert_same_as_source(tickets)


def test_second_process_is_refused_and_told_which_process_runs_and_where(tickets: SourceUnderTest) -> None:
    first = tickets.capture_process()
    try:
        until(lambda: any(is_stream(name) for name in tickets.store.batch_ids()))
        second = tickets.capture_process()
        _, told = second.communicate(timeout=PATIENCE)
        assert second.returncode == CaptureRunning.exit_code, told
        assert f"captured into this home already by process {first.pid} on {socket.gethostname()}, " in told
        # And the first one has noticed nothing.
        _change(tickets, "one")
        until(lambda: bool(tickets.changes()))
        first.terminate()
        _, errors = first.communicate(timeout=PATIENCE)
        assert first.returncode == 0, errors
    finally:
        first.kill()
    _assert_same_as_source(tickets)


@dataclass
class Sleeper:
    """A capture that falls asleep, as in a virtual machine that is paused, and wakes up in another world.

    It reads by TCP, through ``front``: so what it has been sent is there before it hears of any end.
    """

    source: SourceUnderTest
    port: int
    front: subprocess.Popen[str]
    process: subprocess.Popen[str] | None = None

    def start(self, batch_max_seconds: float = 0.5) -> None:
        """Have it capture until it is up to date, and knows what it is sent changes of."""
        dsn = make_dsn(self.source.dsn, host="127.0.0.1", port=self.port)
        behind = replace(self.source, dsn=dsn)
        limits = {"batch_max_seconds": batch_max_seconds, "batch_max_bytes": _LONG // 2}
        self.process = behind.capture_process(overrides=limits)
        until(lambda: bool(self.source.events("b")))
        _change_much(self.source)
        until(lambda: bool(self.source.changes()))

    def falls_asleep(self) -> None:
        """What the source has sent by then has come to where it sleeps, and something more."""
        assert self.process is not None
        _stop(self.process)
        _change_much(self.source)
        until(lambda: self._unread_bytes() >= _LONG)

    def network_goes_away(self) -> None:
        """It will not hear that the server has given it up; if it did, it would not come to land anything."""
        _stop(self.front)

    def _unread_bytes(self) -> int:
        """How much has come for it through the front that it has not read."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        queues = [row[4] for row in rows if int(row[2].partition(":")[2], 16) == self.port]
        return max(int(queue.partition(":")[2], 16) for queue in queues)

    def loses_slot_and_lease(self) -> None:
        """Somebody takes it for dead, and takes away what is its own for as long as it lives."""
        (self.source.home.run / "capture-support_desk.lock").unlink()
        self.source.sql(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            f" WHERE slot_name = '{self.source.slot}'"
        )
        self.source.wait_for_free_slot()

    def wakes_up(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def ends(self) -> tuple[int, str]:
        """Its exit code, and what it said."""
        assert self.process is not None
        _, told = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, told

    def open_batches(self) -> list[Path]:
        """Folders of batches that have been begun and have not landed."""
        store = self.source.store
        return [each for each in (store.folder / "data").iterdir() if not store.exists(each.name)]


_LONG = 32 * 1_250
"""Bytes of a row, more than all that comes by the way."""


def _change_much(source: SourceUnderTest) -> None:
    source.sql(f"UPDATE tickets SET v = repeat(md5(v), {_LONG // 32}) WHERE id = 300")


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


@pytest.fixture
def sleeper(tickets: SourceUnderTest) -> Iterator[Sleeper]:
    given = parse_dsn(tickets.dsn)
    backend = f"{given['host']}/.s.PGSQL.{given['port']}"
    front = subprocess.Popen(
        [sys.executable, "-m", fronts.__name__, "swallowing", backend], stdout=subprocess.PIPE, text=True
    )
    assert front.stdout is not None
    sleeper = Sleeper(tickets, int(front.stdout.readline()), front)
    yield sleeper
    for process in (sleeper.process, front):
        if process is not None:
            process.kill()
            process.communicate(timeout=PATIENCE)


def test_capture_that_wakes_up_late_lands_nothing_that_another_has_landed(
    tickets: SourceUnderTest, sleeper: Sleeper
) -> None:
    sleeper.start()
    sleeper.falls_asleep()
    assert sleeper.open_batches() == []
    _change(tickets, "for both")
    sleeper.loses_slot_and_lease()
    tickets.catch_up()
    landed = tickets.store.batch_ids()
    sleeper.wakes_up()
    code, told = sleeper.ends()
    assert code == ChainContested.exit_code and told.startswith("ChainContested"), told
    assert tickets.store.batch_ids() == landed and sleeper.open_batches() == []
    _change(tickets, "afterwards")
    tickets.catch_up()
    _assert_same_as_source(tickets)
    assert len(tickets.store.epochs()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("its_folder_is_removed", [False, True])
def test_capture_that_wakes_up_late_with_a_batch_begun_lands_it_if_it_goes_on_and_nowhere_else(
    tickets: SourceUnderTest, sleeper: Sleeper, its_folder_is_removed: bool
) -> None:
    """What it has begun is its own for as long as it lives; who removes that by force goes on without it."""
    patience = 3.0
    sleeper.start(batch_max_seconds=patience)
    _change(tickets, "for both")
    until(lambda: sleeper.open_batches() != [])
    # Not while it is still about to begin it.
    time.sleep(0.3)
    sleeper.falls_asleep()
    (begun,) = sleeper.open_batches()
    began = begun.stat().st_mtime
    sleeper.network_goes_away()
    sleeper.loses_slot_and_lease()
    before = tickets.store.batch_ids()
    with pytest.raises(ChainContested, match=f"{begun.name} of support_desk is being written by another"):
        tickets.catch_up()
    assert tickets.store.batch_ids() == before
    # It is to land its batch first thing, before it asks the server for anything.
    until(lambda: time.time() > began + patience + 0.2)
    if its_folder_is_removed:
        shutil.rmtree(begun)
        tickets.catch_up()
        landed = tickets.store.batch_ids()
        assert begun.name in landed
        sleeper.wakes_up()
        code, told = sleeper.ends()
        assert code == ChainContested.exit_code and told.startswith("ChainContested"), told
        assert tickets.store.batch_ids() == landed
    else:
        sleeper.wakes_up()
        until(lambda: begun.name in tickets.store.batch_ids())
        sleeper.front.kill()
        code, told = sleeper.ends()
        assert code == SourceUnavailable.exit_code, told
    _change(tickets, "afterwards")
    tickets.catch_up()
    _assert_same_as_source(tickets)
    assert len(tickets.store.epochs()) == 1 and sleeper.open_batches() == []


def test_dropped_slot_is_a_gap_and_a_new_epoch_repairs_it(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    tickets.wait_for_free_slot()
    tickets.sql(f"SELECT pg_drop_replication_slot('{tickets.slot}')", "DELETE FROM tickets WHERE id < 50")
    with pytest.raises(GapInSource, match="is gone"):
        tickets.catch_up()
    tickets.capture().begin_new_epoch("slot dropped")
    tickets.catch_up()
    assert [epoch.reason for epoch in tickets.store.epochs()] == ["first start", "slot dropped"]
    _assert_same_as_source(tickets)


def test_source_with_another_last_transaction_is_a_gap_at_every_start(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    _change(tickets, "one")
    tickets.killed_at("source.confirm.before@forward")
    (manifest,) = [
        file
        for file in tickets.store.folder.glob("manifests/*-s-*.json")
        if '"last_xid": ' in file.read_text() and '"last_xid": null' not in file.read_text()
    ]
    manifest.write_text(re.sub(r'"last_xid": \d+', '"last_xid": 3', manifest.read_text()))
    _change(tickets, "two")
    for _ in range(2):
        with pytest.raises(GapInSource, match="history is another one"):
            tickets.catch_up()
    tickets.capture().begin_new_epoch("another history")
    tickets.catch_up()
    _assert_same_as_source(tickets)


def test_slot_made_anew_by_somebody_is_a_gap(tickets: SourceUnderTest) -> None:
    tickets.catch_up()
    tickets.wait_for_free_slot()
    tickets.sql(
        f"SELECT pg_drop_replication_slot('{tickets.slot}')",
        "DELETE FROM tickets WHERE id < 50",
        f"SELECT pg_create_logical_replication_slot('{tickets.slot}', 'pgoutput')",
    )
    with pytest.raises(GapInSource, match="made anew"):
        tickets.catch_up()


def test_slot_that_another_process_reads_from_is_waited_for_and_then_named(
    tickets: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets.catch_up()
    monkeypatch.setattr("omnisupport_ingest.sources.postgres.capture.epoch_start.SLOT_WAIT_SECONDS", 0.2)
    reader = WalStream(connect_replication(tickets.dsn), tickets.slot, tickets.slot, tickets.confirmed())
    _change(tickets, "one")
    with pytest.raises(SlotInUse, match="server process"):
        tickets.catch_up()
    reader.close()
    monkeypatch.undo()
    tickets.catch_up()
    _assert_same_as_source(tickets)


def test_slot_of_another_home_is_left_alone(tickets: SourceUnderTest, tmp_path: Path) -> None:
    tickets.catch_up()
    stranger = SourceUnderTest(tickets.dsn, tickets.slot, tmp_path / "stranger", tickets.tables)
    for _ in range(2):
        with pytest.raises(SlotInUse):
            stranger.catch_up()
    with pytest.raises(SlotInUse, match="this home has not created it"):
        stranger.capture().begin_new_epoch("I want it too")
    tickets.catch_up()


@pytest.mark.full
def test_wal_level_that_is_not_logical_is_named_with_its_fix(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path / "server")
    server.start()
    try:
        source = SourceUnderTest(server.dsn(), "replica_only", tmp_path / "home", [contract("t", ("id",))])
        source.sql("CREATE TABLE t (id int PRIMARY KEY)", "ALTER SYSTEM SET wal_level = 'replica'")
        server.stop()
        server.start()
        with pytest.raises(PreflightFailed) as refused:
            source.catch_up()
        assert "wal_level is replica" in refused.value.problem
        assert "ALTER SYSTEM SET wal_level = 'logical'" in refused.value.fix
    finally:
        server.destroy()
