"""A first reading by cursor, to durable batches, beside ``COPY … TO STDOUT`` to /dev/null by psql."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import click

from bench.processes import peak_memory_mb
from bench.report import Run, alternate, conclude, cost
from bench.source import Source, add_tickets, client_program, source
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import sync
from omnisupport_ingest.windows import WindowGrid, WindowSize

FLOOR = 0.5

_CONTRACT = Path("contracts/data/tickets.json")


@click.command()
@click.option("--rows", default=1_000_000, show_default=True, help="Rows of the table.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each program.")
def main(rows: int, repeats: int) -> None:
    """Compare a first reading by cursor with COPY of the same table."""
    client_program("psql")
    table = tickets()
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        add_tickets(server, rows)
        # One transaction made them; rows of a real table have times of their own.
        server.execute(
            "UPDATE support.tickets SET updated_at = now() - interval '1 day' + id * interval '50 ms'",
            "CREATE INDEX ON support.tickets (updated_at, id)",
            "VACUUM (FULL, ANALYZE) support.tickets",
        )
        result = alternate(
            rows, repeats, "COPY to /dev/null", lambda: _copy(server), lambda: _ours(server, table, rows)
        )
    conclude("cursor", "First reading by cursor", result, floor=FLOOR, memory_limit=None)
    click.echo(cost(result))


def tickets() -> TableContract:
    """The contract of the desk's tickets, read by ``updated_at``."""
    document = json.loads(_CONTRACT.read_text())
    document["x-cdc"]["cursor"] = {"field": "updated_at", "lookback": "PT5M"}
    return contract_of(document, _CONTRACT)


def _copy(server: Source) -> Run:
    server.settle()
    with server.processor() as spent:
        run = server.program("psql", "--no-psqlrc", "--command", "COPY support.tickets TO STDOUT")
    return Run(run.seconds, {**run.seen, "server_cpu_seconds": spent.seconds})


def _ours(server: Source, table: TableContract, rows: int) -> Run:
    server.settle()
    folder = server.folder / "landing"
    folder.mkdir()
    grid = WindowGrid(WindowSize(60), datetime(2026, 1, 1, tzinfo=UTC))
    with server.processor() as spent:
        began, before = time.perf_counter(), time.process_time()
        store = LandingStore(folder, table.source)
        with closing(PostgresReader(server.dsn)) as reader, QueryState(store.folder) as state:
            report = sync(Inlet(store, grid, (table,), "bench"), reader, state)
        seconds, cpu = time.perf_counter() - began, time.process_time() - before
    shutil.rmtree(folder)
    (read,) = report.tables
    if read.landed != rows:
        raise click.ClickException(f"{read.landed:,} rows landed of {rows:,}")
    seen = {"peak_mb": peak_memory_mb(), "cpu_seconds": cpu, "server_cpu_seconds": spent.seconds}
    return Run(seconds, seen)


if __name__ == "__main__":
    main()
