"""The first sync of a target beside COPY of the same rows into such a table, then syncs of few changes."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import click

from bench.homes import many_tables, table_name
from bench.landed import now
from bench.processes import peak_memory_mb
from bench.report import Run, alternate, conclude
from bench.source import Source, client_program, source
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.targets.sync import sync_target

FLOOR = 0.0
"""Nothing is promised: a row is compared with what the target has, and its version noted."""

_ENV, _SCHEMA, _TABLE = "BENCH_WAREHOUSE_DSN", "warehouse", "tickets"


@click.command()
@click.option("--rows", default=200_000, show_default=True, help="Rows of the dimension.")
@click.option("--changes", default=2_000, show_default=True, help="Keys that change before each later sync.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each program.")
def main(rows: int, changes: int, repeats: int) -> None:
    """Compare a target's first sync with COPY, and say what later ones take."""
    client_program("psql")
    policy = {"target": {"connection": {"env": _ENV}, "schema": _SCHEMA, "table": _TABLE}}
    with (
        source() as server,
        many_tables(
            server.folder / "home",
            1,
            window="hourly",
            first_window=now() - timedelta(hours=2),
            policy=policy,
        ) as home,
    ):
        os.environ[_ENV] = server.dsn
        click.echo(f"Making a dimension of {rows:,} rows …", err=True)
        home.land(0, rows, now() - timedelta(hours=1))
        home.taken_in()
        _first(server, home.workspace, rows)
        file = server.folder / "rows.copy"
        server.program("psql", "--no-psqlrc", "--command", f"\\copy {_SCHEMA}.{_TABLE} TO '{file}'")
        result = alternate(
            rows,
            repeats,
            "COPY of the same rows",
            lambda: _copy(server, file),
            lambda: _first(server, home.workspace, rows),
        )
        later = []
        for _ in range(repeats):
            home.stream.scattered(changes, now())
            home.taken_in()
            later.append(_synced(home.workspace))
    conclude("target", "First sync of a target", result, floor=FLOOR, memory_limit=None)
    click.echo(f"a sync of {changes:,} changed rows: {median(later):.2f} s")


def _copy(server: Source, file: Path) -> Run:
    server.execute(
        "DROP TABLE IF EXISTS copied", f"CREATE TABLE copied (LIKE {_SCHEMA}.{_TABLE} INCLUDING ALL)"
    )
    server.settle()
    return server.program("psql", "--no-psqlrc", "--command", f"\\copy copied FROM '{file}'")


def _first(server: Source, workspace: Workspace, rows: int) -> Run:
    server.execute(f"DROP SCHEMA IF EXISTS {_SCHEMA} CASCADE")
    server.settle()
    run = Run(_synced(workspace), {"peak_mb": peak_memory_mb()})
    ((count,),) = server.execute(f"SELECT count(*) FROM {_SCHEMA}.{_TABLE}")
    if count != rows:
        raise click.ClickException(f"{count:,} rows are in the target, not {rows:,}")
    return run


def _synced(workspace: Workspace) -> float:
    contract = next(each for each in workspace.contracts if each.name == table_name(0))
    began = time.perf_counter()
    sync_target(workspace, contract)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
