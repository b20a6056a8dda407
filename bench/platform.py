"""The platform up and warm: how long a commit takes to its dimension, and what it costs to wait.

With ``--minutes``, on a table of ``--rows`` under ``--rate`` changes a second (``bench.sustained``).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

import click
import duckdb
import psycopg2

from bench.processes import peak_memory_mb, processor_seconds, spent
from bench.report import write_result
from bench.sustained import fill, sustained
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.lake.table import LakeTable
from omnisupport_ingest.layers.workspace import Workspace
from omnisupport_ingest.runtime.ports import free_port
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres

LATENCY_LIMIT = 4.0
IDLE_LIMIT = 0.05

_READY_SECONDS = 300.0
_CHANGES = 100


@click.command()
@click.option("--rounds", default=8, show_default=True, help="Commits whose way is timed.")
@click.option("--idle-seconds", default=60, show_default=True, help="How long to watch the idle platform.")
@click.option("--rows", default=0, help="Tickets that the source begins with.  [default: the desk's own]")
@click.option("--rate", default=200.0, show_default=True, help="Changes a second, with --minutes.")
@click.option("--minutes", default=0.0, help="How long changes go on.  [default: none]")
@click.option("--rows-per-file", default=0, help="Setting of the contract of tickets.  [default: none]")
@click.option("--deletion-vectors", is_flag=True, help="Setting of the contract of tickets.")
def main(
    rounds: int,
    idle_seconds: int,
    rows: int,
    rate: float,
    minutes: float,
    rows_per_file: int,
    deletion_vectors: bool,
) -> None:
    """Time commits to their dimension on a running platform, then watch it idle."""
    if minutes and not rows:
        raise click.UsageError("--minutes needs --rows")
    policy: dict[str, object] = {"rows_per_file": rows_per_file} if rows_per_file else {}
    policy |= {"deletion_vectors": True} if deletion_vectors else {}
    with _platform(rows, policy) as (workspace, pid):
        if minutes:
            found = sustained(workspace, pid, rows, rate, minutes)
            write_result("sustained", {"contract": policy, **found})
            return
        dsn = EmbeddedPostgres(workspace.home.postgres).dsn()
        _one_commit(workspace, dsn)
        seconds = []
        for number in range(1, rounds + 1):
            # Commits come at any time, not in step with sensors and batches.
            time.sleep(3 + 1.7 * (number % 4))
            seconds.append(_one_commit(workspace, dsn))
            click.echo(f"  {number}/{rounds}: {seconds[-1]:.1f} s", err=True)
        time.sleep(15)
        idle = _idle_share(pid, idle_seconds)
        memory = peak_memory_mb(pid)
    click.echo(
        f"{_CHANGES} changes of one commit reach their dimension in {median(seconds):.1f} s "
        f"(median of {rounds}; from {min(seconds):.1f} to {max(seconds):.1f} s; limit {LATENCY_LIMIT:.0f} s)"
    )
    click.echo(f"Idle, all processes together use {idle:.1%} of one core (limit {IDLE_LIMIT:.0%})")
    click.echo(f"Peak memory of all processes: {memory:.0f} MB")
    write_result("platform", {"seconds": seconds, "idle_share": idle, "peak_mb": memory})


def _one_commit(workspace: Workspace, dsn: str) -> float:
    """Commit a hundred new tickets; seconds until all of them are in the dimension."""
    mark = f"bench {uuid.uuid4()}"
    with closing(psycopg2.connect(dsn)) as connection, connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO support.tickets (id, organization_id, subject, status, created_at, updated_at)"
            " SELECT (SELECT max(id) FROM support.tickets) + n, 1, %s, 'new', now(), now()"
            " FROM generate_series(1, %s) n",
            (mark, _CHANGES),
        )
        connection.commit()
    committed = time.monotonic()
    contract = next(each for each in workspace.contracts.of_source("support_desk") if each.name == "tickets")
    table = workspace.dimension(contract)
    while _rows(table, mark) < _CHANGES:
        if time.monotonic() - committed > _READY_SECONDS:
            raise click.ClickException(
                f"{_CHANGES} changes did not reach the dimension in {_READY_SECONDS:.0f} s"
            )
        time.sleep(0.2)
    return time.monotonic() - committed


def _rows(table: LakeTable, mark: str) -> int:
    if not table.exists:
        return 0
    files = table.open().all_files()
    if not files:
        return 0
    with duckdb.connect() as connection:
        query = f"SELECT count(*) FROM {live_sql(connection, files)} WHERE subject = ?"
        found = connection.execute(query, [mark]).fetchone()
    return int(found[0]) if found else 0


def _idle_share(pid: int, seconds: int) -> float:
    before, began = processor_seconds(pid), time.monotonic()
    time.sleep(seconds)
    return spent(before, processor_seconds(pid)) / (time.monotonic() - began)


@contextmanager
def _platform(rows: int, policy: Mapping[str, object]) -> Iterator[tuple[Workspace, int]]:
    """`omnisupport-ingest up` on a home of its own, with the embedded source, which has ``rows`` tickets.

    ``policy`` is put into the contract of tickets.
    """
    folder = Path(tempfile.mkdtemp(prefix="bench-platform-"))
    contracts = _contracts(folder / "contracts", policy)
    settings = Settings(home=folder / "home", contracts_dir=contracts, _env_file=None)  # type: ignore[call-arg]
    if rows:
        click.echo(f"Making {rows:,} rows …", err=True)
        fill(Workspace.open(settings), rows)
    environment = {
        **os.environ,
        "OMNISUPPORT_HOME": str(folder / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(contracts),
        "OMNISUPPORT_WEBSERVER_PORT": str(free_port()),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "omnisupport_ingest.cli.main", "up"],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        click.echo("Starting the platform …", err=True)
        deadline = time.monotonic() + _READY_SECONDS
        while "The platform runs" not in (folder / "log").read_text():
            if process.poll() is not None or time.monotonic() > deadline:
                raise click.ClickException((folder / "log").read_text())
            time.sleep(0.5)
        yield Workspace.open(settings), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _contracts(folder: Path, policy: Mapping[str, object]) -> Path:
    """A copy of the desk's contracts in ``folder``, that of tickets with ``policy`` in its ``x-cdc``."""
    shutil.copytree(Path(__file__).parents[1] / "contracts" / "data", folder)
    if policy:
        file = folder / "tickets.json"
        contract = json.loads(file.read_text())
        contract["x-cdc"] |= policy
        file.write_text(json.dumps(contract, indent=2))
    return folder


if __name__ == "__main__":
    main()
