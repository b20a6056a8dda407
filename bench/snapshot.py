"""The snapshot of a table, to durable batches, beside ``COPY … TO STDOUT`` to /dev/null by psql."""

from __future__ import annotations

import shutil

import click

from bench.report import Run, alternate, conclude
from bench.source import PUBLICATION, SLOT, Source, add_tickets, client_program, source
from omnisupport_ingest.position import Lsn

FLOOR = 0.5


@click.command()
@click.option("--rows", default=2_000_000, show_default=True, help="Rows of the table.")
@click.option("--repeats", default=3, show_default=True, help="Runs of each program.")
def main(rows: int, repeats: int) -> None:
    """Compare our snapshot with COPY of the same table."""
    client_program("psql")
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        add_tickets(server, rows)
        result = alternate(
            rows, repeats, "COPY to /dev/null", lambda: _yardstick(server), lambda: _ours(server, rows)
        )
    conclude("snapshot", "Snapshot", result, floor=FLOOR, memory_limit=None)


def _yardstick(server: Source) -> Run:
    server.settle()
    return server.program("psql", "--no-psqlrc", "--command", "COPY support.tickets TO STDOUT")


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
