"""``source repair --mode recovery`` on a real lake: what it has already keeps its history."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import duckdb
import pytest
from deltalake import DeltaTable

from omnisupport_ingest.failpoints import VARIABLE
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

REPAIR = ("source", "repair", "--mode", "recovery", "--reason", "the slot was dropped")


def epochs_of_accounts(home: Path) -> dict[int, int]:
    """How many live accounts have their last event in which epoch."""
    files = DeltaTable(str(home / "lake" / pgbench.SOURCE / "dim_pgbench_accounts")).file_uris()
    listed = ", ".join(f"'{file}'" for file in files)
    found = duckdb.sql(
        f"SELECT _cdc_epoch, count(*) FROM read_parquet([{listed}]) WHERE NOT _cdc_is_deleted GROUP BY 1"
    ).fetchall()
    return dict(found)


def lose_the_slot(source: SourceUnderTest) -> None:
    source.sql(
        f"SELECT pg_drop_replication_slot('{source.slot}')",
        "UPDATE pgbench_accounts SET abalance = 7 WHERE aid = 1500",
        "DELETE FROM pgbench_accounts WHERE aid IN (10, 4000)",
        "DELETE FROM \"Rates\" WHERE currency = 'CHF' AND valid_on < '2026-01-04'",
        "UPDATE pgbench_tellers SET filler = NULL WHERE tid = 3",
    )


@pytest.mark.slow
def test_lost_slot_is_repaired_by_reading_what_differs_and_a_killed_repair_by_reading_all(
    source: SourceUnderTest, warm: str, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    given = pgbench.variables(source, tmp_path) | pgbench.on(warm)
    home = tmp_path / "home"

    def run(*arguments: str, code: int = 0, **more: str) -> Any:
        done = pgbench.command(*arguments, folder=tmp_path, variables=given | more)
        assert done.returncode == code, done.stderr
        return done

    run("sync", "--verify", "none")
    source.sql("UPDATE pgbench_accounts SET abalance = 1 WHERE aid = 1")
    run("capture", "--once")
    lose_the_slot(source)
    run("sync", code=7)
    behind = run(*REPAIR, code=1)
    assert "The lake has not taken in all that has landed from bank" in behind.stderr

    run("materialize")
    done = run(*REPAIR)
    # Two that rows have left, and no other: what the pipeline typed has the server's checksum.
    assert "4 of 5 chunks are as in the lake (2 by a comparison row by row), the others were" in done.stdout
    assert "2 rows of the lake are gone from the source." in done.stdout
    assert "pgbench_branches: 1 of 1 chunk are as in the lake.\n" in done.stdout
    assert "Epoch 2 of bank has begun: the slot was dropped" in done.stdout
    source.sql("UPDATE pgbench_accounts SET abalance = 2 WHERE aid = 2")
    proof = json.loads(run("sync", "--verify", "full", "--json").stdout)["verify"]
    assert proof["holds"] is True
    assert proof["tables"]["pgbench_accounts"]["source_rows_compared"] == pgbench.ACCOUNTS - 2
    counted = epochs_of_accounts(home)
    assert set(counted) == {1, 2} and 999 <= counted[2] <= 1001
    for table in pgbench.COLUMNS:
        assert pgbench.rows_of_lake(home, table) == pgbench.rows_of_source(source.dsn, table)

    lose_the_slot(source)
    source.sql("UPDATE pgbench_accounts SET abalance = 8 WHERE aid % 500 = 0")
    died = pgbench.command(
        *REPAIR, folder=tmp_path, variables=given | {VARIABLE: "landing.manifest.before@accounts-000005"}
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(list((home / "run").glob("repair-*"))) == 1
    run("capture", "--once")
    ended, accounts = set(), dict[str, int]()
    for batch in LandingStore(home / "landing", pgbench.SOURCE).manifests():
        if batch.epoch == 3 and batch.chunk is not None:
            snapshot = batch.chunk.snapshot_id
            if batch.chunk.table == "pgbench_accounts":
                accounts[snapshot] = accounts.get(snapshot, 0) + batch.rows
            if batch.chunk.boundary:
                ended.add(batch.chunk.table)
    assert ended == set(pgbench.COLUMNS)
    # What the comparison had read, and then every row and the boundary.
    assert len(accounts) == 2 and max(accounts.values()) == pgbench.ACCOUNTS - 2 + 1
