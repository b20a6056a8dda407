"""A contract or definition of a log that is changed while its capture runs: who looks sees that it waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from omnisupport_ingest.contracts.in_force import contracts_in_force
from omnisupport_ingest.contracts.sources import log_settings, sources_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.capture.outdated import contracts_at_start, definition_at_start
from omnisupport_ingest.sources.postgres.capture.state import CaptureRecords, recorded
from omnisupport_ingest.sources.postgres.session.lease import take_lease
from omnisupport_ingest_tests.cli.command import command, environment
from omnisupport_ingest_tests.sources.query.tickets import contract_document

SECRET = "s3cret-word"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project with the log ``north``, which has the tables tickets and notes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NORTH_DSN", f"host=north dbname=desk user=reader password={SECRET}")
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    for table in ("tickets", "notes"):
        change(tmp_path, table)
    contracts = str(tmp_path / "contracts" / "data")
    with environment(home=str(tmp_path / "home"), contracts_dir=contracts):
        Home.open(tmp_path / "home", Settings().window_size)
        assert command("sources", "new", "north", "--kind", "postgres_log", "--env", "NORTH_DSN").code == 0
        yield tmp_path


def change(folder: Path, table: str, **members: Any) -> None:
    path = folder / "contracts" / "data" / f"{table}.json"
    document = json.loads(path.read_text()) if path.exists() else contract_document(schema="public")
    document["x-cdc"] |= {"source": "north", "table": table, **members}
    path.write_text(json.dumps(document))


@pytest.fixture
def captured(folder: Path) -> Iterator[Path]:
    """The same while a capture of north runs, which began with these files."""
    settings, home = Settings(), folder / "home"
    contracts = contracts_in_force(settings)
    definition = sources_in_force(settings, contracts).find("north")
    (home / "run").mkdir(exist_ok=True)
    (home / "landing" / "north").mkdir(parents=True)
    with (
        take_lease(home / "run", "north"),
        recorded(
            CaptureRecords(home / "landing" / "north"),
            follows=True,
            last_landed=lambda: None,
            definition=definition_at_start(log_settings(settings, definition)),
            contracts=contracts_at_start(definition.tables(contracts)),
        ) as ready,
    ):
        ready()
        yield folder


def told(*name: str) -> list[tuple[str, str]]:
    """What ``sources diff`` has to say of running captures: what differs, and the fix."""
    found = json.loads(command("sources", "diff", *name, "--json").out)["differences"]
    return [(each["what"], each["fix"]) for each in found if each["fix"]]


def test_nothing_differs_until_a_file_is_changed_and_no_password_is_kept(captured: Path) -> None:
    assert told() == []
    record = (captured / "home" / "landing" / "north" / "capture.json").read_text()
    assert "host=north" in record and SECRET not in record
    path = captured / "contracts" / "data" / "notes.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"title": "Other words"}))
    assert told() == [], "capture does not go by it"


def test_a_changed_contract_and_one_that_is_gone_wait_for_a_restart_of_the_capture(captured: Path) -> None:
    change(captured, "tickets", evolution="block")
    (captured / "contracts" / "data" / "notes.json").unlink()
    restart = "omnisupport-ingest source restart north"
    assert told() == told("north")
    assert sorted(told()) == [
        ("the contract notes is gone, and its table is still captured", restart),
        ("the contract tickets has changed, and its capture goes by what it was at its start", restart),
    ]
    seen = json.loads(command("status", "--json").out)
    assert len(seen["definition_changes"]) == 2
    waits = "files of north have changed, and its capture does not go by them yet"
    assert waits in seen["health"]["reasons"]
    shown = " ".join(command("status").out.split())
    assert f"north: the contract notes is gone, and its table is still captured. To do: {restart}" in shown


def test_a_changed_definition_waits_until_up_starts_again(
    captured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = captured / "contracts" / "sources" / "north.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"log": {"slot": "another"}}))
    monkeypatch.setenv("NORTH_DSN", f"host=south dbname=desk user=reader password={SECRET}")
    slot, server = sorted(told(), reverse=True)
    assert slot[0].startswith("log.slot is now another, and its capture goes by omnisupport")
    assert "connection is now host=south" in server[0] and SECRET not in str(server)
    assert "start it again" in server[1]
    path.unlink()
    assert ["its definition is gone" in what for what, _ in told()] == [True]


def test_a_capture_that_does_not_run_goes_by_the_files_at_its_next_start(folder: Path) -> None:
    change(folder, "tickets", evolution="block")
    assert told() == []
