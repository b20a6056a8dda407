"""``tune`` on a real capture: it measures, recommends and writes, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from omnisupport_ingest.demo.domains import embedded_domain
from omnisupport_ingest.demo.workload import Workload
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.requests import PauseRequest
from omnisupport_ingest.sources.postgres.embedded.dsn import source_dsn
from omnisupport_ingest.tuning import measuring
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.waiting import until

pytestmark = [pytest.mark.full, pytest.mark.slow]


def test_it_measures_recommends_and_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = "# mine\nOMNISUPPORT_SLOT=a_slot_of_mine\nOTHER=1\n"
    (tmp_path / ".env").write_text(mine)
    # Nothing may reach the source of the settings: it would fail at once.
    with environment(source_dsn=f"host={tmp_path}/nowhere dbname=mine", home=str(tmp_path / "home")):
        held = dict(os.environ)
        done = command(
            *("tune", "--rate", "200", "--seconds", "2", "--interval", "0.3", "--size", "20000"),
            *("--most-batches", "20000", "--most-files", "90000", "--most-cpu", "400", "--write", "--json"),
        )
        assert dict(os.environ) == held
    assert done.code == 0, done.output
    found = json.loads(done.out)
    by_age, by_size = found["points"]
    assert found["recommended"] == {"OMNISUPPORT_BATCH_MAX_SECONDS": 0.3}
    assert by_age["events"] == by_size["events"] >= 400
    assert 0.3 < by_age["landing"]["p50"] <= by_age["landing"]["p95"] <= by_age["landing"]["p99"]
    assert by_size["events_per_batch"] < by_age["events_per_batch"]
    assert by_age["files"] == 2 * by_age["batches"]
    assert by_age["cpu"] > 0
    assert (tmp_path / ".env").read_text() == mine + "OMNISUPPORT_BATCH_MAX_SECONDS=0.3\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == [".env", "tune.svg"]
    assert not _working_in(tmp_path)


def test_own_traffic_is_measured_by_the_own_capture_on_the_own_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home.open(tmp_path / "home", WindowSize(60))
    stop = threading.Event()
    programs = threading.Thread(target=_write, args=(home, stop))
    programs.start()
    try:
        with environment(home=str(home.path)):
            done = command(
                *("tune", "--own", "--yes", "--seconds", "4", "--interval", "0.3", "--interval", "2"),
                *("--most-batches", "20000", "--most-files", "90000", "--most-cpu", "400", "--json"),
            )
    finally:
        stop.set()
        programs.join()
    assert done.code == 0, done.output
    often, seldom = json.loads(done.out)["points"]
    assert (often["setting"]["seconds"], seldom["setting"]["seconds"]) == (0.3, 2.0)
    assert often["events"] > 0 < seldom["events"]
    assert seldom["events_per_batch"] > often["events_per_batch"]
    assert often["rate"] == often["rate_asked"], "what others commit is not asked for"
    landed = LandingStore(home.landing, "support_desk").landed()
    assert landed.count >= often["batches"] + seldom["batches"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["home", "tune.svg"]


def _write(home: Home, stop: threading.Event) -> None:
    """Write as programs of the user do, once their server runs and is prepared."""
    settings = Settings(home=home.path, _env_file=None)  # type: ignore[call-arg]
    until(lambda: stop.is_set() or "capture" in running_services(home.run))
    if not stop.is_set():
        Workload(embedded_domain(settings), source_dsn(settings, home), 1).run_forever(100, stop)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--own", "--rate", "5"), "--own makes no traffic"),
        (("--own", "--yes"), "There is no home"),
    ],
    ids=["a rate", "no home"],
)
def test_own_needs_a_home_and_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with environment(home=str(tmp_path / "nowhere")):
        done = command("tune", *options)
    assert done.code in (2, 3)
    assert problem in done.output


@pytest.mark.parametrize("when", ["before it is asked for", "before it begins", "while it runs"])
def test_own_measures_no_paused_source_and_says_at_once_how_to_end_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home.open(tmp_path / "home", WindowSize(60))
    pause = PauseRequest(LandingStore(home.landing, "support_desk").folder)
    if when == "while it runs":
        began = measuring._traffic
        monkeypatch.setattr(
            measuring, "_traffic", lambda platform: (began(platform), pause.write("a test"))[0]
        )
    else:
        pause.write("a test")
        monkeypatch.setattr(measuring, "_running", lambda *_: pytest.fail("nothing is started"))
    agreed = () if when == "before it is asked for" else ("--yes",)
    with environment(home=str(home.path)):
        done = command("tune", "--own", *agreed, "--seconds", "1", "--interval", "1")
    assert done.code == 1 and "Go on?" not in done.output
    assert "The capture of support_desk is paused since" in done.err and "(a test)" in done.err
    assert "Fix: omnisupport-ingest source resume" in done.err
    assert pause.present


def _working_in(folder: Path) -> list[int]:
    """Processes of which a variable or the working folder lies in ``folder``, but this one."""
    found = []
    for each in psutil.process_iter():
        try:
            places = (each.cwd(), *each.environ().values())
        except psutil.Error:
            continue
        if each.pid != os.getpid() and any(place.startswith(str(folder)) for place in places):
            found.append(each.pid)
    return found
