"""``up`` on a database of a person's own, named in ``.env``, with Dagster's storage in PostgreSQL."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import parse_dsn

from omnisupport_ingest.cli.probes import LIVE, READY
from omnisupport_ingest.cli.source_connect import shown_dsn
from omnisupport_ingest.runtime.dagster_services import CODE_SERVER, DAEMON
from omnisupport_ingest.runtime.ports import free_port
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.cli.test_probes import asked
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.waiting import PATIENCE, until

PASSWORD = "hunter2-of-dagster"
SOURCE_PASSWORD = "hunter2-of-the-source"


def dagster_url(source: SourceUnderTest) -> str:
    """The database of the source as a URL, for Dagster to keep its storage in beside the tables."""
    parts = parse_dsn(source.dsn)
    return f"postgresql://{parts['user']}:{PASSWORD}@:{parts['port']}/{parts['dbname']}?host={parts['host']}"


def wait_for(what: str, seen: Callable[[], bool], process: subprocess.Popen[str], *, seconds: float) -> None:
    until(lambda: seen() or process.poll() is not None, seconds, every=1.0)
    assert process.poll() is None, f"up ended while waiting for {what}"


def runs_succeeded(source: SourceUnderTest) -> int:
    try:
        ((count,),) = source.query(
            "SELECT count(*) FROM runs "
            f"WHERE status = 'SUCCESS' AND pipeline_name = 'ingest_{pgbench.SOURCE}'"
        )
    except psycopg2.errors.UndefinedTable:
        return 0
    return int(count)


def is_ready(port: int) -> bool:
    try:
        return asked(port, READY)[0] == 200
    except OSError:
        # The last of the services that `up` starts.
        return False


@pytest.mark.drawn(1)
@pytest.mark.slow
def test_it_captures_and_runs_with_its_history_in_postgresql_and_no_password_in_any_file(
    kept_in: str | None, source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    with pgbench.least_role(source, tmp_path) as dsn:
        up_and_verify_as(dsn, source, tmp_path, kept_in)


def up_and_verify_as(dsn: str, source: SourceUnderTest, tmp_path: Path, kept_in: str | None) -> None:
    """``up`` and ``verify`` with the rights of ``dsn`` alone; Dagster's storage has its own."""
    home, health = tmp_path / "home", free_port()
    (tmp_path / ".env").write_text(
        f"OMNISUPPORT_HOME={home}\n"
        "OMNISUPPORT_CONTRACTS_DIR=contracts\n"
        f"OMNISUPPORT_SOURCE={pgbench.SOURCE}\n"
        f"OMNISUPPORT_SOURCE_DSN={dsn} password={SOURCE_PASSWORD}\n"
        f"OMNISUPPORT_SLOT={source.slot}\n"
        f"OMNISUPPORT_PUBLICATION={source.slot}\n"
        f"OMNISUPPORT_DAGSTER_PG_URL={dagster_url(source)}\n"
        "OMNISUPPORT_WEBSERVER_PORT=0\n"
        f"OMNISUPPORT_METRICS_PORT={health}\n"
        "OMNISUPPORT_SPARK_DRIVER_MEMORY=1g\n"
        + ("" if kept_in is None else f"OMNISUPPORT_STORAGE={kept_in}\n")
    )
    with (tmp_path / "up.out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "up"],
            cwd=tmp_path,
            env=pgbench.environment({}),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        wait_for("a run in PostgreSQL", lambda: runs_succeeded(source) > 0, process, seconds=900)
        source.sql("UPDATE pgbench_tellers SET tbalance = 7 WHERE tid = 3")
        expected = pgbench.rows_of_source(source.dsn, "pgbench_tellers")

        def shows_the_change() -> bool:
            return pgbench.rows_of_lake(home, "pgbench_tellers") == expected

        wait_for("the change in the lake", shows_the_change, process, seconds=600)
        wait_for("readiness", lambda: is_ready(health), process, seconds=PATIENCE)
        found = [each["name"] for each in asked(health, READY)[1]["found"]]
        assert found == ["look", "home", "disk", "up", "daemon", f"capture {pgbench.SOURCE}"]
        status, body = asked(health, LIVE)
        assert (status, [each["name"] for each in body["found"]]) == (200, ["look", "up"])
        sampled = pgbench.command("verify", "--sample", "100", "--json", folder=tmp_path, variables={})
        assert sampled.returncode == 0, sampled.stderr + sampled.stdout
        told = json.loads(sampled.stdout)
        assert told["holds"] is True
        assert 20 < told["tables"]["pgbench_accounts"]["source_rows_compared"] < 300
        assert told["tables"]["pgbench_accounts"]["lake_current_rows"] == pgbench.ACCOUNTS
        whole = pgbench.command("verify", "--table", "pgbench_tellers", folder=tmp_path, variables={})
        assert whole.returncode == 0, whole.stderr + whole.stdout
        assert "No difference." in whole.stdout
        assert "pgbench_accounts" not in whole.stdout
        assert "WARNING" not in whole.stderr + whole.stdout
        by_ranges = pgbench.command("verify", "--checksums", "--json", folder=tmp_path, variables={})
        assert by_ranges.returncode == 0, by_ranges.stderr + by_ranges.stdout
        compared = json.loads(by_ranges.stdout)["tables"]
        assert {each["state"] for each in compared.values()} == {"equal"}
        assert compared["pgbench_accounts"]["rows_compared"] == pgbench.ACCOUNTS
        status = pgbench.command("status", folder=tmp_path, variables={})
        assert "equal to the source at LSN" in status.stdout, status.stdout
        pgbench.spoil_teller(home, 3)
        repair = ("verify", "--repair", "--table", "pgbench_tellers")
        repaired = pgbench.command(*repair, folder=tmp_path, variables={})
        assert repaired.returncode == 1, repaired.stderr + repaired.stdout
        assert "pgbench_tellers: DIFFERS: 1 row differs from the source" in repaired.stdout
        assert "Requested: pgbench_tellers, keys 3." in repaired.stdout
        wait_for("the row as it is at the source", shows_the_change, process, seconds=600)
        refused = pgbench.command("materialize", folder=tmp_path, variables={})
        assert refused.returncode == 6
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    told_by_up = (tmp_path / "up.out").read_text()
    assert "Stopped." in told_by_up
    assert f"Source {pgbench.SOURCE}: {shown_dsn(dsn)}\n" in told_by_up
    assert "omnisupport-ingest source connect" in told_by_up
    assert SOURCE_PASSWORD not in told_by_up
    assert not list((home / "dagster").rglob("*.db")), "the storage is not SQLite"
    for file in (each for each in home.rglob("*") if each.is_file()):
        content = file.read_bytes()
        for secret in (PASSWORD, SOURCE_PASSWORD):
            assert secret.encode() not in content, file
    assert home.stat().st_mode & 0o077 == 0
    for name in (CODE_SERVER, DAEMON):
        assert (home / "logs" / f"{name}.log").stat().st_mode & 0o077 == 0


def test_a_source_that_lacks_something_is_told_with_the_sql_before_anything_starts(
    source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    # One table that cannot be captured is left out; where none is left, nothing starts.
    for table in pgbench.KEYS:
        source.sql(f'ALTER TABLE "{table}" DROP CONSTRAINT "{table}_pkey"')
    (tmp_path / ".env").write_text(
        f"OMNISUPPORT_CONTRACTS_DIR=contracts\nOMNISUPPORT_SOURCE={pgbench.SOURCE}\n"
        f"OMNISUPPORT_SOURCE_DSN={source.dsn}\nOMNISUPPORT_SLOT={source.slot}\n"
        f"OMNISUPPORT_PUBLICATION={source.slot}\nOMNISUPPORT_WEBSERVER_PORT=0\n"
    )
    told = pgbench.command("up", folder=tmp_path, variables={})
    assert told.returncode == 5
    assert 'ALTER TABLE "public"."pgbench_tellers" ADD PRIMARY KEY ("tid");' in told.stderr
    assert "Starting" not in told.stdout
    assert not list((tmp_path / ".omnisupport" / "logs").glob("*.log"))
