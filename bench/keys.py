"""Comparing the keys of a table that has not changed with those of the lake (``sync NAME --compare``).

The dimension's files are made by DuckDB, in its columns and in the order of its keys. What is timed is
reading their keys and comparing checksums with a real server, from the first connection to the last answer;
not the look whether anything is pending.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import click
import duckdb

from bench.cursor import tickets
from bench.processes import parent, peak_memory_mb, processor_seconds, spent
from bench.report import write_result
from bench.source import Source, add_tickets, source
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.read.lake_keys import DimensionKeys
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.compare import compare
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.windows import WindowGrid, WindowSize

MOST_SECONDS = 20.0

_FILES = 8


@click.command()
@click.option("--rows", default=5_000_000, show_default=True, help="Rows of the table.")
@click.option("--repeats", default=3, show_default=True, help="Comparisons.")
def main(rows: int, repeats: int) -> None:
    """Compare keys that are the same on both sides."""
    with source() as server:
        click.echo(f"Making {rows:,} rows …", err=True)
        add_tickets(server, rows)
        files = _dimension(server.folder, rows)
        store = LandingStore(server.folder / "landing", tickets().source)
        store.begin_epoch("bench", None, now=datetime.now(UTC))
        runs = []
        for number in range(1, repeats + 1):
            runs.append(_compared(server, store, files))
            seconds, worked, of_server = runs[-1]
            text = f"CPU {worked:.1f} s of ours, {of_server:.1f} s of the server"
            click.echo(f"  {number}/{repeats}: {seconds:.1f} s; {text}", err=True)
        found = median(seconds for seconds, _, _ in runs)
        click.echo(
            f"Comparing {rows:,} unchanged keys: {found:.1f} s, at most {MOST_SECONDS:.0f}: "
            f"{'met' if found <= MOST_SECONDS else 'NOT MET'}; peak memory {peak_memory_mb():.0f} MB"
        )
        write_result("keys", {"rows": rows, "seconds_cpu_and_server_cpu": runs})


def _compared(server: Source, store: LandingStore, files: list[str]) -> tuple[float, ...]:
    server.settle()
    table = tickets()
    with closing(connect(server.dsn)) as connection:
        postmaster = parent(connection.info.backend_pid)
    inlet = Inlet(store, WindowGrid(WindowSize(60), datetime(2026, 1, 1, tzinfo=UTC)), (table,), "bench")
    began, ours = time.perf_counter(), processor_seconds(os.getpid())
    with (
        closing(PostgresReader(server.dsn)) as reader,
        closing(DimensionKeys(table, files)) as keys,
        QueryState(store.folder) as state,
    ):
        theirs = processor_seconds(postmaster)
        (found,) = compare(inlet, reader, state, {table.full_name: keys}).tables
        of_server = spent(theirs, processor_seconds(postmaster))
    seconds = time.perf_counter() - began
    if (found.deleted, found.missed, found.checksums) != (0, 0, 1):
        raise click.ClickException(f"The sides are not the same: {found}")
    return seconds, spent(ours, processor_seconds(os.getpid())), of_server


def _dimension(folder: Path, rows: int) -> list[str]:
    """Files of a dimension with the keys from 1 to ``rows``."""
    each = -(-rows // _FILES)
    found = []
    with closing(duckdb.connect(config={"threads": 2})) as connection:
        for number in range(_FILES):
            path = folder / f"dimension-{number}.parquet"
            connection.execute(
                f"COPY (SELECT id, '[\"' || id || '\"]' AS _cdc_key, false AS _cdc_is_deleted,"
                " []::VARCHAR[] AS _cdc_unresolved, MAP {}::MAP(VARCHAR, VARCHAR) AS _cdc_exact,"
                " (id * 64)::BIGINT AS _cdc_ordinal, repeat(md5(id::VARCHAR), 10) AS subject"
                f" FROM range({number * each + 1}, {min(rows, (number + 1) * each) + 1}) t(id)) TO '{path}'"
            )
            found.append(str(path))
    return found


if __name__ == "__main__":
    main()
