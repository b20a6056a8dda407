"""The history of a table on a warm Spark: how long 100 changes take, and what making all of it takes."""

from __future__ import annotations

import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from bench.landed import Tickets, now
from bench.report import write_result
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.histories import history
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SOURCE = "support_desk"


@click.command()
@click.option("--changes", default=250_000, show_default=True, help="Changes that the history begins with.")
@click.option("--few", default=100, show_default=True, help="Changes of a run.")
@click.option("--repeats", default=5, show_default=True, help="Runs of as many changes.")
def main(changes: int, few: int, repeats: int) -> None:
    """Measure deduped events -> history, and print the figures."""
    settings = Settings(spark_driver_memory="2g", _env_file=None)  # type: ignore[call-arg]
    spark = classic_session(settings)
    _measured(spark, 2_000, few, 1)
    result = _measured(spark, changes, few, repeats)
    for name, value in result.items():
        click.echo(f"  {name:16} {value:,.2f}")
    write_result("versions", result)


def _measured(spark: SparkSession, changes: int, few: int, repeats: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="bench-versions-"))
    try:
        settings = Settings(home=folder / "home", window="hourly", _env_file=None)  # type: ignore[call-arg]
        workspace = Workspace.open(settings)
        contract = next(each for each in workspace.contracts.of_source(_SOURCE) if each.name == "tickets")
        tickets = Tickets(workspace.landing(_SOURCE), workspace.grid)

        def take_in(count: int, hours: int) -> None:
            at = now() - timedelta(hours=hours)
            tickets.land(count, at)
            for stage in (raw, deduped):
                stage.materialize(workspace, spark, _SOURCE, [workspace.grid.key_of(at, now())], "bench")

        def seconds(*, replay: bool = False) -> float:
            began = time.perf_counter()
            history.materialize(workspace, spark, contract, "bench", replay=replay)
            return time.perf_counter() - began

        def bytes_written(before: set[str]) -> tuple[int, int]:
            files = workspace.history(contract).open().all_files()
            new = [file for file in files if file.path not in before]
            return len(new), sum(file.bytes for file in new)

        tickets.keys = 1  # A few updates of keys never seen do no harm.
        take_in(changes, 1)
        first = seconds()
        rows = workspace.history(contract).open().state("").checkpoint.rows  # type: ignore[union-attr]
        scattered, files, size = [], [], []
        for _ in range(repeats):
            take_in(few, 0)
            before = {file.path for file in workspace.history(contract).open().all_files()}
            scattered.append(seconds())
            count, written = bytes_written(before)
            files.append(count)
            size.append(written)
        return {
            "rows": float(rows),
            "files": float(len(workspace.history(contract).open().all_files())),
            "first_seconds": first,
            "few_seconds": median(scattered),
            "few_seconds_min": min(scattered),
            "few_seconds_max": max(scattered),
            "few_files": median(files),
            "few_bytes": median(size),
            "again_seconds": seconds(replay=True),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
