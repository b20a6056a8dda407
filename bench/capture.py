"""Capture of changes, to durable and confirmed batches, beside ``pg_recvlogical`` to /dev/null.

Both read the same changes: before every run the slot is copied anew from one that nobody has read.
"""

from __future__ import annotations

import shutil

import click

from bench.report import Run, alternate, conclude
from bench.source import PUBLICATION, SLOT, Source, change_tickets, client_program, source
from omnisupport_ingest.position import Lsn

FLOOR = 0.5
MEMORY_LIMIT_MB = 600

UNREAD = "unread"


@click.command()
@click.option("--changes", default=1_000_000, show_default=True, help="Changes to capture.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each program.")
def main(changes: int, repeats: int) -> None:
    """Compare our capture with pg_recvlogical on the same slot content."""
    client_program("pg_recvlogical")
    with source() as server:
        click.echo(f"Making {changes:,} changes …", err=True)
        start = server.folder / "home"
        server.capture(start, end_of_wal(server))
        copy_slot(server, SLOT, UNREAD)
        made = change_tickets(server, changes)
        until = end_of_wal(server)
        result = alternate(
            made,
            repeats,
            "pg_recvlogical",
            lambda: _yardstick(server, until),
            lambda: _ours(server, until, made),
        )
    conclude("capture", "Capture", result, floor=FLOOR, memory_limit=MEMORY_LIMIT_MB)


def _yardstick(server: Source, until: Lsn) -> Run:
    copy_slot(server, UNREAD, SLOT)
    server.settle()
    return server.program(
        "pg_recvlogical",
        *("--slot", SLOT, "--start", "--endpos", str(until), "--file", "/dev/null", "--no-loop"),
        *("--option", "proto_version=1", "--option", f"publication_names={PUBLICATION}"),
        *("--option", "messages=true"),
    )


def _ours(server: Source, until: Lsn, changes: int) -> Run:
    """A capture that goes on in a copy of the home that was made before the changes."""
    copy_slot(server, UNREAD, SLOT)
    home = server.folder / "continued"
    shutil.copytree(server.folder / "home", home)
    server.settle()
    run = server.capture(home, until)
    shutil.rmtree(home)
    if run.seen["rows"] != changes:
        raise click.ClickException(f"{run.seen['rows']:,.0f} changes landed of {changes:,}")
    return run


def copy_slot(server: Source, old: str, new: str) -> None:
    server.execute(
        f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '{new}'",
        f"SELECT pg_copy_logical_replication_slot('{old}', '{new}')",
    )


def end_of_wal(server: Source) -> Lsn:
    # A last record of our own, so that the stream reaches past everything before it.
    ((text,),) = server.execute("SELECT pg_switch_wal()", "CHECKPOINT", "SELECT pg_current_wal_flush_lsn()")
    return Lsn.parse(text)


if __name__ == "__main__":
    main()
