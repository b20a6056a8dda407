"""Measure a run over many windows through every layer, and a replay of them: its cost is to follow the number
of windows.

Each number of windows is measured in a process of its own, as its peak memory is its own.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import dagster as dg

from bench.homes import SOURCE, ManyTables, many_tables, table_name, this_minute
from bench.landed import Tickets
from bench.processes import peak_memory_mb, with_children
from bench.report import write_result
from omnisupport_ingest.defs import keys

_WINDOWS_OF_A_BATCH = 500


@click.command()
@click.option(
    "--windows", "-w", "sizes", multiple=True, type=int, default=(500, 1500, 5000), show_default=True
)
@click.option("--events", default=4, show_default=True, help="New rows in each window, all of one table.")
@click.option("--replay/--no-replay", default=True, show_default=True, help="Make all windows again, too.")
@click.option("--alone", is_flag=True, hidden=True, help="Measure the one size here, and print JSON.")
def main(sizes: Sequence[int], events: int, replay: bool, alone: bool) -> None:
    """Measure runs over windows of a minute through Dagster, and print the figures."""
    if alone:
        click.echo(json.dumps(_measured(sizes[0], events, replay=replay)))
        return
    found = {}
    for size in sizes:
        options = ["--windows", str(size), "--events", str(events), "--replay" if replay else "--no-replay"]
        program = [sys.executable, "-m", "bench.windows", "--alone", *options]
        done = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True)
        found[str(size)] = json.loads(done.stdout.splitlines()[-1])
        click.echo(f"{size} windows of {events} events, load {os.getloadavg()[0]:.1f}:")
        for name, value in found[str(size)].items():
            each = f"{value / size * 1000:8.2f} ms a window" if "_mb" not in name else ""
            click.echo(f"  {name:40} {value:8.1f} {each}")
    write_result("windows", {"events": events, "of_windows": found})


def _measured(windows: int, events: int, *, replay: bool) -> dict[str, float]:
    """Seconds and CPU seconds of a run over ``windows`` and of the steps in it, and of a replay; and the peak
    memory of this process and of Spark's."""
    start = this_minute() - timedelta(minutes=windows + 5)
    found: dict[str, float] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-windows-") as folder,
        many_tables(Path(folder) / "of", 1, window="minutes:1", first_window=start) as home,
    ):
        stream = Tickets(home.workspace.landing(SOURCE), home.workspace.grid, table=table_name(0))
        # The first window is for what a process does once, such as the start of Spark.
        for number in range(0, windows + 1, _WINDOWS_OF_A_BATCH):
            count = min(_WINDOWS_OF_A_BATCH, windows + 1 - number)
            stream.land_windows(count, start + timedelta(minutes=number), events)
        first, second, last = (
            home.workspace.grid.key_of(start + timedelta(minutes=number), this_minute())
            for number in (0, 1, windows)
        )
        _say(f"{windows} windows have landed")
        home.run(first, first)
        for what in ("run", "replay") if replay else ("run",):
            before = with_children(os.getpid())
            found[f"{what}_seconds"] = home.run(second, last, replay=what == "replay")
            found[f"{what}_cpu_seconds"] = with_children(os.getpid()) - before
            found |= {f"{what}_{name}": seconds for name, seconds in _steps(home).items()}
            found[f"{what}_driver_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            _say(f"{windows} windows, {what}: {found[f'{what}_seconds']:.0f} s")
        found["java_mb"] = peak_memory_mb(called="java")
        found["all_processes_mb"] = peak_memory_mb()
    return found


def _steps(home: ManyTables) -> dict[str, float]:
    """Seconds of each table's step in the last run, and of its layer alone, without Dagster's records."""
    [run] = home.instance.get_runs(limit=1)
    found: dict[str, Any] = {}
    for entry in home.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_SUCCESS):
        event = entry.dagster_event
        assert event is not None
        name = str(entry.step_key).rpartition("__")[2]
        found[f"step_{name}_seconds"] = event.step_success_data.duration_ms / 1000
    for key in (
        keys.raw_key(SOURCE),
        keys.deduped_key(SOURCE),
        keys.dimension_key(home.workspace.contracts.of_source(SOURCE)[0]),
    ):
        made = home.instance.get_latest_materialization_event(key)
        assert made is not None and made.asset_materialization is not None
        found[f"layer_{key.path[-1]}_seconds"] = made.asset_materialization.metadata["duration_seconds"].value
    return found


def _say(what: str) -> None:
    click.echo(f"  {time.strftime('%H:%M:%S')} {what}", err=True)


if __name__ == "__main__":
    main()
