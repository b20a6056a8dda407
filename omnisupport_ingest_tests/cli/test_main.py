"""The command line as a person meets it: quick to start, and clear when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import duckdb
import psycopg2
import pyarrow.parquet as pq
import pytest

from omnisupport_ingest.cli import errors
from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.errors import IngestError
from omnisupport_ingest.home import Home
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.waiting import PATIENCE


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.quick
def test_importing_the_command_line_loads_nothing_heavy() -> None:
    heavy = ("pyspark", "dagster", "pandas", "pyarrow", "deltalake", "pandera", "duckdb", "psycopg2", "numpy")
    program = (
        f"import sys, omnisupport_ingest.cli.main\nprint([name for name in {heavy!r} if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


@pytest.mark.quick
def test_the_list_of_commands_says_of_each_what_the_command_says_itself() -> None:
    commands = cli.whole()
    assert {name: each.help for name, each in cli.listed.items()} == {
        name: command.get_short_help_str(limit=1000) for name, command in commands.items()
    }
    assert all(command.name == name for name, command in commands.items())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "completed"), [("ver", ["plain,verify"]), ("verify --rep", ["plain,--repair"])]
)
def test_a_shell_completes_commands_and_options(words: str, completed: list[str]) -> None:
    typed = f"omnisupport-ingest {words}"
    asked = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [Path(sys.executable).with_name("omnisupport-ingest")],
        env=os.environ | asked | {"_OMNISUPPORT_INGEST_COMPLETE": "bash_complete"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.stdout.splitlines() == completed, done.stderr


@pytest.mark.quick
def test_a_setting_that_cannot_be_used_is_named_with_the_fix_and_no_traceback() -> None:
    done = run("settings", OMNISUPPORT_WINDOW="weekly")
    assert done.returncode == 2
    assert done.stderr == (
        "Error: OMNISUPPORT_WINDOW is 'weekly', which is not a window size.\n"
        "Fix: Use hourly, daily, or minutes:N where N divides 60 (minutes:1, minutes:15).\n"
    )
    assert done.stdout == ""


def test_a_setting_of_the_wrong_type_is_named_without_its_value() -> None:
    done = run("settings", OMNISUPPORT_WEBSERVER_PORT="hunter2")
    assert done.returncode == errors.SettingsRefused.exit_code
    assert "OMNISUPPORT_WEBSERVER_PORT" in done.stderr
    assert "hunter2" not in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback_as_well() -> None:
    done = run("--debug", "settings", OMNISUPPORT_WINDOW="weekly")
    assert "Traceback" in done.stderr
    assert "Fix: " in done.stderr


@pytest.mark.quick
def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("fly").returncode == 2


@pytest.mark.parametrize("fresh", [(), ("--fresh",)])
def test_demo_leaves_a_configured_source_and_the_home_alone(tmp_path: Path, fresh: tuple[str, ...]) -> None:
    home = tmp_path / "home"
    done = run("demo", *fresh, OMNISUPPORT_HOME=str(home), OMNISUPPORT_SOURCE_DSN="host=h password=hunter2")
    assert done.returncode == 2
    assert "Unset OMNISUPPORT_SOURCE_DSN" in done.stderr
    assert "hunter2" not in done.stderr
    assert not home.exists()


def test_a_fresh_demo_removes_no_home_in_which_another_source_has_landed(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home", WindowSize(1))
    manifest = home.landing / "crm" / "manifests" / "f-1.json"
    manifest.parent.mkdir(parents=True)
    # Looking at a source makes its folders.
    (home.landing / "looked_at" / "manifests").mkdir(parents=True)
    manifest.write_text("of mine")
    done = run("demo", "--fresh", OMNISUPPORT_HOME=str(home.path), OMNISUPPORT_WINDOW="minutes:1")
    assert done.returncode == 3, done.stderr
    assert "has batches of crm, which" in done.stderr
    assert manifest.exists()


def test_settings_are_listed_without_secrets() -> None:
    done = run("settings", OMNISUPPORT_SOURCE_DSN="password=hunter2")
    assert done.returncode == 0
    assert "OMNISUPPORT_SOURCE_DSN=(set, not shown)" in done.stdout
    assert "hunter2" not in done.stdout


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_settings_do_not_show_the_token_in_the_address_of_spark(options: tuple[str, ...]) -> None:
    address = "sc://spark.example:15002/;token=hunter2"
    done = run("settings", *options, OMNISUPPORT_SPARK_REMOTE=address)
    assert done.returncode == 0
    assert "OMNISUPPORT_SPARK_REMOTE" in done.stdout
    assert "hunter2" not in done.stdout


def test_a_wrong_address_of_spark_is_refused_and_its_token_not_told() -> None:
    address = "sc://spark.example:15002/;token=hunter2=="
    done = run("--debug", "settings", OMNISUPPORT_SPARK_REMOTE=address)
    assert done.returncode == 2
    assert "OMNISUPPORT_SPARK_REMOTE" in done.stderr
    assert "%3D" in done.stderr
    assert "hunter2" not in done.stderr


def test_contracts_and_manifests_of_the_project_are_valid() -> None:
    assert "contracts in" in run("contracts", "validate").stdout
    assert "manifests are valid" in run("manifest", "validate").stdout
    printed = json.loads(run("manifest", "validate", "--json").stdout)["manifests"]
    assert len(printed) > 3 and {each["load_mode"] for each in printed.values()} >= {"full_snapshot", "cdc"}


def test_every_manifest_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "seed_manifests"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        (folder / f"{name}.json").write_text('{"name": "x"}')
    with chdir(tmp_path):
        done = run("manifest", "validate")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("Error: ")] != []
    assert all(f"seed_manifests/{name}.json" in done.stderr for name in ("a", "b"))
    assert done.stderr.count("Fix: ") == 2 and "valid" not in done.stdout


def test_clean_leaves_a_folder_alone_that_is_no_home(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    done = run("clean", "--yes", OMNISUPPORT_HOME=str(tmp_path))
    assert done.returncode == 1
    assert "is not a home" in done.stderr
    assert (tmp_path / "precious").exists()


def test_a_full_disk_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    code = errors.report(OSError(28, "No space left on device", "/lake/file"), debug=False)
    assert code == IngestError.exit_code
    told = capsys.readouterr().err
    assert "No space left on the disk at /lake/file." in told
    assert "run the same command again" in told


def test_a_damaged_file_has_an_exit_code_and_nothing_of_it_is_quoted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"ada.lovelace@example.org")
    for read in (pq.read_table, lambda path: duckdb.read_parquet(str(path)).fetchall()):
        with pytest.raises(Exception) as raised:
            read(file)
        assert errors.report(raised.value, debug=False) == 1
        told = capsys.readouterr().err
        assert "cannot be read" in told
        assert "doctor" in told
        assert "ada.lovelace" not in told


def test_an_error_nobody_foresaw_is_told_without_its_message_which_may_quote_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = psycopg2.IntegrityError("DETAIL: Key (email)=(someone@example.com) already exists.")
    assert errors.report(error, debug=False) == errors.UNEXPECTED_EXIT_CODE
    told = capsys.readouterr().err
    assert "unexpected IntegrityError" in told
    assert "someone@example.com" not in told
