"""Measure a warm Spark from landed batches to dimensions: a million changes, and how the cost grows with
size.

The first is measured beside DuckDB and Polars on the same files. All runs are in one process with one
session, as in the platform: the layers are called as Dagster's assets call them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from bench.landed import MIXED, Mix, Tickets, now
from bench.peers import by_duckdb, by_polars
from bench.processes import peak_memory_mb, processor_seconds, spent
from bench.report import write_result
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REACH = 1.5
REACH_MIXED = 0.8
MEMORY_LIMIT_MB = 4096
GROWTH_LIMIT = 1.25

_SOURCE = "support_desk"
_LAYERS = ("raw_cdc_staging", "deduped_events", "net_changes", "dimension")


@dataclass
class Lake:
    """A home of its own with one table's stream landing in it."""

    workspace: Workspace
    tickets: Tickets

    def materialize(self, spark: SparkSession, window: str, *, publish: bool = True) -> dict[str, Cost]:
        """Take what has landed for ``window`` through every layer; what each of them costs."""
        contract = next(
            each for each in self.workspace.contracts.of_source(_SOURCE) if each.name == "tickets"
        )
        steps = {
            "raw_cdc_staging": lambda: raw.materialize(self.workspace, spark, _SOURCE, [window], "bench"),
            "deduped_events": lambda: deduped.materialize(self.workspace, spark, _SOURCE, [window], "bench"),
            "net_changes": lambda: net_changes.materialize(
                self.workspace, spark, contract, [window], "bench"
            ),
            "dimension": lambda: dimensions.update(self.workspace, spark, contract, "bench"),
        }
        if not publish:
            del steps["dimension"]
        return {name: _cost(step) for name, step in steps.items()}


@dataclass(frozen=True)
class Cost:
    """Seconds by the clock, and those of processors that this process and all below it took meanwhile.

    On a machine that does other work too the second is what can be compared.
    """

    wall: float
    cpu: float


def _cost(step: Callable[[], object]) -> Cost:
    began, before = time.perf_counter(), processor_seconds(os.getpid())
    step()
    return Cost(time.perf_counter() - began, spent(before, processor_seconds(os.getpid())))


@click.command()
@click.option("--changes", default=1_000_000, show_default=True, help="Changes of the first question.")
@click.option(
    "--sizes",
    default="1000000,5000000",
    show_default=True,
    help="Rows of the dimensions that 100,000 changes go into.",
)
@click.option("--mixed-changes", default=1_000_000, show_default=True, help="Changes of the mixed stream.")
@click.option("--growth/--no-growth", default=True, show_default=True, help="Ask what size costs.")
@click.option("--repeats", default=3, show_default=True, help="Rounds of each question.")
@click.option("--seed", default=1, show_default=True, help="Of the data.")
@click.option(
    "--body",
    nargs=2,
    type=int,
    default=(100, 600),
    show_default=True,
    help="Least and most characters of a body.",
)
@click.option("--entropy", default=0.0, show_default=True, help="Share of a body that is random.")
@click.option("--skew", default=0.0, show_default=True, help="0: keys are chosen evenly; more: old ones.")
@click.option("--duplicates", default=0.0, show_default=True, help="Share of changes that come again.")
@click.option("--out-of-order", default=0.0, show_default=True, help="Share of changes that come later.")
@click.option("--refused", default=0.0, show_default=True, help="Share of rows that break a rule.")
@click.option("--key-changes", default=0.0, show_default=True, help="Share of changes that change a key.")
@click.option("--unsent", default=0.1, show_default=True, help="Share of updates that leave the body unsent.")
def main(
    changes: int, sizes: str, mixed_changes: int, growth: bool, repeats: int, seed: int, **of_mix: Any
) -> None:
    """Measure landed -> dimensions, and print the figures."""
    mix = Mix(**of_mix)
    settings = Settings(spark_driver_memory="3g", _env_file=None)  # type: ignore[call-arg]
    spark = classic_session(settings)
    with _lake() as warm_up:
        # Two files, so that both workers have begun.
        warm_up.tickets.land(30_000, now())
        warm_up.tickets.land(30_000, now())
        warm_up.materialize(spark, _window(warm_up))
    result: dict[str, Any] = {"changes": changes, "seed": seed, "mix": str(mix)}
    result |= _throughput(spark, _Question(changes, repeats, seed, mix, REACH))
    mixed = _throughput(spark, _Question(mixed_changes, repeats, seed, _mixed(mix), REACH_MIXED))
    result |= {f"mixed_{name}": value for name, value in mixed.items()}
    small, large = (int(size) for size in sizes.split(","))
    if growth:
        result |= _growth(spark, small, large, repeats)
    result["driver_peak_mb"] = peak_memory_mb(called="java")
    result["peak_mb"] = peak_memory_mb()
    click.echo(
        f"Peak memory: the driver's JVM {result['driver_peak_mb']:.0f} MB (limit {MEMORY_LIMIT_MB}), "
        f"with this process and Spark's Python workers {result['peak_mb']:.0f} MB"
    )
    write_result("lake", result)


@dataclass(frozen=True)
class _Question:
    """How many changes of what mix are taken through the layers, how often, and the ratio to be reached."""

    changes: int
    repeats: int
    seed: int
    mix: Mix
    reach: float


def _mixed(mix: Mix) -> Mix:
    """``MIXED``, with the rows of ``mix``."""
    return replace(MIXED, body=mix.body, entropy=mix.entropy, skew=mix.skew)


def _throughput(spark: SparkSession, question: _Question) -> dict[str, float]:
    """The layers of landed events, and peers with the same files in turn."""
    changes, repeats = question.changes, question.repeats
    took: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(repeats):
        with _lake(question.seed, question.mix) as lake:
            # One hour, should the next begin meanwhile.
            at = now()
            window = lake.workspace.grid.key_of(at, at)
            lake.tickets.land(changes, at)
            for name, cost in lake.materialize(spark, window).items():
                took[name].append(cost)
            on_disk = _on_disk(lake.workspace.home.path)
            store = lake.workspace.landing(_SOURCE)
            landed = [store.path_of(part) for part in store.landed().parts(window)]
            for peer in (by_duckdb, by_polars):
                with tempfile.TemporaryDirectory() as folder:
                    took[peer.__name__].append(_cost(partial(peer, landed, Path(folder))))
    rounds = list(zip(*(took[name] for name in _LAYERS), strict=True))
    took["ours"] = [Cost(sum(each.wall for each in all_), sum(each.cpu for each in all_)) for all_ in rounds]
    click.echo(
        f"{changes:,} landed changes of one table, warm Spark local[2], median of {repeats}, seed "
        f"{question.seed}, {question.mix}:"
    )
    found: dict[str, float] = {}
    for kind, unit in (("wall", "s"), ("cpu", "CPU s of all processes")):
        of_kind = {name: [getattr(each, kind) for each in costs] for name, costs in took.items()}
        for name, seconds_of in of_kind.items():
            click.echo(
                f"  {name:16} {median(seconds_of):6.1f} {unit}  "
                f"({min(seconds_of):.1f} to {max(seconds_of):.1f})"
            )
        better = [min(pair) for pair in zip(of_kind["by_duckdb"], of_kind["by_polars"], strict=True)]
        ratio = median(theirs / ours for ours, theirs in zip(of_kind["ours"], better, strict=True))
        click.echo(f"  share of the better peer's speed {ratio:.2f} by {kind} (reach {question.reach})")
        prefix = "" if kind == "wall" else "cpu_"
        found |= {f"{prefix}seconds_{name}": median(each) for name, each in of_kind.items()}
        found[f"{prefix}ratio"] = ratio
    for folder, size in on_disk.items():
        click.echo(f"  {folder:40} {size / changes:6.0f} bytes a change on disk")
        found[f"bytes_{folder}"] = size / changes
    return found


def _on_disk(home: Path) -> dict[str, int]:
    """Bytes of the files in each folder of landing and lake; a file with several names counts where it was
    made, which is the first."""
    seen: set[int] = set()
    found: dict[str, int] = defaultdict(int)
    files = (each for part in ("landing", "lake") for each in (home / part).rglob("*") if each.is_file())
    for file in sorted(files, key=lambda each: (each.relative_to(home).parts[0] == "lake", _stage(each))):
        state = file.stat()
        if state.st_ino not in seen:
            seen.add(state.st_ino)
            parts = file.relative_to(home).parts
            found["/".join(parts[:3])] += state.st_size
    return dict(found)


def _stage(file: Path) -> int:
    """In which order the layers write: a later one links to files of an earlier."""
    return next((number for number, name in enumerate(_LAYERS) if name in file.parts), len(_LAYERS))


def _growth(spark: SparkSession, small: int, large: int, repeats: int) -> dict[str, float]:
    """100,000 changes into a dimension of ``small`` rows beside one of ``large`` rows, in turn."""
    with _lake() as lesser, _lake() as greater:
        for lake, rows in ((lesser, small), (greater, large)):
            click.echo(f"Filling a dimension with {rows:,} rows …", err=True)
            before = now() - timedelta(hours=1)
            lake.tickets.land(rows, before, inserts_only=True)
            lake.materialize(spark, lake.workspace.grid.key_of(before, now()), publish=False)
        ratios = []
        for _ in range(repeats):
            took = []
            for lake in (lesser, greater):
                lake.tickets.land(100_000, now())
                costs = lake.materialize(spark, _window(lake), publish=False).values()
                took.append(sum(each.wall for each in costs))
            ratios.append(took[1] / took[0])
            click.echo(
                f"  100,000 changes: {took[0]:.1f} s into {small:,} rows, {took[1]:.1f} s into {large:,}"
            )
        updates = [lake.materialize(spark, _window(lake))["dimension"].wall for lake in (lesser, greater)]
    click.echo(f"  ratio {median(ratios):.2f} (limit {GROWTH_LIMIT})")
    click.echo(f"  updating the dimension: {updates[0]:.1f} s and {updates[1]:.1f} s")
    return {"growth_ratio": median(ratios), "update_ratio": updates[1] / updates[0]}


@contextmanager
def _lake(seed: int = 1, mix: Mix | None = None) -> Iterator[Lake]:
    folder = Path(tempfile.mkdtemp(prefix="bench-lake-"))
    try:
        settings = Settings(home=folder / "home", window="hourly", _env_file=None)  # type: ignore[call-arg]
        workspace = Workspace.open(settings)
        tickets = Tickets(workspace.landing(_SOURCE), workspace.grid, seed, mix or Mix())
        yield Lake(workspace, tickets)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _window(lake: Lake) -> str:
    return lake.workspace.grid.key_of(now(), now())


if __name__ == "__main__":
    main()
