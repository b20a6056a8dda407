"""Capture and PostgreSQL are killed under traffic; the source and the dimensions end the same."""

from __future__ import annotations

import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.verify.proof import prove
from omnisupport_ingest_tests.recovery.desk import Traffic, capture, kill_server
from omnisupport_ingest_tests.recovery.pipeline import run_layers
from omnisupport_ingest_tests.sources.postgres.source_under_test import SOURCE, SourceUnderTest
from omnisupport_ingest_tests.waiting import until

TABLES = ("tickets", "ticket_comments")
DIES_SECONDS = 180


def stream(source: SourceUnderTest) -> list[Manifest]:
    """The landed batches of the stream that hold events, in order."""
    return [each for each in source.manifests() if each.stream is not None and each.rows]


def landed_end(source: SourceUnderTest) -> Lsn:
    """Where the landed stream ends."""
    return max((each.stream.end_lsn for each in source.manifests() if each.stream), default=Lsn(0))


def events_above(source: SourceUnderTest, confirmed: Lsn) -> int:
    """How many landed events the server holds for unconfirmed, so that it sends them again."""
    return sum(event.commit_lsn >= confirmed.value for event in source.changes())


def land_more(source: SourceUnderTest, process: subprocess.Popen[str]) -> None:
    """Wait until ``process`` has landed events of two more batches."""
    before = len(stream(source))
    until(lambda: process.poll() is not None or len(stream(source)) >= before + 2)
    assert process.poll() is None, (source.home_folder.parent / "capture.log").read_text()[-2000:]


def dies_at(source: SourceUnderTest, failpoint: str) -> None:
    """Start capture and wait for its death at ``failpoint``."""
    with capture(source, failpoint=failpoint) as process:
        assert process.wait(DIES_SECONDS) == -signal.SIGKILL


def without_manifest(source: SourceUnderTest) -> set[str]:
    """The batches of which data files are there and the manifest is not."""
    folders = {file.parent.name for file in (source.store.folder / "data").glob("*/*.parquet")}
    return folders - set(source.store.batch_ids())


def take_all(workspace: Workspace, spark: SparkSession) -> None:
    """Take everything that has landed through every layer."""
    if windows := pending_windows(workspace, SOURCE).windows:
        run_layers(workspace, spark, windows, SOURCE)


@pytest.fixture
def desk(source: SourceUnderTest, tmp_path: Path) -> SourceUnderTest:
    """A filled support desk, of which two tables have a contract; nothing of it captured yet."""
    contracts = tmp_path / "contracts"
    contracts.mkdir()
    for table in TABLES:
        shutil.copy(default_contracts_dir() / f"{table}.json", contracts)
    source.overrides["contracts_dir"] = contracts
    SUPPORT_DESK.prepare(source.dsn, seed=1, size=60)
    return source


@pytest.mark.slow
def test_source_and_dimensions_are_the_same_after_capture_and_postgresql_were_killed(
    desk: SourceUnderTest, postgres: EmbeddedPostgres, spark: SparkSession
) -> None:
    workspace = Workspace.open(desk.settings)
    desk.tables = list(workspace.contracts.of_source(SOURCE))
    try:
        with Traffic(desk.dsn) as traffic:
            with capture(desk) as process:
                land_more(desk, process)
                kill_server(postgres)
                postgres.start()
                land_more(desk, process)

            end = landed_end(desk)
            dies_at(desk, "landing.data.after")
            assert without_manifest(desk) and landed_end(desk) == end

            dies_at(desk, "landing.manifest.after")
            assert not without_manifest(desk)
            assert events_above(desk, desk.confirmed()) > 0
            kill_server(postgres)
            postgres.start()
            sent_again = events_above(desk, desk.confirmed())
            assert sent_again > 0 and landed_end(desk) > max(end, desk.confirmed())

            with capture(desk) as process:
                land_more(desk, process)
                process.terminate()
                assert process.wait(DIES_SECONDS) == 0
        assert traffic.broken_off == 2

        def advance(_lsn: Lsn) -> None:
            desk.catch_up()
            take_all(workspace, spark)

        proof = prove(workspace, lambda: spark, advance=advance)
    finally:
        postgres.start()

    assert proof.holds, proof
    assert all(table.source_rows for table in proof.tables.values())
    landed: dict[str, int] = dict.fromkeys(proof.events, 0)
    for manifest in desk.manifests():
        for file in manifest.files:
            for name, rows in file.rows_per_table.items():
                landed[name.removeprefix("support.")] += rows
    # What was sent again has not landed again, so every landed event is in the lake once.
    assert {name: counts.raw for name, counts in proof.events.items()} == landed
    assert {name: counts.deduped for name, counts in proof.events.items()} == landed
    for earlier, later in pairwise(stream(desk)):
        assert max(file.last for file in earlier.files) < min(file.first for file in later.files)
