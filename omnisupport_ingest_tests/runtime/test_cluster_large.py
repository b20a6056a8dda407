"""More than what works on it can hold, on a real cluster: a hot key, the loss of shuffle files, many windows.

Heaps are small here instead of the data large. Spark's own log of events says what was spilled, lost and
written again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from bench.landed import Mix, Tickets
from omnisupport_ingest.cdc.event_hashes import event_hashes
from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.home import Home
from omnisupport_ingest.lake.contenthash import ContentHash
from omnisupport_ingest.lake.file_rows import rows_of
from omnisupport_ingest.lake.layout import WHOLE_TABLE
from omnisupport_ingest.lake.schema import arrow_schema
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.standalone import WorkerSize, start_standalone
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify.again import contents, copy_batches, differing
from omnisupport_ingest_tests.runtime import cluster_layers
from omnisupport_ingest_tests.runtime.cluster_jobs import GO_ON
from omnisupport_ingest_tests.runtime.cluster_layers import GREW, HELD, HOT, SOURCE
from omnisupport_ingest_tests.runtime.test_cluster import ended, kill_worker_of
from omnisupport_ingest_tests.waiting import PATIENCE, until

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="workers need addresses of their own"
)

START = datetime(2026, 3, 2, 12, tzinfo=UTC)
HEAP_MB = 256
HEAP_BYTES = HEAP_MB * 1024 * 1024

HOT_KEY = Mix(
    inserts=0.05, deletes=0.0, skew=200.0, body=(6_000, 8_000), entropy=0.5,
    duplicates=0.1, out_of_order=0.1, key_changes=0.02, unsent=0.2,
)  # fmt: skip
"""Nine of ten changes are of one key. Some come twice or late, and key changes leave that key, so all of its
images count: more than a task may hold, so whole events are shuffled."""
EVENTS = 60_000

SMALL_HEAPS = """
# Spark refuses heaps below 450 MB, as it sets 300 MB aside.
spark.testing.reservedMemory 67108864
spark.memory.fraction 0.2
# What is read, sent to Python or fetched at once.
spark.sql.parquet.columnarReaderBatchSize 256
spark.sql.execution.arrow.maxRecordsPerBatch 500
spark.reducer.maxSizeInFlight 8m
spark.network.maxRemoteBlockSizeFetchToMem 8m
# Without sorting, Spark hands a shuffle of few partitions to one file each, and never spills.
spark.shuffle.sort.bypassMergeThreshold 0
"""

_SECONDS = 10 * PATIENCE
"""How long the end of a driver is waited for."""


@dataclass
class Bench:
    """A home whose contracts have one table, in a folder of its own, and the log of Spark's events."""

    root: Path
    window: str
    settings: Settings = field(init=False)
    home: Home = field(init=False)

    def __post_init__(self) -> None:
        contracts, own = self.root / "contracts", self.root / "own.conf"
        for folder in (contracts, self.events, self.said):
            folder.mkdir()
        contract = json.loads((default_contracts_dir() / "tickets.json").read_text())
        # No window closes.
        contract["x-cdc"]["lateness"] = {"allowed": "P60D", "max": "P90D"}
        (contracts / "tickets.json").write_text(json.dumps(contract))
        logged = (
            "spark.eventLog.enabled true\nspark.eventLog.rolling.enabled true\nspark.eventLog.compress false"
        )
        own.write_text(f"{SMALL_HEAPS}{logged}\nspark.eventLog.dir {self.events.as_uri()}\n")
        self.settings = Settings(
            home=self.root / "home",
            window=self.window,
            contracts_dir=contracts,
            source=SOURCE,
            spark_driver_memory=f"{HEAP_MB}m",
            spark_properties=own,
            _env_file=None,
        )
        self.home = Home.open(self.settings.home, self.settings.window_size, first=START)
        record_in_force(self.settings, self.home)

    @property
    def events(self) -> Path:
        return self.root / "events"

    @property
    def said(self) -> Path:
        """Where driver, tasks and test speak to each other."""
        return self.root / "said"

    def stream(self, mix: Mix) -> Tickets:
        workspace = Workspace.open(self.settings)
        return Tickets(workspace.landing(SOURCE), workspace.grid, mix=mix)

    def cluster(self, supervisor: Supervisor) -> Settings:
        return start_standalone(supervisor, self.settings, self.home, 2, WorkerSize(memory=f"{HEAP_MB}m"))

    def start(self, settings: Settings, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.root / "layers.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", cluster_layers.__name__, *arguments],
                cwd=Path(__file__).parents[2],
                env={**os.environ, **settings_environment(settings)},
                stdout=output,
                stderr=output,
            )

    def finish(self, driver: subprocess.Popen[bytes]) -> None:
        try:
            assert driver.wait(_SECONDS) == 0, (self.root / "layers.log").read_text()[-4000:]
        finally:
            driver.kill()
            driver.wait()

    def alone(self) -> Settings:
        """The settings of a home beside, of the same batches, whose layers were made on one machine."""
        own = {"home": self.root / "alone", "spark_properties": None, "spark_driver_memory": "1g"}
        there = self.settings.model_copy(update=own)
        copy_batches(self.home, there.home)
        self.finish(self.start(there))
        return there


@dataclass
class Seen:
    """What Spark noted of an application.

    ``wrote``: bytes of shuffle files, by executor. ``lost``: executors, the first one first. Figures are
    those of tasks that ended well, in bytes.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrote: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    read: int = 0
    spilled: int = 0

    @classmethod
    def of(cls, folder: Path) -> Seen:
        seen = cls()
        for event in _events(folder):
            if event["Event"] == "SparkListenerExecutorRemoved":
                seen.lost.append(event["Executor ID"])
            if event["Event"] == "SparkListenerTaskEnd":
                seen._count(event)
        return seen

    def _count(self, event: dict[str, Any]) -> None:
        reason = event["Task End Reason"]["Reason"]
        self.ends[reason] += 1
        if reason != "Success":
            return
        metrics = event["Task Metrics"]
        self.wrote[event["Task Info"]["Executor ID"]] += metrics["Shuffle Write Metrics"][
            "Shuffle Bytes Written"
        ]
        read = metrics["Shuffle Read Metrics"]
        self.read += read["Local Bytes Read"] + read["Remote Bytes Read"]
        self.spilled += metrics["Disk Bytes Spilled"]


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for file in sorted(folder.rglob("events_*")):
        with file.open() as lines:
            # The last one may not be whole.
            yield from (json.loads(line) for line in lines if line.endswith("\n"))


@pytest.mark.slow
def test_a_key_larger_than_any_heap_survives_the_loss_of_its_task_and_of_shuffle_files(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, "hourly")
    bench.stream(HOT_KEY).land(EVENTS, START)
    hot, total = bytes_of_hot_key(bench.home)
    # So more than either executor's heap, and more than the driver's.
    assert hot > HEAP_BYTES
    alone = bench.alone()
    with Supervisor(bench.home) as supervisor:
        driver = bench.start(bench.cluster(supervisor), str(bench.said), str(EVENTS // 2))
        try:
            # It has all shuffled events of the key in hand.
            [task] = until(lambda: ended(driver) or list(bench.said.glob(f"{HOT}-*")), _SECONDS)
            pid = int(task.name.rpartition("-")[2])
            kill_worker_of(bench.home, pid)
            with suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
            (bench.said / GO_ON).touch()
        finally:
            bench.finish(driver)
    assert differing(contents(alone), contents(bench.settings)) == []
    # The state of each key as well, which tells the first event, not the last one alone.
    assert folded_rows(alone) == folded_rows(bench.settings)
    assert_only_whole_files(bench.settings)
    seen = Seen.of(bench.events)
    held, grew = (int((bench.said / name).read_text()) for name in (HELD, GREW))
    print(f"\n{total:,} bytes, {hot:,} of one key; its task held {held:,}, the driver {grew:,}; {seen}")
    assert seen.lost and seen.wrote[seen.lost[0]] > 0, "shuffle files went with the executor"
    # Beside what was read in the end, what the lost executor had written was written again.
    assert sum(seen.wrote.values()) - seen.read > 0.9 * seen.wrote[seen.lost[0]]
    assert seen.spilled > HEAP_BYTES / 4
    assert grew < total / 2, "no rows pass through the driver"


@pytest.mark.slow
@pytest.mark.parametrize("windows", [300, pytest.param(5000, marks=pytest.mark.huge)])
def test_many_windows_in_one_run_hold_just_what_landed(tmp_path: Path, windows: int) -> None:
    bench = Bench(tmp_path, "minutes:1")
    stream = bench.stream(Mix())
    stream.land_windows(windows, START)
    with Supervisor(bench.home) as supervisor:
        bench.finish(bench.start(bench.cluster(supervisor)))
    landed, found = hashes_of_landed(stream.store), contents(bench.settings)
    assert len(landed) == windows
    # Every event is a new row, so each layer of a window has the hash of its events.
    for table in ("raw_cdc_staging", "deduped_events", "net_changes/tickets"):
        made = {window: text for (name, window), text in found.items() if name == f"{SOURCE}/{table}"}
        assert made == landed, table
    assert_only_whole_files(bench.settings)
    workspace = Workspace.open(bench.settings)
    [contract] = workspace.contracts.of_source(SOURCE)
    dimension = workspace.dimension(contract).open().state(WHOLE_TABLE)
    assert dimension is not None and dimension.checkpoint.rows == windows


def bytes_of_hot_key(home: Home) -> tuple[int, int]:
    """The bytes of landed images of the key with most of the events, which it must have, and of all keys."""
    files = [str(each) for each in home.landing.rglob("data/*/*.parquet")]
    [(most, events, size, total)] = duckdb.sql(
        "SELECT arg_max(size, events), max(events), sum(size), sum(events) FROM (SELECT "
        f"sum(length(after)) AS size, count(*) AS events FROM read_parquet({files}) GROUP BY key)"
    ).fetchall()
    assert events > 0.8 * total
    return int(most), int(size)


def folded_rows(settings: Settings) -> list[str]:
    """The rows of the net changes, in an order that tells nothing of who wrote them."""
    workspace = Workspace.open(settings)
    [contract] = workspace.contracts.of_source(SOURCE)
    table = workspace.net_changes(contract)
    rows = rows_of(table.open().all_files(), arrow_schema(table.spec.schema, without=()))
    return sorted(map(str, rows.to_pylist()))


def assert_only_whole_files(settings: Settings) -> None:
    """No file of a table can be seen that its newest version does not hold."""
    tables = [each for each in Workspace.open(settings).tables() if each.exists]
    assert len(tables) >= 4
    for table in tables:
        held = {Path(uri).relative_to(table.folder) for uri in DeltaTable(str(table.folder)).file_uris()}
        assert visible_files(table) == held, table.spec.path


def visible_files(table: LakeTable) -> set[Path]:
    """The Parquet files of ``table`` that no hidden folder has."""
    files = {each.relative_to(table.folder) for each in table.folder.rglob("*.parquet")}
    return {file for file in files if not any(part.startswith((".", "_")) for part in file.parts)}


def hashes_of_landed(store: LandingStore) -> dict[str, str]:
    """The content hash of the events of each window, worked out from what landed, without Spark."""
    return {
        file.window: str(ContentHash.of(event_hashes(pq.read_table(store.folder / file.path)).to_numpy()))
        for batch in store.manifests()
        for file in batch.files
    }
