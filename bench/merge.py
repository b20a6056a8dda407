"""Changes into a dimension of millions of rows, beside what others do with the same changes (P4a, P4b).

100 scattered keys, 100 recent ones and 100,000 mixed changes, in turn, from landed files to the dimension,
warm. Their window holds a million events already. Sizes take turns, so growth is measured in one run; the
others begin with the rows of ours, are given the landed files, fold and type them by DuckDB and merge.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from bench.bulk import Bulk, an_hour_before
from bench.landed import now
from bench.merge_peers import Peer, fold, peers, rows_of
from bench.report import write_result
from omnisupport_ingest.contracts.model import DelayedMerge, TableContract
from omnisupport_ingest.lake.standing_task import release, standing_task
from omnisupport_ingest.layers.dimension import dimensions, net_changes
from omnisupport_ingest.layers.events import deduped, raw
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REACH = 3.0
"""How often as fast as the best of the others, at the size that they have."""

GROWTH_LIMIT = 1.3
"""The largest dimension beside the smallest."""

RECENT_SECONDS, SCATTERED_SECONDS = 1.5, 4.0
"""100 changes, landed → dimension, of recent keys and of scattered ones."""

_SOURCE = "support_desk"
_DELAY, _DELAYED_RUNS = DelayedMerge(timedelta(hours=1), 0.01), 5


@dataclass
class Table:
    """A home with one dimension, and the stream of its changes."""

    workspace: Workspace
    stream: Bulk
    spark: SparkSession
    policy: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def made(
        cls,
        folder: Path,
        rows: int,
        held: int,
        seed: int,
        spark: SparkSession,
        policy: Mapping[str, Any] | None = None,
    ) -> Table:
        """A dimension of ``rows``, and ``held`` events in the window of now. ``policy``: what the contract
        says otherwise."""
        settings = Settings(home=folder / f"home-{rows}", window="hourly", _env_file=None)  # type: ignore[call-arg]
        workspace = Workspace.open(settings)
        stream = Bulk(workspace.landing(_SOURCE), workspace.grid, seed)
        table = cls(workspace, stream, spark, policy or {})
        click.echo(f"Making a dimension of {rows:,} rows …", err=True)
        began = time.perf_counter()
        table.stream.fill(rows, an_hour_before(now()))
        landed = time.perf_counter() - began
        table.take_in(before=True)
        if held:
            table.stream.mixed(held, now())
            table.take_in()
        seconds = time.perf_counter() - began
        click.echo(f"  {seconds:.0f} s, of which {landed:.0f} s landing; {table.files()} files", err=True)
        return table

    @property
    def contract(self) -> TableContract:
        contracts = self.workspace.contracts.of_source(_SOURCE)
        tickets = next(each for each in contracts if each.name == "tickets")
        return replace(tickets, **self.policy)

    def take_in(self, *, before: bool = False, delay: DelayedMerge | None = None) -> dict[str, float]:
        """Take what has landed through every layer; seconds by layer. ``before``: of the window before.

        ``delay``: what lets net changes wait for their merge."""
        window = self.workspace.grid.key_of(an_hour_before(now()) if before else now(), now())
        of_all: tuple[Any, ...] = (self.workspace, self.spark, _SOURCE, [window], "bench")
        of_one: tuple[Any, ...] = (self.workspace, self.spark, self.contract, [window], "bench")
        steps: dict[str, Callable[[], object]] = {
            "raw": lambda: raw.materialize(*of_all),
            "deduped": lambda: deduped.materialize(*of_all),
            "net_changes": lambda: net_changes.materialize(*of_one),
            "dimension": lambda: dimensions.update(
                self.workspace, self.spark, replace(self.contract, delayed_merge=delay), "bench"
            ),
        }
        seconds = {}
        # As a run of the platform has it, which is a process of its own.
        with standing_task(self.spark):
            for name, step in steps.items():
                began = time.perf_counter()
                step()
                seconds[name] = time.perf_counter() - began
        release()
        return seconds | {"all": sum(seconds.values())}

    def files(self) -> int:
        return len(self.workspace.dimension(self.contract).open().all_files())

    def landed_since(self, known: set[Path]) -> list[Path]:
        """The landed data files that are not among ``known``."""
        return sorted(set(self.landed()) - known)

    def landed(self) -> list[Path]:
        store = self.workspace.landing(_SOURCE)
        window = self.workspace.grid.key_of(now(), now())
        return [store.path_of(part) for part in store.landed().parts(window)]


@click.command()
@click.option(
    "--sizes", default="1000000,5000000", show_default=True, help="Rows; add 20000000 for the reach."
)
@click.option("--held", default=1_000_000, show_default=True, help="Events in the window beforehand.")
@click.option("--many", default=100_000, show_default=True, help="Changes of the third question.")
@click.option("--peers-at", default=5_000_000, show_default=True, help="The size that the others are given.")
@click.option(
    "--peer", "names", multiple=True, help="Only those whose names begin so; repeatable. None: all."
)
@click.option("--ours-alone", is_flag=True, help="Measure no others.")
@click.option("--repeats", default=3, show_default=True, help="Rounds.")
@click.option("--seed", default=1, show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), help="Where homes are made.")
@click.option("--rows-per-file", type=int, help="Of the contract.  [default: none]")
@click.option("--deletion-vectors", is_flag=True, help="Of the contract.")
def main(
    sizes: str,
    held: int,
    many: int,
    peers_at: int,
    names: Sequence[str],
    ours_alone: bool,
    repeats: int,
    seed: int,
    folder: Path | None,
    rows_per_file: int | None,
    deletion_vectors: bool,
) -> None:
    """Measure merges of changes into dimensions, and print the figures."""
    scratch = Path(tempfile.mkdtemp(prefix="bench-merge-", dir=folder))
    settings = Settings(home=scratch / "spark", spark_driver_memory="3g", _env_file=None)  # type: ignore[call-arg]
    spark = classic_session(settings)
    others: list[Peer] = []
    try:
        policy = {"rows_per_file": rows_per_file, "deletion_vectors": deletion_vectors}
        Table.made(scratch / "warm", 20_000, 1_000, seed, spark, policy)
        tables = {
            int(size): Table.made(scratch, int(size), held, seed, spark, policy) for size in sizes.split(",")
        }
        if not ours_alone and peers_at in tables:
            others = _loaded(tables[peers_at], scratch, spark, names)
        took = _rounds(tables, others, peers_at, many, repeats)
    finally:
        for each in others:
            each.close()
        shutil.rmtree(scratch, ignore_errors=True)
    _conclude(took, [int(size) for size in sizes.split(",")], others, peers_at, repeats)


def _loaded(table: Table, scratch: Path, spark: SparkSession, names: Sequence[str]) -> list[Peer]:
    rows = scratch / "rows.parquet"
    dimension = table.workspace.dimension(table.contract).open()
    rows_of(dimension.all_files(), rows)
    found = peers(scratch, spark, names)
    for each in found:
        began = time.perf_counter()
        each.load(rows)
        click.echo(f"  {each.name} loaded in {time.perf_counter() - began:.0f} s", err=True)
    rows.unlink()
    return found


def _rounds(
    tables: dict[int, Table], others: Sequence[Peer], peers_at: int, many: int, repeats: int
) -> dict[str, dict[str, list[float]]]:
    """By question, seconds by what was measured."""
    took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(1, repeats + 1):
        for question in ("100 scattered", "100 recent", f"{many:,} mixed"):
            found = took[question]
            for size, table in tables.items():
                known = set(table.landed()) if size == peers_at and others else set()
                change = {"scattered": table.stream.scattered, "recent": table.stream.recent}
                count, kind = question.replace(",", "").split()
                change.get(kind, table.stream.mixed)(int(count), now())
                for layer, seconds in table.take_in().items():
                    found[f"{size} {layer}"].append(seconds)
                if size == peers_at and others:
                    _peers_round(table.landed_since(known), others, found)
            click.echo(
                f"  {number}/{repeats} {question}: "
                + ", ".join(f"{name} {each[-1]:.2f}" for name, each in found.items()),
                err=True,
            )
        for size, table in tables.items():
            _delayed_round(size, table, took)
    return took


def _delayed_round(size: int, table: Table, took: dict[str, dict[str, list[float]]]) -> None:
    """Runs of 100 scattered changes whose merge waits, and the merge of all of them."""
    for _ in range(_DELAYED_RUNS):
        table.stream.scattered(100, now())
        took["100 scattered, merge delayed"][f"{size} all"].append(table.take_in(delay=_DELAY)["all"])
    merged = table.take_in()["all"]
    took[f"merge of {100 * _DELAYED_RUNS} scattered"][f"{size} all"].append(merged)


def _peers_round(landed: Sequence[Path], others: Sequence[Peer], found: dict[str, list[float]]) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-changes-") as folder:
        changes = Path(folder) / "changes.parquet"
        began = time.perf_counter()
        fold(landed, changes)
        folded = time.perf_counter() - began
        for each in others:
            began = time.perf_counter()
            each.merge(changes)
            found[each.name].append(folded + time.perf_counter() - began)


def _conclude(
    took: dict[str, dict[str, list[float]]],
    sizes: Sequence[int],
    others: Sequence[Peer],
    peers_at: int,
    repeats: int,
) -> None:
    middle = {
        question: {name: median(each) for name, each in found.items()} for question, found in took.items()
    }
    open_files = {each.name for each in others if each.open_files}
    click.echo(f"Landed → dimension, warm Spark local[2], seconds, median of {repeats} (lowest to highest):")
    verdicts: dict[str, Any] = {}
    for question, found in took.items():
        click.echo(f"{question} changes")
        for name, each in found.items():
            if name.endswith(" all") or (" " in name and not name[0].isdigit()):
                click.echo(f"  {name:<28} {median(each):8.2f}  ({min(each):.2f} to {max(each):.2f})")
        seconds = middle[question]
        small, large = f"{min(sizes)} all", f"{max(sizes)} all"
        verdict = {"growth": seconds[large] / seconds[small]}
        ours = seconds.get(f"{peers_at} all")
        for what, those in (("best", [each.name for each in others]), ("best_with_open_files", open_files)):
            best = min(
                (name for name in those if name in seconds), key=lambda name: seconds[name], default=None
            )
            if best is not None and ours is not None:
                verdict[what] = seconds[best] / ours
                click.echo(f"  {what.replace('_', ' ')}: {best}, ratio {verdict[what]:.2f} (reach {REACH})")
        click.echo(f"  largest beside smallest {verdict['growth']:.2f} (limit {GROWTH_LIMIT} of 20M by 1M)")
        verdicts[question] = verdict
    for kind, limit in (("100 recent", RECENT_SECONDS), ("100 scattered", SCATTERED_SECONDS)):
        seconds_of = middle[kind].get(f"{peers_at} all", middle[kind][f"{max(sizes)} all"])
        met = "met" if seconds_of <= limit else "NOT MET"
        click.echo(f"{kind} keys: {seconds_of:.2f} s, limit {limit} s: {met}")
    write_result("merge", {"sizes": list(sizes), "seconds": took, "median": middle, "verdicts": verdicts})


if __name__ == "__main__":
    main()
