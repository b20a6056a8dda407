"""Databases without a write beside a busy one: the server keeps WAL for all of them together.

A slot that stays where it is while another database of the server writes holds back the WAL of all. Other
captures have a heartbeat for that, a row written into the source now and then; this one has keepalives.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.protocol.walstream import Keepalive
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.sources.postgres.stream.follower import Follower
from omnisupport_ingest_tests.sources.postgres.snapshot_facts import (
    COLUMNS,
    complete,
    following,
    same_as_source,
)
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract
from omnisupport_ingest_tests.waiting import until

pytestmark = pytest.mark.full

WRITTEN = 48 << 20
WITNESS = "witness"


@dataclass(frozen=True)
class Server:
    """One server with a database that is written to and two that are not, each captured into its own home."""

    busy: SourceUnderTest
    idle: tuple[SourceUnderTest, SourceUnderTest]

    def write(self, kilobytes: int) -> None:
        """So much WAL, or somewhat more, for the busy database."""
        kilobyte = "repeat(md5(random()::text), 32)"
        self.busy.sql(f"INSERT INTO tickets (v) SELECT {kilobyte} FROM generate_series(1, {kilobytes})")

    def now(self) -> tuple[Lsn, datetime]:
        """How far the server's WAL goes, and its clock."""
        ((lsn, clock),) = self.busy.query("SELECT pg_current_wal_lsn()::text, clock_timestamp()")
        return Lsn.parse(lsn), clock

    @contextmanager
    def written_to(self) -> Iterator[None]:
        """The busy database is written to all the while."""
        over = threading.Event()

        def write() -> None:
            while not over.wait(0.02):
                self.write(20)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            over.set()
            writer.join()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Three captures that follow, their snapshots behind them."""
    monkeypatch.setattr("omnisupport_ingest.sources.postgres.stream.follower.IDLE_SECONDS", 0.2)
    postgres = EmbeddedPostgres(tmp_path / "server")
    postgres.start()
    try:
        names, sources = ("busy", "idle_a", "idle_b"), list[SourceUnderTest]()
        SourceUnderTest(postgres.dsn(), "", tmp_path).sql(*(f"CREATE DATABASE {name}" for name in names))
        for name in names:
            source = SourceUnderTest(postgres.dsn(name), name, tmp_path / name)
            source.overrides["max_clock_skew_seconds"] = 0
            source.sql(
                "CREATE TABLE tickets (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text)",
                "INSERT INTO tickets (v) VALUES ('one')",
            )
            source.tables.append(contract("tickets", COLUMNS))
            sources.append(source)
        for source in sources[1:]:
            bear_witness(source)
        with ExitStack() as captures:
            for source in sources:
                captures.enter_context(following(source))
            for source in sources:
                until(lambda source=source: complete(source))
            yield Server(sources[0], (sources[1], sources[2]))
    finally:
        postgres.destroy()


def bear_witness(source: SourceUnderTest) -> None:
    """From now on ``seen`` tells what is written into the database, by whomever, into any table."""
    source.sql(
        f"CREATE PUBLICATION {WITNESS} FOR ALL TABLES",
        f"SELECT pg_create_logical_replication_slot('{WITNESS}_' || current_database(), 'pgoutput')",
    )


def seen(source: SourceUnderTest) -> list[str]:
    """Changes, truncations and logical messages since ``bear_witness``, each by its kind."""
    rows = source.query(
        f"SELECT data FROM pg_logical_slot_peek_binary_changes('{WITNESS}_' || current_database(), NULL,"
        f" NULL, 'proto_version', '1', 'publication_names', '{WITNESS}', 'messages', 'true')"
    )
    kinds = [chr(bytes(data)[0]) for (data,) in rows]
    return [kind for kind in kinds if kind in "IUDTM"]


def has_passed(source: SourceUnderTest, now: tuple[Lsn, datetime]) -> bool:
    """Whether the slot of ``source`` and the watermark of what has landed are as far as the server was."""
    epoch = source.store.current_epoch()
    assert epoch is not None
    last = source.store.last_stream(epoch.number)
    if last is None or last.arrival.watermark is None:
        return False
    return source.confirmed() >= now[0] and last.arrival.watermark >= now[1]


def kept_bytes(source: SourceUnderTest) -> int:
    """WAL that the server keeps for the slot of ``source``."""
    ((kept,),) = source.query(
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint FROM pg_replication_slots"
        f" WHERE slot_name = '{source.slot}'"
    )
    return int(kept)


def test_idle_databases_move_on_while_another_is_written_to_and_nothing_is_written_to_them(
    server: Server,
) -> None:
    rows = [len(source.events()) for source in server.idle]
    with server.written_to():
        # More than once: they must not be moved by what is left of their start.
        for _ in range(3):
            server.write(100)
            now = server.now()
            until(lambda now=now: all(has_passed(source, now) for source in server.idle))
    for source, before in zip(server.idle, rows, strict=True):
        assert len(source.events()) == before
        assert seen(source) == []
        # The witness is not blind.
        source.sql("SELECT pg_logical_emit_message(false, 'heartbeat', '')")
        source.sql("INSERT INTO tickets (v) VALUES ('two')")
        assert seen(source) == ["M", "I"]
    until(lambda: same_as_source(server.busy))


def test_wal_is_not_kept_for_idle_databases(server: Server) -> None:
    start = current_wal_lsn(server.busy.dsn)
    for _ in range(4):
        server.write(WRITTEN // 4 // 1024)
    written = current_wal_lsn(server.busy.dsn).value - start.value
    assert written >= WRITTEN
    kept = list[int]()

    def little_is_kept() -> bool:
        # From where a slot has to read on moves with what the server notes of the transactions under way, as
        # every checkpoint does; to pass such a note, the slot must be confirmed beyond it.
        server.busy.sql("CHECKPOINT")
        kept[:] = [kept_bytes(source) for source in server.idle]
        return max(kept) < WRITTEN // 16

    until(little_is_kept)
    print(f"\n{written:,} bytes written, {kept} kept")


def test_watermark_waits_for_no_second_look_if_the_server_was_a_moment_behind_the_first(
    source: SourceUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first keepalive after a look at the clock stands just below what the clock is proved by."""
    below: set[Lsn] = set()
    answer = Follower._answer

    def behind(self: Follower, keepalive: Keepalive) -> None:
        flushed = self._wal_clock.flushed
        if keepalive.wal_end >= flushed and flushed not in below:
            below.add(flushed)
            answer(self, replace(keepalive, wal_end=Lsn(flushed.value - 1), reply_now=False))
        answer(self, keepalive)

    def watermark() -> datetime | None:
        last = source.store.last_stream(1)
        return None if last is None else last.arrival.watermark

    source.overrides["max_clock_skew_seconds"] = 0
    source.sql("CREATE TABLE tickets (id bigint PRIMARY KEY, v text)")
    source.tables.append(contract("tickets", COLUMNS))
    source.catch_up()
    source.sql("CREATE TABLE elsewhere ()")
    ((before,),) = source.query("SELECT clock_timestamp()")
    monkeypatch.setattr(Follower, "_answer", behind)
    # The next look is an hour away.
    monkeypatch.setattr("omnisupport_ingest.sources.postgres.stream.follower.IDLE_SECONDS", 3600.0)
    with following(source):
        until(lambda: (watermark() or before) > before)
    assert below
