"""Capture on one machine, the layers on two others: homes of their own, and one bucket."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.session.server import current_wal_lsn
from omnisupport_ingest.windows import WindowSize
from omnisupport_ingest_tests.cli import pgbench
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest
from omnisupport_ingest_tests.storage.s3_server import S3Server
from omnisupport_ingest_tests.waiting import PATIENCE, until


@contextmanager
def running(*arguments: str, folder: Path, given: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
            cwd=folder,
            env=pgbench.environment(given),
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_capture_and_the_layers_of_different_machines_share_a_bucket_and_two_of_one_kind_do_no_harm(
    s3: S3Server, source: SourceUnderTest, tmp_path: Path
) -> None:
    source.sql(pgbench.TABLES)
    pgbench.write_contracts(tmp_path / "contracts")
    of_all = pgbench.variables(source, tmp_path) | {"OMNISUPPORT_STORAGE": s3.place()}
    captures, layers, other = (
        of_all | {"OMNISUPPORT_HOME": str(tmp_path / each)} for each in ("c", "l", "o")
    )
    of_source = Home.open(tmp_path / "c", WindowSize.parse("hourly"), storage=of_all["OMNISUPPORT_STORAGE"])
    landing = LandingStore(of_source.landing, pgbench.SOURCE)

    def landed_to() -> Lsn:
        landing.look_again()
        last = landing.last_stream(1)
        return last.stream.end_lsn if last is not None and last.stream is not None else Lsn(0)

    with running("capture", folder=tmp_path, given=captures) as capture:
        until(lambda: capture.poll() is None and landed_to() > Lsn(0))
        # Another machine captures the same: it is refused, and the first goes on.
        second = pgbench.command("capture", "--once", folder=tmp_path, variables=other)
        assert second.returncode != 0 and source.slot in second.stderr, second.stderr
        for step in range(2):
            source.sql(
                f"UPDATE pgbench_tellers SET tbalance = tbalance + {step + 7} WHERE tid < 4",
                f"DELETE FROM pgbench_accounts WHERE aid = {step + 1}",
                "INSERT INTO pgbench_accounts VALUES (9000, 1, 0, 'new') ON CONFLICT DO NOTHING",
            )
            written = current_wal_lsn(source.dsn)
            until(lambda written=written: landed_to() >= written)
            # Two machines take the same batches in at once.
            with (
                running("materialize", folder=tmp_path, given=layers) as here,
                running("materialize", folder=tmp_path, given=other) as there,
            ):
                codes = [each.wait(PATIENCE) for each in (here, there)]
            assert codes == [0, 0], (tmp_path / "materialize.log").read_text()[-3000:]
            for table in pgbench.COLUMNS:
                expected = pgbench.rows_of_source(source.dsn, table)
                assert pgbench.rows_of_lake(tmp_path / "l", table) == expected, table
        capture.send_signal(signal.SIGTERM)
        assert capture.wait(PATIENCE) == 0, (tmp_path / "capture.log").read_text()[-2000:]
    # Nothing of the lake was made where capture is, nor anything landed by the others alone.
    assert not [*(tmp_path / "c" / "lake").rglob("*.parquet")]
