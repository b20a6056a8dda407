"""Debezium's events to durable batches, beside Spark and DuckDB that parse the same lines into Parquet.

Programs take turns over one file of events, in one of the shapes in which they come. Ours is ``land``: every
line checked, positions, identities, windows, manifest, everything synced, the line itself kept.

Spark, on a warm session, and DuckDB do it twice. "Same Parquet": the columns of a landed file, with the line
itself, images as JSON, key and position, compressed by zstd as ours. "Parsed": the envelopes as nested
columns, which is less than ours and a third of its bytes; DuckDB's JSON reader finds the schema itself. Both
prove nothing and sync nothing. Flat events have no such row: their image is the line without its metadata,
which SQL cannot cut out. With ``--kafka`` the same values also come from a topic (Tansu, a broker in memory,
whose own work is not counted).
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import duckdb

from bench.processes import processor_seconds, spent
from bench.report import write_result
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.runtime.spark import classic_session
from omnisupport_ingest.settings import Settings
from omnisupport_ingest.sources.debezium.land import Inlet, land
from omnisupport_ingest.windows import WindowGrid, WindowSize
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, START, TABLES, contract
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope, flattened, schema_of

TIMES_SPARK, TIMES_DUCKDB = 3.0, 1.0

_WORDS = [
    "export",
    "import",
    "ticket",
    "agent",
    "reply",
    "queue",
    "error",
    "screen",
    "sign",
    "password",
    "invoice",
]
_IMAGE = (
    "STRUCT<id: BIGINT, email: STRING, name: STRING, full_name: STRING, status: STRING, org_id: BIGINT,"
    " updated_at: STRING, attrs: STRING>"
)
_ENVELOPE = (
    f"before {_IMAGE}, after {_IMAGE}, source STRUCT<version: STRING, connector: STRING, name: STRING,"
    " ts_ms: BIGINT, snapshot: STRING, db: STRING, sequence: STRING, ts_us: BIGINT, ts_ns: BIGINT,"
    " schema: STRING, `table`: STRING, txId: BIGINT, lsn: BIGINT, xmin: BIGINT>,"
    " transaction STRUCT<id: STRING, total_order: BIGINT, data_collection_order: BIGINT>, op STRING,"
    " ts_ms BIGINT"
)

Seen = tuple[float, float]
"""Wall seconds and CPU seconds."""


_FLAT = (
    _IMAGE.removeprefix("STRUCT<").removesuffix(">").replace(":", "")
    + ", __op STRING, __source_ts_ms BIGINT, __source_schema STRING, __source_table STRING,"
    " __source_lsn BIGINT, __source_sequence STRING, __source_db STRING, __source_txId BIGINT,"
    " __transaction_id STRING, __transaction_total_order BIGINT, __deleted STRING"
)
_FIELDS: dict[str, dict[str, Any]] = {
    "id": {"type": "int64"},
    **{each: {"type": "string"} for each in ("email", "name", "full_name", "status")},
    "org_id": {"type": "int32"},
    "updated_at": {"type": "string", "name": "io.debezium.time.ZonedTimestamp", "version": 1},
    "attrs": {"type": "string", "name": "io.debezium.data.Json", "version": 1},
}


_TYPES = {
    "paid": "numeric(12,2)",
    "total": "numeric",
    "due": "date",
    "seen_at": "timestamp",
    "rate": "double precision",
    "kind": "public.kind",
}
_TYPED = _ENVELOPE.replace(
    "attrs: STRING>",
    "attrs: STRING, paid: STRING, total: STRUCT<scale: INT, value: STRING>, due: INT, seen_at: BIGINT,"
    " rate: DOUBLE, kind: STRING>",
)


def _typed(number: int) -> dict[str, Any]:
    """Values of ``_TYPES`` as the connector writes them by default."""
    cents = base64.b64encode((number * 7919 % 8_000_000).to_bytes(3, "big")).decode()
    return {
        "paid": cents,
        "total": {"scale": 3, "value": cents},
        "due": 20_000 + number % 900,
        "seen_at": 1_795_000_000_000_000 + number * 1_234_567,
        "rate": number % 1000 / 8,
        "kind": ("gold", "silver")[number % 2],
    }


@dataclass(frozen=True)
class Shape:
    """How events come. ``columns``: of a line, for Spark. ``blank``: what stands behind commas and colons.
    ``types``, ``values``: further columns of the table, and theirs of the row of a number. ``within``: the
    member that is the envelope; None: there is no envelope."""

    columns: str = _ENVELOPE
    within: str | None = ""
    told: Callable[[dict[str, Any]], Any] = lambda change: change
    blank: str = ""
    types: Mapping[str, str] = field(default_factory=dict)
    values: Callable[[int], dict[str, Any]] = lambda _: {}


SHAPES = {
    "plain": Shape(),
    "flat": Shape(_FLAT, None, flattened),
    "schema": Shape(
        f"payload STRUCT<{_ENVELOPE}>",
        "payload",
        lambda change: {"schema": schema_of(change, _FIELDS), "payload": change},
    ),
    "spaced": Shape(blank=" "),
    "typed": Shape(_TYPED, types=_TYPES, values=_typed),
}


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


def write_events(path: Path, rows: int, seed: int = 1, shape: Shape = SHAPES["plain"]) -> None:
    """``rows`` creates and updates of customers, about 900 bytes each, no two with the same texts."""
    separators = ("," + shape.blank, ":" + shape.blank)
    rng = random.Random(seed)  # noqa: S311 - data, not secrets
    with path.open("w") as file:
        for number in range(rows):
            key = number % (rows // 2 or 1)
            row = customer(
                key,
                email=f"c{key}@example.com",
                name=f"Customer {number}",
                full_name=" ".join(rng.choices(_WORDS, k=45)) + f' "{number}"',
                status=rng.choice(("active", "paused")),
                org_id=rng.randrange(1000),
                updated_at=f"2026-11-21T10:{number // 60_000 % 60:02d}:{number // 1000 % 60:02d}."
                f"{number % 1000:03d}000Z",
                attrs=json.dumps({"plan": rng.randrange(9), "tags": rng.sample(_WORDS, 2)}),
                **shape.values(number),
            )
            value = envelope("c" if key == number else "u", row, lsn=1000 + number, order=1)
            value["source"] = {
                "version": "3.6.3.Final", "connector": "postgresql", "name": "sd", "snapshot": "false",
                "db": "samples", "ts_us": value["source"]["ts_ms"] * 1000, **value["source"], "xmin": None,
            }  # fmt: skip
            file.write(json.dumps(shape.told(value), ensure_ascii=False, separators=separators) + "\n")


class Ours:
    """Lands files of one source into new homes."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        (folder / "contracts").mkdir()
        key, columns = TABLES["customers"]
        table = contract("customers", key, {**columns, **shape.types})
        (folder / "contracts" / "customers.json").write_text(json.dumps(table))
        self._folder, self._contracts = folder, load_contracts(folder / "contracts")
        self._first = folder / "first.jsonl"
        write_events(self._first, 2, shape=shape)

    def land(self, path: Path, rows: int) -> Seen:
        """Land ``path`` in a source that has landed a file before, as all but the first find it."""
        home = Path(tempfile.mkdtemp(dir=self._folder))
        grid = WindowGrid(WindowSize(60), START)
        inlet = Inlet(LandingStore(home, SOURCE), grid, self._contracts, "none")
        land(self._first, inlet)
        with _measured() as seen:
            done = land(path, inlet)
        assert done.tally is not None and (done.tally.read, done.tally.odd) == (rows, 0)
        shutil.rmtree(home)
        return seen()


@contextmanager
def _measured() -> Iterator[Callable[[], Seen]]:
    """Gives a function that tells, behind the block, its wall and CPU seconds, of all processes below us."""
    before, began = processor_seconds(os.getpid()), time.perf_counter()
    found: list[Seen] = []
    yield lambda: found[0]
    wall = time.perf_counter() - began
    found.append((wall, spent(before, processor_seconds(os.getpid()))))


def _by_kafka(folder: Path, path: Path, rows: int, repeats: int) -> list[Seen]:
    """The same values from a topic of four partitions, a sync into a new home each time."""
    from confluent_kafka import Producer

    from omnisupport_ingest_tests.sources.kafka.broker import running_broker
    from omnisupport_ingest_tests.sources.kafka.topics import Reader

    found = []
    with running_broker(folder / "broker.log") as broker:
        broker.make_topic("bench", 4)
        producer = Producer({"bootstrap.servers": broker.address, "queue.buffering.max.messages": 1_000_000})
        with path.open("rb") as lines:
            for number, line in enumerate(lines):
                key = json.dumps({"id": number % (rows // 2 or 1)}, separators=(",", ":"))
                producer.produce("bench", key=key, value=line.rstrip(b"\n"), partition=number % 4)
                producer.poll(0)
        assert producer.flush(120) == 0
        for number in range(repeats):
            reader = Reader(folder / f"kafka-{number}", broker.address, "bench")
            began, worked = time.perf_counter(), time.process_time()
            report = reader.sync()
            found.append((time.perf_counter() - began, time.process_time() - worked))
            assert (report.records, report.odd) == (rows, 0)
    return found


@click.command()
@click.option("--rows", default=500_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--kafka", is_flag=True, help="Also from a topic.")
@click.option("--shape", "name", type=click.Choice(list(SHAPES)), default="plain", show_default=True)
def main(rows: int, repeats: int, kafka: bool, name: str) -> None:
    """Measure the programs in turns."""
    from pyspark.sql import functions as F

    folder = Path(tempfile.mkdtemp(prefix="bench-envelopes-"))
    path = folder / "events.jsonl"
    shape = SHAPES[name]
    write_events(path, rows, shape=shape)
    ours = Ours(folder, shape)
    spark = classic_session(Settings(spark_driver_memory="3g", _env_file=None))  # type: ignore[call-arg]

    def by_spark(source: Path, landed: bool) -> Seen:
        with _measured() as seen:
            lines = spark.read.text(str(source))
            if landed:
                lines.toDF("line").createOrReplaceTempView("lines")
                read = spark.sql(_landed_by_spark(shape.within or ""))
            else:
                read = lines.select(F.from_json("value", shape.columns).alias("e")).select("e.*")
            written = read.write.mode("overwrite").option("compression", "zstd")
            written.parquet(str(folder / "spark"))
        return seen()

    def by_duckdb(landed: bool) -> Seen:
        query = (
            _landed_by_duckdb(path, shape.within or "")
            if landed
            else f"FROM read_json('{path}', format = 'newline_delimited')"
        )
        with _measured() as seen, closing(duckdb.connect(config={"threads": 2})) as connection:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"COPY ({query}) TO '{folder / 'duckdb.parquet'}' (COMPRESSION zstd)")
        return seen()

    ways = {"same Parquet": True, "parsed": False} if shape.within is not None else {"parsed": False}
    warm = folder / "warm.jsonl"
    write_events(warm, 20_000, shape=shape)
    found: dict[str, list[Seen]] = {"ours": []}
    for way, landed in ways.items():
        by_spark(warm, landed)
        found |= {f"{program}, {way}": [] for program in ("Spark", "DuckDB")}
    for number in range(1, repeats + 1):
        found["ours"].append(ours.land(path, rows))
        for way, landed in ways.items():
            found[f"Spark, {way}"].append(by_spark(path, landed))
            found[f"DuckDB, {way}"].append(by_duckdb(landed))
        figures = ", ".join(
            f"{program} {runs[-1][0]:.1f} s ({runs[-1][1]:.1f} CPU s)" for program, runs in found.items()
        )
        click.echo(f"  {number}/{repeats}: {figures}", err=True)
    if kafka:
        found["ours, from a topic"] = _by_kafka(folder, path, rows, repeats)
    size = path.stat().st_size / rows
    click.echo(f"{rows:,} {name} events of {size:.0f} bytes, {repeats} runs each in turns, medians:")
    for program, runs in found.items():
        wall, worked = (median(run[i] for run in runs) for i in range(2))
        each = f"{rows / wall:>9,.0f} a second; {1e6 * worked / rows:6.1f} CPU µs each"
        click.echo(f"  {program:<22} {wall:6.1f} s, {each}")
    for program, runs in found.items():
        least = {"Spark": TIMES_SPARK, "DuckDB": TIMES_DUCKDB}.get(program.partition(",")[0])
        if least is None:
            continue
        by_wall, by_cpu = (
            median(run[i] for run in runs) / median(run[i] for run in found["ours"]) for i in range(2)
        )
        both = f"{by_wall:.2f} times {program} by the clock, {by_cpu:.2f} by CPU"
        reached = "met" if by_wall >= least else "NOT MET"
        judged = f"; to be reached {least:.0f}: {reached}" if program.endswith(next(iter(ways))) else ""
        click.echo(f"  {both}{judged}")
    write_result("envelopes", {"shape": name, "rows": rows, "bytes": size, "seconds_and_cpu": found})
    spark.stop()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
