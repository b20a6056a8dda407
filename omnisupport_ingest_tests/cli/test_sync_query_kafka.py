"""``sync NAME`` of a source without a log: from its tables to the dimensions, deletes by comparison."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import duckdb
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.cli.sync_query_kafka import _runs_of
from omnisupport_ingest.verify.runs import FinishedRun
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.sources.query.tickets import contract_document

DIMENSION = "home/lake/desk/dim_tickets"


def shown(folder: Path) -> dict[int, tuple[str, bool]]:
    files = DeltaTable(folder / DIMENSION).file_uris()
    rows = duckdb.sql(f"SELECT id, subject, _cdc_is_deleted FROM read_parquet({files})").fetchall()
    return {number: (subject, gone) for number, subject, gone in rows}


@pytest.mark.slow
def test_a_table_of_sqlite_is_in_the_lake_after_a_sync_and_deletes_after_a_comparison(
    warm: str, tmp_path: Path
):
    base = sqlite3.connect(tmp_path / "desk.db", isolation_level=None)
    base.execute(
        "CREATE TABLE tickets (id INTEGER PRIMARY KEY, subject TEXT,"
        " updated_at DATETIME DEFAULT (datetime('now')))"
    )
    base.executemany("INSERT INTO tickets (id, subject) VALUES (?, 'old')", [(n,) for n in range(1, 201)])
    base.execute("UPDATE tickets SET updated_at = '2020-01-01 00:00:00' WHERE id <= 100")
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    (tmp_path / "contracts" / "sources").mkdir()
    document = contract_document(schema="main")
    (tmp_path / "contracts" / "data" / "tickets.json").write_text(json.dumps(document))
    definition = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "name": "desk",
        "kind": "query",
        "description": "A desk in SQLite.",
        "connection": {"env": "DESK_URL"},
        "page_rows": 60,
    }
    (tmp_path / "contracts" / "sources" / "desk.json").write_text(json.dumps(definition))
    given = {
        "OMNISUPPORT_HOME": str(tmp_path / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(tmp_path / "contracts" / "data"),
        "DESK_URL": f"sqlite:///{tmp_path / 'desk.db'}",
        **pgbench.on(warm),
    }

    first = pgbench.command("sync", "desk", "--json", folder=tmp_path, variables=given)
    assert first.returncode == 0, first.stderr
    (table,) = json.loads(first.stdout)["tables"]
    assert (table["full"], table["landed"], table["finished"]) == (True, 200, True)
    # Rows older than the home's first window are there too.
    assert shown(tmp_path) == dict.fromkeys(range(1, 201), ("old", False))

    base.execute("UPDATE tickets SET subject = 'new', updated_at = datetime('now', '+1 second') WHERE id = 7")
    base.execute("DELETE FROM tickets WHERE id IN (3, 150)")
    second = pgbench.command("sync", "desk", "--compare", "--json", folder=tmp_path, variables=given)
    assert second.returncode == 0, second.stderr
    told = json.loads(second.stdout)
    assert told["compared"][0]["deleted"] == 2
    found = shown(tmp_path)
    assert found[7] == ("new", False)
    assert {number for number, (_, gone) in found.items() if gone} == {3, 150}

    # Rows whose cursors are odd are in the dimension, with their values and their changes.
    base.execute("INSERT INTO tickets VALUES (401, 'far ahead', '2126-01-01 00:00:00'), (402, 'first', NULL)")
    base.execute("UPDATE tickets SET updated_at = datetime('now') WHERE id = 8")
    third = pgbench.command("sync", "desk", folder=tmp_path, variables=given)
    assert third.returncode == 0 and "quarantine" not in third.stderr, third.stderr
    base.execute("UPDATE tickets SET subject = 'changed' WHERE id = 402")
    # An older clock wrote this one.
    base.execute(
        "UPDATE tickets SET subject = 'x', updated_at = datetime(updated_at, '-1 minute') WHERE id = 8"
    )
    fourth = pgbench.command("sync", "desk", folder=tmp_path, variables=given)
    assert fourth.returncode == 0, fourth.stderr
    assert "1 event of desk waits in quarantine" in fourth.stderr
    assert "omnisupport-ingest quarantine list --source desk" in fourth.stderr
    found = shown(tmp_path)
    assert (found[401], found[402]) == (("far ahead", False), ("changed", False))

    # A table that is refused is the error of the sync, after what was read of the others.
    base.execute("INSERT INTO tickets (id, updated_at) VALUES (999, 'unknown')")
    refused = pgbench.command("sync", "desk", folder=tmp_path, variables=given)
    assert refused.returncode == 5 and "main.tickets: refused" in refused.stdout
    assert "no ISO text of a time" in refused.stderr and "unknown" not in refused.stderr
    base.close()


def test_a_source_without_a_contract_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "contracts" / "data").mkdir(parents=True)
    monkeypatch.setenv("OMNISUPPORT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMNISUPPORT_CONTRACTS_DIR", str(tmp_path / "contracts" / "data"))
    monkeypatch.setenv("DESK_URL", f"sqlite:///{tmp_path / 'desk.db'}")
    (tmp_path / "contracts" / "data" / "other.json").write_text(json.dumps(contract_document(schema="main")))
    assert command("sources", "new", "replica", "--kind", "query", "--env", "DESK_URL").code == 0

    done = command("sync", "replica")

    assert done.code == 5
    assert "No contract names the source replica" in done.err
    assert "omnisupport-ingest contracts new --all --source replica" in done.err


def test_runs_of_other_sources_are_not_counted_as_those_of_the_one_that_was_named() -> None:
    def run(source: str) -> FinishedRun:
        return FinishedRun("id", source, "2026-01-02T0900", "2026-01-02T0900", 1)

    assert _runs_of("desk", [run("desk")]) == "1 run."
    assert _runs_of("desk", [run("partner"), run("files"), run("partner")]) == (
        "0 runs. The pass took in what waited of files, partner, too."
    )
