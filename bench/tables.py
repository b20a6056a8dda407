"""Many tables of which one has news, beside few tables of which one has: a tick, and the run it asks for.

A run of the platform is a process of its own, so its checks of all layers begin with nothing open. They are
measured apart, by a workspace that has just been opened.
"""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import click

from bench.homes import SOURCE, ManyTables, many_tables
from bench.landed import now
from bench.report import write_result
from omnisupport_ingest.checks.lake_checks import counts_add_up
from omnisupport_ingest.checks.window_checks import replays_explained, windows_settled
from omnisupport_ingest.lake import table
from omnisupport_ingest.layers.workspace import Workspace

_MEASURED = ("tick", "run", "checks")

LIMIT = 1.2
"""Seconds of tick, run and checks with many tables, beside those with few."""


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
    with (
        tempfile.TemporaryDirectory(prefix="bench-tables-") as folder,
        many_tables(Path(folder) / "few", few, window="hourly", first_window=first, seed=seed) as lesser,
        many_tables(Path(folder) / "many", many, window="hourly", first_window=first, seed=seed) as greater,
    ):
        homes = {few: lesser, many: greater}
        for count, home in homes.items():
            for number in range(count):
                home.land(number, rows, now() - timedelta(hours=1))
            began = time.perf_counter()
            home.taken_in()
            click.echo(f"  {count} tables made in {time.perf_counter() - began:.0f} s", err=True)
        for number in range(1, repeats + 1):
            for count, home in homes.items():
                home.land(number % few, changes, now())
                tick, run = home.taken_in()
                took[f"tick {count}"].append(tick)
                took[f"run {count}"].append(run)
                took[f"checks {count}"].append(_checked_anew(home))
            text = ", ".join(f"{name} {each[-1]:.2f}" for name, each in took.items())
            click.echo(f"  {number}/{repeats}: {text}", err=True)
    middle = {name: median(each) for name, each in took.items()}
    ratio = sum(middle[f"{what} {many}"] for what in _MEASURED) / sum(
        middle[f"{what} {few}"] for what in _MEASURED
    )
    for name, each in took.items():
        click.echo(f"  {name:<10} tables {median(each):7.2f} s  ({min(each):.2f} to {max(each):.2f})")
    click.echo(f"  ratio {ratio:.2f} (limit {LIMIT}): {'met' if ratio <= LIMIT else 'NOT MET'}")
    write_result("tables", {"few": few, "many": many, "seconds": took, "median": middle, "ratio": ratio})


def _checked_anew(home: ManyTables) -> float:
    """Seconds that the checks of all layers take a process that has opened no table.

    It has read the contracts: a run is a fork of one that has.
    """
    table._opened.clear()
    workspace = Workspace.open(home.workspace.settings)
    began = time.perf_counter()
    for check in (counts_add_up, windows_settled, replays_explained):
        finding = check(workspace, SOURCE)
        if not finding.passed:
            raise click.ClickException(finding.summary)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
