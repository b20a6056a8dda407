"""Health over HTTP: what goes on, what is ready, and what a probe hears while something hangs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from dagster._core.test_utils import instance_for_test
from dagster._daemon.types import DaemonHeartbeat

from omnisupport_ingest.cli import metrics, probes
from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.probes import LIVE, READY, Finding, Health, attached, look
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import DAEMON_HOLDS, HomeLock
from omnisupport_ingest.runtime.ports import LOOPBACK, PortTaken, free_port
from omnisupport_ingest.runtime.running import Beat
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.storage import forget_home
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.cli.sample_home import SampleHome
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.waiting import PATIENCE, until


def asked(port: int, path: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}{path}", timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)


def found(settings: Settings) -> dict[str, Finding]:
    return {each.name: each for each in look(settings)}


def test_a_home_on_which_nothing_ever_ran_is_live_and_not_ready(sample_home: SampleHome) -> None:
    port = free_port()
    end = metrics.serve(port)
    try:
        until(lambda: len(asked(port, READY)[1]["found"]) > 2)
        assert asked(port, LIVE)[0] == 200
        status, body = asked(port, READY)
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics") as answer:
            assert b"omnisupport_up 1.0" in answer.read()
        with pytest.raises(PortTaken, match=str(port)):
            metrics.serve(port)
        with environment(metrics_port=str(port)):
            assert command("serve", "metrics", "--check").code == 0
    finally:
        end()
    assert (status, body["ok"]) == (503, False)
    wrong = [each for each in body["found"] if not each["ok"]]
    assert [each["name"] for each in wrong] == ["services"], body
    with environment(metrics_port=str(port)):
        assert command("serve", "metrics", "--check").code == 1, "nobody answers"


def test_a_home_that_is_gone_is_not_ready_and_says_why(sample_home: SampleHome) -> None:
    settings = open_settings()
    assert found(settings)["home"].ok
    sample_home.home.rename(sample_home.home.with_name("away"))
    assert [(name, each.ok) for name, each in found(settings).items()] == [("home", False)]


def test_a_home_whose_store_does_not_answer_is_not_ready(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "h", storage=s3.place(), _env_file=None)
    Home.open(settings.home, settings.window_size, storage=settings.storage)
    assert found(settings)["home"].ok
    # The library asks the address that it was opened with.
    forget_home(settings.home)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{LOOPBACK}:{free_port()}")
    gone = found(settings)["home"]
    assert not gone.ok and "s3://" in gone.says


def test_little_room_is_not_ready(sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = open_settings()
    assert found(settings)["disk"].ok
    monkeypatch.setattr(probes, "SCARCE_BYTES", 2**63)
    assert not found(settings)["disk"].ok


def test_a_look_that_hangs_is_answered_at_once_and_is_not_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_STUCK_SECONDS", 1.0)
    monkeypatch.setattr(probes, "_LATE_SECONDS", 0.5)
    monkeypatch.setattr(probes, "_LOOK_SECONDS", 0.01)
    hangs, stop = threading.Event(), threading.Event()

    def looking() -> Iterator[Finding]:
        yield Finding("home", ok=True, says="there")
        if hangs.is_set():
            stop.wait()

    health = Health(looking)
    thread = threading.Thread(target=health.watch, args=(stop,))
    thread.start()
    try:
        until(lambda: all(each.ok for each in health.ready()))
        hangs.set()
        until(lambda: not all(each.ok for each in health.live()))
        began = time.monotonic()
        assert [each.name for each in health.ready() if not each.ok] == ["look"]
        assert time.monotonic() - began < 1
    finally:
        stop.set()
        thread.join()


def test_a_look_that_fails_is_told_without_its_text_and_the_next_goes_well() -> None:
    fails = [True]

    def looking() -> Iterator[Finding]:
        if fails[0]:
            raise KeyError("a value of a row")
        yield Finding("home", ok=True, says="there")

    health = Health(looking)
    health.look_once()
    assert [each.says for each in health.ready() if not each.ok] == ["the look failed: KeyError"]
    fails[0] = False
    health.look_once()
    assert all(each.ok for each in health.ready())


def test_the_loop_of_up_that_does_not_go_round_is_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "h", _env_file=None)
    home = Home.open(settings.home, settings.window_size)
    Beat(home.run)()
    assert "up" not in found(settings), "nobody holds the home"
    with HomeLock(home, "up"):
        health = Health(lambda: look(settings))
        health.look_once()
        assert [each.name for each in health.live() if each.ok] == ["look", "up"]
        monkeypatch.setattr(probes, "_STUCK_SECONDS", 0.0)
        assert not found(settings)["up"].ok


@pytest.mark.parametrize("beats", [True, False])
def test_a_daemon_is_there_while_it_gives_heartbeats(
    beats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "h", _env_file=None)
    home = Home.open(settings.home, settings.window_size)
    (home.path / "dagster").mkdir()
    with (
        environment(home=str(home.path)),
        instance_for_test(temp_dir=str(home.path / "dagster")) as instance,
    ):
        assert command("serve", "daemon", "--check").code == 1, "nobody holds the home"
        with HomeLock(home, DAEMON_HOLDS):
            instance.add_daemon_heartbeat(DaemonHeartbeat(0.0, "SENSOR", "an earlier one", []))
            assert command("serve", "daemon", "--check").code == 0, "it has just begun"
            monkeypatch.setattr(probes, "_HEARTBEAT_SECONDS", 0.0)
            if beats:
                soon = time.time() + 60
                instance.add_daemon_heartbeat(DaemonHeartbeat(soon, "SENSOR", "this one", []))
            assert command("serve", "daemon", "--check").code == (0 if beats else 1)


LOG = {
    "name": "desk", "capture": "RUNNING", "paused": None, "last_error": None, "reachable": True,
    "problem": None, "slot": {"name": "slot_of_desk", "read": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "ok", "says"),
    [
        ({}, True, "reads its slot"),
        ({"capture": "PAUSED", "paused": "since noon"}, True, "paused since noon"),
        ({"capture": "STOPPED"}, False, "is stopped"),
        ({"capture": "FAILED", "last_error": "The slot is gone."}, False, "The slot is gone."),
        ({"reachable": False, "problem": "refused"}, False, "does not answer: refused"),
        ({"slot": {"name": "slot_of_desk", "read": False}}, False, "nothing reads the slot slot_of_desk"),
    ],
)
def test_a_capture_is_attached_if_it_runs_and_reads_its_slot(
    changed: dict[str, Any], ok: bool, says: str
) -> None:
    finding = attached(LOG | changed)
    assert (finding.ok, says in finding.says) == (ok, True), finding


@pytest.mark.slow
def test_a_real_capture_is_attached_until_it_is_stopped(
    source: SourceUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    monkeypatch.chdir(tmp_path)
    given = pgbench.environment(pgbench.variables(source, tmp_path))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "capture.log").open("ab") as log:
        capture = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "capture"],
            env=given,
            stdout=log,
            stderr=log,
        )

    def of_capture() -> Finding | None:
        return found(open_settings()).get(f"capture {pgbench.SOURCE}")

    try:
        until(lambda: capture.poll() is None and (seen := of_capture()) is not None and seen.ok, every=0.5)
        capture.send_signal(signal.SIGTERM)
        assert capture.wait(PATIENCE) == 0, (tmp_path / "capture.log").read_text()[-2000:]
        ended = of_capture()
        assert ended is not None and not ended.ok
    finally:
        capture.kill()
        capture.wait()


@pytest.mark.parametrize(("holds", "hangs"), [("up", True), ("serve daemon", True), ("sync", False)])
def test_only_who_has_a_daemon_can_have_one_that_hangs(
    holds: str, hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that a pass has taken has the heartbeat of an earlier daemon."""
    home = Home.open(tmp_path / "home", WindowSize(60))
    monkeypatch.setattr(probes, "daemon_seen", lambda *_: datetime.now(UTC) - timedelta(hours=1))
    monkeypatch.setattr(probes, "_HEARTBEAT_SECONDS", -1.0)
    with HomeLock(home, holds):
        assert probes.daemon_hangs(home, Settings(home=home.path, _env_file=None)) is hangs
