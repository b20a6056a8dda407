"""What a batch, a tick of the sensor and a plan cost in a home with a short, a long and a very long past.

One home grows in one run, so that the machine is the same for every size. Its past is made
(``bench.history``); what is measured is what the platform runs.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click

from bench.history import SOURCE, History
from bench.report import write_result
from omnisupport_ingest.checks.lake_checks import chain_unbroken, sentinel_empty, watermark_fresh
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.scheduling.pending import pending_windows

_ROUNDS = 15
_PER_WINDOW = 100


def _milliseconds(step: Callable[[], object], rounds: int = _ROUNDS) -> float:
    """The median of ``rounds`` calls."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        taken.append(1000 * (time.perf_counter() - began))
    return round(median(taken), 2)


def _resident_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * 4096 / 1024**2, 1)


def measure(history: History) -> dict[str, float]:
    """Milliseconds of each step in ``history`` as it is, and the megabytes that looking at it has cost."""
    found: dict[str, float] = {}
    workspace = history.workspace

    def tick() -> object:
        return pending_windows(workspace, SOURCE)

    def checks() -> None:
        for check in (chain_unbroken, sentinel_empty):
            check(workspace, SOURCE)
        watermark_fresh(workspace, SOURCE, history.clock)

    def tick_with_news() -> float:
        history.seal()
        began = time.perf_counter()
        tick()
        return 1000 * (time.perf_counter() - began)

    def plan_of_a_new_run(layer: object) -> Callable[[], object]:
        def plan() -> object:
            # Nothing is left to take in there, so nothing needs Spark.
            again = history.opened()
            return layer.materialize(again, None, SOURCE, [history.window(0)], "bench")  # type: ignore[attr-defined]

        return plan

    found["seal, ms"] = _milliseconds(history.seal)
    before = _resident_mb()
    began = time.perf_counter()
    tick()
    found["first tick of a process, ms"] = round(1000 * (time.perf_counter() - began), 1)
    found["tick without news, ms"] = _milliseconds(tick)
    found["tick with news, ms"] = round(median(tick_with_news() for _ in range(_ROUNDS)), 2)
    found["checks of landing, ms"] = _milliseconds(checks)
    found["plan of raw, new process, ms"] = _milliseconds(plan_of_a_new_run(raw), 5)
    found["plan of deduped, new process, ms"] = _milliseconds(plan_of_a_new_run(deduped), 5)
    found["memory of looking, MB"] = round(_resident_mb() - before, 1)
    return found


@click.command()
@click.option("--sizes", default="1000,100000,1000000", help="Batches of the past, rising, with commas.")
@click.option("--per-window", default=_PER_WINDOW, show_default=True, help="Batches of a window.")
def main(sizes: str, per_window: int) -> None:
    """Measure at each size and compare the last with the first."""
    results: dict[int, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="landing-index-") as folder:
        history = History(Path(folder), per_window)
        for size in map(int, sizes.split(",")):
            began = time.perf_counter()
            history.grow(size)
            click.echo(f"{size:,} batches made in {time.perf_counter() - began:.0f} s", err=True)
            results[size] = measure(history)
            index = sum(file.stat().st_size for file in history.index_folder.iterdir())
            results[size]["index, MB"] = round(index / 1024**2, 1)
            click.echo(f"  {results[size]}", err=True)
    steps = list(next(iter(results.values())))
    click.echo(f"{'':<36}" + "".join(f"{size:>14,}" for size in results))
    for step in steps:
        click.echo(f"{step:<36}" + "".join(f"{found[step]:>14}" for found in results.values()))
    figures = {str(size): found for size, found in results.items()}
    write_result("landing_index", {"per_window": per_window, "results": figures})


if __name__ == "__main__":
    main()
