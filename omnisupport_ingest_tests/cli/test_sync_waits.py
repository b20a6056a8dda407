"""``sync --verify full`` beside transactions that do not end: the lake first, then a wait that names them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.waiting import PATIENCE, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server that takes prepared transactions, with a database for the bank and one beside it."""
    made = EmbeddedPostgres(tmp_path / "server")
    made.start()
    with closing(connect(made.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute("ALTER SYSTEM SET max_prepared_transactions = 5")
        for database in ("bank", "beside"):
            cursor.execute(f"CREATE DATABASE {database}")
    made.stop()
    made.start()
    yield made
    made.destroy()


@pytest.mark.slow
def test_what_has_landed_is_in_the_lake_while_verify_waits_and_ctrl_c_leaves_no_slot(
    server: EmbeddedPostgres, warm: str, tmp_path: Path
) -> None:
    source = SourceUnderTest(server.dsn("bank"), "bank_slot", tmp_path / "home")
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    given = pgbench.variables(source, tmp_path) | pgbench.on(warm)
    first = pgbench.command("sync", "--verify", "none", folder=tmp_path, variables=given)
    assert first.returncode == 0, first.stderr
    source.sql("UPDATE pgbench_branches SET bbalance = 77")
    expected = pgbench.rows_of_source(source.dsn, "pgbench_branches")
    assert pgbench.rows_of_lake(tmp_path / "home", "pgbench_branches") != expected

    with (
        closing(connect(server.dsn("beside"))) as connection,
        connection.cursor() as cursor,
        (tmp_path / "stderr").open("w") as stderr,
    ):
        cursor.execute("CREATE TABLE orders (id int)")
        cursor.execute("BEGIN; INSERT INTO orders VALUES (1); PREPARE TRANSACTION 'order 17'")
        cursor.execute("BEGIN; INSERT INTO orders VALUES (2)")
        process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "sync", "--verify", "full"],
            cwd=tmp_path,
            env=pgbench.environment(given),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            told = tmp_path / "stderr"
            until(
                lambda: "waits for transactions" in told.read_text() or process.poll() is not None,
                max(300, PATIENCE),
            )
            assert pgbench.rows_of_lake(tmp_path / "home", "pgbench_branches") == expected
            (line,) = [each for each in told.read_text().splitlines() if "waits for transactions" in each]
            assert f"of process {connection.info.backend_pid}, postgres in database beside, for " in line
            assert "prepared as 'order 17' by postgres in database beside, for " in line
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
        finally:
            process.kill()
            process.wait()
        assert source.query("SELECT slot_name FROM pg_replication_slots") == [("bank_slot",)]
        cursor.execute("ROLLBACK")
        cursor.execute("ROLLBACK PREPARED 'order 17'")
