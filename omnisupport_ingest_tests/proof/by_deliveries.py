"""The way of files of rows: the random histories as deliveries with a manifest, in every mode but ``cdc``.

The tables are those of ``by_cursor``, and no server holds them: each version of a row has the time of its
change as its cursor. The first part comes as a full snapshot; of the second, the newest version of each row
that changed as an increment, and the one from its middle later, as a backfill, beside the increment of the
third; the fourth as a full snapshot, which ends what is gone, with the older versions behind it; then some
windows are replayed. Formats and packings are drawn. After each part the dimension must hold the version that
stands highest: a snapshot at its moment, every other row at its cursor.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from omnisupport_ingest.sources.encrypting import encrypting_store
from omnisupport_ingest.sources.manifests.examine import windows_of_batches
from omnisupport_ingest.sources.manifests.land import Inlet, land
from omnisupport_ingest.sources.manifests.policies import BACKFILL, FULL_SNAPSHOT, INCREMENTAL, REPLAY
from omnisupport_ingest.sources.manifests.seed_manifest import SeedManifest, load_manifest
from omnisupport_ingest_tests.oracle.model import Event, Image, Key, TableShape
from omnisupport_ingest_tests.proof import compare
from omnisupport_ingest_tests.proof.by_cursor import (
    ADDED,
    ADDED_BEFORE,
    CURSOR,
    PARTS,
    TERMS,
    differences,
    name_cursors,
    rows_after,
    terms_of,
    with_column,
)
from omnisupport_ingest_tests.proof.compare import Difference
from omnisupport_ingest_tests.proof.history import START
from omnisupport_ingest_tests.proof.platform import Platform
from omnisupport_ingest_tests.proof.privacy import exposed, hidden_by
from omnisupport_ingest_tests.proof.tables import KEY, LEARNABLE, SHAPES, SOURCE, TYPES, held, shapes_of

TEXTS, PACKED = (".jsonl", ".ndjson", ".json", ".csv"), ("", ".gz", ".zst")
FORMATS = (".parquet", *(text + packed for text in TEXTS for packed in PACKED))

LANDED_AT = START + timedelta(hours=PARTS + 1)

Versions = Mapping[Key, tuple[datetime, Image]]
"""Rows of a table by key, each with the time of its change."""

_PARQUET: Mapping[str, pa.DataType] = {
    "cost": pa.decimal128(12, 2),
    "left": pa.timestamp("us", tz="UTC"),
    "tags": pa.list_(pa.string()),
    "rate": pa.float64(),
    CURSOR: pa.timestamp("us", tz="UTC"),
    **dict.fromkeys(KEY, pa.int64()),
}
"""The types of columns that are not text, as a file of Parquet has them."""


@dataclass
class Table:
    """A table of the source, and what the deliveries say of it.

    ``rows``: the versions that it holds. ``older``: versions that have been superseded and not delivered.
    ``stands``: by key, the position of the highest version that was delivered, and the version. ``ended``:
    the position of the newest snapshot, which ends what stands below. ``before_column``: the rows of which
    no version was delivered since the table got a column.
    """

    rows: dict[Key, tuple[datetime, Image]] = field(default_factory=dict)
    older: dict[Key, tuple[datetime, Image]] = field(default_factory=dict)
    stands: dict[Key, tuple[tuple[datetime, int], Image]] = field(default_factory=dict)
    ended: tuple[datetime, int] = (datetime.min.replace(tzinfo=UTC), 0)
    before_column: set[Key] = field(default_factory=set)

    def come_to(self, rows: Mapping[Key, Image], moment: datetime) -> dict[Key, tuple[datetime, Image]]:
        """Have the table hold ``rows`` from ``moment`` on; the versions that are new, each a moment later."""
        self.rows = {key: version for key, version in self.rows.items() if key in rows}
        new = {
            key: (moment + timedelta(milliseconds=number), row)
            for number, (key, row) in enumerate(rows.items())
            if key not in self.rows or self.rows[key][1] != row
        }
        self.rows |= new
        return new

    def delivered(self, versions: Versions, snapshot: datetime | None = None) -> None:
        """``versions`` have come, all of a snapshot if it has a moment: this one stands just above it."""
        if snapshot is not None:
            self.ended = max(self.ended, (snapshot, 1))
        for key, (changed, row) in versions.items():
            at = (changed, 0) if snapshot is None else (snapshot, 2)
            if key not in self.stands or self.stands[key][0] < at:
                self.stands[key] = at, row
                self.before_column.discard(key)

    @property
    def alive(self) -> dict[Key, Image]:
        return {key: row for key, (at, row) in self.stands.items() if at > self.ended}


@dataclass(frozen=True)
class Desk:
    """Who writes the deliveries: files in ``folder``, with a manifest for each."""

    folder: Path
    platform: Platform
    rng: Random

    def file(self, name: str, mode: str, shape: TableShape, versions: Versions, **more: Any) -> SeedManifest:
        """The manifest of one file with ``versions``, of a format that is drawn."""
        path = self.folder / f"{name}{self.rng.choice(FORMATS)}"
        path.write_bytes(content(path.name.removeprefix(name), shape, versions))
        entry = {
            "path": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "rows": len(versions),
        }
        gates = dict.fromkeys(("checksum", "row_count", "schema"), "reject")
        gates |= {"unknown_column": "accept", "row": "quarantine"}
        return self.manifest(name, mode, shape, {"files": [entry], "gates": gates, **more})

    def manifest(self, name: str, mode: str, shape: TableShape, more: Mapping[str, Any]) -> SeedManifest:
        contracts = self.platform.workspace.contracts
        contract = contracts.find(SOURCE, "public", shape.name)
        assert contract is not None, "the table has a contract"
        document = {
            "name": name,
            "description": "Rows of a random history.",
            "owner": "team:tests",
            "license": "CC0-1.0",
            "load_mode": mode,
            "contract": {
                "source": SOURCE,
                "schema": "public",
                "table": contract.table,
                "version": contract.version,
            },
            **more,
        }
        path = self.folder / f"{name}.manifest.json"
        path.write_text(json.dumps(document))
        return load_manifest(path, contracts)

    @property
    def inlet(self) -> Inlet:
        workspace = self.platform.workspace
        store = encrypting_store(workspace.home, SOURCE, workspace.contracts.of_source(SOURCE))
        return Inlet(store, workspace.grid, alone=False, clock=lambda: LANDED_AT)

    def land(self, seed: SeedManifest) -> str:
        """Land a delivery; the name of its batch."""
        delivery = land(seed, self.inlet)
        assert not delivery.already_landed and not delivery.examined.kept_out, delivery.examined.faults
        (batch,) = delivery.batches
        return batch.batch_id


def prove_by_deliveries(
    events: Sequence[Event], folder: Path, spark: SparkSession, turn: tuple[int, int]
) -> Iterator[Difference]:
    """Deliver ``events`` in parts; what differs after one of them."""
    platform = Platform(folder, spark, TERMS, {})
    desk = Desk(folder, platform, Random(f"deliveries of {len(events)} events"))
    tables = {shape.name: Table() for shape in SHAPES}
    batches: list[str] = []
    for part in range(PARTS):
        if part == turn[0] + 1:
            for shape in SHAPES:
                platform.learn(shape.name, ADDED)
        platform.change_law(terms_of(part, turn), {})
        name_cursors(platform)
        for shape in SHAPES:
            table = tables[shape.name]
            if part == ADDED_BEFORE:
                _add_column(table, shape.name)
            whole = shape if part < ADDED_BEFORE else with_column(shape)
            batches += _of_part(desk, whole, table, part, events)
        platform.catch_up()
        yield from _differences(platform, tables, events, (part, turn))
    before = platform.content()
    platform.run(_replayed(desk, batches), replay=True)
    platform.catch_up()
    for place, found in platform.content().items():
        if found != before.get(place):
            yield Difference(place[0], f"content of {place[1]} after a replay", found, before.get(place))
    yield from _differences(platform, tables, events, (PARTS - 1, turn))


def _of_part(
    desk: Desk, shape: TableShape, table: Table, part: int, events: Sequence[Event]
) -> Iterator[str]:
    """Deliver what part number ``part`` has for one table; the names of the batches."""
    name, begins = f"{shape.name}_{part}", START + timedelta(hours=part)
    half, end = (len(events) * (2 * part + each) // (2 * PARTS) for each in (1, 2))
    older = table.older
    table.older = table.come_to(rows_after(events[:half], shape), begins)
    newer = table.come_to(rows_after(events[:end], shape), begins + timedelta(minutes=20))
    if part in (0, PARTS - 1):
        as_of = begins + timedelta(minutes=40)
        snapshot = desk.file(name, FULL_SNAPSHOT, shape, table.rows, as_of=as_of.isoformat())
        yield desk.land(snapshot)
        assert land(snapshot, desk.inlet).already_landed
        table.delivered(table.rows, as_of)
    else:
        # A row that did not change after the middle has its newest version there.
        newest = {key: each for key, each in table.rows.items() if key in table.older or key in newer}
        yield desk.land(desk.file(name, INCREMENTAL, shape, newest))
        table.delivered(newest)
    late = {key: version for key, version in older.items() if table.rows.get(key) != version}
    if late:
        yield desk.land(desk.file(f"{name}_late", BACKFILL, shape, late))
        table.delivered(late)


def _add_column(table: Table, name: str) -> None:
    """Give the table the column, with what the contract says of rows that are older."""
    default = LEARNABLE[name][ADDED]
    table.rows = {key: (at, {**row, ADDED: default}) for key, (at, row) in table.rows.items()}
    table.older = {key: (at, {**row, ADDED: default}) for key, (at, row) in table.older.items()}
    table.stands = {key: (at, {**row, ADDED: default}) for key, (at, row) in table.stands.items()}
    table.before_column = set(table.stands)


def _replayed(desk: Desk, batches: Sequence[str]) -> list[str]:
    """The windows of a replay that is drawn: one window, or those of one batch."""
    shape, window = desk.rng.choice(SHAPES), desk.rng.choice(desk.platform.windows)
    what = (
        {"windows": {"from": window}} if desk.rng.random() < 0.5 else {"batches": [desk.rng.choice(batches)]}
    )
    seed = desk.manifest("again", REPLAY, shape, {"replay": {"reason": "drawn by lot", **what}})
    assert seed.replay is not None
    if seed.replay.first is not None:
        return [seed.replay.first]
    windows, faults = windows_of_batches(seed, desk.inlet.store)
    assert not faults
    return windows


def _differences(
    platform: Platform,
    tables: Mapping[str, Table],
    events: Sequence[Event],
    when: tuple[int, tuple[int, int]],
) -> Iterator[Difference]:
    terms = terms_of(*when)
    shapes = shapes_of(terms, platform.tokens)
    for shape in shapes:
        table = tables[shape.name]
        yield from differences(platform.workspace, shape, table.alive, table.before_column)
    values = hidden_by(terms, shapes).values((event, None) for event in events)
    for name, found in exposed(platform.workspace, values, compare._rows):
        yield Difference(name, "values that a policy hides", found, [])


def content(suffix: str, shape: TableShape, versions: Versions) -> bytes:
    """``versions`` as the bytes of a file whose name ends with ``suffix``."""
    kind, _, packed = suffix.lstrip(".").partition(".")
    names = (*KEY, *shape.columns, CURSOR)
    rows = [{**dict(zip(KEY, key, strict=True)), **row, CURSOR: at} for key, (at, row) in versions.items()]
    if kind == "parquet":
        columns = {
            name: pa.array([_typed(name, row[name]) for row in rows], _PARQUET.get(name, pa.string()))
            for name in names
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink)
        return sink.getvalue()
    if kind == "csv":
        lines = [names, *([_literal(_text(row[name]), name) for name in names] for row in rows)]
        plain = "".join(",".join(map(_quoted, line)) + "\n" for line in lines).encode()
    else:
        plain = b"".join(json.dumps(_json(row)).encode() + b"\n" for row in rows)
    if packed == "gz":
        return gzip.compress(plain)
    return pa.Codec("zstd").compress(plain, asbytes=True) if packed == "zst" else plain


def _typed(name: str, value: object) -> Any:
    if name in KEY:
        return int(str(value))
    if isinstance(value, str) and name in TYPES:
        found = held(SHAPES[0], name, value)
        return list(found) if isinstance(found, tuple) else found
    return value


def _json(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as JSON: arrays as such, floats as numbers, times and decimals as their texts."""
    return {
        name: _typed(name, value) if name in (*KEY, "tags", "rate") else _text(value)
        for name, value in row.items()
    }


def _text(value: object) -> str | None:
    if isinstance(value, datetime):
        return value.isoformat(" ")
    return None if value is None else str(value)


def _literal(text: str | None, name: str) -> str | None:
    """``text`` with every text of an array in quotes, as it lands from other formats."""
    if text is None or name != "tags":
        return text
    texts = ("NULL" if each is None else json.dumps(each, ensure_ascii=False) for each in _typed(name, text))
    return "{" + ",".join(texts) + "}"


def _quoted(text: str | None) -> str:
    """A value of CSV: NULL is empty, an empty text is quoted."""
    line = io.StringIO()
    csv.writer(line, quoting=csv.QUOTE_ALL, lineterminator="").writerow([text])
    return "" if text is None else line.getvalue()
