"""What others do with lines of Debezium's events: Spark and DuckDB parse them and write Parquet.

They read files, check nothing, prove nothing and sync nothing. Written are either the columns of a landed
file ("same Parquet"), with the line itself, images as JSON, key and position, compressed by zstd as ours; or
the envelopes as nested columns ("parsed").
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click
import duckdb
import pyarrow as pa

from bench.processes import processor_seconds, spent
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TIMES_SPARK, TIMES_DUCKDB = 3.0, 1.0

Seen = tuple[float, float]
"""Wall seconds and CPU seconds."""

_READ = (
    "op STRING, source STRUCT<sequence: STRING, lsn: BIGINT, ts_ms: BIGINT, txId: BIGINT, schema: STRING,"
    " `table`: STRING>, transaction STRUCT<total_order: BIGINT>, before STRING, after STRING"
)
"""What of an envelope makes the columns of a landed file, in Spark's words; images stay JSON."""

_LANDED = """
    1 AS epoch, {commit_lsn} AS commit_lsn, s.lsn * 16384 + t.total_order AS ordinal, op,
    {source_ts} AS source_ts, s.txId AS tx_id, s.lsn AS lsn, s.schema AS source_schema,
    s.`table` AS source_table, concat('["', {id}, '"]') AS key, before, after,
    CAST(NULL AS STRING) AS unchanged, CAST(NULL AS STRING) AS moved_from_key,
    CAST(NULL AS STRING) AS chunk_id, CAST(NULL AS STRING) AS identity, CAST(NULL AS BOOLEAN) AS misplaced,
    {file_row} AS file_row, line AS envelope, 'f-1' AS batch_id
"""


def _landed_by_spark(within: str) -> str:
    """The query of ``lines (line)`` that gives the columns of a landed file."""
    schema = f"{within} STRUCT<{_READ}>" if within else _READ
    columns = _LANDED.format(
        commit_lsn="CAST(get_json_object(s.sequence, '$[0]') AS BIGINT)",
        source_ts="timestamp_millis(s.ts_ms)",
        id="get_json_object(after, '$.id')",
        file_row="monotonically_increasing_id()",
    )
    return (
        f"SELECT {columns} FROM (SELECT line, e.op, e.source AS s, e.transaction AS t, e.before, e.after FROM"
        f" (SELECT line, from_json(line, '{schema}'){'.' + within if within else ''} AS e FROM lines))"
    )


def _landed_by_duckdb(path: Path, within: str) -> str:
    """The query that gives the columns of a landed file, from the lines of ``path``."""
    envelope: Any = {
        "op": "VARCHAR",
        "source": {
            **dict.fromkeys(("lsn", "ts_ms", "txId"), "BIGINT"),
            **dict.fromkeys(("sequence", "schema", "table"), "VARCHAR"),
        },
        "transaction": {"total_order": "BIGINT"},
        **dict.fromkeys(("before", "after"), "JSON"),
    }
    read = json.dumps({within: envelope} if within else envelope)
    columns = _LANDED.format(
        commit_lsn="CAST(json_extract_string(s.sequence, '$[0]') AS BIGINT)",
        source_ts="make_timestamptz(s.ts_ms * 1000)",
        id="(after->>'$.id')",
        file_row="row_number() OVER ()",
    )
    lines = (
        f"read_csv('{path}', columns = {{'line': 'VARCHAR'}}, delim = '\x01', quote = '', escape = '',"
        " header = false, auto_detect = false)"
    )
    return (
        f"SELECT {columns.replace('`', chr(34))} FROM (SELECT line, e.op, e.source AS s, e.transaction AS t,"
        f" e.before, e.after FROM (SELECT line, json_transform(line, '{read}')"
        f"{'.' + within if within else ''} AS e FROM {lines}))"
    )


@contextmanager
def measured(*, alone: bool = False) -> Iterator[Callable[[], Seen]]:
    """Gives a function that returns, after the block, its wall and CPU seconds: of all processes below us
    too, unless ``alone``."""

    def worked() -> dict[int, float]:
        return {0: time.process_time()} if alone else processor_seconds(os.getpid())

    before, began = worked(), time.perf_counter()
    found: list[Seen] = []
    yield lambda: found[0]
    wall = time.perf_counter() - began
    found.append((wall, spent(before, worked())))


class Peers:
    """Spark, a session that stays, and DuckDB, each time anew; both with two threads.

    ``columns``: of a line, in Spark's words. ``within``: the member that is the envelope; empty: the line is.
    """

    def __init__(self, folder: Path, columns: str, within: str) -> None:
        self._folder, self._columns, self._within = folder, columns, within
        settings = Settings(spark_driver_memory="3g", _env_file=None)  # type: ignore[call-arg]
        self._spark = classic_session(settings)

    def by_spark(self, path: Path, *, landed: bool) -> Seen:
        """Write the lines of ``path``: the columns of a landed file, or parsed."""
        with measured() as seen:
            self._written_by_spark(self._spark.read.text(str(path)), landed=landed)
        return seen()

    def by_spark_from_tasks(self, read: Callable[[int], Iterator[list[bytes]]], tasks: int) -> Seen:
        """Write the columns of a landed file from the lines that ``read`` gives to each task."""

        def lines(numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for number in (each for batch in numbers for each in batch.column(0).to_pylist()):
                for some in read(number):
                    yield pa.RecordBatch.from_arrays(
                        [pa.array(some, pa.binary()).cast(pa.string())], ["value"]
                    )

        with measured() as seen:
            numbers = self._spark.range(0, tasks, 1, tasks)
            self._written_by_spark(numbers.mapInArrow(lines, "value string"), landed=True)
        return seen()

    def _written_by_spark(self, lines: DataFrame, *, landed: bool) -> None:
        from pyspark.sql import functions as F

        if landed:
            lines.toDF("line").createOrReplaceTempView("lines")
            read = self._spark.sql(_landed_by_spark(self._within))
        else:
            read = lines.select(F.from_json("value", self._columns).alias("e")).select("e.*")
        written = read.write.mode("overwrite").option("compression", "zstd")
        written.parquet(str(self._folder / "spark"))

    def by_duckdb(self, path: Path, *, landed: bool) -> Seen:
        """The same by DuckDB, whose JSON reader finds the schema of what is parsed itself."""
        query = (
            _landed_by_duckdb(path, self._within)
            if landed
            else f"FROM read_json('{path}', format = 'newline_delimited')"
        )
        with measured() as seen, closing(duckdb.connect(config={"threads": 2})) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"COPY ({query}) TO '{self._folder / 'duckdb.parquet'}' (COMPRESSION zstd)")
        return seen()

    def stop(self) -> None:
        """End the session."""
        self._spark.stop()


def in_turns(programs: Mapping[str, Callable[[], Seen]], repeats: int) -> dict[str, list[Seen]]:
    """Run ``programs`` one after the other, ``repeats`` times; return what was seen of each."""
    found: dict[str, list[Seen]] = {name: [] for name in programs}
    for number in range(1, repeats + 1):
        for name, run in programs.items():
            found[name].append(run())
        last = [(name, *runs[-1]) for name, runs in found.items()]
        figures = ", ".join(f"{name} {wall:.1f} s ({worked:.1f} CPU s)" for name, wall, worked in last)
        click.echo(f"  {number}/{repeats}: {figures}", err=True)
    return found


def report(found: Mapping[str, list[Seen]], rows: int, *, judged: str) -> None:
    """Print the medians of each program, and ours (the first) beside Spark and DuckDB.

    ``judged``: the way of the peers by which it is judged whether ours is fast enough.
    """
    for program, runs in found.items():
        wall, worked = (median(run[i] for run in runs) for i in range(2))
        each = f"{rows / wall:>9,.0f} a second; {1e6 * worked / rows:6.1f} CPU µs each"
        click.echo(f"  {program:<22} {wall:6.1f} s, {each}")
    ours = next(iter(found.values()))
    for program, runs in found.items():
        least = {"Spark": TIMES_SPARK, "DuckDB": TIMES_DUCKDB}.get(program.partition(",")[0])
        if least is None:
            continue
        by_wall, by_cpu = (median(run[i] for run in runs) / median(run[i] for run in ours) for i in range(2))
        both = f"{by_wall:.2f} times {program} by the clock, {by_cpu:.2f} by CPU"
        reached = "met" if by_wall >= least else "NOT MET"
        click.echo(f"  {both}{f'; to be reached {least:.0f}: {reached}' if program.endswith(judged) else ''}")
