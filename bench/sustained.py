"""Changes that go on for minutes on a large table of a running platform: when a commit is in its dimension.

Commits of ten changes, nine of which are among the newest hundredth of the keys and one is anywhere. Each
commit writes its number to one more row, the probe, so the file with that row tells up to which commit a
version of the dimension shows the source. The moment of a version is that of its log entry.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import dagster as dg
import duckdb
import numpy as np
import psycopg2

from bench.processes import memory_mb, processor_seconds, spent
from bench.source import Source, add_tickets
from omnisupport_ingest.demo.support_desk import SUPPORT_DESK
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect

P50_SECONDS, P95_SECONDS = 4.0, 8.0
"""Freshness of a commit in its dimension at 200 changes a second on 5,000,000 rows."""

_INGEST = "ingest_support_desk"
_OF_A_COMMIT = 10
_TENTH = 10
_LOOK_SECONDS = 0.25
_FILL_SECONDS = 3600.0


def fill(workspace: Workspace, rows: int) -> None:
    """Make the embedded source of the home with ``rows`` tickets, before the platform is up."""
    server = EmbeddedPostgres(workspace.home.postgres)
    server.start()
    try:
        with closing(connect(server.dsn())) as connection:
            SUPPORT_DESK.create(connection)
        add_tickets(Source(server.dsn(), workspace.home.path), rows)
    finally:
        server.stop()


@dataclass
class Traffic(threading.Thread):
    """``rate`` changes a second on tickets ``1`` to ``rows``, of which the last is the probe."""

    dsn: str
    rows: int
    rate: float
    seed: int = 1
    committed: list[float] = field(default_factory=list)
    """When each commit returned, seconds since 1970."""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._ends = threading.Event()
        self._failed: BaseException | None = None

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        rng, every = np.random.default_rng(self.seed), _OF_A_COMMIT / self.rate
        newest = max(1, self.rows - self.rows // 100)
        try:
            with closing(psycopg2.connect(self.dsn)) as connection, connection.cursor() as cursor:
                due = time.monotonic()
                while not self._ends.wait(max(0.0, due - time.monotonic())):
                    keys = rng.integers(newest, self.rows, _OF_A_COMMIT - 2).tolist()
                    keys.append(int(rng.integers(1, self.rows)))
                    cursor.execute(
                        "UPDATE support.tickets SET priority = 1 + (priority %% 4), updated_at = now()"
                        " WHERE id = ANY(%s)",
                        (keys,),
                    )
                    cursor.execute(
                        "UPDATE support.tickets SET subject = %s, updated_at = now() WHERE id = %s",
                        (f"commit {len(self.committed)}", self.rows),
                    )
                    connection.commit()
                    self.committed.append(time.time())
                    due += every
        except BaseException as error:
            self._failed = error

    def stop(self) -> None:
        """End, and raise what went wrong."""
        self._ends.set()
        self.join()
        if self._failed is not None:
            raise self._failed


@dataclass
class Watch:
    """What is seen of a dimension while traffic goes on: by commit, seconds until it was shown."""

    table: LakeTable
    probe: int
    version: int = -1
    shown: dict[int, float] = field(default_factory=dict)
    _upto: int = -1

    def look(self, committed: Sequence[float]) -> None:
        """Read the versions that have come since."""
        log = self.table.folder / "_delta_log"
        while (entry := log / f"{self.version + 1:020d}.json").exists():
            self.version += 1
            upto = self._probed(entry)
            if upto is None:
                continue
            at = entry.stat().st_mtime
            for commit in range(self._upto + 1, min(upto + 1, len(committed))):
                self.shown[commit] = at - committed[commit]
            self._upto = max(self._upto, upto)

    def _probed(self, entry: Path) -> int | None:
        actions = [json.loads(line) for line in entry.read_text().splitlines()]
        # A file with a deletion vector was there before; a changed row is in a new one.
        added = [each["add"] for each in actions if "add" in each]
        paths = [str(self.table.folder / each["path"]) for each in added if "deletionVector" not in each]
        with duckdb.connect() as connection:
            query = (
                "SELECT subject FROM read_parquet(?, hive_partitioning = false, union_by_name = true)"
                " WHERE id = ?"
            )
            found = connection.execute(query, [paths, self.probe]).fetchone() if paths else None
        if found is None or not str(found[0]).startswith("commit "):
            return None
        return int(str(found[0]).removeprefix("commit "))


def sustained(workspace: Workspace, pid: int, rows: int, rate: float, minutes: float) -> dict[str, Any]:
    """Traffic for ``minutes``; figures and what they come to are printed. ``pid``: of the platform."""
    contract = next(each for each in workspace.contracts.of_source("support_desk") if each.name == "tickets")
    table = workspace.dimension(contract)
    _until_filled(table, rows)
    watch = Watch(table, rows, table.open().version)
    traffic = Traffic(EmbeddedPostgres(workspace.home.postgres).dsn(), rows, rate)
    began, ends = time.time(), time.monotonic() + minutes * 60
    processors, memory, by_minute = processor_seconds(pid), [], []
    traffic.start()
    last_shown = time.monotonic()
    while time.monotonic() < ends and traffic.is_alive():
        time.sleep(_LOOK_SECONDS)
        watch.look(traffic.committed)
        if time.monotonic() - last_shown >= min(60.0, minutes * 6):
            last_shown = time.monotonic()
            memory.append((round(time.time() - began), round(memory_mb(pid))))
            by_minute.append(_last_minute(watch, traffic))
            click.echo(f"  {_line(watch, by_minute[-1], memory[-1])}", err=True)
    traffic.stop()
    busy = spent(processors, processor_seconds(pid)) / (time.time() - began)
    give_up = time.monotonic() + 60
    while len(watch.shown) < len(traffic.committed) and time.monotonic() < give_up:
        time.sleep(_LOOK_SECONDS)
        watch.look(traffic.committed)
    runs = runs_since(workspace, began)
    found = {
        "rows": rows,
        "rate": rate,
        "minutes": minutes,
        "commits": len(traffic.committed),
        "not_shown": len(traffic.committed) - len(watch.shown),
        "freshness": _quantiles(list(watch.shown.values())),
        "by_minute": by_minute,
        "run_seconds": [seconds for job, _, seconds in runs if job == _INGEST],
        "other_runs": [run for run in runs if run[0] != _INGEST],
        "memory_mb": memory,
        "share_of_a_core": busy,
        "files": {name: len(list(folder.rglob("*.parquet"))) for name, folder in _folders(workspace).items()},
        "megabytes": {name: round(_bytes_in(folder) / 1e6) for name, folder in _folders(workspace).items()},
    }
    _conclude(found)
    return found


def runs_since(workspace: Workspace, since: float) -> list[tuple[str, int, float]]:
    """The runs that began after ``since`` (seconds since 1970) and have ended, in order: job, the second at
    which it began, and how many it took."""
    with dg.DagsterInstance.from_config(str(workspace.home.dagster)) as instance:
        records = instance.get_run_records(ascending=True)
    return [
        (each.dagster_run.job_name, round(each.start_time - since), round(each.end_time - each.start_time, 3))
        for each in records
        if each.start_time and each.end_time and each.start_time >= since
    ]


def _until_filled(table: LakeTable, rows: int) -> None:
    click.echo(f"Waiting for a dimension of {rows:,} rows …", err=True)
    give_up = time.monotonic() + _FILL_SECONDS
    held = 0
    while held < rows:
        if time.monotonic() > give_up:
            raise click.ClickException(f"the dimension has {held:,} of {rows:,} rows")
        time.sleep(2)
        held = sum(file.rows for file in table.open().all_files()) if table.exists else 0


def _folders(workspace: Workspace) -> dict[str, Path]:
    return {"landing": workspace.home.landing, "lake": workspace.home.lake}


def _bytes_in(folder: Path) -> int:
    """Of the files that are there, replaced ones too."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _last_minute(watch: Watch, traffic: Traffic) -> dict[str, float]:
    return _quantiles(list(watch.shown.values())[-int(traffic.rate / _OF_A_COMMIT * 60) :])


def _line(watch: Watch, quantiles: Mapping[str, float], memory: tuple[int, int]) -> str:
    text = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in quantiles.items())
    return f"{memory[0]:>5} s: {text or 'nothing shown'}; {watch.version} versions, {memory[1]} MB"


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
    return {name: round(ordered[int(part * (len(ordered) - 1))], 3) for name, part in at.items() if ordered}


def _conclude(found: Mapping[str, Any]) -> None:
    fresh, runs, memory = found["freshness"], found["run_seconds"], found["memory_mb"]
    if not fresh:
        raise click.ClickException("no commit was shown by the dimension")
    met = fresh["p50"] <= P50_SECONDS and fresh["p95"] <= P95_SECONDS and not found["not_shown"]
    click.echo(
        f"{found['rate']:.0f} changes a second for {found['minutes']:g} minutes on {found['rows']:,} rows: a "
        f"commit is in its dimension after {fresh['p50']:.1f} s (p50), {fresh['p95']:.1f} s (p95), "
        f"{fresh['p99']:.1f} s (p99); limits {P50_SECONDS:.0f} and {P95_SECONDS:.0f} s: "
        f"{'met' if met else 'NOT MET'}; {found['not_shown']} of {found['commits']} commits not shown"
    )
    if len(runs) > 2 * _TENTH:
        first, last = runs[_TENTH - 1 : 2 * _TENTH], runs[-_TENTH - 1 :]
        click.echo(
            f"{len(runs)} runs: from the tenth on {median(first):.2f} s, the last ones {median(last):.2f} s "
            "(medians)"
        )
    for job, at, seconds in found["other_runs"]:
        if seconds >= 1:
            click.echo(f"  {job} began after {at} s and took {seconds:.1f} s")
    if memory:
        click.echo(f"All processes: {memory[0][1]} MB after {memory[0][0]} s, {memory[-1][1]} MB at the end")
    click.echo(
        f"They used {found['share_of_a_core']:.0%} of a core; files: {found['files']}; "
        f"MB: {found['megabytes']}"
    )
