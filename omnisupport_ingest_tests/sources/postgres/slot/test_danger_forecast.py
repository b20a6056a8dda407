"""How fast the WAL of a real server grows, and when a slot that nobody reads is in danger, as told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.capture import status as source_status
from omnisupport_ingest.sources.postgres.slot import retention
from omnisupport_ingest_tests.sources.postgres.awkward import Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import status
from omnisupport_ingest_tests.waiting import until

MB = 1 << 20
LIMIT = 512 * MB
WRITTEN = 24 * MB


@pytest.fixture
def limited(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    """A shop that was captured once, on a server with a limit; a rate is told over four seconds or more."""
    monkeypatch.setattr(source_status, "_RATE_MIN_SPAN", timedelta(seconds=4))
    monkeypatch.setattr(retention, "_MINIMUM_SPAN", timedelta(seconds=4))
    shop.sql(f"ALTER SYSTEM SET max_slot_wal_keep_size = '{LIMIT // MB}MB'", "SELECT pg_reload_conf()")
    try:
        until(lambda: shop.query("SHOW max_slot_wal_keep_size") == [(f"{LIMIT // MB}MB",)])
        assert shop.run("capture", "--once").code == 0
        yield shop
    finally:
        shop.sql("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")


@pytest.mark.slow
def test_rate_is_of_the_wal_written_since_and_the_time_left_is_what_is_left_at_that_rate(
    limited: Shop,
) -> None:
    early = status(limited)["server"]["forecast"]
    assert early["wal_bytes_per_second"] is None and early["seconds_left"] is None
    assert early["bytes_left"] == pytest.approx(LIMIT, abs=32 * MB)
    assert "rate of the WAL not known yet;" in limited.run("source", "status").out

    began = datetime.fromisoformat(status(limited)["landed"]["at"])
    start = end_of_wal(limited)
    for _ in range(8):
        limited.sql(f"SELECT pg_logical_emit_message(false, 'noise', repeat('x', {WRITTEN // 8}))")
        time.sleep(0.5)
    # What is left is counted from what has been written out, which no commit asks for here.
    until(lambda: limited.query("SELECT pg_current_wal_lsn() = pg_current_wal_insert_lsn()") == [(True,)])
    asked = datetime.now(UTC)
    told = status(limited, code=1)
    shortest, longest = ((moment - began).total_seconds() for moment in (asked, datetime.now(UTC)))
    written = end_of_wal(limited) - start
    assert written == pytest.approx(WRITTEN, rel=0.2)

    server, ahead = told["server"], told["server"]["forecast"]
    # The command looks at the clock somewhere between its start and its end, which may be seconds apart.
    assert written / longest * 0.7 < ahead["wal_bytes_per_second"] < written / shortest * 1.3
    assert server["max_slot_wal_keep_size"] == LIMIT and ahead["ends_at"] == "max_slot_wal_keep_size"
    # The server counts by whole segments of 16 MB.
    assert ahead["bytes_left"] == pytest.approx(LIMIT - server["slot"]["retained_bytes"], abs=32 * MB)
    assert ahead["bytes_left"] <= early["bytes_left"] - WRITTEN
    assert ahead["seconds_left"] == pytest.approx(ahead["bytes_left"] / ahead["wal_bytes_per_second"], abs=1)
    (warned,) = told["warnings"]
    assert "at the rate of late, max_slot_wal_keep_size is reached in 0.0 hours" in warned["what"]
    assert "if the slot stood still, max_slot_wal_keep_size in" in limited.run("source", "status").out


@pytest.mark.slow
def test_wal_that_was_written_long_before_it_landed_is_not_taken_for_the_rate_of_late(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an hour in which capture was off, with two seconds for the hour."""
    monkeypatch.setattr(source_status, "_RATE_SPAN", timedelta(seconds=2))
    monkeypatch.setattr(source_status, "_RATE_MIN_SPAN", timedelta(seconds=1))
    monkeypatch.setattr(retention, "_MINIMUM_SPAN", timedelta(seconds=1))
    assert shop.run("capture", "--once").code == 0
    began, start = time.monotonic(), end_of_wal(shop)
    for place in range(4):
        shop.sql(
            f"INSERT INTO items SELECT g, repeat('x', 500) FROM generate_series({place}0003, {place}9000) g"
        )
    written = end_of_wal(shop) - start
    time.sleep(3)
    with monkeypatch.context() as patched:
        patched.setenv("OMNISUPPORT_BATCH_MAX_BYTES", "1000000")
        assert shop.run("capture", "--once").code == 0
    time.sleep(1.2)
    # Whether that rate is a danger depends on how fast this machine is.
    told = json.loads(shop.run("source", "status", "--json").out)
    rate = told["server"]["forecast"]["wal_bytes_per_second"]
    assert 0 <= rate < 2 * written / (time.monotonic() - began)


def end_of_wal(shop: Shop) -> int:
    ((text,),) = shop.query("SELECT pg_current_wal_lsn()::text")
    return Lsn.parse(str(text)).value
