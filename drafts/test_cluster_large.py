"""Data larger than what works on it, on a real cluster that loses a worker: the content of one machine.

One window holds more than an executor's memory, most of it of one key. Spark's event log tells what was
spilled, and written again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest

from bench.landed import Mix, Tickets
from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.contracts.load import default_contracts_dir
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.environment import settings_environment
from omnisupport_ingest.runtime.running import running_services
from omnisupport_ingest.runtime.standalone import WORKER, WorkerSize, start_standalone
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify.again import contents, copy_batches, differing
from omnisupport_ingest_tests.runtime import cluster_layers
from omnisupport_ingest_tests.runtime.cluster_layers import SOURCE
from omnisupport_ingest_tests.waiting import until

START = datetime(2026, 3, 2, 12, tzinfo=UTC)
EXECUTOR_MB = 512
LARGE = 100_000
"""Events of the large window."""

HOT = Mix(
    inserts=0.2, deletes=0.0, skew=60.0, body=(6_000, 8_000), entropy=0.5,
    duplicates=0.1, out_of_order=0.1, key_changes=0.02, unsent=0.2,
)  # fmt: skip
"""More than half of the changes are of one key. Some come twice or late, and keys change while a column is
not sent, so no task can fold what it has by itself: whole rows are shuffled."""

SPILLS = """
spark.memory.fraction 0.2
# Without sorting, Spark hands a shuffle of few partitions to one file each, and spills nothing.
spark.shuffle.sort.bypassMergeThreshold 0
"""

_SECONDS = 3600.0
"""The end of a driver is waited for so long; a slow machine takes minutes."""


@dataclass
class Bench:
    """A home whose contracts have one table, in a folder of its own, and the log of Spark's events."""

    root: Path
    window: str
    lateness: str
    properties: str = ""
    settings: Settings = field(init=False)
    home: Home = field(init=False)

    def __post_init__(self) -> None:
        contracts, own = self.root / "contracts", self.root / "own.conf"
        for folder in (contracts, self.log):
            folder.mkdir()
        contract = json.loads((default_contracts_dir() / "tickets.json").read_text())
        contract["x-cdc"]["lateness"] = {"allowed": self.lateness, "max": "P90D"}
        (contracts / "tickets.json").write_text(json.dumps(contract))
        logged = "spark.eventLog.enabled true\nspark.eventLog.compress false\nspark.eventLog.dir"
        own.write_text(f"{self.properties}\n{logged} {self.log.as_uri()}\n")
        self.settings = Settings(
            home=self.root / "home",
            window=self.window,
            contracts_dir=contracts,
            source=SOURCE,
            spark_driver_memory=f"{EXECUTOR_MB}m",
            spark_properties=own,
            _env_file=None,
        )
        self.home = Home.open(self.settings.home, self.settings.window_size, first=START)
        record_in_force(self.settings, self.home)

    @property
    def log(self) -> Path:
        return self.root / "events"

    def stream(self, mix: Mix) -> Tickets:
        workspace = Workspace.open(self.settings)
        return Tickets(workspace.landing(SOURCE), workspace.grid, mix=mix)

    def start(self, settings: Settings) -> subprocess.Popen[bytes]:
        with (self.root / "layers.log").open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", cluster_layers.__name__],
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

    def alone(self) -> Settings:
        """The settings of a home beside, of the same batches, whose layers were made on one machine."""
        there = self.settings.model_copy(update={"home": self.root / "alone", "spark_properties": None})
        copy_batches(self.home, there.home)
        self.finish(self.start(there))
        return there


@dataclass
class Seen:
    """What Spark noted of an application up to now."""

    folder: Path
    counts: Counter[str] = field(default_factory=Counter)
    wrote: Counter[str] = field(default_factory=Counter)
    """Bytes of shuffle files, by the host whose executor wrote them."""
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> Seen:
        for file in sorted(each for each in self.folder.rglob("*") if each.is_file()):
            for event in self._new(file):
                self._count(event)
        return self

    def _new(self, file: Path) -> Iterator[dict[str, Any]]:
        with file.open("rb") as lines:
            lines.seek(self._read.get(file, 0))
            # The last line may still be written.
            while (line := lines.readline()).endswith(b"\n"):
                yield json.loads(line)
                self._read[file] = lines.tell()

    def _count(self, event: dict[str, Any]) -> None:
        kind = event["Event"]
        if kind == "SparkListenerExecutorRemoved":
            self.counts["executors lost"] += 1
        if kind == "SparkListenerTaskEnd":
            self.counts[event["Task End Reason"]["Reason"]] += 1
            metrics = event.get("Task Metrics") or {}
            shuffled = metrics.get("Shuffle Write Metrics", {}).get("Shuffle Bytes Written", 0)
            self.counts["shuffled"] += shuffled
            read = metrics.get("Shuffle Read Metrics", {})
            self.counts["read"] += read.get("Local Bytes Read", 0) + read.get("Remote Bytes Read", 0)
            self.counts["spilled"] += metrics.get("Disk Bytes Spilled", 0)
            if shuffled:
                self.wrote[event["Task Info"]["Host"]] += shuffled


def kill_worker(home: Home, host: str) -> None:
    """Kill the worker that listens on ``host``, with its executor: its shuffle files are then nobody's."""
    # The first worker is on 127.0.0.2 (``runtime.standalone``).
    name = WORKER.format(int(host.rpartition(".")[2]) - 1)
    worker = psutil.Process(running_services(home.run)[name])
    executors = worker.children(recursive=True)
    worker.send_signal(signal.SIGKILL)
    for each in executors:
        each.kill()


def larger_than_an_executor(bench: Bench) -> None:
    """Require that the landed images are more than an executor's memory, which is the driver's, too, and that
    most of them are of one key."""
    files = [str(each) for each in bench.home.landing.rglob("data/*/*.parquet")]
    [(size, most, total)] = duckdb.sql(
        "SELECT sum(size), max(events), sum(events) FROM (SELECT sum(length(after)) AS size, "
        f"count(*) AS events FROM read_parquet({files}) GROUP BY key)"
    ).fetchall()
    assert size > EXECUTOR_MB * 1024 * 1024
    assert most > total / 2


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need addresses of their own")
def test_a_window_larger_than_an_executor_with_a_hot_key_survives_the_loss_of_shuffle_files(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, "hourly", "PT1H", SPILLS)
    stream = bench.stream(HOT)
    stream.land(LARGE, START)
    # A day later: the large window closes, and its files become one, by a shuffle.
    stream.land(10, START + timedelta(days=1))
    larger_than_an_executor(bench)
    alone = bench.alone()
    seen = Seen(bench.log)
    with Supervisor(bench.home) as supervisor:
        cluster = start_standalone(
            supervisor, bench.settings, bench.home, 2, WorkerSize(memory=f"{EXECUTOR_MB}m")
        )
        driver = bench.start(cluster)
        try:
            until(lambda: driver.poll() is not None or seen.look().wrote, _SECONDS, every=0.1)
            assert driver.poll() is None, (tmp_path / "layers.log").read_text()[-4000:]
            lost = next(iter(seen.wrote))
            kill_worker(bench.home, lost)
        finally:
            bench.finish(driver)
    counts = seen.look().counts
    print(f"\n{dict(counts)}, of them by {lost}, which was killed: {seen.wrote[lost]}")
    assert counts["executors lost"], counts
    # What it had written was written again, beside what was read in the end.
    assert counts["shuffled"] - counts["read"] > 0.9 * seen.wrote[lost] > 0, counts
    assert counts["spilled"] > EXECUTOR_MB * 1024 * 1024 / 4, counts
    assert differing(contents(alone), contents(bench.settings)) == []
