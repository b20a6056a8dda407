"""What others do to bring changes into a table that has their keys: each merges the same typed changes.

They keep no state that a later, earlier or repeated change could be merged with, check no row and know no
truncate; a change that lacks a value keeps the one of the row. All have two threads or processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import duckdb
import polars as pl
import pyarrow.parquet as pq
from deltalake import DeltaTable, write_deltalake

from omnisupport_ingest.lake.layout import LakeFile
from omnisupport_ingest.lake.live_rows import live_sql
from omnisupport_ingest.sources.postgres.embedded.server import EmbeddedPostgres
from omnisupport_ingest.sources.postgres.session.connection import connect

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = {
    "id": "BIGINT",
    "organization_id": "BIGINT",
    "customer_id": "VARCHAR",
    "agent_handle": "VARCHAR",
    "subject": "VARCHAR",
    "body": "VARCHAR",
    "status": "VARCHAR",
    "priority": "SMALLINT",
    "channel": "VARCHAR",
    "metadata": "VARCHAR",
    "satisfaction": "DOUBLE",
    "created_at": "TIMESTAMPTZ",
    "updated_at": "TIMESTAMPTZ",
    "is_deleted": "BOOLEAN",
}
_CONFIG = {"threads": 2}
_OTHERS = [name for name in COLUMNS if name != "id"]


class Peer(Protocol):
    """``open_files``: what it leaves can be read by any engine, as Parquet."""

    name: str
    open_files: bool

    def load(self, rows: Path) -> None:
        """Begin with the table in the Parquet file ``rows``."""

    def merge(self, changes: Path) -> None:
        """Bring in the Parquet file ``changes``, one row per key, durably."""

    def close(self) -> None:
        """Let go of what it holds open."""


def fold(landed: Sequence[Path], changes: Path) -> None:
    """Landed files → the newest values of each key, typed, as the Parquet file ``changes``; by DuckDB."""
    named = [name for name in COLUMNS if name != "is_deleted"]
    paths = "[" + ", ".join(f"'/{name}'" for name in named) + "]"
    newest = ", ".join(
        f"arg_max_null(texts[{number}], place) FILTER (op <> 'd' AND NOT list_contains(unsent, '{name}'))"
        f"::{COLUMNS[name]} AS {name}"
        for number, name in enumerate(named, 1)
        if name != "id"
    )
    with duckdb.connect(config=_CONFIG) as connection:
        connection.execute(
            f"COPY (SELECT key[3:-3]::BIGINT AS id, {newest}, arg_max(op, place) = 'd' AS is_deleted FROM ("
            "SELECT DISTINCT ON (epoch, commit_lsn, ordinal) key, op, (epoch, commit_lsn, ordinal) AS place,"
            f" coalesce(unchanged, []) AS unsent, json_extract_string(after, {paths}) AS texts"
            f" FROM read_parquet({[str(path) for path in landed]})) GROUP BY key) TO '{changes}'"
        )


def rows_of(dimension: Sequence[LakeFile], rows: Path) -> None:
    """The rows of a dimension of ours as one Parquet file for the others to begin with."""
    named = ", ".join(f"{name}::{kind} AS {name}" for name, kind in COLUMNS.items() if name != "is_deleted")
    with duckdb.connect(config=_CONFIG) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(
            f"COPY (SELECT {named}, _cdc_is_deleted AS is_deleted FROM {live_sql(connection, dimension)})"
            f" TO '{rows}'"
        )


class DuckDBRewrite:
    """DuckDB writes the Parquet file anew."""

    name, open_files = "DuckDB rewrite", True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "duckdb-rewrite.parquet"

    def load(self, rows: Path) -> None:
        shutil.copyfile(rows, self._file)

    def merge(self, changes: Path) -> None:
        merged = ", ".join(f"coalesce(c.{name}, t.{name}) AS {name}" for name in _OTHERS)
        new = self._file.with_suffix(".new")
        with duckdb.connect(config=_CONFIG) as connection:
            connection.execute(
                f"COPY (SELECT id, {merged} FROM '{self._file}' t FULL JOIN '{changes}' c USING (id))"
                f" TO '{new}' (FORMAT parquet)"
            )
        new.replace(self._file)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class _DuckDBTable:
    """A database of DuckDB's own."""

    open_files = False
    _key = ""

    def __init__(self, folder: Path) -> None:
        self._connection = duckdb.connect(str(folder / f"{type(self).__name__}.db"), config=_CONFIG)

    def load(self, rows: Path) -> None:
        columns = ", ".join(f"{name} {kind}" for name, kind in COLUMNS.items())
        self._connection.execute(f"CREATE TABLE tickets ({columns}{self._key})")
        self._connection.execute(f"INSERT INTO tickets SELECT {', '.join(COLUMNS)} FROM '{rows}'")
        self._connection.execute("CHECKPOINT")

    def close(self) -> None:
        self._connection.close()


class DuckDBMerge(_DuckDBTable):
    name = "DuckDB MERGE"

    def merge(self, changes: Path) -> None:
        updated = ", ".join(f"{name} = coalesce(c.{name}, t.{name})" for name in _OTHERS)
        self._connection.execute(
            f"MERGE INTO tickets t USING '{changes}' c ON t.id = c.id WHEN MATCHED THEN UPDATE SET {updated}"
            f" WHEN NOT MATCHED THEN INSERT ({', '.join(COLUMNS)})"
            f" VALUES ({', '.join(f'c.{name}' for name in COLUMNS)})"
        )


class DuckDBConflict(_DuckDBTable):
    name = "DuckDB ON CONFLICT"
    _key = ", PRIMARY KEY (id)"

    def merge(self, changes: Path) -> None:
        updated = ", ".join(f"{name} = coalesce(excluded.{name}, {name})" for name in _OTHERS)
        self._connection.execute(
            f"INSERT INTO tickets SELECT {', '.join(COLUMNS)} FROM '{changes}'"
            f" ON CONFLICT (id) DO UPDATE SET {updated}"
        )


class DeltaRsMerge:
    """delta-rs on a Delta table, streamed."""

    name, open_files = "delta-rs MERGE", True

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "delta-rs"

    def load(self, rows: Path) -> None:
        with duckdb.connect(config=_CONFIG) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            write_deltalake(str(self._folder), connection.sql(f"FROM '{rows}'").to_arrow_reader(100_000))

    def merge(self, changes: Path) -> None:
        (
            DeltaTable(str(self._folder))
            .merge(pq.read_table(changes), "t.id = c.id", source_alias="c", target_alias="t")
            .when_matched_update({name: f"coalesce(c.{name}, t.{name})" for name in _OTHERS})
            .when_not_matched_insert({name: f"c.{name}" for name in COLUMNS})
            .execute()
        )

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class PolarsRewrite:
    """Polars writes the Parquet file anew."""

    name, open_files = "Polars rewrite", True

    def __init__(self, folder: Path) -> None:
        self._file = folder / "polars.parquet"

    def load(self, rows: Path) -> None:
        shutil.copyfile(rows, self._file)

    def merge(self, changes: Path) -> None:
        new = self._file.with_suffix(".new")
        pl.scan_parquet(self._file).update(pl.scan_parquet(changes), on="id", how="full").sink_parquet(new)
        new.replace(self._file)

    def close(self) -> None:
        self._file.unlink(missing_ok=True)


class SparkRewrite:
    """Spark joins and writes a folder of Parquet files anew; in the session that ours has."""

    name, open_files = "Spark rewrite", True

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self._folder, self._spark, self._count = folder, spark, 0

    def load(self, rows: Path) -> None:
        self._spark.read.parquet(f"file://{rows}").write.parquet(self._now)

    @property
    def _now(self) -> str:
        return f"file://{self._folder / f'spark-{self._count}'}"

    def merge(self, changes: Path) -> None:
        merged = [f"coalesce(c.{name}, t.{name}) AS {name}" for name in COLUMNS]
        rows = self._spark.read.parquet(self._now).alias("t")
        news = self._spark.read.parquet(f"file://{changes}").alias("c")
        both = rows.join(news, rows["id"] == news["id"], "full").selectExpr(*merged)
        before = self._now
        self._count += 1
        both.write.parquet(self._now)
        shutil.rmtree(before.removeprefix("file://"))

    def close(self) -> None:
        shutil.rmtree(self._now.removeprefix("file://"), ignore_errors=True)


class PostgresConflict:
    """PostgreSQL, logged and synchronous, on a server of its own; changes go in by COPY."""

    name, open_files = "PostgreSQL ON CONFLICT", False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = EmbeddedPostgres(folder / "postgres")
        self._server.start()

    def load(self, rows: Path) -> None:
        columns = ", ".join(f"{name} {_POSTGRES.get(kind, kind)}" for name, kind in COLUMNS.items())
        self._do(f"CREATE TABLE tickets ({columns}, PRIMARY KEY (id))")
        self._copy(rows, "tickets")
        self._do("VACUUM ANALYZE tickets", "CHECKPOINT")

    def merge(self, changes: Path) -> None:
        updated = ", ".join(f"{name} = coalesce(excluded.{name}, tickets.{name})" for name in _OTHERS)
        self._do("CREATE UNLOGGED TABLE changes (LIKE tickets)")
        self._copy(changes, "changes")
        self._do(
            f"INSERT INTO tickets SELECT * FROM changes ON CONFLICT (id) DO UPDATE SET {updated}",
            "DROP TABLE changes",
        )

    def _copy(self, rows: Path, table: str) -> None:
        text = self._folder / f"{table}.csv"
        with duckdb.connect(config=_CONFIG) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"COPY (SELECT {', '.join(COLUMNS)} FROM '{rows}') TO '{text}' (HEADER false)")
        with (
            closing(connect(self._server.dsn())) as connection,
            connection.cursor() as cursor,
            text.open() as lines,
        ):
            cursor.copy_expert(f"COPY {table} FROM STDIN (FORMAT csv)", lines)
        text.unlink()

    def _do(self, *statements: str) -> None:
        with closing(connect(self._server.dsn())) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def close(self) -> None:
        self._server.destroy()


_POSTGRES = {"VARCHAR": "text", "DOUBLE": "double precision"}


def peers(folder: Path, spark: SparkSession, names: Sequence[str]) -> list[Peer]:
    """Those of the peers whose names begin with one of ``names``, each new, in ``folder``; none: all."""
    makers: dict[str, Any] = {
        each.name: each for each in (DuckDBRewrite, DuckDBMerge, DuckDBConflict, DeltaRsMerge, PolarsRewrite)
    }
    makers["Spark rewrite"] = lambda folder: SparkRewrite(folder, spark)
    makers["PostgreSQL ON CONFLICT"] = PostgresConflict
    wanted = [name for name in makers if not names or name.startswith(tuple(names))]
    return [makers[name](folder) for name in wanted]
