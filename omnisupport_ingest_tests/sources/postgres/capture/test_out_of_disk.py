"""The disk of the source is full: capture says so, waits, and has lost nothing once there is room again."""

from __future__ import annotations

import os
import pwd
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg2
import pytest

from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest_tests.landing.batches import is_stream
from omnisupport_ingest_tests.small_disk import Disk, small_disk
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract, folded
from omnisupport_ingest_tests.waiting import PATIENCE, until

pytestmark = pytest.mark.full

MEGABYTE = 1024 * 1024


@dataclass
class Cramped:
    """A source whose data and WAL are on a disk of their own."""

    server: EmbeddedPostgres
    disk: Disk
    source: SourceUnderTest


@pytest.fixture
def cramped(tmp_path: Path) -> Iterator[Cramped]:
    # Where the server's own user can go, which the folder of a test is not.
    place = Path("/tmp") / f"omnisupport-disk-{secrets.token_hex(4)}"
    try:
        with small_disk(place, megabytes=400) as disk:
            folder = place / "server"
            folder.mkdir(mode=0o700)
            if os.geteuid() == 0:
                os.chown(folder, pwd.getpwnam("nobody").pw_uid, -1)
            server = EmbeddedPostgres(folder, logs=tmp_path / "logs")
            server.start()
            try:
                source = SourceUnderTest(server.dsn(), "cramped", tmp_path / "home")
                source.sql("CREATE TABLE tickets (id int PRIMARY KEY, v text)")
                source.sql("ALTER TABLE tickets ALTER v SET STORAGE EXTERNAL")
                source.sql("INSERT INTO tickets SELECT g, 'old' FROM generate_series(1, 100) g")
                source.tables.append(contract("tickets", ("id", "v")))
                source.catch_up()
                yield Cramped(server, disk, source)
            finally:
                server.destroy()
    finally:
        if place.is_dir():
            place.rmdir()


def refused(source: SourceUnderTest, statement: str) -> str:
    """Run ``statement`` until the server cannot; returns what it said."""
    for _ in range(500):
        try:
            source.sql(statement)
        except (psycopg2.Error, IngestError) as error:
            return str(error)
    pytest.fail("there was room for all of it")


def assert_same_as_source(source: SourceUnderTest) -> None:
    assert folded(source.events(), "tickets") == source.rows("tickets", ("id", "v"))


def test_server_that_ends_for_want_of_room_for_its_wal_is_waited_for_and_nothing_is_lost(
    cramped: Cramped,
) -> None:
    source, server = cramped.source, cramped.server
    before = len(source.store.batch_ids())
    process = source.capture_process()
    try:
        source.sql("UPDATE tickets SET v = 'followed' WHERE id < 50")
        until(lambda: any(is_stream(name) for name in source.store.batch_ids()[before:]))
        with cramped.disk.full():
            source.sql("UPDATE tickets SET v = 'last' WHERE id = 1")
            refused(source, "SELECT pg_logical_emit_message(true, 'fill', repeat('x', 1000000))")
            _, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == SourceUnavailable.exit_code, errors
            until(lambda: not server.running)
            with pytest.raises(SourceUnavailable) as away:
                source.catch_up()
            assert "Start the server" in away.value.fix or "Wait until" in away.value.fix
    finally:
        process.kill()
    server.start()
    source.sql("UPDATE tickets SET v = 'after' WHERE id > 90")
    source.catch_up()
    assert_same_as_source(source)
    assert len(source.store.epochs()) == 1


def test_server_that_refuses_writes_is_captured_all_the_while(cramped: Cramped) -> None:
    source = cramped.source
    source.sql("CREATE UNLOGGED TABLE filling (v text)", "ALTER TABLE filling ALTER v SET STORAGE EXTERNAL")
    with cramped.disk.full(but=2 * MEGABYTE):
        told = refused(source, "INSERT INTO filling VALUES (repeat('x', 500000))")
        assert "No space left on device" in told
        source.sql("UPDATE tickets SET v = 'in place' WHERE id = 1")
        source.catch_up()
        assert_same_as_source(source)
    source.sql("UPDATE tickets SET v = 'after' WHERE id > 90")
    source.catch_up()
    assert_same_as_source(source)


def test_server_without_room_to_decode_a_large_transaction_says_so_and_sends_it_later(
    cramped: Cramped,
) -> None:
    source = cramped.source
    source.sql("ALTER SYSTEM SET logical_decoding_work_mem = '64kB'", "SELECT pg_reload_conf()")
    source.overrides["stream_transactions"] = False
    source.sql("INSERT INTO tickets SELECT g, repeat('x', 1000) FROM generate_series(1000, 9000) g")
    with cramped.disk.full(but=MEGABYTE):
        for _ in range(2):
            with pytest.raises(SourceUnavailable, match="No space left on device"):
                source.catch_up()
    source.catch_up()
    assert_same_as_source(source)
