"""``init`` makes a project that the other commands find themselves in, and keeps what is there."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from omnisupport_ingest.cli.main import cli
from omnisupport_ingest.contracts.decision_table import default_decision_table, load_decision_table
from omnisupport_ingest.contracts.load import default_contracts_dir

pytestmark = pytest.mark.quick


def test_a_project_is_what_the_commands_take_for_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(cli, ["init", str(tmp_path / "shop")])
    assert done.exit_code == 0, done.output
    monkeypatch.chdir(tmp_path / "shop")
    assert default_contracts_dir().absolute() == tmp_path / "shop" / "contracts" / "data"
    assert default_decision_table().absolute().is_relative_to(tmp_path)
    assert load_decision_table(default_decision_table()).decisions
    ignored = Path(".gitignore").read_text().splitlines()
    assert {".omnisupport/", ".omnisupport-*/"} <= set(ignored), "homes, also those of the demo"
    assert stat.S_IMODE((tmp_path / "shop" / ".env").stat().st_mode) == 0o600
    assert [line for line in Path(".env").read_text().splitlines() if line and not line.startswith("#")] == []


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("OMNISUPPORT_WINDOW=daily\n")
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    first = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert first.exit_code == 0 and f"{tmp_path}/.env\n" not in first.output
    assert (tmp_path / ".env").read_text() == "OMNISUPPORT_WINDOW=daily\n"
    again = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert again.exit_code == 0 and "has everything already" in again.output


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "contracts").write_text("")
    done = CliRunner().invoke(cli, ["init", str(tmp_path)])
    assert done.exit_code == 1
    problem = str(done.exception or "") + done.output
    assert "contracts" in problem and "cannot be written" in problem
