"""Debezium's events to durable batches, beside Spark and DuckDB that parse the same lines into Parquet.

Programs take turns over one file of events, in one of the shapes in which they come. Ours is ``land``: every
line checked, positions, identities, windows, manifest, everything synced, the line itself kept.

Spark, on a warm session, and DuckDB do it twice. "Same Parquet": the columns of a landed file, with the line
itself, images as JSON, key and position, compressed by zstd as ours. "Parsed": the envelopes as nested
columns, which is less than ours and a third of its bytes; DuckDB's JSON reader finds the schema itself. Both
prove nothing and sync nothing. Flat events have no such row: their image is the line without its metadata,
which SQL cannot cut out. The same values from a topic: ``bench.kafka``.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from bench.envelope_peers import Peers, Seen, in_turns, measured, report
from bench.report import write_result
from omnisupport_ingest.contracts.load import load_contracts
from omnisupport_ingest.landing.store import LandingStore
from omnisupport_ingest.sources.debezium.land import Inlet, land
from omnisupport_ingest.windows import WindowGrid, WindowSize
from omnisupport_ingest_tests.sources.debezium.recorded import SOURCE, START, TABLES, contract
from omnisupport_ingest_tests.sources.debezium.told import customer, envelope, flattened, schema_of

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
        with measured() as seen:
            done = land(path, inlet)
        assert done.tally is not None and (done.tally.read, done.tally.odd) == (rows, 0)
        shutil.rmtree(home)
        return seen()


@click.command()
@click.option("--rows", default=500_000, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--shape", "name", type=click.Choice(list(SHAPES)), default="plain", show_default=True)
def main(rows: int, repeats: int, name: str) -> None:
    """Measure the programs in turns."""
    folder = Path(tempfile.mkdtemp(prefix="bench-envelopes-"))
    path, warm = folder / "events.jsonl", folder / "warm.jsonl"
    shape = SHAPES[name]
    write_events(path, rows, shape=shape)
    write_events(warm, 20_000, shape=shape)
    ours, peers = Ours(folder, shape), Peers(folder, shape.columns, shape.within or "")
    ways = ("same Parquet", "parsed") if shape.within is not None else ("parsed",)
    programs: dict[str, Callable[[], Seen]] = {"ours": lambda: ours.land(path, rows)}
    for way in ways:
        peers.by_spark(warm, landed=way == "same Parquet")
        programs[f"Spark, {way}"] = partial(peers.by_spark, path, landed=way == "same Parquet")
        programs[f"DuckDB, {way}"] = partial(peers.by_duckdb, path, landed=way == "same Parquet")
    found = in_turns(programs, repeats)
    size = path.stat().st_size / rows
    click.echo(f"{rows:,} {name} events of {size:.0f} bytes, {repeats} runs each in turns, medians:")
    report(found, rows, judged=ways[0])
    write_result("envelopes", {"shape": name, "rows": rows, "bytes": size, "seconds_and_cpu": found})
    peers.stop()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
