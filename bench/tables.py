"""Many tables of which one has news, beside few tables of which one has: a tick, and the run it asks for.

A run of the platform is a fork of a process that has the definitions and has opened no table, so each run
here begins with nothing open. Its checks are part of it. The sensor's process stands, and keeps what it has
seen.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path
from statistics import median

import click

from bench.homes import SOURCE, ManyTables, many_tables
from bench.landed import now
from bench.report import write_result
from omnisupport_ingest.definitions import build_definitions
from omnisupport_ingest.lake import file_index, table
from omnisupport_ingest.layers.scheduling.pending import pending_windows
from omnisupport_ingest.layers.workspace import Workspace

_MEASURED = ("tick", "run")

LIMIT = 1.2
"""Seconds of tick and run with many tables, beside those with few."""


@click.command()
@click.option("--few", default=5, show_default=True)
@click.option("--many", default=300, show_default=True)
@click.option("--rows", default=100, show_default=True, help="Rows of every table.")
@click.option("--changes", default=100, show_default=True, help="Changes of the table that has news.")
@click.option("--repeats", default=5, show_default=True, help="Rounds.")
@click.option("--seed", default=1, show_default=True)
def main(few: int, many: int, rows: int, changes: int, repeats: int, seed: int) -> None:
    """Measure what tables without news cost, and print the figures."""
    first = now() - timedelta(hours=2)
    took: dict[str, list[float]] = {f"{what} {n}": [] for n in (few, many) for what in _MEASURED}
    cpu: dict[str, list[float]] = {name: [] for name in took}
    with (
        tempfile.TemporaryDirectory(prefix="bench-tables-") as folder,
        many_tables(Path(folder) / "few", few, window="hourly", first_window=first, seed=seed) as lesser,
        many_tables(Path(folder) / "many", many, window="hourly", first_window=first, seed=seed) as greater,
    ):
        homes = {few: lesser, many: greater}
        runs = {count: _Runs(home) for count, home in homes.items()}
        for count, home in homes.items():
            for number in range(count):
                home.land(number, rows, now() - timedelta(hours=1))
            began = time.perf_counter()
            home.taken_in()
            click.echo(f"  {count} tables made in {time.perf_counter() - began:.0f} s", err=True)
        for number in range(1, repeats + 1):
            for count, home in homes.items():
                home.land(number % few, changes, now())
                for what, seconds, cpu_seconds in runs[count].one():
                    took[f"{what} {count}"].append(seconds)
                    cpu[f"{what} {count}"].append(cpu_seconds)
            text = ", ".join(f"{name} {each[-1]:.2f}" for name, each in took.items())
            click.echo(f"  {number}/{repeats}: {text}", err=True)
    middle = {name: median(each) for name, each in took.items()}
    ratio = sum(middle[f"{what} {many}"] for what in _MEASURED) / sum(
        middle[f"{what} {few}"] for what in _MEASURED
    )
    for name, each in took.items():
        of_python = f"{median(cpu[name]):.2f} CPU s of Python"
        click.echo(
            f"  {name:<10} tables {median(each):7.2f} s  ({min(each):.2f} to {max(each):.2f}), {of_python}"
        )
    click.echo(f"  ratio {ratio:.2f} (limit {LIMIT}): {'met' if ratio <= LIMIT else 'NOT MET'}")
    of_python = {name: median(each) for name, each in cpu.items()}
    cpu_ratio = sum(of_python[f"{what} {many}"] for what in _MEASURED) / sum(
        of_python[f"{what} {few}"] for what in _MEASURED
    )
    click.echo(f"  ratio by the CPU seconds of Python {cpu_ratio:.2f}")
    write_result(
        "tables",
        {
            "few": few,
            "many": many,
            "seconds": took,
            "cpu_seconds": cpu,
            "median": middle,
            "ratio": ratio,
            "cpu_ratio": cpu_ratio,
        },
    )


class _Runs:
    """Rounds of a home: a tick of a process that stands, and the run it asks for, which begins as a fork."""

    def __init__(self, home: ManyTables) -> None:
        self._home, opened = home, home.workspace
        self._workspace = Workspace(
            opened.settings, opened.home, opened.contracts, opened.decisions, opened.documents
        )
        # The process that is forked knows the columns of every table.
        list(self._workspace.windowed_tables(SOURCE))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            home.definitions = build_definitions(self._workspace)

    def one(self) -> list[tuple[str, float, float]]:
        """Return seconds and CPU seconds of the look for what is pending, and of its run."""
        began = _clocks()
        pending = pending_windows(self._home.workspace, SOURCE)
        looked = _since(began)
        table._opened.clear()
        for index in file_index._indexes.values():
            index.close()
        self._workspace._seen.clear()
        self._workspace._during.clear()
        self._workspace._landings.clear()
        began = _clocks()
        self._home.run(pending.windows[0], pending.windows[-1], tables=pending.tables)
        return [("tick", *looked), ("run", *_since(began))]


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    seconds, cpu = _clocks()
    return seconds - began[0], cpu - began[1]


if __name__ == "__main__":
    main()
