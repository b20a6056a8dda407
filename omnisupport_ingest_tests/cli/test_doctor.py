"""``doctor``: findings with their fixes, and an archive that gives nothing away."""

from __future__ import annotations

import json
import socket
import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from omnisupport_ingest.cli import doctor_machine
from omnisupport_ingest.cli.doctor import doctor
from omnisupport_ingest.cli.doctor_archive import log_summary, without_words
from omnisupport_ingest.cli.doctor_home import clocks
from omnisupport_ingest.cli.doctor_machine import Level, contradictions, judged_disk, permissions, spark_bytes
from omnisupport_ingest.landing.accepted_losses import AcceptedLosses
from omnisupport_ingest.retention.forecast import DiskForecast
from omnisupport_ingest.runtime.running import record_service
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.cli.sample_home import SampleHome, document, run
from omnisupport_ingest_tests.layers.story import SOURCE

NOW = datetime(2026, 1, 2, tzinfo=UTC)


def levels(found: dict[str, object], area: str) -> set[str]:
    return {each["level"] for each in found["findings"] if each["area"] == area}  # type: ignore[attr-defined]


def test_every_finding_that_is_bad_has_a_fix_and_the_exit_code_says_so(sample_home: SampleHome) -> None:
    found = document(doctor)
    bad = [each for each in found["findings"] if each["level"] in ("warning", "problem")]
    assert {"chain"} <= {each["area"] for each in bad}
    assert all(each["fix"] for each in bad)
    assert levels(found, "lake") == {"ok"}
    assert run(doctor).return_value == 1


def test_a_table_whose_file_is_gone_is_named(sample_home: SampleHome) -> None:
    gone = next((sample_home.home / "lake" / SOURCE / "dim_notes").rglob("part-*.parquet"))
    gone.unlink()
    (problem,) = [
        each for each in document(doctor)["findings"] if each["area"] == "lake" and each["level"] == "problem"
    ]
    assert "1 file of desk/dim_notes" in problem["seen"]


def lake_problems() -> list[str]:
    found = document(doctor)["findings"]
    return [each["seen"] for each in found if each["area"] == "lake" and each["level"] == "problem"]


def test_a_table_whose_file_was_cut_is_named(sample_home: SampleHome) -> None:
    cut = next((sample_home.home / "lake" / SOURCE / "dim_notes").rglob("part-*.parquet"))
    cut.write_bytes(cut.read_bytes()[:20])
    assert lake_problems() == ["1 file of desk/dim_notes has another size than its log says."]


def test_a_table_whose_log_is_broken_is_named_and_hides_no_other_finding(sample_home: SampleHome) -> None:
    log = sample_home.home / "lake" / SOURCE / "dim_notes" / "_delta_log"
    newest = max(log.glob("*.json"))
    newest.write_text('{"add": {"stats": "ada.lovelace')
    found = document(doctor)
    assert lake_problems() == ["The log of desk/dim_notes cannot be read (DeltaError)."]
    assert {"chain", "lake", "dagster"} <= {each["area"] for each in found["findings"]}
    assert "ada.lovelace" not in json.dumps(found)


@pytest.mark.parametrize("there", [True, False])
def test_whether_what_reads_changes_is_compiled_is_told(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(doctor_machine, "NOT_COMPILED", () if there else ("compiled_rows",))
    (found,) = [each for each in document(doctor)["findings"] if each["area"] == "compiled"]
    assert found["level"] == ("ok" if there else "note")
    assert bool(found["fix"]) is not there
    assert there or "compiled_rows" in json.dumps(found)


def test_a_home_that_is_not_there_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "nowhere"))
    assert levels(document(doctor), "home") == {"note"}
    assert not (tmp_path / "nowhere").exists()


def test_the_archive_holds_no_secret_no_value_of_a_row_and_no_word_of_a_person(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    password, personal, name = "hunter2secret", "ada.lovelace@example.org", "grace.hopper"
    monkeypatch.setenv(
        "OMNISUPPORT_SOURCE_DSN", f"host=127.0.0.1 port=9 user={name} password={password} connect_timeout=1"
    )
    monkeypatch.setenv("OMNISUPPORT_ALARM_WEBHOOK", f"https://hooks.example/{password}")
    monkeypatch.setenv("OMNISUPPORT_ALARM_COMMAND", f"page --token {password}")
    AcceptedLosses(sample_home.home / "landing" / SOURCE).accept(
        1, name, f"asked for by {personal}", None, None, of_another_history=False
    )
    logs = sample_home.home / "logs"
    logs.mkdir(exist_ok=True)
    (logs / "capture.log").write_text(f"ValueError: bad row {personal} {password}\nmore of {personal}\n")
    run(doctor, "--archive", "report.zip")
    archive = Path("report.zip")
    assert archive.stat().st_mode & 0o077 == 0
    with zipfile.ZipFile(archive) as held:
        contents = {each: held.read(each).decode() for each in held.namelist()}
    assert {"doctor.json", "status.json", "ledger.json", "logs.json", "versions.json"} <= contents.keys()
    for secret in (password, personal, name, "one", "three"):
        # Titles of the story's rows are short words: they stand in no text as values.
        looked_for = secret if len(secret) > 5 else f'"{secret}"'
        assert not [file for file, text in contents.items() if looked_for in text], secret
    assert json.loads(contents["logs.json"])["capture.log"] == {
        "lines": 2,
        "bytes": (logs / "capture.log").stat().st_size,
        "errors": {"ValueError": 1},
    }


def test_words_of_people_are_taken_out_wherever_they_stand() -> None:
    told_of = {"a": [{"by": "ana", "reason": None, "at": 1}], "reason": "mine"}
    assert without_words(told_of) == {
        "a": [{"by": "(not shown)", "reason": None, "at": 1}],
        "reason": "(not shown)",
    }


def test_a_word_of_a_row_that_looks_like_an_error_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("KeyError\nMyPrivateNameError\n")
    assert log_summary(tmp_path / "a.log")["errors"] == {"KeyError": 1}


def seen(**given: object) -> list[str]:
    return [each.seen for each in contradictions(Settings(_env_file=None, **given))]  # type: ignore[arg-type]


def test_settings_that_contradict_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOURCE_DSN", "ALARM_COMMAND", "ALARM_WEBHOOK"):
        monkeypatch.delenv(f"OMNISUPPORT_{name}", raising=False)
    assert seen() == []
    assert "the alarm comes first" in seen(slot_warning_bytes=2, slot_alarm_bytes=1)[0]
    assert "SPARK_MASTER has no effect" in seen(spark_remote="sc://h:1", spark_master="local[4]")[0]
    assert seen(spark_remote="sc://h:1") == []
    assert "STREAM_ABOVE_BYTES has no effect" in seen(stream_transactions=False, stream_above_bytes=65536)[0]
    assert "are both 3000" in seen(metrics_port=3000)[0]
    assert "removes no run" in seen(runs_kept_days=30)[0]
    assert seen(runs_kept_days=30, retention="apply", metrics_port=9464) == []
    assert "longer than a window" in seen(window="minutes:1", batch_max_seconds=61)[0]
    assert "Nobody hears of it" in seen(source_dsn="host=h")[0]
    assert seen(source_dsn="host=h", alarm_command="page") == []


def test_clocks_that_differ_are_named_with_the_way() -> None:
    (ahead,) = clocks("desk", NOW + timedelta(seconds=3), NOW)
    assert (ahead.level, "3.0 s ahead of" in ahead.seen) == (Level.WARNING, True)
    (well,) = clocks("desk", NOW - timedelta(seconds=0.4), NOW)
    assert well.level is Level.OK


GB = 1024**3


@pytest.mark.parametrize(
    ("free", "days", "settled", "level"),
    [
        (500 * GB, None, False, Level.OK),
        (500 * GB, 90.0, True, Level.OK),
        (500 * GB, 3.0, True, Level.WARNING),
        # Its first hours, with the first reading of the tables in them, say nothing of a usual day.
        (500 * GB, 0.1, False, Level.NOTE),
        (GB, 90.0, True, Level.WARNING),
        (GB // 4, None, False, Level.PROBLEM),
    ],
)
def test_the_disk_lasts_as_long_as_status_says(
    free: int, days: float | None, settled: bool, level: Level
) -> None:
    found = judged_disk(DiskForecast({}, None, free, days, settled), 1000 * GB)
    assert found.level is level and bool(found.fix) is (level is not Level.OK)
    assert (f"full in {days:,.0f} days" if days is not None else "free of") in found.seen


def test_a_port_of_metrics_that_another_program_has_is_named(
    sample_home: SampleHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("OMNISUPPORT_METRICS_PORT", str(port))
        found = [each for each in document(doctor)["findings"] if each["area"] == "ports"]
        assert found[-1]["seen"] == f"Another program listens on {port}, the port of metrics."
        assert "OMNISUPPORT_METRICS_PORT" in found[-1]["fix"]
        record_service(sample_home.home / "run", "metrics")
        found = [each for each in document(doctor)["findings"] if each["area"] == "ports"]
        assert (found[-1]["level"], found[-1]["seen"].endswith(f"served on {port}")) == ("ok", True)


def test_a_folder_that_others_may_look_into_is_named(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir(mode=0o700)
    assert [each.level for each in permissions(tmp_path)] == [Level.OK]
    (tmp_path / "lake").chmod(0o755)
    (found,) = permissions(tmp_path)
    assert found.fix == f"chmod -R go-rwx {tmp_path / 'lake'}"


def test_sizes_of_spark_are_bytes() -> None:
    assert (spark_bytes("2g"), spark_bytes("512M"), spark_bytes("2"), spark_bytes("xg")) == (
        2 * 1024**3,
        512 * 1024**2,
        None,
        None,
    )
