"""Commands that look at a home: status, checkpoint, export. They change nothing, and tell the truth."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pyspark.sql import SparkSession

from omnisupport_ingest.cli.checkpoint import checkpoint
from omnisupport_ingest.cli.export import export
from omnisupport_ingest.cli.opening import HomeMissing
from omnisupport_ingest.cli.status import status
from omnisupport_ingest.contracts.model import UnknownTable
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.runtime.running import record_ui_port, ui_port
from omnisupport_ingest.sources.postgres.capture_record import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.embedded import EmbeddedPostgres
from omnisupport_ingest.stages.checkpoint_file import CheckpointFileUnreadable, HomeContradicts
from omnisupport_ingest.stages.export import NoDimension
from omnisupport_ingest_tests.recovery.pipeline import open_workspace, run_stages
from omnisupport_ingest_tests.stages.story import FIRST, SOURCE, START, Change, Commit, Story, events


@dataclass(frozen=True)
class Told:
    """A home whose first batch is in every layer, and whose second one has only landed."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Path:
    folder = tmp_path_factory.mktemp("looking") / "told"
    story = Story(folder)
    story.land(
        Commit(10, 1, [Change("c", 1, {"title": "one", "body": "text"}), Change("c", 2, {"title": "two"})]),
        # Its create was never seen, so what it does not carry is not known.
        Commit(20, 2, [Change("u", 3, {"title": "three"}, unchanged=("body",)), Change("d", 2)]),
    )
    run_stages(open_workspace(folder), spark, [FIRST])
    return folder


@pytest.fixture
def told(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    shutil.copytree(whole, tmp_path / "told")
    environment = dict(os.environ)
    told = Told(tmp_path / "told")
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("HOME", told.home),
        ("CONTRACTS_DIR", told.folder / "contracts"),
        ("SOURCE", SOURCE),
    ):
        monkeypatch.setenv(f"OMNISUPPORT_{name}", str(value))
    monkeypatch.delenv("OMNISUPPORT_SOURCE_DSN", raising=False)
    yield told
    # A command that starts Dagster sets variables for the rest of its process.
    os.environ.clear()
    os.environ.update(environment)


def land_another(told: Told) -> None:
    """A batch that continues the stream of the copied home."""
    workspace = open_workspace(told.folder)
    at = START + timedelta(seconds=61)
    span = StreamSpan(Lsn(20), Lsn(30), Lsn(30), Lsn(30), 30, at, at)
    name = stream_batch_id(1, Lsn(20))
    with BatchWriter(workspace.landing(SOURCE), workspace.grid, 1, name, clock=lambda: at) as writer:
        for event in events(Commit(30, 61, [Change("c", 4, {"title": "four"})])):
            writer.add(event)
        writer.seal(stream=span)


def run(command: Any, *arguments: str) -> Result:
    return CliRunner(catch_exceptions=False).invoke(command, list(arguments), standalone_mode=False)


def document(command: Any, *arguments: str) -> Any:
    return json.loads(run(command, *arguments, "--json").stdout)


def tables(seen: Any) -> dict[str, Any]:
    (source,) = seen["sources"]
    return {each["table"].removeprefix(f"{SOURCE}/"): each for each in source["tables"]}


def files_in(folder: Path) -> set[Path]:
    """All but what SQLite keeps beside the index of landing while somebody reads it."""
    beside = ("index.sqlite-shm", "index.sqlite-wal")
    return {each.relative_to(folder) for each in folder.rglob("*") if each.name not in beside}


# --- status --------------------------------------------------------------------------------------


def test_status_of_a_home_that_is_not_there_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(HomeMissing):
        run(status)
    assert not (tmp_path / "nowhere").exists()


def test_status_of_a_home_that_is_up_to_date_has_nothing_pending(told: Told) -> None:
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


def test_status_names_what_landed_and_is_not_in_the_tables_yet_and_changes_nothing(told: Told) -> None:
    land_another(told)
    before = files_in(told.home)
    found = tables(document(status))
    for name in ("raw_cdc_staging", "deduped_events", "dim_notes"):
        assert (found[name]["pending_windows"], found[name]["pending_batches"]) == (1, 1), name
    assert files_in(told.home) == before


def test_status_names_net_changes_that_the_dimension_does_not_show(told: Told) -> None:
    shutil.rmtree(told.home / "lake" / SOURCE / "dim_notes")
    found = tables(document(status))
    assert (found["net_changes/notes"]["rows"], found["net_changes/notes"]["pending_windows"]) == (3, 0)
    assert found["dim_notes"]["pending_windows"] == 1


def test_status_tells_how_far_what_people_read_is_behind(told: Told) -> None:
    seen = document(status)
    landing, notes = seen["sources"][0]["landing"], tables(seen)["dim_notes"]
    assert notes["complete_to"] == landing["watermark"]
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (0.0, 0)
    land_another(told)
    seen = document(status)
    landing, notes = seen["sources"][0]["landing"], tables(seen)["dim_notes"]
    assert notes["complete_to"] == (START + timedelta(seconds=2)).isoformat()
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (59.0, 1)
    assert notes["lag_seconds"] == pytest.approx(landing["watermark_lag_seconds"] + 59, abs=1)
    assert "people read what was committed before 2026-01-01 12:00:02" in " ".join(run(status).stdout.split())


def test_a_table_without_new_events_is_as_fresh_as_landing_is(told: Told) -> None:
    workspace = open_workspace(told.folder)
    at = START + timedelta(seconds=120)
    other = events(Commit(30, 100, [Change("c", 4, {"title": "four"})]))[0]._replace(source_table="others")
    span = StreamSpan(Lsn(20), Lsn(30), Lsn(30), Lsn(30), 30, at, at)
    name = stream_batch_id(1, Lsn(20))
    with BatchWriter(workspace.landing(SOURCE), workspace.grid, 1, name, clock=lambda: at) as writer:
        writer.add(other)
        writer.seal(stream=span)
    notes = tables(document(status))["dim_notes"]
    assert (notes["behind_landing_seconds"], notes["unshown_batches"]) == (0.0, 0)


def test_a_capture_that_has_failed_is_told_by_the_exit_code(told: Told) -> None:
    """As ``source status`` does, and it says which capture and why."""
    records = CaptureRecords(told.home / "landing" / SOURCE)
    assert run(status).return_value == 0
    with suppress(IngestError), recorded(records, follows=True, last_landed=lambda: None):
        raise IngestError("The slot is gone.", fix="Make another.")
    done = run(status)
    assert "FAILED: The slot is gone." in done.stdout
    assert done.return_value == 1


def test_status_of_a_home_where_a_contract_changed_has_its_windows_pending_again(told: Told) -> None:
    path = told.folder / "contracts" / "notes.json"
    contract = json.loads(path.read_text())
    contract["properties"]["title"]["maxLength"] = 30
    path.write_text(json.dumps(contract))
    found = tables(document(status))
    assert found["raw_cdc_staging"]["pending_windows"] == 0
    assert found["deduped_events"]["pending_windows"] == 1
    assert found["dim_notes"]["pending_windows"] == 1


def test_a_hole_is_told_with_its_fix_and_by_the_exit_code(told: Told) -> None:
    land_another(told)
    manifests = told.home / "landing" / SOURCE / "manifests"
    first = next(each for each in manifests.iterdir() if each.stem.endswith("0000"))
    record = told.home / "landing" / SOURCE / "epochs" / "000001.json"
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
    record.write_text(json.dumps(epoch | {"format_version": 1}))
    first.unlink()
    done = run(status)
    assert done.return_value == 1
    assert "is broken" in done.stdout
    assert "--new-epoch" in done.stdout


def test_a_manifest_that_cannot_be_read_is_told_and_hides_no_table(told: Told) -> None:
    manifest = next((told.home / "landing" / SOURCE / "manifests").iterdir())
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
    told: Told, monkeypatch: pytest.MonkeyPatch, dsn: str
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", dsn)
    done = run(status)
    assert "does not answer" in done.output
    assert "hunter2" not in done.output + run(status, "--json").output


def test_a_source_that_answers_is_told_with_its_slot(
    told: Told, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres
) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", postgres.dsn())
    monkeypatch.setenv("OMNISUPPORT_SLOT", "nobody_has_this")
    source = document(status)["source"]
    assert (source["kind"], source["reachable"], source["slot"]["there"]) == ("configured", True, False)
    assert source["capture"] == "STOPPED"


def test_status_fits_a_terminal_of_100_columns(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNISUPPORT_SOURCE_DSN", "postgresql://somebody@127.0.0.1:9/database")
    assert max(len(line) for line in run(status).output.splitlines()) <= 100


def test_the_ui_is_named_while_its_process_lives_and_answers(tmp_path: Path) -> None:
    assert ui_port(tmp_path) is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        record_ui_port(tmp_path, port)
        assert ui_port(tmp_path) is None
        (tmp_path / "dagster-webserver.pid").write_text(f"{os.getpid()}\n")
        assert ui_port(tmp_path) == port
    assert ui_port(tmp_path) is None


# --- export --------------------------------------------------------------------------------------


def test_export_writes_the_live_rows_for_their_owner_alone_and_says_how_far(
    told: Told, tmp_path: Path
) -> None:
    out = tmp_path / "notes.jsonl"
    done = run(export, "notes", "--out", str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == [1, 3]
    assert rows[1]["body"] is None
    assert rows[1]["_cdc_unresolved"] == ["body"]
    assert out.stat().st_mode & 0o777 == 0o600
    assert "2 rows of desk.notes" in done.stdout
    assert "Complete to 0/14" in done.stdout
    assert "1 rows have values that are not known" in done.stderr
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


def test_export_finds_a_table_by_its_name_at_the_source(told: Told, tmp_path: Path) -> None:
    for name in ("public.notes", 'public."notes"', "NOTES"):
        out = tmp_path / "notes.csv"
        assert document(export, name, "--out", str(out))["table"] == "desk.notes"
        out.unlink()


def test_export_with_deleted_rows_takes_the_place_of_an_older_file(told: Told, tmp_path: Path) -> None:
    out = tmp_path / "notes.csv"
    out.write_text("older")
    out.chmod(0o644)
    record = document(export, "desk.notes", "--out", str(out), "--include-deleted")
    assert (record["rows"], record["unresolved"], record["pending_batches"]) == (3, 2, 0)
    assert len(out.read_text().splitlines()) == 4
    assert out.stat().st_mode & 0o777 == 0o600


def test_export_says_what_has_landed_and_is_not_in_the_file(told: Told, tmp_path: Path) -> None:
    land_another(told)
    record = document(export, "notes", "--out", str(tmp_path / "notes.parquet"))
    assert (record["complete_to"], record["pending_batches"]) == (None, 1)


def test_export_of_a_table_that_nobody_knows_lists_the_tables(told: Told, tmp_path: Path) -> None:
    with pytest.raises(UnknownTable) as raised:
        run(export, "tickets", "--out", str(tmp_path / "tickets.csv"))
    assert "desk.notes" in raised.value.fix
    assert not (tmp_path / "tickets.csv").exists()


def test_export_of_a_table_without_a_dimension(told: Told, tmp_path: Path) -> None:
    shutil.rmtree(told.home / "lake" / SOURCE / "dim_notes")
    with pytest.raises(NoDimension):
        run(export, "notes", "--out", str(tmp_path / "notes.csv"))


# --- checkpoint ----------------------------------------------------------------------------------


def test_checkpoints_of_one_table_as_json(told: Told) -> None:
    (one,) = document(checkpoint, "show", "--table", "net_changes/notes")
    assert (one["table"], one["rows"], one["cursor"]) == ("desk/net_changes/notes", 3, "1:0/14:2")


def exported(told: Told) -> tuple[Path, dict[str, Any]]:
    path = told.folder / "checkpoints.json"
    run(checkpoint, "export", "--out", str(path))
    return path, json.loads(path.read_text())


def test_a_home_holds_what_its_own_file_says_and_more_after_it_went_on(told: Told) -> None:
    path, record = exported(told)
    assert len(record["checkpoints"]) == 4
    assert "three" not in path.read_text()
    land_another(told)
    assert "holds all 4 checkpoints" in run(checkpoint, "import", str(path), "--check").stdout


def test_importing_tells_dagster_of_partitions_it_does_not_know_and_once_only(told: Told) -> None:
    path, _ = exported(told)
    assert "3 partitions are reported" in run(checkpoint, "import", str(path)).stdout
    assert "0 partitions are reported" in run(checkpoint, "import", str(path)).stdout


def refused(path: Path, record: Any) -> str:
    path.write_text(json.dumps(record))
    with pytest.raises(HomeContradicts) as raised:
        run(checkpoint, "import", str(path))
    return raised.value.problem


def test_a_file_that_is_ahead_of_landing_is_refused(told: Told) -> None:
    path, record = exported(told)
    record["sources"][SOURCE]["stream_end"] = "0/15"
    assert "ends at 0/14 here, at 0/15 in it" in refused(path, record)


def test_a_file_that_is_ahead_of_the_lake_is_refused_with_every_window(told: Told) -> None:
    path, record = exported(told)
    record["checkpoints"][0] |= {"cursor": "1:0/15:0", "idempotency_key": "another"}
    record["checkpoints"][1]["window"] = "2026-01-01T1203"
    problem = refused(path, record)
    assert "complete to 1:0/14:2 here, to 1:0/15:0 in it" in problem
    assert "2026-01-01T1203: has no checkpoint here" in problem


def test_a_lake_with_other_rows_from_the_same_inputs_contradicts_the_file(told: Told) -> None:
    path, record = exported(told)
    record["checkpoints"][2]["content_hash"] = "0" * 48
    assert "made from the same inputs" in refused(path, record)


def test_a_home_of_other_windows_contradicts_the_file(told: Told) -> None:
    path, record = exported(told)
    record["window"] = "hourly"
    assert "its window is minutes:1, in the file it is hourly" in refused(path, record)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_file_that_is_none_of_ours_is_refused(told: Told, tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(CheckpointFileUnreadable):
        run(checkpoint, "import", str(path))
