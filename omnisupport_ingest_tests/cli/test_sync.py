"""``sync`` on a database that the code has never seen, while it changes; compared by none of our code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omnisupport_ingest.cli.sync import SlotLeft, slot_left
from omnisupport_ingest.home import Home
from omnisupport_ingest.runtime.home_lock import HomeLock
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract

RANGE_START = "dagster/asset_partition_range_start"


def runs_in_dagster(folder: Path, given: dict[str, str]) -> list[dict[str, str]]:
    """Status and windows of every run that the instance of the home knows, oldest first."""
    program = (
        "import dagster as dg, json\n"
        "with dg.DagsterInstance.get() as instance:\n"
        "    runs = instance.get_runs()[::-1]\n"
        "    told = [dict(run.tags, status=run.status.value, run_id=run.run_id) for run in runs]\n"
        "    print(json.dumps(told))\n"
    )
    said = subprocess.check_output(
        [sys.executable, "-c", program],
        env=pgbench.environment(given | {"DAGSTER_HOME": str(folder / "home" / "dagster")}),
        text=True,
    )
    found: list[dict[str, str]] = json.loads(said)
    return found


@pytest.mark.slow
def test_a_database_that_changes_meanwhile_is_the_same_in_the_lake_after_two_passes_with_the_least_rights(
    source: SourceUnderTest, warm: str, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    with pgbench.least_role(source, tmp_path) as dsn:
        passes_as(dsn, source, tmp_path, pgbench.on(warm))


def passes_as(dsn: str, source: SourceUnderTest, tmp_path: Path, on_warm: dict[str, str]) -> None:
    """Three passes with the rights of ``dsn`` alone, one of them on a Spark of its own.

    The traffic and the comparison have rights of their own.
    """
    given = pgbench.variables(source, tmp_path) | {"OMNISUPPORT_SOURCE_DSN": dsn}
    with pgbench.traffic(source.dsn):
        first = pgbench.command("sync", "--json", folder=tmp_path, variables=given)
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout)
    assert told["landed"]["snapshots"] == ["Rates", "pgbench_accounts", "pgbench_branches", "pgbench_tellers"]
    assert told["verify"]["mode"] == "sample"
    assert told["verify"]["holds"] is True
    assert told["slot"]["name"] == source.slot
    assert told["slot"]["remove_with"] == "omnisupport-ingest source drop"

    second = pgbench.command("sync", "--verify", "full", folder=tmp_path, variables=given | on_warm)
    assert second.returncode == 0, second.stderr
    assert "No difference." in second.stdout
    assert f"The replication slot {source.slot} stays on the server" in second.stdout
    assert "incubator" not in second.stderr + first.stderr
    for table in pgbench.COLUMNS:
        expected = pgbench.rows_of_source(source.dsn, table)
        assert expected
        assert pgbench.rows_of_lake(tmp_path / "home", table) == expected

    runs = runs_in_dagster(tmp_path, given)
    assert {run["status"] for run in runs} == {"SUCCESS"}
    assert [run["run_id"] for run in runs][: len(told["runs"])] == [run["run_id"] for run in told["runs"]]
    assert all(RANGE_START in run for run in runs)

    third = pgbench.command("sync", "--verify", "none", "--json", folder=tmp_path, variables=given)
    assert third.returncode == 0, third.stderr
    nothing = json.loads(third.stdout)
    assert (nothing["runs"], nothing["landed"]["changes"], nothing["verify"]) == ([], 0, None)
    assert "Starting Spark" not in third.stderr


@pytest.mark.slow
def test_capture_once_and_materialize_are_its_two_halves(
    source: SourceUnderTest, warm: str, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    given = pgbench.variables(source, tmp_path) | pgbench.on(warm)
    captured = pgbench.command("capture", "--once", folder=tmp_path, variables=given)
    assert captured.returncode == 0, captured.stderr
    assert captured.stdout == ""
    assert "Landed the snapshot of pgbench_tellers: 10 rows" in captured.stderr
    made = pgbench.command("materialize", "--json", folder=tmp_path, variables=given)
    assert made.returncode == 0, made.stderr
    assert len(json.loads(made.stdout)["runs"]) == 1
    assert pgbench.rows_of_lake(tmp_path / "home", "pgbench_tellers") == pgbench.rows_of_source(
        source.dsn, "pgbench_tellers"
    )


@pytest.mark.slow
def test_a_run_that_fails_says_why_and_the_same_command_works_once_that_is_repaired(
    source: SourceUnderTest, warm: str, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    given = pgbench.variables(source, tmp_path) | pgbench.on(warm)
    assert pgbench.command("capture", "--once", folder=tmp_path, variables=given).returncode == 0
    damaged = max((tmp_path / "home" / "landing").rglob("*.parquet"), key=lambda file: file.stat().st_size)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    failed = pgbench.command("materialize", folder=tmp_path, variables=given)
    assert failed.returncode == 1
    assert f"Error: The run over {runs_in_dagster(tmp_path, given)[0][RANGE_START]} failed." in failed.stderr
    assert damaged.name in failed.stderr
    assert failed.stderr.count("Fix: ") == 1
    damaged.write_bytes(whole)
    repaired = pgbench.command("materialize", folder=tmp_path, variables=given)
    assert repaired.returncode == 0, repaired.stderr
    assert "Everything that has landed is in every layer." in repaired.stdout
    assert [run["status"] for run in runs_in_dagster(tmp_path, given)] == ["FAILURE", "SUCCESS"]


def test_a_source_that_lacks_a_right_is_told_with_the_fix_and_the_same_command_works_after_it(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES, "ALTER TABLE pgbench_tellers DROP CONSTRAINT pgbench_tellers_pkey")
    pgbench.write_contracts(tmp_path / "contracts")
    given = pgbench.variables(source, tmp_path)
    refused = pgbench.command("capture", "--once", folder=tmp_path, variables=given)
    assert refused.returncode == 5
    assert 'ALTER TABLE "public"."pgbench_tellers" ADD PRIMARY KEY ("tid");' in refused.stderr
    source.sql('ALTER TABLE "public"."pgbench_tellers" ADD PRIMARY KEY ("tid")')
    repaired = pgbench.command("capture", "--once", folder=tmp_path, variables=given)
    assert repaired.returncode == 0, repaired.stderr


@pytest.mark.slow
def test_a_source_that_does_not_answer_is_told_before_anything_is_started(tmp_path: Path) -> None:
    pgbench.write_contracts(tmp_path / "contracts")
    given = {
        "OMNISUPPORT_HOME": str(tmp_path / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(tmp_path / "contracts"),
        "OMNISUPPORT_SOURCE": pgbench.SOURCE,
        "OMNISUPPORT_SOURCE_DSN": "host=127.0.0.1 port=1 dbname=bank user=me password=hunter2",
    }
    for arguments in (("sync",), ("verify",), ("capture", "--once")):
        told = pgbench.command(*arguments, folder=tmp_path, variables=given)
        assert told.returncode == 4, told.stderr
        assert "hunter2" not in told.stderr + told.stdout
        assert "Starting Spark" not in told.stderr


def test_a_pass_leaves_a_home_to_the_command_that_has_it(tmp_path: Path) -> None:
    pgbench.write_contracts(tmp_path / "contracts")
    given = {
        "OMNISUPPORT_HOME": str(tmp_path / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(tmp_path / "contracts"),
        "OMNISUPPORT_SOURCE": pgbench.SOURCE,
    }
    home = Home.open(tmp_path / "home", WindowSize.parse("hourly"))
    with HomeLock(home, "up"):
        for arguments in (("sync",), ("materialize",)):
            told = pgbench.command(*arguments, folder=tmp_path, variables=given)
            assert told.returncode == 6
            assert "is in use by `up`" in told.stderr
            assert "take everything in" in told.stderr


def test_the_slot_that_capture_left_is_told_with_the_wal_that_it_holds(source: SourceUnderTest) -> None:
    assert slot_left(source.settings, source.home) is None
    source.sql("CREATE TABLE notes (id int PRIMARY KEY)")
    source.tables.append(contract("notes", ["id"]))
    source.catch_up()
    before = slot_left(source.settings, source.home)
    source.sql("INSERT INTO notes SELECT generate_series(1, 20000)")
    after = slot_left(source.settings, source.home)
    assert before is not None
    assert after is not None
    assert (after.name, after.safe_bytes is not None) == (source.slot, True)
    assert after.retained_bytes > before.retained_bytes + 1_000_000


def test_without_a_limit_the_danger_is_named() -> None:
    message = SlotLeft("mine", 3 * 1024**3, None).message
    assert "3.0 GB now" in message
    assert "sets no limit" in message
    assert "omnisupport-ingest source drop" in message
    assert "After 5 MB more" in SlotLeft("mine", 10, 5 * 1024**2).message
