"""``land``: what a person and a machine are told, and the watcher as a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.kept import Documents, keep
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify import services
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.waiting import PATIENCE, until

SAMPLE = program_file("data/debezium_events/partner_tickets.jsonl")
SOURCE = "partner_desk"
BEFORE_SAMPLE = datetime(2026, 11, 21, 6, tzinfo=UTC)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home that was made before the events of the sample, with the contracts that come along."""
    Home.open(tmp_path / "home", WindowSize(60), now=BEFORE_SAMPLE)
    with environment(home=str(tmp_path / "home"), contracts_dir=str(program_file("contracts/data"))):
        yield tmp_path / "home"


def test_the_sample_lands_and_a_person_is_told_what_of(home: Path) -> None:
    done = command("land", str(SAMPLE), "--source", SOURCE)
    assert done.code == 0, done.output
    assert "12 events" in done.out
    assert "log position alone" in done.out
    assert "1 tombstone, 1 heartbeat" in done.out
    assert "Windows: 2026-11-21T0600, 2026-11-21T0700, 2026-11-21T0800. Late: none." in done.out
    again = command("land", str(SAMPLE), "--source", SOURCE)
    assert (again.code, "had landed before" in again.out) == (0, True)


def test_a_machine_is_told_the_same_as_one_document(home: Path, tmp_path: Path) -> None:
    lines = SAMPLE.read_text().splitlines()
    late, foreign = tmp_path / "late.jsonl", tmp_path / "foreign.jsonl"
    late.write_text(lines[0] + "\n")
    foreign.write_text(lines[2].replace('"table":"tickets"', '"table":"drafts"') + "\n")
    done = command("land", str(SAMPLE), str(late), str(foreign), "--source", SOURCE, "--json")
    assert (done.code, done.err) == (0, "")
    sample, second, third = json.loads(done.out)["files"]
    assert (sample["events"], sample["tombstones"], sample["skipped"]) == (12, 1, {"heartbeat": 1})
    assert (sample["order"], sample["epoch"], sample["began_epoch"]) == ("lsn", 1, 1)
    assert sample["duplicates"] is None
    # The sample brought the watermark to 08:25, an hour and more past the end of this window.
    assert second["late_windows"] == ["2026-11-21T0600"]
    assert third["tables_without_contract"] == {"public.drafts": 1}


def test_a_refused_file_is_told_and_the_others_land(home: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"password": "hunter2"}\n')
    done = command("land", str(bad), str(SAMPLE), "--source", SOURCE, "--json")
    assert done.code == 1
    first, second = json.loads(done.out)["files"]
    assert "line 1" in first["refused"]["problem"]
    assert second["events"] == 12
    assert "hunter2" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--source", "support_desk"], "capture reads"),
        (["--source", "partner"], "No contract names the source 'partner'"),
        ([], "Name files and their --source"),
        (["--source", SOURCE, "--watch"], "--watch takes neither"),
        (["--source", SOURCE, "--once"], "go with --watch"),
        (["--source", SOURCE, "--new-epoch", " "], "needs the reason"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_lands(
    home: Path, arguments: list[str], words: str
) -> None:
    done = command("land", str(SAMPLE), *arguments)
    assert done.code == 2
    assert words in done.err
    assert not (home / "landing" / SOURCE).exists()


def test_a_source_of_seed_manifests_takes_no_files_of_events(home: Path) -> None:
    assert (
        command("manifest", "load", str(program_file("data/seed_manifests/legacy_tickets_2025.json"))).code
        == 0
    )
    done = command("land", str(SAMPLE), "--source", "support_files")
    assert done.code == 2
    assert "deliveries of a seed manifest" in done.err


def test_a_dry_run_says_the_file_of_a_fault_and_the_fix(home: Path, tmp_path: Path) -> None:
    original = program_file("data/seed_manifests/legacy_tickets_2025.json")
    document = json.loads(original.read_text())
    for each in document["files"]:
        data = (original.parent / each["path"]).resolve()
        each["path"] = data.name
        (tmp_path / data.name).write_bytes(data.read_bytes())
    document["gates"]["row_count"] = "warn"
    document["files"][0]["rows"] += 1
    (tmp_path / "delivery.json").write_text(json.dumps(document))
    done = command("manifest", "load", str(tmp_path / "delivery.json"), "--dry-run")
    assert done.code == 0, done.err
    [fault] = [line for line in done.out.splitlines() if line.startswith("warn: ")]
    file = tmp_path / document["files"][0]["path"]
    assert fault.startswith(f"warn: {file}: ") and "(gate row_count). " in fault
    assert not fault.endswith("(gate row_count). ")


def test_an_event_before_the_home_is_announced(tmp_path: Path) -> None:
    Home.open(tmp_path / "later", WindowSize(60), now=datetime(2027, 1, 1, tzinfo=UTC))
    with environment(home=str(tmp_path / "later"), contracts_dir=str(program_file("contracts/data"))):
        done = command("land", str(SAMPLE), "--source", SOURCE)
    assert done.code == 0
    assert "12 events in no window of this home, which begins at 2026-12-31 23:00 UTC" in done.out
    assert "OMNISUPPORT_FIRST_WINDOW" in done.out


def test_one_look_into_the_inbox_takes_what_is_there(home: Path) -> None:
    folder = home / "inbox" / SOURCE
    folder.mkdir(parents=True)
    (folder / "sample.jsonl").write_bytes(SAMPLE.read_bytes())
    (folder / "bad.jsonl").write_text("{}\n")
    done = command("land", "--watch", "--once")
    assert done.code == 1
    assert "12 events" in done.out
    assert (folder / "landed" / "sample.jsonl").exists()
    assert (folder / "refused" / "bad.jsonl.reason.txt").exists()


def test_no_named_file_lands_while_its_source_is_paused(home: Path) -> None:
    assert command("source", "pause", SOURCE, "--reason", "maintenance").code == 0
    done = command("land", str(SAMPLE), "--source", SOURCE)
    assert done.code == 1
    assert f"The source {SOURCE} is paused" in done.err and "maintenance" in done.err
    assert f"omnisupport-ingest source resume {SOURCE}" in done.err
    assert LandingStore(home / "landing", SOURCE).batch_ids() == []
    assert command("source", "resume", SOURCE).code == 0
    assert command("land", str(SAMPLE), "--source", SOURCE).code == 0


@pytest.mark.parametrize(
    ("source", "manifest"),
    [("support_files", "legacy_tickets_2025.json"), (SOURCE, "partner_tickets_events.json")],
)
def test_no_delivery_lands_while_its_source_is_paused(home: Path, source: str, manifest: str) -> None:
    path = str(program_file(f"data/seed_manifests/{manifest}"))
    assert command("source", "pause", source).code == 0
    assert command("manifest", "load", path, "--dry-run").code == 0
    done = command("manifest", "load", path)
    assert done.code == 1
    assert f"omnisupport-ingest source resume {source}" in done.err
    assert LandingStore(home / "landing", source).batch_ids() == []
    assert command("source", "resume", source).code == 0
    assert command("manifest", "load", path).code == 0


def test_files_of_a_paused_source_wait_in_the_inbox_and_that_is_said_once(home: Path) -> None:
    assert command("source", "pause", SOURCE).code == 0
    folder = home / "inbox" / SOURCE
    folder.mkdir(parents=True)
    for name in ("sample.jsonl", "sample_again.jsonl"):
        (folder / name).write_bytes(SAMPLE.read_bytes())
    # It looks twice, as a file that has just come may not be complete.
    done = command("land", "--watch", "--once")
    assert done.code == 0
    assert done.err.count("is paused") == 1 and f"source resume {SOURCE}" in done.err
    assert sorted(each.name for each in folder.iterdir()) == ["sample.jsonl", "sample_again.jsonl"]
    assert LandingStore(home / "landing", SOURCE).batch_ids() == []
    assert command("source", "resume", SOURCE).code == 0
    assert "12 events" in command("land", "--watch", "--once").out
    assert (folder / "landed" / "sample.jsonl").exists()


def test_the_watcher_takes_a_file_and_ends_when_it_is_told_to(home: Path) -> None:
    (home / "inbox").mkdir()
    watcher = subprocess.Popen(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "land", "--watch"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert watcher.stdout is not None
        assert watcher.stdout.readline().startswith(f"Watching {home / 'inbox'}")
        folder = home / "inbox" / SOURCE
        folder.mkdir()
        (folder / ".draft").write_bytes(SAMPLE.read_bytes())
        (folder / ".draft").rename(folder / "sample.jsonl")
        until(lambda: (folder / "landed" / "sample.jsonl").exists())
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(PATIENCE) == 0
    finally:
        watcher.kill()


def test_a_file_whose_contract_is_not_in_use_yet_waits_in_the_inbox(home: Path, tmp_path: Path) -> None:
    contracts = tmp_path / "project" / "contracts"
    shutil.copytree(program_file("contracts/data"), contracts)
    (partner,) = (each for each in contracts.iterdir() if f'"source": "{SOURCE}"' in each.read_text())
    text = partner.read_text()
    partner.unlink()
    folder = home / "inbox" / SOURCE
    folder.mkdir(parents=True)
    with environment(contracts_dir=str(contracts)):
        assert command("land", "--watch", "--once").code == 0
        LandingStore(home / "landing", "support_desk").begin_epoch("first", None)
        keep(Documents(Settings()))
        # A person adds the source, and breaks another contract.
        partner.write_text(text)
        agents = contracts / "agents.json"
        right = agents.read_text()
        agents.write_text("{")
        (folder / "sample.jsonl").write_bytes(SAMPLE.read_bytes())
        log = tmp_path / "watcher.log"
        with log.open("w") as output:
            watcher = subprocess.Popen(
                [sys.executable, "-m", "omnisupport_ingest.cli.main", "land", "--watch"],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            until(lambda: "Trying again" in log.read_text() or (folder / "refused").exists())
            assert (folder / "sample.jsonl").exists() and not (folder / "refused").exists()
            agents.write_text(right)
            until(lambda: (folder / "landed" / "sample.jsonl").exists())
        finally:
            watcher.kill()
            watcher.wait(PATIENCE)


def test_up_watches_the_inbox_once_somebody_has_made_it(home: Path) -> None:
    settings = Settings()
    opened = Home.open(settings.home, settings.window_size)
    with Supervisor(opened) as supervisor:
        services.watch_inbox_when_used(supervisor, settings, opened)
        assert supervisor.names == ()
        folder = home / "inbox" / SOURCE
        folder.mkdir(parents=True)
        (folder / "sample.jsonl").write_bytes(SAMPLE.read_bytes())
        services.watch_inbox_when_used(supervisor, settings, opened)
        services.watch_inbox_when_used(supervisor, settings, opened)
        assert supervisor.names == (services.WATCHER,)
        supervisor.wait((folder / "landed" / "sample.jsonl").exists, service="The watcher", seconds=PATIENCE)
