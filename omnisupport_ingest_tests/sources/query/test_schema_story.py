"""A table that changes in the middle of a workload read by a cursor: from real ALTERs to the history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import Row, SparkSession

from omnisupport_ingest.checks.quality_checks import schemas_as_contracted
from omnisupport_ingest_tests.cli.command import command
from omnisupport_ingest_tests.sources.query.platform_of_desk import Platform
from omnisupport_ingest_tests.sources.query.tickets import SOURCE, Desk


def columns(rows: list[Row], *names: str) -> list[tuple[object, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def propose() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command("contracts", "propose", "tickets", "--write", "--json").out)
    return document


@pytest.mark.slow
def test_a_cursor_workload_goes_on_through_every_change_of_its_table(
    desk: Desk, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch)
    desk.run("INSERT INTO tickets VALUES (1, 'one', now() - interval '1 hour'), (2, 'two', now())")
    home.sync()
    home.take_in(spark)

    desk.run(
        "ALTER TABLE tickets ADD size int DEFAULT 7;"
        "INSERT INTO tickets VALUES (3, 'three', clock_timestamp(), 30)"
    )
    home.sync()
    home.take_in(spark)
    ((kind, column, edit),) = home.asked()
    assert (kind, column) == ("column_added", "size") and edit.endswith("add size under properties")
    told = command("contracts", "changes")
    assert told.code == 1 and "column added: size integer DEFAULT 7" in told.out
    assert f"{SOURCE}.tickets: column added: size" in command("status", "--all").out
    check = schemas_as_contracted(home.workspace, SOURCE, ["tickets"])["tickets"]
    assert not check.passed and "size" in check.summary

    assert propose()["version"] == "1.1.0"
    assert home.asked() == []
    home.take_in(spark)
    # The first is older than any lookback: what the default gave it is known by the catalog.
    assert columns(home.rows(spark), "id", "size") == [(1, 7), (2, 7), (3, 30)]

    desk.run(
        "ALTER TABLE tickets ALTER size TYPE bigint;"
        "UPDATE tickets SET size = 5000000000, updated_at = clock_timestamp() WHERE id = 3"
    )
    home.sync()
    assert [each[:2] for each in home.asked()] == [("column_widened", "size")]
    assert propose()["version"] == "1.2.0"
    desk.run(
        "ALTER TABLE tickets RENAME subject TO title; INSERT INTO tickets (id, title) VALUES (4, 'four')"
    )
    home.sync()
    assert [each[:2] for each in home.asked()] == [("column_renamed", "subject")]
    assert propose()["version"] == "2.0.0"
    assert "title" in {each.name for each in home.contract.columns}
    home.sync(reason="subject is called title")
    desk.run("ALTER TABLE tickets DROP title; INSERT INTO tickets (id) VALUES (5)")
    home.sync()
    home.take_in(spark)
    assert [each[:2] for each in home.asked()] == [("column_dropped", "title")]
    # What is older than the lookback keeps its last value; what is read once more has none.
    shown = [(1, "one", 7), (2, None, 7), (3, None, 5_000_000_000), (4, None, 7), (5, None, 7)]
    assert columns(home.rows(spark), "id", "title", "size") == shown
    unresolved = {row["id"] for row in home.rows(spark) if "title" in (row["_cdc_unresolved"] or ())}
    assert unresolved == {2, 3, 4, 5}, "what nothing said is no NULL"
    sizes = columns(home.rows(spark, past=True), "id", "size")
    assert (3, 30) in sizes and (3, 5_000_000_000) in sizes
    assert propose()["version"] == "3.0.0"
    home.sync()
    home.take_in(spark)
    assert [row["id"] for row in home.rows(spark)] == [1, 2, 3, 4, 5] and home.asked() == []


@pytest.mark.slow
def test_a_blocked_table_says_so_until_it_is_read_whole(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch, evolution="block")
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    home.sync()
    desk.run("ALTER TABLE tickets ADD size int; INSERT INTO tickets VALUES (2, 'two', clock_timestamp(), 20)")
    home.sync()
    assert [each[:2] for each in home.asked()] == [("column_added", "size")]
    assert propose()["version"] == "1.1.0"
    ((*_, edit),) = home.asked()
    assert edit.startswith(f"omnisupport-ingest sync {SOURCE} --table tickets --full-refresh")
    told = command("sync", SOURCE)
    assert told.code == 0 and "public.tickets: not read, as its schema or key has changed" in told.out
    home.sync(reason="somebody has looked")
    assert home.asked() == []


@pytest.mark.slow
def test_an_additive_contract_learns_a_nullable_column_by_itself(
    desk: Desk, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Platform(desk, tmp_path / "own", monkeypatch, evolution="additive")
    desk.run("INSERT INTO tickets VALUES (1, 'one')")
    home.sync()
    desk.run(
        "ALTER TABLE tickets ADD size int, ADD due date NOT NULL DEFAULT '2026-01-01', ADD email text;"
        "INSERT INTO tickets VALUES (2, 'two', clock_timestamp(), 20, '2026-02-02', 'a@example.com')"
    )
    home.sync()
    assert home.contract.version == "1.1.0"
    assert {each[1] for each in home.asked()} == {"due", "email"}, "NOT NULL and personal data are a person's"
    home.take_in(spark)
    assert columns(home.rows(spark), "id", "size") == [(1, None), (2, 20)]
