"""The snapshot of a table, to durable batches, beside ``COPY … TO STDOUT`` to /dev/null by psql.

With ``--engine`` Debezium's own engine reads it as well, in pairs with ours after the others.
"""

from __future__ import annotations

import shutil

import click

from bench.engine import NAME, Engine, engine_option, source_and_engine
from bench.report import Run, alternate, conclude
from bench.source import PUBLICATION, SLOT, Source, add_tickets, client_program
from omnisupport_ingest.position import Lsn

FLOOR = 0.5
ENGINE_REACH = 6.0


@click.command()
@click.option("--rows", default=2_000_000, show_default=True, help="Rows of the table.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each program.")
@engine_option
def main(rows: int, repeats: int, engine: str | None) -> None:
    """Compare our snapshot with COPY of the same table."""
    client_program("psql")
    with source_and_engine(engine) as (server, beside):
        click.echo(f"Making {rows:,} rows …", err=True)
        add_tickets(server, rows)
        result = alternate(
            rows, repeats, "COPY to /dev/null", lambda: _yardstick(server), lambda: _ours(server, rows)
        )
        theirs = beside and alternate(
            rows, repeats, NAME, lambda: _by_engine(beside, server, rows), lambda: _ours(server, rows)
        )
    conclude("snapshot", "Snapshot", result, floor=FLOOR, memory_limit=None)
    if theirs is not None:
        conclude("snapshot-engine", "Snapshot", theirs, floor=ENGINE_REACH, memory_limit=None)


def _yardstick(server: Source) -> Run:
    server.settle()
    return server.program("psql", "--no-psqlrc", "--command", "COPY support.tickets TO STDOUT")


def _by_engine(engine: Engine, server: Source, rows: int) -> Run:
    run = engine.snapshot(server, "support.tickets")
    if run.seen["rows"] < rows:
        raise click.ClickException(f"{run.seen['rows']:,.0f} records came by Debezium of {rows:,}")
    return run


def _ours(server: Source, rows: int) -> Run:
    """A first start: slot, epoch and snapshots of all tables, of which only the tickets hold rows."""
    server.settle()
    home = server.folder / "home"
    run = server.capture(home, Lsn(1))
    shutil.rmtree(home)
    server.execute(f"SELECT pg_drop_replication_slot('{SLOT}')", f"DROP PUBLICATION {PUBLICATION}")
    if run.seen["rows"] < rows:
        raise click.ClickException(f"{run.seen['rows']:,.0f} rows landed of {rows:,}")
    return run


if __name__ == "__main__":
    main()
