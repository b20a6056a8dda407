"""``landing``: the batches of a home listed, described, checked, and followed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from omnisupport_ingest import progress
from omnisupport_ingest.cli.landing import landing
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.ledger import SEQUENCE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.landing.epochs import EpochFacts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.ledgers import RETENTION_TYPE, retention_ledger
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.landing.batches import land
from omnisupport_ingest_tests.waiting import PATIENCE

SOURCE = "support_desk"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LandingStore:
    """A home with an epoch, three batches of one event each, and an idle stretch."""
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    store = LandingStore(Home.open(tmp_path / "home", WindowSize(60)).landing, SOURCE)
    store.begin_epoch("first start", EpochFacts("1", 1, "slot", Lsn(0), "desk", "18.4"))
    for start in (0, 100, 200):
        land(store, start, start + 100)
    land(store, 300, 400, at=None)
    return store


def run(*arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(landing, list(arguments), standalone_mode=False)


def document(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_the_newest_batches_are_listed_last_and_the_others_are_counted(store: LandingStore) -> None:
    listed = document("list", "--limit", "2")
    assert listed["batches"] == 4
    assert [(each["kind"], each["events"], each["end_lsn"]) for each in listed["listed"]] == [
        ("stream", 1, "0/12C"),
        ("idle", 0, "0/190"),
    ]
    told = run("list", "--limit", "1").stdout
    assert "4 batches of support_desk with 3 events; 3 earlier ones are not listed" in told
    assert len(document("list", "--limit", "0")["listed"]) == 4


def test_a_long_check_of_landing_says_how_far_it_is(
    store: LandingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, int, int]] = []

    @contextmanager
    def speaking() -> Iterator[None]:
        with progress.listening(lambda stage: heard.append((stage.what, stage.done, stage.of))):
            yield

    monkeypatch.setattr("omnisupport_ingest.cli.landing.speaking", speaking)
    run("verify")
    manifests = [(f"reading the manifests of {SOURCE}", done, 4) for done in range(4)]
    assert heard == manifests + [(f"reading the files of {SOURCE}", done, 4) for done in range(4)]


def test_a_batch_is_described_in_words_and_as_it_is_stored(store: LandingStore) -> None:
    name = store.batch_ids()[1]
    told = run("show", name).stdout
    assert "continues        0/64, ends at 0/C8" in told
    assert "1 of public.tickets" in told
    assert document("show", name) == json.loads((store.folder / "manifests" / f"{name}.json").read_text())


def test_a_batch_or_source_that_is_not_there_is_named_with_what_is(store: LandingStore) -> None:
    with pytest.raises(IngestError, match="No batch nothing has landed from support_desk"):
        run("show", "nothing")
    with pytest.raises(IngestError, match="there is: support_desk"):
        run("list", "--source", "other")
    assert not (store.folder.parent / "other").exists()


def test_whole_landing_is_told_to_be_whole(store: LandingStore) -> None:
    done = run("verify")
    assert done.return_value == 0
    assert "support_desk: 4 batches, 3 files" in done.stdout
    assert "all as they landed" in done.stdout


def test_damage_is_told_with_its_fix_by_exit_code_one(store: LandingStore) -> None:
    first, second, *_ = store.manifests()
    store.path_of(first.files[0]).unlink()
    (store.folder / "manifests" / f"{second.batch_id}.json").unlink()
    done = run("verify")
    assert done.return_value == 1
    assert "file: " in done.stdout
    assert "is missing" in done.stdout
    assert "chain: The chain of epoch 1 is broken" in done.stdout
    assert done.stdout.count("Fix: ") == 2
    found = document("verify", "--source", SOURCE)
    assert found["whole"] is False
    assert [each["kind"] for each in found["sources"][0]["damage"]] == ["file", "chain"]


def test_the_last_events_are_json_lines_in_debeziums_envelope(store: LandingStore) -> None:
    records = [json.loads(line) for line in run("tail", "-n", "2").stdout.splitlines()]
    assert [each["source"]["lsn"] for each in records] == [101, 201]
    assert records[0]["op"] == "c"
    assert records[0]["source"] | {"db": "desk", "name": SOURCE, "table": "tickets"} == records[0]["source"]
    assert run("tail", "--table", "agents").stdout == ""


def test_batches_of_which_retention_removed_a_file_are_left_out_of_the_last_events(
    store: LandingStore, tmp_path: Path
) -> None:
    first = store.manifests()[0]
    gone = first.files[0]
    removal = {"window": gone.window, "landed_until": first.arrival.landed_at, "why": "a test"}
    row = {"layer": "landing", "step": "begun", "files": 1, "events": 1, "bytes": 1, **removal}
    row |= {"removed_by": "a test", "removed_at": first.arrival.landed_at}
    schema = arrow_schema(RETENTION_TYPE, without=(SEQUENCE,))
    ledger = retention_ledger(tmp_path / "home" / "lake", SOURCE)
    ledger.append(lambda _: pa.Table.from_pylist([row], schema=schema))
    store.path_of(gone).unlink()
    records = [json.loads(line) for line in run("tail", "-n", "3").stdout.splitlines()]
    assert [each["source"]["lsn"] for each in records] == [101, 201]


def test_following_prints_what_lands_and_ends_when_it_is_told_to(store: LandingStore) -> None:
    command = [sys.executable, "-m", "omnisupport_ingest.cli.main", "landing", "tail", "-n", "1", "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as following:
        try:
            assert following.stdout is not None
            before = json.loads(following.stdout.readline())
            time.sleep(0.2)
            land(store, 400, 500)
            after = json.loads(following.stdout.readline())
            assert (before["source"]["lsn"], after["source"]["lsn"]) == (201, 401)
            following.send_signal(signal.SIGTERM)
            assert following.wait(PATIENCE) == 0
        finally:
            following.kill()
