"""``source``: the least rights suffice, the status is true, a pause loses nothing, leaving is clean."""

from __future__ import annotations

import io
import json

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.session.errors import CaptureRunning, GapInSource
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.verify import services
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import environment
from omnisupport_ingest_tests.sources.postgres.awkward import PASSWORD, ROLE, SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import landed_rows, status
from omnisupport_ingest_tests.waiting import PATIENCE, until

CAPTURE = ("capture", "--once")


def _captured(shop: Shop, *, dsn: str | None = None) -> None:
    done = shop.run(*CAPTURE, dsn=dsn)
    assert done.code == 0, done.output


def _confirmed(shop: Shop) -> Lsn:
    ((lsn,),) = shop.query(
        f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{shop.database}'"
    )
    return Lsn.parse(str(lsn))


def test_role_with_nothing_but_the_printed_grants_takes_snapshot_and_stream_and_confirms(shop: Shop) -> None:
    role = f"{shop.database}_least"
    shop.sql(f"DROP PUBLICATION {shop.database}")
    printed = shop.run("source", "grants", "--role", role)
    assert printed.code == 0
    # As an administrator would: the whole script, and then a password.
    shop.sql(printed.out, f"ALTER ROLE {role} PASSWORD '{PASSWORD}'")
    dsn = shop.dsn(user=role)
    assert shop.run("preflight", dsn=dsn).code == 0
    _captured(shop, dsn=dsn)
    assert shop.landed()
    before = _confirmed(shop)
    shop.sql("INSERT INTO items VALUES (3, 'three')", "TRUNCATE orders")
    _captured(shop, dsn=dsn)
    assert landed_rows(shop) == 2 and _confirmed(shop) > before
    rights = "rolsuper, rolcreaterole, rolcreatedb, rolbypassrls"
    assert shop.query(f"SELECT {rights} FROM pg_roles WHERE rolname = '{role}'") == [(False,) * 4]
    # It can leave again as well; the publication is its owner's.
    left = shop.run("source", "drop", "--yes", dsn=dsn)
    assert f"Dropped: slot {shop.database}." in left.out
    assert f'DROP PUBLICATION "{shop.database}";' in left.out
    shop.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_grants_need_no_connection_and_name_the_database(shop: Shop) -> None:
    away = shop.dsn(host="127.0.0.1", port=1, dbname="elsewhere")
    done = shop.run("source", "grants", dsn=away)
    assert 'GRANT CONNECT ON DATABASE "elsewhere" TO "omnisupport_capture";' in done.out
    assert shop.run("source", "grants", dsn="host=somewhere").code == 2
    assert not shop.home.exists()


def test_status_of_a_source_before_and_after_its_first_capture(shop: Shop) -> None:
    Home.open(shop.home, WindowSize(1))
    before = status(shop, code=0)
    assert before["landed"] is None and before["server"]["slot"] is None
    assert before["server"]["publication"] == {"name": shop.database, "exists": True, "missing_tables": []}
    _captured(shop)
    after = status(shop)
    slot, landed = after["server"]["slot"], after["landed"]
    assert slot["active"] is False and slot["wal_status"] == "reserved"
    assert slot["confirmed_flush_lsn"] == landed["lsn"] and landed["epoch"] == 1
    assert after["server"]["max_slot_wal_keep_size"] == 4 << 30
    assert after["server"]["forecast"]["ends_at"] == "max_slot_wal_keep_size"
    shop.sql("INSERT INTO items SELECT n, repeat('x', 1000) FROM generate_series(10, 1000) n")
    later = status(shop)
    assert later["landed"]["bytes_behind"] > 500_000
    assert later["server"]["slot"]["retained_bytes"] > slot["retained_bytes"] + 500_000
    text = shop.run("source", "status").out
    assert "nobody reads it" in text and "covers 2 of 2 tables" in text


def test_status_without_a_server_tells_what_is_known_and_what_is_wrong(shop: Shop) -> None:
    _captured(shop)
    with_server = status(shop)
    done = shop.run("source", "status", "--json", dsn=shop.dsn(password="wr0ng"))
    told = json.loads(done.out)
    assert done.code == 1 and told["server"] is None
    assert told["landed"]["lsn"] == with_server["landed"]["lsn"]
    assert "password authentication failed" in told["warnings"][0]["what"]


def test_status_warns_of_a_slot_near_its_limit_and_of_one_that_is_gone(shop: Shop) -> None:
    _captured(shop)
    shop.sql("ALTER SYSTEM SET max_slot_wal_keep_size = '1MB'", "SELECT pg_reload_conf()")
    try:
        until(lambda: shop.query("SHOW max_slot_wal_keep_size") == [("1MB",)])
        for _ in range(2):
            shop.sql("INSERT INTO items VALUES (99, 'x') ON CONFLICT (id) DO UPDATE SET v = 'y'")
            shop.sql("SELECT pg_switch_wal()")
        (warned,) = status(shop, code=1)["warnings"]
        assert "max_slot_wal_keep_size" in warned["what"]
        assert "ALTER SYSTEM SET max_slot_wal_keep_size = '2MB'" in warned["fix"]
        shop.sql("CHECKPOINT")
        (lost,) = status(shop, code=1)["warnings"]
        assert "removed WAL" in lost["what"] and "--new-epoch" in lost["fix"]
        assert shop.run("preflight").code == 1
    finally:
        shop.sql("ALTER SYSTEM RESET max_slot_wal_keep_size", "SELECT pg_reload_conf()")
    assert shop.run(*CAPTURE).code == GapInSource.exit_code
    anew = shop.run(*CAPTURE, "--new-epoch", "the server gave the slot up")
    assert anew.code == 0, anew.output
    until(lambda: shop.run("source", "status").code == 0)


def test_paused_capture_waits_in_its_process_and_goes_on_without_loss(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        until(lambda: landed_rows(shop) == 1)
        paused = shop.run("source", "pause", "--reason", "a test")
        assert paused.code == 0 and "The capture has stopped." in paused.out
        capture.says("is paused since")
        assert capture.process.poll() is None
        told = status(shop)
        assert told["capture"]["running"] is False and told["capture"]["paused_because"] == "a test"
        # The slot stays and keeps what commits meanwhile.
        assert told["server"]["slot"]["active"] is False
        shop.sql("INSERT INTO items VALUES (4, 'four')")
        refused = shop.run(*CAPTURE)
        assert refused.code == 1 and "Fix: omnisupport-ingest source resume" in refused.err
        assert landed_rows(shop) == 1
        assert "no longer paused" in shop.run("source", "resume").out
        capture.says("The pause is over")
        until(lambda: landed_rows(shop) == 2)
    finally:
        assert capture.stop() == 0
    assert LandingStore(shop.home / "landing", SOURCE).landed().gap is None


def test_pause_is_nothing_that_a_supervisor_starts_again(shop: Shop) -> None:
    told: list[str] = []
    with environment(**shop.settings()):
        settings = Settings(_env_file=None)
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home, report=told.append) as supervisor:
        supervisor.start(services.capture(settings))
        supervisor.wait(shop.landed, service="the snapshot", seconds=PATIENCE)
        assert shop.run("source", "pause").code == 0
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        log = supervisor.log_of(services.CAPTURE)
        supervisor.wait(lambda: "is paused since" in log.read_text(), service="the pause", seconds=PATIENCE)
        supervisor.check()
        assert landed_rows(shop) == 0
        assert shop.run("source", "resume").code == 0
        supervisor.wait(lambda: landed_rows(shop) == 1, service="the row", seconds=PATIENCE)
    assert told == []


def test_pause_outlives_the_process_and_is_set_twice_as_once(shop: Shop) -> None:
    _captured(shop)
    first = shop.run("source", "pause")
    assert "No capture was running." in first.out
    assert shop.run("source", "pause", "--reason", "again").code == 0
    assert status(shop)["capture"]["paused_because"] is None
    capture = shop.following()
    capture.says("is paused since")
    assert capture.stop() == 0
    assert shop.run("source", "resume").code == 0
    assert "was not paused" in shop.run("source", "resume").out
    _captured(shop)


def test_drop_asks_says_what_it_means_and_takes_only_what_capture_made(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.sql(f"DROP PUBLICATION {shop.database}", f"GRANT CREATE ON DATABASE {shop.database} TO {ROLE}")
    shop.sql(f"ALTER TABLE items OWNER TO {ROLE}", f"ALTER TABLE orders OWNER TO {ROLE}")
    _captured(shop)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    asked = shop.run("source", "drop")
    assert asked.code == 130 and "a later capture needs --new-epoch" in asked.out
    assert status(shop)["server"]["slot"] is not None
    done = shop.run("source", "drop", "--yes")
    assert f"Dropped: slot {shop.database}, publication {shop.database}." in done.out
    assert shop.query("SELECT FROM pg_replication_slots WHERE database = current_database()") == []
    assert shop.query("SELECT FROM pg_publication") == []
    assert shop.landed()
    assert "Nothing of ours" in shop.run("source", "drop", "--yes").out
    assert shop.run(*CAPTURE).code == GapInSource.exit_code
    came_back = shop.run(*CAPTURE, "--new-epoch", "back again")
    assert came_back.code == 0, came_back.output


def test_drop_is_refused_while_capture_runs_and_leaves_a_slot_of_another_home_alone(shop: Shop) -> None:
    shop.sql(f"SELECT pg_create_logical_replication_slot('{shop.database}', 'pgoutput')")
    home = Home.open(shop.home, WindowSize(1))
    done = shop.run("source", "drop", "--yes")
    assert f"Stays: Slot {shop.database}: this home has not made it" in done.out
    with take_lease(home.run, SOURCE):
        assert shop.run("source", "drop", "--yes").code == CaptureRunning.exit_code
    assert shop.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == [
        (1,)
    ]


def test_publication_that_another_slot_may_use_stays(shop: Shop) -> None:
    shop.sql(f"DROP PUBLICATION {shop.database}", f"GRANT CREATE ON DATABASE {shop.database} TO {ROLE}")
    shop.sql(f"ALTER TABLE items OWNER TO {ROLE}", f"ALTER TABLE orders OWNER TO {ROLE}")
    _captured(shop)
    shop.sql(f"SELECT pg_create_logical_replication_slot('{shop.database}_b', 'pgoutput')")
    done = shop.run("source", "drop", "--yes")
    assert f"Dropped: slot {shop.database}." in done.out
    assert f"other slots that may use it ({shop.database}_b)" in done.out
    assert len(shop.query("SELECT FROM pg_publication")) == 1
