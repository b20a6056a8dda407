"""Rows that a reading by cursor misses with a short lookback, while transactions commit late."""

from __future__ import annotations

import random
import threading
import time
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import click

from bench.source import Source, source
from omnisupport_ingest.contracts.load import contract_of
from omnisupport_ingest.contracts.model import TableContract
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.postgres.session.connection import connect
from omnisupport_ingest.sources.query.batches import Inlet
from omnisupport_ingest.sources.query.postgres import PostgresReader
from omnisupport_ingest.sources.query.state import QueryState
from omnisupport_ingest.sources.query.sync import sync
from omnisupport_ingest.windows import WindowGrid, WindowSize

LOOKBACKS = ("PT0S", "PT1S", "PT2S", "PT5S")
MEAN_SECONDS = 0.2
"""Mean duration of a transaction, exponentially spread."""


@click.command()
@click.option("--seconds", default=40, show_default=True, help="How long the clients write.")
@click.option("--clients", default=8, show_default=True, help="Clients that write at a time.")
def main(seconds: int, clients: int) -> None:
    """Count the rows that each lookback misses; the table is read about once a second."""
    with source() as server:
        server.execute(
            "CREATE TABLE late (id bigserial PRIMARY KEY, at timestamptz NOT NULL)",
            "CREATE INDEX ON late (at, id)",
        )
        stop = threading.Event()
        writers = [threading.Thread(target=_write, args=(server.dsn, stop, seed)) for seed in range(clients)]
        for each in writers:
            each.start()
        tables = {lookback: _contract(lookback) for lookback in LOOKBACKS}
        landed = dict.fromkeys(LOOKBACKS, 0)
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end:
                began = time.monotonic()
                _read_each(server, tables, landed)
                time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))
        finally:
            stop.set()
            for each in writers:
                each.join()
        _read_each(server, tables, landed)
        ((rows,),) = server.execute("SELECT count(*) FROM late")
        for lookback, found in landed.items():
            click.echo(f"{lookback}: {rows - found:,} of {rows:,} rows missed")


def _write(dsn: str, stop: threading.Event, seed: int) -> None:
    pause = random.Random(seed)  # noqa: S311 - data, not secrets
    with closing(connect(dsn)) as connection, connection.cursor() as cursor:
        connection.autocommit = False
        while not stop.is_set():
            cursor.execute("INSERT INTO late (at) VALUES (clock_timestamp())")
            time.sleep(pause.expovariate(1 / MEAN_SECONDS))
            connection.commit()


def _read_each(server: Source, tables: dict[str, TableContract], landed: dict[str, int]) -> None:
    grid = WindowGrid(WindowSize(60), datetime(2026, 1, 1, tzinfo=UTC))
    for lookback, table in tables.items():
        folder = server.folder / lookback
        folder.mkdir(exist_ok=True)
        store = LandingStore(folder, table.source)
        with closing(PostgresReader(server.dsn)) as reader, QueryState(store.folder) as state:
            (report,) = sync(Inlet(store, grid, (table,), "bench"), reader, state).tables
        landed[lookback] += report.landed


def _contract(lookback: str) -> TableContract:
    columns = {"id": ("integer", "bigint"), "at": ("string", "timestamp with time zone")}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Late",
        "description": "Rows of transactions that commit late.",
        "type": "object",
        "required": list(columns),
        "additionalProperties": True,
        "properties": {
            name: {"type": kind, "x-pg-type": pg_type, "description": "Column."}
            for name, (kind, pg_type) in columns.items()
        },
        "x-cdc": {
            "version": "1.0.0",
            "source": "bench",
            "schema": "public",
            "table": "late",
            "owner": "team:bench",
            "key": ["id"],
            "events": {"soft_delete_column": None},
            "cursor": {"field": "at", "lookback": lookback},
        },
    }
    return contract_of(document, Path("late.json"))


if __name__ == "__main__":
    main()
