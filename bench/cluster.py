"""The same batches on one machine, and on Spark clusters of it with more and more workers.

It asks whether the content is the same and what a cluster costs beside one process: worker processes share
the machine's cores, so seconds say nothing about machines of their own. Each pass is a command of its own,
with the start of its Spark in its seconds.
"""

from __future__ import annotations

import resource
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from bench.landed import Mix, Tickets, now
from bench.report import write_result
from omnisupport_ingest.contracts.in_force import record_in_force
from omnisupport_ingest.home import Home
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.standalone import WorkerSize, start_standalone
from omnisupport_ingest.runtime.supervisor import Supervisor
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.verify.again import MadeAgain, differing, make_again

_SOURCE = "support_desk"


@click.command()
@click.option("--changes", default=1_000_000, show_default=True, help="Landed changes of one table.")
@click.option("--workers", default="1,2", show_default=True, help="Worker processes of each cluster.")
@click.option("--memory", default="1g", show_default=True, help="Of each executor.")
@click.option("--repeats", default=3, show_default=True, help="Rounds, each with every way in turn.")
@click.option("--seed", default=1, show_default=True, help="Of the data.")
def main(changes: int, workers: str, memory: str, repeats: int, seed: int) -> None:
    """Measure landed -> dimensions on clusters of this machine beside `local[2]`."""
    ways = {"local[2]": 0} | {f"{count} worker(s)": int(count) for count in workers.split(",")}
    took: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="bench-cluster-") as name:
        folder = Path(name)
        settings = Settings(home=folder / "home", window="hourly", _env_file=None)  # type: ignore[call-arg]
        home = Home.open(settings.home, settings.window_size)
        record_in_force(settings, home)
        workspace = Workspace.open(settings)
        Tickets(workspace.landing(_SOURCE), workspace.grid, seed, Mix()).land(changes, now())
        first: MadeAgain | None = None
        for number in range(repeats):
            for way, count in ways.items():
                began = _cpu_seconds()
                with _spark(settings, home, count, memory) as changed:
                    made = make_again(settings, home, folder / f"{number}-{count}", **changed)
                took[way].append((made.seconds, _cpu_seconds() - began))
                first = first or made
                if different := differing(first.contents, made.contents):
                    raise SystemExit(f"{way} differs from local[2] in {', '.join(different)}")
    assert first is not None
    click.echo(f"{changes:,} landed changes, median of {repeats}: seconds, CPU seconds of all processes")
    result: dict[str, Any] = {"changes": changes, "seed": seed, "memory": memory}
    for way, each in took.items():
        seconds, cpu = (median(figures) for figures in zip(*each, strict=True))
        click.echo(f"  {way:12} {seconds:7.1f} s {cpu:7.1f} CPU s")
        result[way] = {"seconds": seconds, "cpu_seconds": cpu}
    click.echo(f"  {len(first.contents)} content hashes, the same in every way")
    write_result("cluster", result)


@contextmanager
def _spark(settings: Settings, home: Home, workers: int, memory: str) -> Iterator[dict[str, Any]]:
    """The settings of a pass, with a cluster of ``workers`` meanwhile if there are any."""
    if not workers:
        yield {}
        return
    with Supervisor(home, report=lambda line: click.echo(line, err=True)) as supervisor:
        there = start_standalone(supervisor, settings, home, workers, WorkerSize(memory=memory))
        yield {name: getattr(there, name) for name in ("spark_master", "spark_properties")}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
