"""Alarms: each change of what is wrong is sent once, whoever looks, and the heartbeat comes after them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from pydantic import SecretStr

from omnisupport_ingest.cli import status, status_health
from omnisupport_ingest.cli.alarms import Watch, alarms
from omnisupport_ingest.cli.opening import open_workspace
from omnisupport_ingest.cli.status_health import Problem
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.events.quarantine_files import EventsGone
from omnisupport_ingest.runtime.alarm import AlarmNotSent
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, run

RED = Problem("check desk/dim_notes:fresh", "desk/dim_notes:fresh: 61 s behind.", "omnisupport-ingest status")
BROKEN = Problem("capture desk", "capture of desk has failed", "source status desk", broken=True)


class Platform:
    """What a look finds, and what a real command and a real heartbeat got of it."""

    def __init__(self, folder: Path, heartbeat: str) -> None:
        self.found: list[Problem] = []
        self.running = True
        self._told = folder / "told"
        self.command = f"cat >> {self._told}; echo >> {self._told}"
        self._heartbeat = heartbeat
        self._home = Home.open(folder / "home", WindowSize(60))

    def look(self) -> dict[str, object]:
        settings = Settings(
            home=self._home.path,
            alarm_command=self.command,
            heartbeat_url=SecretStr(self._heartbeat),
            _env_file=None,  # type: ignore[call-arg]
        )
        return Watch(settings, self._home, lambda: (self.found, self.running)).look()

    @property
    def told(self) -> list[tuple[str, list[str]]]:
        """Level and new problems of each alarm."""
        lines = self._told.read_text().splitlines() if self._told.exists() else []
        documents = [json.loads(line) for line in lines]
        return [
            (each["level"], [one["problem"] for one in each["problems"] if one["new"]]) for each in documents
        ]


class Heart(HTTPServer):
    """A watcher on loopback that counts the signs of life."""

    def __init__(self) -> None:
        self.beats, self.code = 0, 200
        heart = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                heart.beats += 1
                self.send_response(heart.code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def heart() -> Iterator[Heart]:
    server = Heart()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def platform(tmp_path: Path, heart: Heart) -> Platform:
    return Platform(tmp_path, f"http://127.0.0.1:{heart.server_port}/s3cret")


def test_each_change_is_told_once_and_so_is_its_end(platform: Platform) -> None:
    platform.look()
    assert platform.told == []
    platform.found = [RED]
    platform.look()
    platform.found = [Problem(RED.kind, "desk/dim_notes:fresh: 121 s behind.", RED.help)]
    platform.look()
    platform.found = [*platform.found, BROKEN]
    platform.look()
    platform.found = []
    platform.look()
    platform.look()
    assert platform.told == [("warning", [RED.says]), ("alarm", [BROKEN.says]), ("well", [])]


def test_a_warning_that_becomes_an_alarm_beside_another_alarm_is_sent(platform: Platform) -> None:
    platform.found = [BROKEN, RED]
    platform.look()
    platform.found = [BROKEN, replace(RED, broken=True)]
    document = platform.look()
    assert document["sent"] and [each["new"] for each in document["problems"]] == [False, True]  # type: ignore[attr-defined]
    assert not platform.look()["sent"]


def test_what_cannot_be_looked_at_is_not_said_to_be_well(platform: Platform) -> None:
    other = Problem("run retention", "the last run of retention failed", "logs")
    away = Problem("records", "Dagster's records cannot be read", "doctor", hides=("check ", "run "))
    platform.found = [replace(RED, broken=True), other]
    platform.look()
    platform.found = [away]
    document = platform.look()
    assert (document["level"], document["gone"]) == ("alarm", [])
    platform.found = [other]
    document = platform.look()
    assert document["gone"] == [RED.kind, away.kind]
    assert [each["new"] for each in document["problems"]] == [False]  # type: ignore[attr-defined]


def test_a_source_that_cannot_be_looked_at_hides_none_whose_name_begins_alike(platform: Platform) -> None:
    gaps = [Problem(f"gap {each}", "a gap", "source repair", broken=True) for each in ("shop", "shop_eu")]
    platform.found = [*gaps]
    platform.look()
    platform.found = [Problem("landing shop", "cannot be read", "restore it", hides=("gap shop",))]
    document = platform.look()
    assert (document["gone"], document["level"]) == (["gap shop_eu"], "alarm")


def test_a_slot_that_cannot_be_looked_at_stays_what_it_was(platform: Platform) -> None:
    platform.found = [Problem("slot shop: retained", "23 GB of WAL", "source status", broken=True)]
    platform.look()
    platform.found = [Problem("slot shop: unknown", "no answer", "source status", hides=("slot shop:",))]
    document = platform.look()
    assert (document["gone"], document["level"]) == ([], "alarm")


@pytest.mark.parametrize("there", [True, None, False])
def test_a_slot_that_nobody_reads_is_hidden_while_its_server_does_not_answer(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch, there: bool | None
) -> None:
    monkeypatch.setattr("omnisupport_ingest.sources.postgres.slot.home_slot.may_have_slot", lambda *_: True)
    log = {"name": "gone", "slot": {"name": "s", "there": there, "read": False}}
    slots = status_health.unread_slots(open_workspace(), [log])
    found = list(status_health.problems({**document(status.status), "unread_slots": slots}))
    kinds = {each.kind: each.hides for each in found if each.kind in ("unread slot gone", "away gone")}
    assert (
        kinds
        == {
            True: {"unread slot gone": ()},
            None: {"away gone": ("unread slot gone",)},
            False: {},
        }[there]
    )


def test_a_file_of_quarantine_that_is_gone_is_an_alarm(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise EventsGone("q.parquet is not there.", fix="Run the window again.")

    monkeypatch.setattr("omnisupport_ingest.review.quarantine_stock.stock_of", lost)
    (found,) = [each for each in status_health.problems(document(status.status)) if "quarantine" in each.kind]
    assert (found.says, found.help, found.broken) == (
        "q.parquet is not there.",
        "Run the window again.",
        True,
    )


def test_what_could_not_be_told_is_told_by_the_next_look_and_the_heart_stands_still_meanwhile(
    platform: Platform, heart: Heart
) -> None:
    platform.look()
    assert heart.beats == 1
    works, platform.command, platform.found = platform.command, "exit 7 # s3cret", [BROKEN]
    for _ in range(2):
        with pytest.raises(AlarmNotSent, match="ended with code 7") as failed:
            platform.look()
        assert "s3cret" not in repr(failed.value)
    assert heart.beats == 1
    platform.command = works
    platform.look()
    assert (platform.told, heart.beats) == ([("alarm", [BROKEN.says])], 2)


def test_a_platform_that_does_not_run_gives_no_sign_of_life(platform: Platform, heart: Heart) -> None:
    platform.running = False
    platform.look()
    assert heart.beats == 0


def test_a_heartbeat_that_is_refused_is_named_without_its_address(platform: Platform, heart: Heart) -> None:
    heart.code = 503
    with pytest.raises(AlarmNotSent, match="The heartbeat answered 503") as failed:
        platform.look()
    assert "s3cret" not in repr(failed.value)


def test_a_timer_tells_that_the_platform_does_not_run_and_of_the_quarantine(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"cat > {told}")
    assert document(alarms)["sent"] is False, "a platform that nobody expects to run is well"
    found = document(alarms, "--expect-running")
    assert found["sent"] is True
    (problem,) = json.loads(told.read_text())["problems"]
    assert problem["problem"] == "the platform does not run"
    assert problem["fix"].startswith("omnisupport-ingest up, or")
    told.unlink()
    assert document(alarms, "--expect-running")["sent"] is False
    assert not told.exists()


def test_a_landing_that_cannot_be_read_is_told_with_its_fix(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"cat > {tmp_path / 'told'}")
    manifest = next((sample_home.home / "landing").glob("*/manifests/*.json"))
    manifest.write_text("{")
    shutil.rmtree(manifest.parents[1] / "index", ignore_errors=True)
    run(alarms)
    told = json.loads((tmp_path / "told").read_text())
    assert told["level"] == "alarm"
    (problem,) = told["problems"]
    assert "cannot be read" in problem["problem"]
    assert problem["fix"]


def test_a_test_needs_somebody_to_tell(sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="OMNISUPPORT_ALARM_COMMAND"):
        run(alarms, "--test")
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", "cat > told")
    assert "Sent" in run(alarms, "--test").stdout
    assert json.loads(Path("told").read_text())["test"] is True


@pytest.mark.parametrize("table", ["dim_notes", "raw_cdc_staging", "deduped_events", "quarantine"])
def test_a_damaged_log_of_one_table_is_an_alarm_and_silences_no_other(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    sent = sample_home.folder / "sent"
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"cat > {sent}")
    run(alarms, "--expect-running")
    kinds = {each["kind"] for each in json.loads(sent.read_text())["problems"]}
    (folder,) = (sample_home.home / "lake").rglob(f"{table}/_delta_log")
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / f"{0:020d}.json").write_bytes(bytes(100))
    run(alarms, "--expect-running")
    found = json.loads(sent.read_text())["problems"]
    (new,) = (each for each in found if each["new"])
    assert (new["kind"], new["level"]) == (
        f"table {folder.parent.relative_to(sample_home.home / 'lake')}",
        "alarm",
    )
    assert str(folder.parent) in new["fix"]
    assert kinds <= {each["kind"] for each in found}


def test_a_look_that_ends_with_an_error_is_an_alarm(
    sample_home: SampleHome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise ValueError("with a value of a row")

    monkeypatch.setattr(status, "status_document", fails)
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"cat > {tmp_path / 'sent'}")
    run(alarms)
    (problem,) = json.loads((tmp_path / "sent").read_text())["problems"]
    assert problem["level"] == "alarm" and "ValueError" in problem["problem"]
    assert "value of a row" not in problem["problem"]
