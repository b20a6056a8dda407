"""Measure capture of changes, to durable and confirmed batches, beside ``pg_recvlogical`` to /dev/null.

Both read the same changes: before every run the slot is copied from one that nobody has read. Wall time is
reported with the processor time of both programs and of the server, which is meaningful on a busy machine
too. With ``--engine`` Debezium's own engine reads them as well, in pairs with ours after the others.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from bench.engine import NAME, Engine, engine_option, mark_end, source_and_engine
from bench.report import Run, alternate, conclude, cost
from bench.shapes import SHAPES
from bench.source import PUBLICATION, SLOT, Source, client_program
from omnisupport_ingest.position import Lsn

FLOORS = {"tickets": 0.5, "mixed": 0.5}
MEMORY_LIMIT_MB = 600
ENGINE_REACH = 5.0

UNREAD = "unread"


@click.command()
@click.option(
    "--changes", default=1_000_000, show_default=True, help="Changes to capture; fewer of large rows."
)
@click.option("--shape", type=click.Choice([*SHAPES, "all"]), default="mixed", show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Runs of each program.")
@engine_option
def main(changes: int, shape: str, repeats: int, engine: str | None) -> None:
    """Compare our capture with pg_recvlogical on the same slot content."""
    client_program("pg_recvlogical")
    for name in SHAPES if shape == "all" else [shape]:
        _measure(name, changes, repeats, engine)


def _measure(name: str, changes: int, repeats: int, python: str | None) -> None:
    shape = SHAPES[name]
    with source_and_engine(python) as (server, engine):
        wanted = max(1, int(changes * shape.share))
        click.echo(f"{name}: making {wanted:,} changes …", err=True)
        shape.prepare(server)
        contracts = shape.contracts(server.folder)
        server.capture(server.folder / "home", end_of_wal(server), contracts)
        copy_slot(server, SLOT, UNREAD)
        made = shape.change(server, wanted)
        until = end_of_wal(server)
        mark_end(server)
        results = {
            "": alternate(
                made,
                repeats,
                "pg_recvlogical",
                lambda: _yardstick(server, until),
                lambda: _ours(server, until, made, contracts),
            )
        }
        if engine is not None:
            results["-engine"] = alternate(
                made,
                repeats,
                NAME,
                lambda: _by_engine(engine, server, made),
                lambda: _ours(server, until, made, contracts),
            )
    floors = {"": FLOORS.get(name, 0.3), "-engine": ENGINE_REACH}
    for beside, result in results.items():
        conclude(
            f"capture-{name}{beside}",
            f"Capture, {name}",
            result,
            floor=floors[beside],
            memory_limit=MEMORY_LIMIT_MB,
        )
        click.echo(cost(result))


def _yardstick(server: Source, until: Lsn) -> Run:
    copy_slot(server, UNREAD, SLOT)
    server.settle()
    with server.processor() as spent:
        run = server.program(
            "pg_recvlogical",
            *("--slot", SLOT, "--start", "--endpos", str(until), "--file", "/dev/null", "--no-loop"),
            *("--option", "proto_version=1", "--option", f"publication_names={PUBLICATION}"),
            *("--option", "messages=true"),
        )
    run.seen["server_cpu_seconds"] = spent.seconds
    return run


def _by_engine(engine: Engine, server: Source, changes: int) -> Run:
    copy_slot(server, UNREAD, SLOT)
    run = engine.follow(server, SLOT, PUBLICATION)
    if run.seen["rows"] < changes:
        raise click.ClickException(f"{run.seen['rows']:,.0f} records came by Debezium of {changes:,}")
    return run


def _ours(server: Source, until: Lsn, changes: int, contracts: Path) -> Run:
    """A capture that goes on in a copy of the home that was made before the changes."""
    copy_slot(server, UNREAD, SLOT)
    home = server.folder / "continued"
    shutil.copytree(server.folder / "home", home)
    server.settle()
    with server.processor() as spent:
        run = server.capture(home, until, contracts)
    run.seen["server_cpu_seconds"] = spent.seconds
    shutil.rmtree(home)
    # The mark behind the changes may land too, as an event.
    if not 0 <= run.seen["rows"] - changes <= 1:
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
