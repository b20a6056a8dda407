"""``status``: it changes nothing, and shows what there is, what is pending, and what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.cli.errors import HomeMissing
from omnisupport_ingest.cli.opening import open_settings
from omnisupport_ingest.cli.status import status
from omnisupport_ingest.cli.status_text import _freshness_facts
from omnisupport_ingest.contracts.kept import Documents, keep
from omnisupport_ingest.contracts.model import ContractError
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.read.verified import EQUAL, Moment, Verified, write_verified
from omnisupport_ingest.runtime.running import record_ui_port, ui_port
from omnisupport_ingest.sources.postgres.capture.parked import ParkedTables
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, files_in, land_another, run, tables
from omnisupport_ingest_tests.layers.story import SOURCE, START, Change, Commit, events
from omnisupport_ingest_tests.recovery.pipeline import open_workspace


def test_status_of_a_home_that_is_not_there_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(HomeMissing):
        run(status)
    assert not (tmp_path / "nowhere").exists()


def test_status_of_a_home_that_is_up_to_date_has_nothing_pending(sample_home: SampleHome) -> None:
    seen = document(status)
    found = tables(seen)
    assert list(found) == [
        "raw_cdc_staging",
        "deduped_events",
        "quarantine",
        "dim_notes",
    ]
    assert {each["pending_batches"] for each in found.values()} == {0, None}
    assert {name: each["rows"] for name, each in found.items()} == {
        "raw_cdc_staging": 4,
        "deduped_events": 4,
        "quarantine": 0,
        "dim_notes": 3,
    }
    assert seen["sources"][0]["landing"]["stream_end"] == "0/14"
    assert found["dim_notes"]["cursor"] == "1:0/14:2"


def test_status_names_what_landed_and_is_not_in_the_tables_yet_and_changes_nothing(
    sample_home: SampleHome,
) -> None:
    land_another(sample_home)
    before = files_in(sample_home.home)
    found = tables(document(status))
    for name in ("raw_cdc_staging", "deduped_events", "dim_notes"):
        assert (found[name]["pending_windows"], found[name]["pending_batches"]) == (1, 1), name
    assert files_in(sample_home.home) == before


def test_status_names_net_changes_that_the_dimension_does_not_show(sample_home: SampleHome) -> None:
    shutil.rmtree(sample_home.home / "lake" / SOURCE / "dim_notes")
    found = tables(document(status))
    assert (found["net_changes/notes"]["rows"], found["net_changes/notes"]["pending_windows"]) == (3, 0)
    assert found["dim_notes"]["pending_windows"] == 1


def test_status_tells_how_far_what_people_read_is_behind(sample_home: SampleHome) -> None:
    seen = document(status)
    landing, notes = seen["sources"][0]["landing"], tables(seen)["dim_notes"]
    assert notes["complete_to"] == landing["watermark"]
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (0.0, 0)
    land_another(sample_home)
    seen = document(status)
    landing, notes = seen["sources"][0]["landing"], tables(seen)["dim_notes"]
    assert notes["complete_to"] == (START + timedelta(seconds=2)).isoformat()
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (59.0, 1)
    assert notes["lag_seconds"] == pytest.approx(landing["watermark_lag_seconds"] + 59, abs=1)
    assert "people read what was committed before 2026-01-01 12:00:02" in " ".join(run(status).stdout.split())


def test_status_tells_which_promises_are_kept_and_since_when_a_table_is_equal_to_its_source(
    sample_home: SampleHome,
) -> None:
    file = sample_home.folder / "contracts" / "notes.json"
    contract = json.loads(file.read_text())
    contract["x-cdc"]["quality"] = {"freshness": "PT1M"}
    file.write_text(json.dumps(contract))
    workspace = open_workspace(sample_home.folder)
    (notes,) = workspace.contracts.of_source(SOURCE)
    moment = Moment(1, Lsn(20), datetime.now(UTC) - timedelta(minutes=3))
    write_verified(workspace.home, notes, Verified("notes", EQUAL, moment.at, 3, through=moment))
    seen = document(status)
    table = tables(seen)["dim_notes"]
    assert table["service_level"]["kept"] is False and table["service_level"]["by_contract"] is True
    assert table["verified"]["in_words"] == "equal to the source at LSN 0/14, checked 3 minutes ago"
    assert "the service level of dim_notes is broken" in seen["health"]["reasons"]
    shown = " ".join(run(status).stdout.split())
    assert "0 service levels kept, 1 broken" in shown and "and 60 seconds are allowed" in shown
    assert "dim_notes: equal to the source at LSN 0/14, checked 3 minutes ago" in shown


def test_status_says_what_is_given_up_by_age_and_whether_it_goes(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert document(status)["retention"]["gives_up"] == {}
    assert "given up by age" not in run(status).stdout
    file = sample_home.folder / "contracts" / "notes.json"
    contract = json.loads(file.read_text())
    contract["x-cdc"]["retention"] = {"history": "P400D"}
    file.write_text(json.dumps(contract))
    told = {"nightly": "plan", "gives_up": {SOURCE: ["history"]}, "runs_kept_days": None}
    assert document(status)["retention"] == told
    assert f"history of {SOURCE}: counted every night, not removed" in " ".join(run(status).stdout.split())
    monkeypatch.setenv("OMNISUPPORT_RETENTION", "apply")
    assert f"history of {SOURCE}: removed every night" in " ".join(run(status).stdout.split())


def test_a_table_without_new_events_is_as_fresh_as_landing_is(sample_home: SampleHome) -> None:
    workspace = open_workspace(sample_home.folder)
    at = START + timedelta(seconds=120)
    other = events(Commit(30, 100, [Change("c", 4, {"title": "four"})]))[0]._replace(source_table="others")
    span = StreamSpan(Lsn(20), Lsn(30), Lsn(30), Lsn(30), 30, at, at)
    name = stream_batch_id(1, Lsn(20))
    with BatchWriter(workspace.landing(SOURCE), workspace.grid, 1, name, clock=lambda: at) as writer:
        writer.add(other)
        writer.seal(stream=span)
    notes = tables(document(status))["dim_notes"]
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (0.0, 0)


def test_a_capture_that_has_failed_is_told_by_the_exit_code(sample_home: SampleHome) -> None:
    """As ``source status`` does, and it says which capture and why."""
    records = CaptureRecords(sample_home.home / "landing" / SOURCE)
    assert run(status).return_value == 0
    with suppress(IngestError), recorded(records, follows=True, last_landed=lambda: None):
        raise IngestError("The slot is gone.", fix="Make another.")
    done = run(status)
    assert "FAILED: The slot is gone." in done.stdout
    assert done.return_value == 1


def test_healthy_a_warning_and_broken_can_be_told_apart_by_the_exit_code(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level, codes in (("healthy", (0, 0)), ("warning", (0, 8)), ("broken", (1, 1))):
        monkeypatch.setattr(
            "omnisupport_ingest.cli.status.health", lambda _, level=level: {"level": level, "reasons": []}
        )
        assert (run(status).return_value, run(status, "--strict").return_value) == codes, level


def test_status_of_a_home_where_a_contract_changed_has_its_windows_pending_again(
    sample_home: SampleHome,
) -> None:
    path = sample_home.folder / "contracts" / "notes.json"
    contract = json.loads(path.read_text())
    contract["properties"]["title"]["maxLength"] = 30
    path.write_text(json.dumps(contract))
    found = tables(document(status))
    assert found["raw_cdc_staging"]["pending_windows"] == 0
    assert found["deduped_events"]["pending_windows"] == 1
    assert found["dim_notes"]["pending_windows"] == 1


def test_status_shows_everything_by_the_kept_documents_while_a_contract_is_wrong(
    sample_home: SampleHome,
) -> None:
    land_another(sample_home)
    before = tables(document(status))
    keep(Documents(open_settings()))
    (sample_home.folder / "contracts" / "notes.json").write_text("{")
    found = document(status)
    assert tables(found).keys() == before.keys()
    assert tables(found)["dim_notes"]["pending_windows"] == before["dim_notes"]["pending_windows"] == 1
    assert "notes.json is not valid JSON" in found["documents_refused"]["problem"]
    assert any("no edit is in use" in each for each in found["health"]["reasons"])
    assert "In use are contracts, sources and decision table as they were at" in run(status).output


def test_status_of_a_home_without_kept_documents_shows_what_runs(
    sample_home: SampleHome, capsys: pytest.CaptureFixture[str]
) -> None:
    (sample_home.folder / "contracts" / "notes.json").write_text("{")
    with pytest.raises(ContractError, match=r"notes\.json is not valid JSON"):
        status.main([], standalone_mode=False)
    shown = capsys.readouterr().out
    assert str(sample_home.home) in shown and "platform     not running" in shown


def write_epoch(landing: Path) -> None:
    facts = {
        "system_identifier": "1",
        "timeline": 1,
        "slot": "s",
        "consistent_point": "0/0",
        "database": "d",
        "server_version": "18",
        "session_settings": {},
    }
    epoch = {"number": 1, "reason": "first", "began_at": "2026-01-01T12:00:00+00:00", "facts": facts}
    (landing / "epochs" / "000001.json").write_text(json.dumps(epoch | {"format_version": 1}))


def test_a_table_that_capture_left_out_is_told_while_nothing_runs(sample_home: SampleHome) -> None:
    landing = sample_home.home / "landing" / SOURCE
    write_epoch(landing)
    ParkedTables(landing, 1).park({"notes": "Its schema has changed.", "of_no_contract": "Gone."})
    found = document(status)
    says = f"{SOURCE}.notes is left out, the other tables go on: Its schema has changed."
    assert says in found["health"]["reasons"]
    assert not any("of_no_contract" in each for each in found["health"]["reasons"])
    [left] = next(each for each in found["sources"] if each["source"] == SOURCE)["left_out"]
    assert "source snapshot notes" in left["fix"]
    ParkedTables(landing, 1).take_back(["notes"])
    assert says not in document(status)["health"]["reasons"]


def test_a_gap_is_told_with_its_fix_and_by_the_exit_code(sample_home: SampleHome) -> None:
    land_another(sample_home)
    landing = sample_home.home / "landing" / SOURCE
    first = next(each for each in (landing / "manifests").iterdir() if each.stem.endswith("0000"))
    write_epoch(landing)
    first.unlink()
    done = run(status)
    assert done.return_value == 1
    assert "is broken" in done.stdout
    assert "--new-epoch" in done.stdout


def test_a_manifest_that_cannot_be_read_is_told_and_hides_no_table(sample_home: SampleHome) -> None:
    manifest = next((sample_home.home / "landing" / SOURCE / "manifests").iterdir())
    manifest.write_text("{")
    done = run(status, "--json")
    seen = json.loads(done.stdout)
    assert done.return_value == 1
    assert str(manifest) in seen["sources"][0]["landing"]["problem"]["problem"]
    found = tables(seen)
    assert (found["dim_notes"]["rows"], found["dim_notes"]["pending_batches"]) == (3, None)
    assert "Restore this file" in run(status).stdout


@pytest.mark.parametrize("dsn", ["postgresql://u:hunter2@127.0.0.1:9/db", "host=/nowhere password=hunter2"])
def test_a_source_that_does_not_answer_is_told_without_its_password(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", dsn)
    done = run(status)
    assert "does not answer" in done.output
    assert "hunter2" not in done.output + run(status, "--json").output


def test_a_source_that_answers_is_told_with_its_slot(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", postgres.dsn())
    monkeypatch.setenv("OMNISUPPORT_SLOT", "nobody_has_this")
    source = document(status)["source"]
    assert (source["kind"], source["reachable"], source["slot"]["there"]) == ("configured", True, False)
    assert source["capture"] == "STOPPED"


def test_status_fits_a_terminal_of_100_columns(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "postgresql://somebody@127.0.0.1:9/database")
    # A path cannot be broken, and is as long as it is.
    lines = [line for line in run(status).output.splitlines() if str(sample_home.folder) not in line]
    assert max(map(len, lines)) <= 100, [line for line in lines if len(line) > 100]


def test_the_ui_is_named_while_its_process_lives_and_answers(tmp_path: Path) -> None:
    assert ui_port(tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        record_ui_port(tmp_path, port)
        assert ui_port(tmp_path) is None
        (tmp_path / "dagster-webserver.pid").write_text(f"{os.getpid()}\n")
        assert ui_port(tmp_path) == port
    assert ui_port(tmp_path) is None


def test_nobody_is_said_to_read_a_table_that_is_not_there() -> None:
    table = {"table": "dim_notes", "there": False, "complete_to": "2026-01-01T12:00:00+00:00"}
    assert list(_freshness_facts(SOURCE, [table])) == []
