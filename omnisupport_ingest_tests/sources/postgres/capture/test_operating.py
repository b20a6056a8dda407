"""A capture's state is one true word, its last error outlives it, and a restart loses nothing."""

from __future__ import annotations

import json
import os
import signal
import stat
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.requests import RestartRequest
from omnisupport_ingest.sources.postgres.capture.state import (
    CaptureRecords,
    LastError,
    State,
    capture_state,
    recorded,
)
from omnisupport_ingest.sources.postgres.session.errors import GapInSource, NotRestartable, SourceUnavailable
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest.verify import services
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import environment
from omnisupport_ingest_tests.sources.postgres.awkward import PASSWORD, SOURCE, Shop
from omnisupport_ingest_tests.sources.postgres.shop_facts import (
    killed_at,
    landed_rows,
    same_as_source,
    status,
)
from omnisupport_ingest_tests.waiting import PATIENCE, until

ONCE = ("capture", "--once")


def state(shop: Shop) -> str:
    return str(json.loads(shop.run("source", "status", "--json").out)["state"])


def record_file(shop: Shop) -> Path:
    return shop.home / "landing" / SOURCE / "capture.json"


def captures(shop: Shop) -> bool:
    """Whether a capture has come through the checks of its start, and runs."""
    record = CaptureRecords(record_file(shop).parent).read()
    return record is not None and record.ready and record.ended is None


def test_state_follows_a_capture_from_its_first_start_over_a_pause_to_its_end(shop: Shop) -> None:
    Home.open(shop.home, WindowSize(1))
    never = status(shop)
    assert (never["state"], never["state_since"], never["last_error"]) == ("STOPPED", None, None)
    assert "no start is on record" in shop.run("source", "status").out
    capture = shop.following()
    capture.says("snapshot of orders")
    runs = status(shop)
    assert runs["state"] == "RUNNING" and runs["capture"]["pid"] == capture.process.pid
    assert runs["capture"]["host"] == os.uname().nodename
    assert datetime.fromisoformat(runs["state_since"]) <= datetime.now(UTC)
    assert shop.run("source", "pause", "--reason", "a test").code == 0
    until(lambda: state(shop) == "PAUSED")
    assert "PAUSED since" in shop.run("source", "status").out
    assert shop.run("source", "resume").code == 0
    until(lambda: state(shop) == "RUNNING")
    assert capture.stop() == 0
    ended = status(shop)
    assert ended["state"] == "STOPPED" and ended["last_error"] is None
    assert ended["capture"]["pid"] is None and ended["server"]["slot"]["plugin"] == "pgoutput"


def test_error_of_a_capture_is_shown_when_it_is_gone_and_stays_after_a_good_start(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    shop.sql(f"SELECT pg_drop_replication_slot('{shop.database}')")
    refused = shop.run(*ONCE)
    assert refused.code == GapInSource.exit_code
    failed = status(shop, code=1)
    error = failed["last_error"]
    assert failed["state"] == "FAILED" and failed["state_since"] == error["at"]
    assert error["error"] == "GapInSource" and error["problem"] in refused.err
    assert "--new-epoch" in error["fix"] and failed["capture"]["killed"] is False
    shown = shop.run("source", "status").out
    assert "FAILED since" in shown and "GapInSource" in shown and shown.count(error["problem"]) == 1
    assert shop.run(*ONCE).code == GapInSource.exit_code
    again = status(shop, code=1)
    # The state has lasted since the first of the failures; the error is the last one.
    assert again["state_since"] == failed["state_since"] and again["last_error"]["at"] > error["at"]
    assert shop.run(*ONCE, "--new-epoch", "a test").code == 0
    well = status(shop)
    assert well["state"] == "STOPPED" and well["last_error"] == again["last_error"]
    assert error["problem"] in " ".join(shop.run("source", "status").out.split())
    assert stat.S_IMODE(record_file(shop).stat().st_mode) == 0o600
    assert PASSWORD not in record_file(shop).read_text()


def test_killed_capture_is_failed_and_told_from_one_that_ended_by_an_error(shop: Shop) -> None:
    capture = shop.following()
    capture.says("snapshot of orders")
    shop.sql("INSERT INTO items VALUES (3, 'three')")
    until(lambda: landed_rows(shop) == 1)
    os.kill(capture.process.pid, signal.SIGKILL)
    capture.process.communicate()
    killed = status(shop, code=1)
    assert killed["state"] == "FAILED" and killed["capture"]["killed"] is True
    assert killed["last_error"]["error"] == "Killed"
    assert f"process {capture.process.pid}" in killed["last_error"]["problem"]
    # The last that is known of it is its last batch.
    assert killed["last_error"]["at"] == killed["landed"]["at"]
    assert "FAILED: killed, not before" in shop.run("source", "status").out
    assert shop.run(*ONCE).code == 0
    after = status(shop)
    assert after["state"] == "STOPPED" and after["last_error"] == killed["last_error"]


def test_source_that_is_away_is_a_failure_until_it_lets_capture_in_again(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    away = shop.run(*ONCE, dsn=shop.dsn(port=1))
    assert away.code == SourceUnavailable.exit_code
    # `capture --once` asks for the end of the WAL before it captures; what follows does not.
    assert state(shop) == "STOPPED"
    shop.server.server.stop()
    capture = shop.following()
    try:
        capture.says("Trying again in")
        assert state(shop) == "FAILED"
        shop.server.server.start()
        until(lambda: state(shop) == "RUNNING")
        assert status(shop)["last_error"]["error"] == "SourceUnavailable"
    finally:
        shop.server.server.start()
        assert capture.stop() == 0


def test_lag_is_told_in_bytes_and_seconds_and_an_idle_source_has_none(shop: Shop) -> None:
    assert shop.run(*ONCE).code == 0
    shop.sql("INSERT INTO items SELECT n, repeat('x', 1000) FROM generate_series(10, 1000) n")
    behind = status(shop)["landed"]
    assert behind["bytes_behind"] > 500_000
    assert "of WAL" in shop.run("source", "status").out

    def nothing_left() -> bool:
        # Now and then the server writes WAL of its own.
        assert shop.run(*ONCE).code == 0
        return "lag          none: the source has written nothing since" in shop.run("source", "status").out

    until(nothing_left)
    first = status(shop)["landed"]
    time.sleep(1.0)
    later = status(shop)["landed"]
    # The clock goes on and the watermark does not: only the bytes say that nothing is missing.
    assert later["watermark"] == first["watermark"]
    assert later["watermark_lag_seconds"] >= first["watermark_lag_seconds"] + 1.0


def test_restart_goes_on_in_the_same_process_without_loss_and_takes_in_a_new_contract(shop: Shop) -> None:
    capture = shop.following()
    try:
        capture.says("snapshot of orders")
        before = status(shop)
        shop.sql("CREATE TABLE late (id int PRIMARY KEY, v text)", "INSERT INTO late VALUES (1, 'one')")
        shop.sql("GRANT SELECT ON late TO PUBLIC", f"ALTER PUBLICATION {shop.database} ADD TABLE late")
        shop.contract("late")
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        done = shop.run("source", "restart", "--reason", "a new table")
        assert done.code == 0, done.output
        assert f"captured again by process {capture.process.pid}" in done.out
        capture.says("(a new table). The capture starts again.")
        capture.says("snapshot of late")
        shop.sql("INSERT INTO items VALUES (4, 'four')")
        until(lambda: landed_rows(shop) == 2)
        after = status(shop)
        assert after["state"] == "RUNNING" and after["capture"]["pid"] == before["capture"]["pid"]
        assert after["last_error"] is None
        # Asked for once, done once.
        record = CaptureRecords(record_file(shop).parent).read()
        time.sleep(1.0)
        assert CaptureRecords(record_file(shop).parent).read() == record
    finally:
        assert capture.stop() == 0
    assert LandingStore(shop.home / "landing", SOURCE).landed().gap is None


def test_restart_that_fails_tells_the_error_of_the_start(shop: Shop) -> None:
    capture = shop.following()
    capture.says("snapshot of orders")
    until(lambda: captures(shop))
    # One table that cannot be followed is left out, and that is told; the restart goes well.
    shop.sql("ALTER TABLE items DROP CONSTRAINT items_pkey")
    done = shop.run("source", "restart")
    assert done.code == 0, done.output
    capture.says("items is left out, the other tables go on")
    shop.sql("INSERT INTO orders VALUES (3, 'beside')")
    until(lambda: landed_rows(shop) == 1)
    same_as_source(shop, "orders")
    told = status(shop, code=1)
    assert told["state"] == "RUNNING"
    (warned,) = [each for each in told["warnings"] if "items is left out" in each["what"]]
    assert "source snapshot items" in warned["fix"]
    # Without a table that it could follow nothing goes on.
    shop.sql("ALTER TABLE orders DROP CONSTRAINT orders_pkey")
    done = shop.run("source", "restart")
    assert done.code == 1 and "failed when it started again" in done.err
    assert "Key column id of public.orders" in done.err
    assert 'ALTER TABLE "public"."orders" ADD PRIMARY KEY ("id")' in done.err
    assert capture.process.wait(timeout=PATIENCE) == 5
    assert "Error:" in capture.process.communicate()[1]
    failed = status(shop, code=1)
    assert failed["state"] == "FAILED" and failed["last_error"]["error"] == "PreflightFailed"


def test_restart_is_refused_with_the_way_to_go_where_nothing_would_obey(shop: Shop) -> None:
    home = Home.open(shop.home, WindowSize(1))
    landing = LandingStore(home.landing, SOURCE).folder
    none = shop.run("source", "restart")
    assert none.code == NotRestartable.exit_code and "omnisupport-ingest up" in none.err
    with (
        take_lease(home.run, SOURCE),
        recorded(CaptureRecords(landing), follows=False, last_landed=lambda: None),
    ):
        bounded = shop.run("source", "restart")
    assert bounded.code == NotRestartable.exit_code and "ends by itself" in bounded.err
    with take_lease(home.run, SOURCE):
        other = shop.run("source", "restart")
    assert other.code == NotRestartable.exit_code and "has not begun to capture" in other.err
    assert shop.run("source", "pause").code == 0
    paused = shop.run("source", "restart")
    assert paused.code == 1 and "Fix: omnisupport-ingest source resume" in paused.err
    assert not (landing / "restart.json").exists()


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_capture_killed_at_each_record_of_a_start_goes_on_and_is_known_by_it(
    shop: Shop, moment: str, times: int
) -> None:
    assert shop.run(*ONCE).code == 0
    # Its begin, that it may capture, its end.
    for number in (1, 2, 3):
        for _ in range(times):
            killed_at(shop, f"source.capture_record.{moment}:{number}", *ONCE)
        begun, ended = (number, moment) != (1, "before"), (number, moment) == (3, "after")
        assert status(shop, code=int(begun and not ended))["state"] == (
            "FAILED" if begun and not ended else "STOPPED"
        )
        shop.sql(f"INSERT INTO items VALUES ({number + 10}, 'x')")
        assert shop.run(*ONCE).code == 0
        assert status(shop)["state"] == "STOPPED" and landed_rows(shop) == number


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_restart_killed_at_its_gates_is_made_by_the_same_command_and_not_twice(
    shop: Shop, moment: str, times: int
) -> None:
    capture = shop.following()
    capture.says("snapshot of orders")
    for _ in range(times):
        killed_at(shop, f"source.restart.{moment}", "source", "restart")
        if moment == "after":
            capture.says("The capture starts again.")
            until(lambda: captures(shop))
    assert shop.run("source", "restart").code == 0
    capture.says("The capture starts again.")
    assert capture.stop() == 0
    note = RestartRequest(record_file(shop).parent)
    for _ in range(times):
        note.write("left behind")
        killed_at(shop, f"source.restart_clear.{moment}", "capture")
        assert note.present == (moment == "before")
    capture = shop.following()
    until(lambda: state(shop) == "RUNNING")
    assert not note.present
    assert capture.stop() == 0


def test_only_the_class_of_an_error_that_is_not_ours_is_kept(tmp_path: Path) -> None:
    records = CaptureRecords(tmp_path)
    with pytest.raises(ValueError), recorded(records, follows=True, last_landed=lambda: None):
        raise ValueError("row of a customer")
    found = records.read()
    assert found is not None and found.last_error is not None and found.failing_since is not None
    assert found.last_error.error == "ValueError"
    assert "customer" not in (tmp_path / "capture.json").read_text()


def test_capture_that_a_person_stops_has_not_failed(tmp_path: Path) -> None:
    records = CaptureRecords(tmp_path)
    with pytest.raises(KeyboardInterrupt), recorded(records, follows=True, last_landed=lambda: None):
        raise KeyboardInterrupt
    found = records.read()
    assert found is not None and found.ended is not None
    assert found.failing_since is None and found.last_error is None


def test_record_that_cannot_be_read_is_none_and_the_next_start_writes_it_anew(tmp_path: Path) -> None:
    records = CaptureRecords(tmp_path)
    (tmp_path / "capture.json").write_text('{"pid": 1}')
    assert records.read() is None
    with recorded(records, follows=False, last_landed=lambda: None) as ready:
        ready()
    found = records.read()
    assert found is not None and found.ready and found.ended is not None and not found.follows
    assert LastError.of(SourceUnavailable("a", fix="b")).fix == "b"


def test_restart_is_nothing_that_a_supervisor_starts_again_and_stands_in_the_logs(shop: Shop) -> None:
    told: list[str] = []
    with environment(**shop.settings()):
        settings = Settings(_env_file=None)
    home = Home.open(settings.home, settings.window_size)
    with Supervisor(home, report=told.append) as supervisor:
        supervisor.start(services.capture(settings))
        supervisor.wait(shop.landed, service="the snapshot", seconds=PATIENCE)
        shop.sql("INSERT INTO items VALUES (3, 'three')")
        assert shop.run("source", "restart").code == 0
        shop.sql("INSERT INTO items VALUES (4, 'four')")
        supervisor.wait(lambda: landed_rows(shop) == 2, service="the rows", seconds=PATIENCE)
        supervisor.check()
        logged = shop.run("logs", "--component", "capture")
        assert logged.code == 0 and "capture | A restart of the capture of shop was requested." in logged.out
        assert "There are no errors in capture." in shop.run("logs", "--errors").err
    assert told == []


@pytest.mark.slow
def test_one_who_looks_never_keeps_a_capture_from_starting_and_never_sees_a_failing_one_run(
    tmp_path: Path,
) -> None:
    records, over, seen = CaptureRecords(tmp_path), threading.Event(), set[State]()

    def look() -> None:
        while not over.is_set():
            seen.add(capture_state(tmp_path, tmp_path, SOURCE, None, None).state)

    def fail() -> None:
        with take_lease(tmp_path, SOURCE), recorded(records, follows=True, last_landed=lambda: None):
            raise SourceUnavailable("away", fix="wait")

    with pytest.raises(SourceUnavailable):
        fail()
    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(300):
            with pytest.raises(SourceUnavailable):
                fail()
    finally:
        over.set()
        looking.join()
    assert seen == {State.FAILED}
