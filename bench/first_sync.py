"""Measure the first ``sync`` of a large table, beside COPY to a file and DuckDB to Parquet.

Ours is the command itself with the start of Spark: from a source that nobody has read to a dimension.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import click
import duckdb

from bench.phases import tell_phases, watch
from bench.report import Run, alternate, conclude
from bench.source import PUBLICATION, SLOT, Source, add_tickets, source
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.session.connection import connect

FLOOR = 0.3

_SOURCE = "support_desk"


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the table.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each.")
def main(rows: int, repeats: int) -> None:
    """Compare a first sync with a copy of the same table."""
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        add_tickets(server, rows)
        result = alternate(
            rows, repeats, "COPY, then DuckDB", lambda: _copied(server, rows), lambda: _synced(server, rows)
        )
    conclude("first_sync", "First sync", result, floor=FLOOR, memory_limit=None)


def _copied(server: Source, rows: int) -> Run:
    server.settle()
    text, parquet = server.folder / "tickets.csv", server.folder / "tickets.parquet"
    began = time.monotonic()
    with closing(connect(server.dsn)) as connection, connection.cursor() as cursor, text.open("w") as file:
        cursor.copy_expert("COPY support.tickets TO STDOUT (FORMAT csv, HEADER)", file)
    with duckdb.connect(config={"threads": 2}) as connection:
        connection.execute(f"COPY (FROM read_csv('{text}', header = true)) TO '{parquet}'")
        found = connection.execute(f"SELECT count(*) FROM '{parquet}'").fetchone()
    seconds = time.monotonic() - began
    text.unlink()
    parquet.unlink()
    if found != (rows,):
        raise click.ClickException(f"{found} rows were copied of {rows:,}")
    return Run(seconds)


def _synced(server: Source, rows: int) -> Run:
    server.settle()
    home = server.folder / "home"
    watched = watch(*_sync(server, home, "none", SLOT))
    if watched.code:
        said = "\n".join(line for _, line in watched.lines)
        raise click.ClickException(f"sync ended with {watched.code}: {said}")
    tell_phases(watched, home)
    seconds = watched.ended - watched.began
    found = rows_of_tickets(home)
    shutil.rmtree(home)
    server.execute(f"SELECT pg_drop_replication_slot('{SLOT}')", f"DROP PUBLICATION {PUBLICATION}")
    if found != rows:
        raise click.ClickException(f"{found:,} rows are in the dimension of {rows:,}")
    cpu = sum(watched.spent(watched.began, watched.ended).values())
    return Run(seconds, {"cpu_seconds": cpu})


def run_sync(server: Source, home: Path, verify: str, slot: str = SLOT) -> None:
    """``sync`` of ``server`` into ``home``, as a process of its own; its output is shown if it fails."""
    command, given = _sync(server, home, verify, slot)
    done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"sync ended with {done.returncode}: {done.stdout}{done.stderr}")


def _sync(server: Source, home: Path, verify: str, slot: str) -> tuple[list[str], dict[str, str]]:
    """The command, and the variables that it is given."""
    command = [sys.executable, "-m", "omnisupport_ingest.cli.main", "sync", "--verify", verify]
    return command, {
        "OMNISUPPORT_HOME": str(home),
        "OMNISUPPORT_SOURCE_DSN": server.dsn,
        "OMNISUPPORT_SOURCE": _SOURCE,
        "OMNISUPPORT_SLOT": slot,
    }


def rows_of_tickets(home: Path) -> int:
    """The rows of the dimension of the tickets."""
    workspace = Workspace.open(Settings(home=home, _env_file=None))  # type: ignore[call-arg]
    contracts = workspace.contracts.of_source(_SOURCE)
    contract = next(each for each in contracts if each.name == "tickets")
    return sum(file.rows for file in workspace.dimension(contract).open().all_files())


if __name__ == "__main__":
    main()
