"""The progress of a repair by recovery: chunks that are compared take time, whether or not rows land."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from omnisupport_ingest.cli.source_status import show_status
from omnisupport_ingest.contracts.model import Column, Contracts
from omnisupport_ingest.landing.manifest import Manifest
from omnisupport_ingest.sources.postgres.capture.capture import Capture
from omnisupport_ingest.sources.postgres.capture.status import source_status
from omnisupport_ingest_tests.sources.postgres.folded_lake import FoldedLake
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest, contract


@pytest.mark.slow
def test_comparison_tells_chunks_and_time_left_and_no_rate_of_rows(
    source: SourceUnderTest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source.sql(
        "CREATE TABLE tickets (id int PRIMARY KEY, v text)",
        "INSERT INTO tickets SELECT n, 'old' FROM generate_series(1, 550) n",
    )
    columns = (Column("id", "integer"), Column("v", "text"))
    source.tables.append(replace(contract("tickets", ("id", "v")), columns=columns))
    source.overrides |= {"snapshot_chunk_rows": 100}
    source.catch_up()
    source.sql(
        f"SELECT pg_drop_replication_slot('{source.slot}')", "UPDATE tickets SET v = 'lost' WHERE id = 120"
    )
    stop = threading.Event()

    def landed(batch: Manifest) -> None:
        if batch.chunk is not None and batch.chunk.chunk == 2:
            stop.set()

    source.overrides |= {"snapshot_rows_per_second": 200}
    capture = Capture(source.settings, source.home, Contracts(tuple(source.tables)), landed)
    capture.recover("a test", FoldedLake(source, tmp_path), stop, lambda _: None)

    status = source_status(source.dsn, source.settings, source.home, source.tables)
    (under_way,) = status.snapshots
    assert (under_way.chunks, under_way.done, under_way.rows) == (6, 3, 100)
    # The second was looked at three times: five looks of half a second at three chunks.
    assert under_way.rows_per_second is None and under_way.seconds_left is not None
    assert 2.2 < under_way.seconds_left < 5
    show_status(status)
    left = f"{under_way.seconds_left:.0f} s of reading left"
    told = f"tickets: 3 of 6 chunks compared, 100 rows read again, about {left}\n"
    assert told in capsys.readouterr().out
