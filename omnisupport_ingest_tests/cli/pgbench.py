"""A database that the platform has never seen: pgbench's four tables, and its transaction as traffic."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import obstore
import psycopg2
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from obstore.store import from_url
from psycopg2.extensions import make_dsn

from omnisupport_ingest.lake.delta import table_uri
from omnisupport_ingest.storage import at_hand, storage_of
from omnisupport_ingest_tests.sources.postgres.source_under_test import SourceUnderTest

SOURCE = "bank"
ACCOUNTS = 5_000

TABLES = f"""
CREATE TABLE pgbench_branches (bid int PRIMARY KEY, bbalance int, filler char(88));
CREATE TABLE pgbench_tellers (tid int PRIMARY KEY, bid int, tbalance int, filler char(84));
CREATE TABLE pgbench_accounts (aid int PRIMARY KEY, bid int, abalance int, filler char(84));
CREATE TABLE pgbench_history (tid int, bid int, aid int, delta int, mtime timestamp, filler char(22));
CREATE TABLE "Rates" (rate numeric(10,4), valid_on date, currency char(3),
    PRIMARY KEY (currency, valid_on));
INSERT INTO "Rates" SELECT 1.5, '2026-01-01'::date + d, c
    FROM generate_series(0, 9) d, (VALUES ('EUR'), ('CHF')) v (c);
INSERT INTO pgbench_branches VALUES (1, 0, NULL);
INSERT INTO pgbench_tellers SELECT t, 1, 0, 'teller' FROM generate_series(1, 10) t;
INSERT INTO pgbench_accounts SELECT a, 1, 0, '' FROM generate_series(1, {ACCOUNTS}) a;
"""
"""As ``pgbench --initialize`` makes them, the history without a key; and a table whose key is neither its
first columns nor in their order."""

COLUMNS = {
    "pgbench_branches": {"bid": "integer", "bbalance": "integer", "filler": "character(88)"},
    "pgbench_tellers": {"tid": "integer", "bid": "integer", "tbalance": "integer", "filler": "character(84)"},
    "pgbench_accounts": {
        "aid": "integer",
        "bid": "integer",
        "abalance": "integer",
        "filler": "character(84)",
    },
    "Rates": {"rate": "numeric(10,4)", "valid_on": "date", "currency": "character(3)"},
}
KEYS = {
    "pgbench_branches": ["bid"],
    "pgbench_tellers": ["tid"],
    "pgbench_accounts": ["aid"],
    "Rates": ["currency", "valid_on"],
}


def write_contracts(folder: Path) -> None:
    """A contract of each table that has a key."""
    folder.mkdir(parents=True)
    for table, columns in COLUMNS.items():
        key = KEYS[table]
        properties = {
            name: {
                "type": _json_type(kind) if name in key else [_json_type(kind), "null"],
                "x-pg-type": kind,
                "description": name,
            }
            for name, kind in columns.items()
        }
        document = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": table,
            "description": f"{table} of the bank.",
            "type": "object",
            "required": key,
            "properties": properties,
            "x-cdc": {
                "version": "1.0.0",
                "source": SOURCE,
                "schema": "public",
                "table": table,
                "owner": "team:tests",
                "key": key,
                "events": {"soft_delete_column": None},
                "lateness": {"allowed": "PT1H", "max": "P7D"},
            },
        }
        (folder / f"{table}.json").write_text(json.dumps(document, indent=2))


def _json_type(kind: str) -> str:
    return "integer" if kind == "integer" else "string"


@contextmanager
def traffic(dsn: str, *, clients: int = 2) -> Iterator[None]:
    """pgbench's TPC-B-like transaction, again and again, by ``clients`` at a time."""
    stop = threading.Event()
    threads = [threading.Thread(target=_trade, args=(dsn, number, stop)) for number in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _trade(dsn: str, seed: int, stop: threading.Event) -> None:
    chance = random.Random(seed)
    connection = psycopg2.connect(dsn)
    while not stop.wait(0.02):
        aid, tid = chance.randint(1, ACCOUNTS), chance.randint(1, 10)
        delta = chance.randint(-5000, 5000)
        with connection, connection.cursor() as cursor:
            cursor.execute(
                "UPDATE pgbench_accounts SET abalance = abalance + %s WHERE aid = %s", (delta, aid)
            )
            cursor.execute("UPDATE pgbench_tellers SET tbalance = tbalance + %s WHERE tid = %s", (delta, tid))
            cursor.execute("UPDATE pgbench_branches SET bbalance = bbalance + %s WHERE bid = 1", (delta,))
            cursor.execute('UPDATE "Rates" SET rate = rate + 0.0001 WHERE valid_on > %s', ("2026-01-05",))
            cursor.execute("INSERT INTO pgbench_history VALUES (%s, 1, %s, %s, now())", (tid, aid, delta))
    connection.close()


def command(
    *arguments: str, folder: Path, variables: dict[str, str], timeout: float = 400
) -> subprocess.CompletedProcess[str]:
    """``omnisupport-ingest`` in a process of its own, with ``folder`` as its working directory."""
    return subprocess.run(
        [sys.executable, "-m", "omnisupport_ingest.cli.main", *arguments],
        cwd=folder,
        env=environment(variables),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def environment(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment without any setting of the platform, and ``variables``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OMNISUPPORT_")}
    # The package must be found from another working directory too.
    return inherited | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables


def variables(source: SourceUnderTest, folder: Path) -> dict[str, str]:
    """The settings of a home in ``folder`` that captures the bank."""
    return {
        "OMNISUPPORT_HOME": str(folder / "home"),
        "OMNISUPPORT_CONTRACTS_DIR": str(folder / "contracts"),
        "OMNISUPPORT_SOURCE": SOURCE,
        "OMNISUPPORT_SOURCE_DSN": source.dsn,
        "OMNISUPPORT_SLOT": source.slot,
        "OMNISUPPORT_PUBLICATION": source.slot,
        "OMNISUPPORT_SPARK_DRIVER_MEMORY": "1g",
        # The larger table is read in five chunks.
        "OMNISUPPORT_SNAPSHOT_CHUNK_ROWS": "1000",
    }


def on(warm: str) -> dict[str, str]:
    """The setting by which a command has its session on a server that runs, instead of a JVM of its own."""
    return {"OMNISUPPORT_SPARK_REMOTE": warm}


@contextmanager
def least_role(source: SourceUnderTest, folder: Path) -> Iterator[str]:
    """The connection string of a role that has what `source grants` prints, and no more."""
    role = f"{source.slot}_least"
    given = variables(source, folder)
    printed = command("source", "grants", "--role", role, folder=folder, variables=given)
    assert printed.returncode == 0, printed.stderr
    source.sql(printed.stdout)
    rights = "rolsuper, rolcreaterole, rolcreatedb, rolbypassrls"
    assert source.query(f"SELECT {rights} FROM pg_roles WHERE rolname = '{role}'") == [(False,) * 4]
    try:
        yield make_dsn(source.dsn, user=role)
    finally:
        source.sql(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def rows_of_source(dsn: str, table: str) -> list[tuple[Any, ...]]:
    """Every row, by PostgreSQL alone; sorted."""
    with psycopg2.connect(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(f'SELECT {", ".join(COLUMNS[table])} FROM "{table}"')
        return sorted(cursor.fetchall(), key=repr)


def rows_of_lake(home: Path, table: str) -> list[tuple[Any, ...]]:
    """Every live row of the dimension, by delta-rs and DuckDB alone; sorted."""
    table_folder = home / "lake" / SOURCE / f"dim_{table}"
    uri = table_uri(table_folder)
    store = from_url(uri if "://" in uri else f"file://{uri}")
    # Whole files, as one that was spoiled has not the length that the log says.
    paths = [each.rpartition(f"{table_folder.name}/")[2] for each in DeltaTable(uri).file_uris()]
    files = [io.BytesIO(obstore.get(store, path).bytes()) for path in paths]
    rows = pa.concat_tables(map(pq.read_table, files), promote_options="permissive")
    with duckdb.connect() as connection:
        connection.register("dimension", rows)
        found = connection.execute(
            f"SELECT {', '.join(COLUMNS[table])} FROM dimension WHERE NOT _cdc_is_deleted"
        ).fetchall()
    return sorted(found, key=repr)


def spoil_teller(home: Path, number: int) -> None:
    """Give one row of the dimension of the tellers another balance, behind the back of everything."""
    folder = home / "lake" / SOURCE / "dim_pgbench_tellers"
    for uri in DeltaTable(table_uri(folder)).file_uris():
        file = folder / uri.rpartition(f"{folder.name}/")[2]
        table = pq.read_table(at_hand(file), partitioning=None)
        rows = [each | ({"tbalance": -1} if each["tid"] == number else {}) for each in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, table.schema), file)
        storage_of(file).replace(file, file.read_bytes())
