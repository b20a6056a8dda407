"""A transaction in progress, and capture that is killed, is stopped or has no room: it lands whole, once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.protocol.changes import ChangeCollector
from omnisupport_ingest.sources.postgres.protocol.pgoutput import Begin
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.stream.follower import Follower
from omnisupport_ingest_tests.sources.postgres.random_writers import Script
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.sources.postgres.two_readers import (
    TwoReaders,
    many,
    run,
    session,
    two_readers_of_notes,
)
from omnisupport_ingest_tests.waiting import PATIENCE, until


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
    source: SourceUnderTest, tmp_path: Path, small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.home_folder = small_disk / "home"
    both = two_readers_of_notes(source, tmp_path)
    source.sql("INSERT INTO notes VALUES (1)")
    both.catch_up()
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
            until(lambda: both.sent_early() > 0)
            sent = current_wal_lsn(source.dsn)
            source.sql("INSERT INTO notes VALUES (9000)")
            until(lambda: source.confirmed() > sent)
            run(writer, many(1001))
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE)
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
        until(lambda: len(list((source.store.folder / "data").glob("*-s-*"))) > 0)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)
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
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, errors
    assert both.sent_early() == 1 and len(source.changes()) == 400
    source.sql(many(1001))
    both.catch_up()
    both.assert_same()
    assert sum(bool(each.stream and each.stream.recovered_from) for each in source.manifests()) == 1


def slot_is_read(source: SourceUnderTest) -> bool:
    ((active,),) = source.query(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{source.slot}'")
    return bool(active)


@pytest.mark.slow
def test_server_hears_of_capture_while_a_transaction_is_given_out_for_long(
    both: TwoReaders, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, row = both.early, ChangeCollector.add_row
    still_read = []

    def slowly(self: ChangeCollector, message: bytes) -> bool:
        time.sleep(0.001)
        still_read.append(message if len(still_read) % 1000 else slot_is_read(source))
        return row(self, message)

    source.sql("INSERT INTO notes SELECT g, 'some words', 'x' FROM generate_series(1, 4001) g")
    # The server gives a reader up that is silent for this long.
    source.dsn += " options='-c wal_sender_timeout=2s'"
    with monkeypatch.context() as patched:
        patched.setattr("omnisupport_ingest.sources.postgres.stream.follower._ASK_SECONDS_IF_AWAITED", 0.2)
        patched.setattr("omnisupport_ingest.sources.postgres.stream.follower._CHECK_MESSAGES", 200)
        patched.setattr(ChangeCollector, "add_row", slowly)
        began = time.monotonic()
        source.catch_up()
        assert time.monotonic() - began > 4
    assert still_read[::1000] == [True] * 5
    both.catch_up()
    both.assert_same()
    assert both.sent_early() == 1


@pytest.mark.parametrize("killed", [False, True], ids=["shut down", "killed"])
def test_server_that_ends_with_a_transaction_in_progress_takes_it_along(
    both: TwoReaders, postgres: EmbeddedPostgres, killed: bool
) -> None:
    source = both.early
    process = source.capture_process(overrides=source.overrides)
    try:
        with session(source) as writer:
            run(writer, "BEGIN", many(1))
            until(lambda: both.sent_early() > 0)
            source.sql("INSERT INTO notes VALUES (9000)")
            began = time.monotonic()
            if killed:
                assert postgres.pid is not None
                os.kill(postgres.pid, signal.SIGKILL)
            else:
                postgres.stop()
            _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == SourceUnavailable.exit_code, errors
        assert time.monotonic() - began < 45
    finally:
        process.kill()
        postgres.start()
    source.sql(many(1001))
    both.catch_up()
    both.assert_same()
    assert len(source.changes()) == 401


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
        patched.setattr("omnisupport_ingest.sources.postgres.stream.follower._STOP_GRACE_SECONDS", 0.0)
        source.capture().run(None, StopWithinIt())
    assert source.changes() == [] and both.sent_early() == 1
    both.catch_up()
    both.assert_same()


@pytest.mark.slow
def test_capture_killed_again_and_again_under_random_transactions_loses_nothing_and_moves_nothing(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    script, chance = Script(source, 99, messages=False), random.Random(99)
    script.prepare()
    both = TwoReaders(source, tmp_path)
    both.catch_up()
    kills = 0
    playing = threading.Thread(target=script.play, args=(200, 0.1, lambda: kills <= 3))
    playing.start()
    while playing.is_alive():
        process = source.capture_process(overrides=source.overrides)
        enough = both.sent_early() + 1
        try:
            while both.sent_early() < enough and playing.is_alive():
                assert process.poll() is None, "capture has ended by itself"
                time.sleep(0.02)
            time.sleep(chance.random() / 5)
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE)
        kills += 1
    playing.join()
    both.catch_up()
    both.assert_same()
