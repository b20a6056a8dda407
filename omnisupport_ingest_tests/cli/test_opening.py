"""A home that cannot be opened as told: a clear error, and the same command works after its fix."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.cli.opening import open_home, open_settings, open_workspace, table_of
from omnisupport_ingest.cli.up import Captures
from omnisupport_ingest.contracts.documents import program_file
from omnisupport_ingest.contracts.in_force import in_force
from omnisupport_ingest.contracts.model import UnknownTable
from omnisupport_ingest.demo.social import SOCIAL
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.epochs import EpochFacts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.errors import SourceUnavailable
from omnisupport_ingest.verify.services import check_source
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.waiting import PATIENCE

MISMATCH_EXIT_CODE = 3


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return Home.open(tmp_path / "home", WindowSize(60)).path


def show_checkpoints(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", "checkpoint", "show"],
        env={**os.environ, "OMNISUPPORT_HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


@pytest.mark.slow
def test_a_home_of_another_window_size_opens_with_its_own(home: Path):
    marker = (home / "home.json").read_bytes()
    refused = show_checkpoints(home, OMNISUPPORT_WINDOW="daily")
    assert refused.returncode == MISMATCH_EXIT_CODE
    assert f"{home} has hourly windows, but OMNISUPPORT_WINDOW is daily." in refused.stderr
    assert "Fix: Set OMNISUPPORT_WINDOW=hourly" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (home / "home.json").read_bytes() == marker
    assert show_checkpoints(home, OMNISUPPORT_WINDOW="hourly").returncode == 0
    assert show_checkpoints(home).returncode == 0


def test_a_home_of_a_newer_format_is_left_alone(home: Path):
    marker = home / "home.json"
    ours = marker.read_text()
    marker.write_text(json.dumps({**json.loads(ours), "format_version": 99}))
    newer = marker.read_bytes()
    refused = show_checkpoints(home)
    assert refused.returncode == MISMATCH_EXIT_CODE
    assert "has format version 99" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert marker.read_bytes() == newer
    marker.write_text(ours)
    assert show_checkpoints(home).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        *(("alarms", "--json"), ("sweep",), ("checkpoint", "rebuild"), ("materialize",)),
        *(("verify",), ("verify", "--checksums")),
    ],
)
def test_a_home_that_is_not_there_is_made_by_no_command_that_needs_one(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """A wrong path in a crontab would be an empty home in which all is well."""
    with environment(home=str(tmp_path / "typo")):
        done = command(*arguments)
    assert done.code == 3 and "There is no home" in done.err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "arguments", [("verify",), ("verify", "--checksums"), ("verify", "--table", "tickets")]
)
def test_a_source_that_no_contract_names_is_refused_and_not_called_equal(
    home: Path, arguments: tuple[str, ...]
) -> None:
    with environment(home=str(home), contracts_dir=str(program_file("contracts/data")), source="suport_desk"):
        done = command(*arguments)
    assert done.code != 0 and "No contract names the source 'suport_desk'" in done.err


def test_a_table_is_found_by_its_name_whatever_source_it_is_of(home: Path) -> None:
    with environment(home=str(home), contracts_dir=str(program_file("contracts/data"))):
        workspace = open_workspace()
        found = [table_of(workspace, name, None) for name in ("tickets", "partner_tickets")]
        assert [each.source for each in found] == ["support_desk", "partner_desk"]
        assert table_of(workspace, "tickets", "partner_desk").name == "partner_tickets"
        with pytest.raises(UnknownTable, match="no table with a contract"):
            table_of(workspace, "partner_tickets", "support_desk")


def test_a_captured_source_whose_setting_is_gone_gets_no_empty_server(tmp_path: Path) -> None:
    project = tmp_path / "home"
    home = Home.open(project, WindowSize(60))
    facts = EpochFacts("7300", 1, "omnisupport", Lsn(100), "shop", "16.4")
    LandingStore(home.landing, "support_desk").begin_epoch("first", facts)
    contracts = str(program_file("contracts/data"))

    with environment(home=str(project), contracts_dir=contracts):
        with pytest.raises(SourceUnavailable, match="OMNISUPPORT_SOURCE_DSN is not set"):
            check_source(open_settings(), home, print)  # as `up` does, before anything starts
        synced, seen, found = command("sync"), command("preflight"), command("doctor")

    assert synced.code == 4
    assert "system identifier 7300" in synced.err and "OMNISUPPORT_SOURCE_DSN is not set" in synced.err
    assert "OMNISUPPORT_SOURCE_DSN is not set" in seen.out
    assert "OMNISUPPORT_SOURCE_DSN is not set" in found.out
    assert not any((project / "postgres").glob("*"))


def test_targets_that_nobody_named_have_no_lag(home: Path) -> None:
    with environment(home=str(home), contracts_dir=str(program_file("contracts/data"))):
        done = command("target", "status")
    assert (done.code, done.out) == (0, "No contract names a target.\n")


@pytest.mark.parametrize("checkout", [True, False], ids=["in a checkout", "in an empty folder"])
def test_a_new_home_of_a_domain_of_the_demo_has_its_contracts(
    checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if checkout:
        for folder in ("contracts", "reports/week03"):
            shutil.copytree(program_file(folder), tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    with environment(source="social"):
        settings = open_settings()
        assert settings.contracts_dir is None, "nobody has set it"
        assert "CONTRACTS_DIR" not in command("settings", "--set").out
        home = open_home(settings)
        has = in_force(settings)
        assert has.contracts == (tmp_path / SOCIAL.contracts if checkout else program_file(SOCIAL.contracts))
        assert Captures(settings, home).names == ("social",)
        LandingStore(home.landing, "social").begin_epoch("first", None)
        assert in_force(open_settings()) == in_force(settings), "the home has recorded them"
    with environment():
        assert open_settings().source == "social" and in_force(open_settings()).contracts == has.contracts


def test_contracts_of_ones_own_stay_in_force_beside_a_source_called_like_a_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = json.loads(program_file("contracts/data/tickets.json").read_text())
    document["x-cdc"]["source"] = "shop"
    mine = tmp_path / "contracts" / "data" / "tickets.json"
    mine.parent.mkdir(parents=True)
    mine.write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    with environment(source="social"):
        assert in_force(open_settings()).contracts == mine.parent
    with environment(source="social", source_dsn="dbname=network"):
        assert in_force(open_settings()).contracts == mine.parent


def test_opening_a_home_of_a_domain_imports_no_domain(tmp_path: Path) -> None:
    """Every command does it, and their generators of traffic take 50 ms to import."""
    code = (
        "import sys; from omnisupport_ingest.cli.opening import open_home, open_settings; "
        "open_home(open_settings()); assert 'omnisupport_ingest.demo.domains' not in sys.modules"
    )
    with environment(source="social", home=str(tmp_path / "home")):
        subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
