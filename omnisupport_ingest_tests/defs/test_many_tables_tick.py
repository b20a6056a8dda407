"""Three sources with a hundred tables each in one deployment: what a tick of their sensors costs."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.home import Home
from omnisupport_ingest.landing.manifest import StreamSpan
from omnisupport_ingest.landing.names import stream_batch_id
from omnisupport_ingest.landing.rows import LandedEvent
from omnisupport_ingest.landing.writer import BatchWriter
from omnisupport_ingest.layers.dimension import dimensions
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.position import Lsn
from omnisupport_ingest.settings import Settings
from omnisupport_ingest_tests.layers.story import CONTRACT

SOURCES = ("desk", "bank", "shop")
TABLES = 100
WITH_NEWS = 5
LIMIT = 2.0
"""Processor seconds of a tick of every sensor together: a busy machine does not change them much."""


def workspace_of(folder: Path, now: datetime) -> Workspace:
    contracts = folder / "contracts"
    contracts.mkdir()
    for source in SOURCES:
        for number in range(TABLES):
            cdc = {**CONTRACT["x-cdc"], "source": source, "table": f"notes_{number:03}"}  # type: ignore[dict-item]
            (contracts / f"{source}_{number:03}.json").write_text(json.dumps({**CONTRACT, "x-cdc": cdc}))
    settings = Settings(home=folder / "home", window="hourly", contracts_dir=contracts, _env_file=None)
    return Workspace(
        settings, Home.open(settings.home, settings.window_size, now=now), load_contracts(contracts)
    )


def land(workspace: Workspace, source: str, before: int, now: datetime) -> list[str]:
    """Land a batch with a row of each of the first ``WITH_NEWS`` tables; returns its windows."""
    end = Lsn(before + 10)
    writer = BatchWriter(
        workspace.landing(source), workspace.grid, 1, stream_batch_id(1, Lsn(before)), clock=lambda: now
    )
    for number in range(WITH_NEWS):
        text = json.dumps({"id": str(before), "title": "one", "body": None})
        writer.add(
            LandedEvent(
                1, end.value, 2 * number, "c", now, 7, end.value, "public", f"notes_{number:03}",
                f'["{before}"]', None, text, None, None, None,
            )
        )  # fmt: skip
    return list(writer.seal(stream=StreamSpan(Lsn(before), end, end, end, 7, now, now)).windows)


@pytest.mark.slow
def test_a_tick_of_all_sensors_takes_less_than_two_seconds(spark: SparkSession, tmp_path: Path) -> None:
    now = datetime.now(UTC) - timedelta(minutes=1)
    workspace = workspace_of(tmp_path, now)
    for source in SOURCES:
        windows = land(workspace, source, 0, now)
        raw.materialize(workspace, spark, source, windows, "run")
        deduped.materialize(workspace, spark, source, windows, "run")
        for contract in workspace.contracts.of_source(source)[:WITH_NEWS]:
            dimensions.materialize(workspace, spark, contract, windows, "run")
    repository = build_definitions(workspace).get_repository_def()
    names = [
        f"{kind}_{source}" for kind in ("wal_batches", "late_arrivals", "freshness") for source in SOURCES
    ]
    took: dict[int, dict[str, float]] = {}
    with dg.DagsterInstance.ephemeral() as instance:
        cursors: dict[str, str | None] = dict.fromkeys(names)
        for tick in range(3):
            for source in SOURCES:
                land(workspace, source, 10 * (tick + 1), now)
            took[tick] = {}
            for name in names:
                context = dg.build_sensor_context(instance, cursor=cursors[name], repository_def=repository)
                began = time.process_time()
                answer = repository.get_sensor_def(name)(context, workspace=workspace)
                took[tick][name] = time.process_time() - began
                cursors[name] = answer.cursor  # type: ignore[union-attr]
                if name.startswith("wal_batches"):
                    assert answer.run_requests, "it has news each time"  # type: ignore[union-attr]
    told = {
        tick: f"{sum(each.values()):.2f} s, most {max(each, key=each.__getitem__)}"
        for tick, each in took.items()
    }
    print(f"\nprocessor seconds of each tick, {len(SOURCES)} sources with {TABLES} tables each: {told}")
    # The first tick of a process looks at each table once.
    assert all(sum(each.values()) < LIMIT for tick, each in took.items() if tick), told
